"""Buffers, storages, samplers and writers made by Hydra from YAML, as a user's script would."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import records
from torchrl.data import ReplayBuffer, ReplayBufferEnsemble
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

pytest.importorskip("hydra", reason="needs the extra hydra")

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING, OmegaConf

import torchrl_generational as g

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchRL's configurations import its collectors, which warn of their own classes
    from torchrl_generational import configs

KINDS = (ReplayBuffer, Storage, Sampler, Writer)
WITHOUT = {
    "GenerationalReplayBufferEnsemble",  # tested below: its members are configurations too
    "GenerationalRayReplayBuffer",  # its arguments are those of a class that it is told
}
PARTS = {
    name: part
    for name in g.__all__
    if inspect.isclass(part := getattr(g, name)) and issubclass(part, KINDS) and name not in WITHOUT
}
CLASSES = {name: getattr(configs, f"{name}Config") for name in PARTS if hasattr(configs, f"{name}Config")}


def composed(path: Path, text: str, *overrides: str) -> Any:
    (path / "config.yaml").write_text(text)
    with initialize_config_dir(version_base=None, config_dir=str(path)):
        return compose("config", overrides=list(overrides))


def made(path: Path, group: str, name: str, fields: str = "") -> Any:
    """What a configuration with ``group: name`` among its defaults makes, and these fields of it."""
    text = f"defaults:\n  - {group}: {name}\n  - _self_\n"
    if fields:
        text += f"{group}:\n" + "".join(f"  {line}\n" for line in fields.splitlines())
    return instantiate(composed(path, text)[group])


# group, name in it, fields in YAML, and what a made object says of each field
EXAMPLES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "GenerationalTensorStorage": (
        "storage",
        "generational_tensor",
        "storage:\n  _target_: torch.zeros\n  _args_: [3, 2]\nndim: 2",
        {"max_size": 3, "ndim": 2, "device": torch.device("cpu"), "generations.shape": (3, 2)},
    ),
    "GenerationalLazyTensorStorage": (
        "storage",
        "generational_lazy_tensor",
        "max_size: 8\nndim: 2\nconsolidated: true",
        {"max_size": 8, "ndim": 2, "consolidated": True},
    ),
    "GenerationalLazyMemmapStorage": (
        "storage",
        "generational_lazy_memmap",
        "max_size: 8\nscratch_dir: SCRATCH\nauto_cleanup: true",
        {"max_size": 8, "scratch_dir": "SCRATCH/", "_auto_cleanup": True},
    ),
    "GenerationalPrioritizedSampler": (
        "sampler",
        "generational_prioritized",
        "max_capacity: 8\nalpha: 0.7\nbeta: 0.5\neps: 0.1\ndtype: float64\nreduction: mean\n"
        "max_priority_within_buffer: true\ndevice: cpu",
        {
            "max_size": 8,
            "alpha": 0.7,
            "beta": 0.5,
            "_eps": 0.1,
            "dtype": torch.float64,
            "reduction": "mean",
            "_max_priority_within_buffer": True,
        },
    ),
    "GenerationalPrioritizedSliceSampler": (
        "sampler",
        "generational_prioritized_slice",
        "max_capacity: 8\nalpha: 0.7\nbeta: 0.5\nslice_len: 4\nend_keys: [[next, done], cut]\n"
        "init_key: [agent, is_init]\nstrict_length: false\nspan: [0, 2]",
        {
            "slice_len": 4,
            "end_keys": (("next", "done"), "cut"),
            "truncated_key": ("next", "truncated"),
            "init_key": ("agent", "is_init"),
            "strict_length": False,
            "span": (0, 2),
            "dtype": torch.float32,
        },
    ),
    "GenerationalRoundRobinWriter": ("writer", "generational_round_robin", "compilable: true", {"_compilable": True}),
    "GenerationalTensorDictRoundRobinWriter": (
        "writer",
        "generational_tensordict_round_robin",
        "",
        {"_compilable": False, "tracks_generations": True},
    ),
    "GenerationalTensorDictMaxValueWriter": (
        "writer",
        "generational_tensordict_max_value",
        "rank_key: [next, score]\nreduction: max",
        {"_rank_key": ("next", "score"), "_reduction": "max"},
    ),
    "GenerationalReplayBuffer": (
        "replay_buffer",
        "generational_base",
        "batch_size: 4\nprefetch: 2",
        {"batch_size": 4, "_prefetch_cap": 2},
    ),
    "GenerationalTensorDictReplayBuffer": (
        "replay_buffer",
        "generational_tensordict",
        "batch_size: 4\npriority_key: error\ngenerator:\n  _target_: torch.Generator",
        {"batch_size": 4, "priority_key": "error"},
    ),
    "GenerationalPrioritizedReplayBuffer": (
        "replay_buffer",
        "generational_prioritized",
        "alpha: 0.7\nbeta: 0.5\neps: 0.1\ndtype: float64\nbatch_size: 4",
        {"sampler.alpha": 0.7, "sampler.beta": 0.5, "sampler._eps": 0.1, "sampler.dtype": torch.float64},
    ),
    "GenerationalTensorDictPrioritizedReplayBuffer": (
        "replay_buffer",
        "generational_tensordict_prioritized",
        "alpha: 0.7\nbeta: 0.5\nreduction: mean\npriority_key: error\nsync: false",
        {"_prioritized_sampler.reduction": "mean", "priority_key": "error", "_sync": False},
    ),
}


def test_every_public_buffer_storage_sampler_and_writer_has_a_configuration_a_name_and_an_example():
    assert {f"{name}Config" for name in PARTS} == set(configs.__all__) - {
        "GenerationalReplayBufferEnsembleConfig",
        "register_configs",
    }
    assert set(EXAMPLES) == set(PARTS)
    store = ConfigStore.instance()
    for group, name, _, _ in EXAMPLES.values():
        assert f"{name}.yaml" in store.list(group)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_defaults_list_makes_it_and_its_fields_arrive(name, tmp_path):
    group, entry, text, expected = EXAMPLES[name]
    scratch = str(tmp_path / "scratch")
    part = made(tmp_path, group, entry, text.replace("SCRATCH", scratch))
    assert type(part) is PARTS[name]
    for path, value in expected.items():
        found: Any = part
        for step in path.split("."):
            found = getattr(found, step)
        assert found == (value.replace("SCRATCH", scratch) if isinstance(value, str) else value), path
        assert not OmegaConf.is_config(found), path
    if isinstance(part, ReplayBuffer):
        part.shutdown()


# Arguments of the metaclass of TorchRL's buffers, and two that its own configuration of tensordict buffers lacks.
SERVICE = {"service_backend", "service_backend_options"}
NOT_THERE = {"GenerationalTensorDictReplayBuffer": {"transport", "transport_options"}}


def arguments_of(cls: type) -> dict[str, inspect.Parameter]:
    """The arguments of a class, and of those that it passes its keyword arguments on to."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        own = inspect.signature(vars(base)["__init__"]).parameters if "__init__" in vars(base) else {}
        found = {**own, **found}
        if own and not any(argument.kind is argument.VAR_KEYWORD for argument in own.values()):
            break
    return {
        name: argument
        for name, argument in found.items()
        if name != "self" and argument.kind not in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL)
    }


@pytest.mark.parametrize("name", CLASSES)
def test_fields_and_defaults_are_the_arguments_of_the_class(name):
    arguments = arguments_of(PARTS[name])
    fields = {field.name: field for field in dataclasses.fields(CLASSES[name]) if not field.name.startswith("_")}
    assert set(fields) - SERVICE == set(arguments) - SERVICE - NOT_THERE.get(name, set())
    for key in set(fields) - SERVICE:
        default, argument = fields[key].default, arguments[key].default
        if argument is inspect.Parameter.empty:
            assert default == MISSING, key
        elif isinstance(argument, torch.dtype):
            assert default == str(argument).removeprefix("torch."), key
        else:  # None stands for False and 0 in places
            assert default == argument or not (default or argument), key


def test_buffers_are_composed_of_parts_and_used(tmp_path):
    config = composed(
        tmp_path,
        """
defaults:
  - replay_buffer: generational_tensordict
  - storage@replay_buffer.storage: generational_lazy_tensor
  - sampler@replay_buffer.sampler: generational_prioritized
  - writer@replay_buffer.writer: generational_tensordict_round_robin
  - _self_
capacity: 8
replay_buffer:
  batch_size: 4
  storage:
    max_size: ${capacity}
  sampler:
    max_capacity: ${capacity}
    alpha: 0.7
    beta: 0.5
""",
        "replay_buffer.batch_size=6",
        "replay_buffer.sampler.beta=1.0",
    )
    rb = instantiate(config.replay_buffer)
    assert (rb.batch_size, rb.sampler.beta, rb.storage.max_size) == (6, 1.0, 8)
    rb.extend(records(8))
    sample = rb.sample()
    rb.extend(records(8))
    sample["td_error"] = torch.rand(6)
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 6


def test_an_ensemble_is_composed_of_buffers(tmp_path):
    config = composed(
        tmp_path,
        """
defaults:
  - replay_buffer: generational_ensemble
  - replay_buffer@new: generational_tensordict_prioritized
  - storage@new.storage: generational_lazy_tensor
  - replay_buffer@old: generational_tensordict_prioritized
  - storage@old.storage: generational_lazy_tensor
  - _self_
new: {alpha: 0.7, beta: 0.5, storage: {max_size: 8}}
old: {alpha: 0.7, beta: 0.5, storage: {max_size: 4}}
replay_buffer:
  rbs: ["${new}", "${old}"]
  p: [0.25, 0.75]
  batch_size: 8
  num_buffer_sampled: 2
""",
    )
    rb = instantiate(config.replay_buffer)
    assert type(rb) is g.GenerationalReplayBufferEnsemble
    assert (rb.batch_size, rb.sampler.p.tolist(), rb.sampler.num_buffer_sampled) == (8, [0.25, 0.75], 2)
    assert [rb[number].storage.max_size for number in range(2)] == [8, 4]
    for number in range(2):
        rb[number].extend(records(4))
    sample = rb.sample()
    sample["td_error"] = torch.rand(sample.batch_size)
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 8
    fields = {field.name for field in dataclasses.fields(configs.GenerationalReplayBufferEnsembleConfig)}
    taken = set(inspect.signature(ReplayBufferEnsemble.__init__).parameters)
    assert taken - fields == {"self", "storages", "samplers", "writers", "shared", "kwargs"}


def test_parts_that_are_made_later_are_made_by_the_buffer(tmp_path):
    config = composed(
        tmp_path,
        """
defaults:
  - replay_buffer: generational_prioritized
  - storage@replay_buffer.storage: generational_lazy_tensor
  - _self_
replay_buffer:
  _partial_: true
  alpha: 0.7
  beta: 0.5
  batch_size: 2
  storage:
    _partial_: true
    max_size: 8
""",
    )
    rb = instantiate(config.replay_buffer)(storage=g.GenerationalLazyTensorStorage(16))
    assert type(rb) is g.GenerationalPrioritizedReplayBuffer
    assert rb.storage.max_size == rb.sampler.max_size == 16
    rb = instantiate(config.replay_buffer)()
    assert rb.storage.max_size == rb.sampler.max_size == 8


def test_nested_keys_reach_the_records(tmp_path):
    sampler = made(
        tmp_path,
        "sampler",
        "generational_prioritized_slice",
        "max_capacity: 8\nalpha: 1.0\nbeta: 1.0\nslice_len: 2\ntraj_key: [collector, traj_ids]\ntruncated_key: null",
    )
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), sampler=sampler, batch_size=4)
    rb.extend(records(8).set(("collector", "traj_ids"), torch.arange(8) // 4))
    sample = rb.sample()
    assert (sample["x"][1::2] - sample["x"][::2] == 1).all()
    assert ("next", "truncated") not in sample.keys(True)


def test_a_mandatory_field_that_is_missing_is_named(tmp_path):
    with pytest.raises(Exception, match="max_capacity"):
        made(tmp_path, "sampler", "generational_prioritized", "alpha: 0.7\nbeta: 0.5")


def test_a_field_that_no_argument_stands_for_and_a_number_that_is_none_are_refused(tmp_path):
    with pytest.raises(Exception, match="capacity"):
        made(tmp_path, "sampler", "generational_prioritized", "capacity: 8")
    with pytest.raises(Exception, match="many"):
        made(tmp_path, "sampler", "generational_prioritized", "max_capacity: many")


@pytest.mark.parametrize("name", ["float128x", "Tensor"])
def test_a_dtype_that_torch_does_not_have_is_refused_by_name(name, tmp_path):
    with pytest.raises(InstantiationException, match=f"dtype should be the name.*'{name}'"):
        made(tmp_path, "sampler", "generational_prioritized", f"max_capacity: 8\nalpha: 1.0\nbeta: 1.0\ndtype: {name}")


def test_a_writer_without_generations_is_refused_as_by_its_class(tmp_path):
    with pytest.raises(InstantiationException, match="always tracks generations"):
        made(tmp_path, "writer", "generational_round_robin", "track_generations: false")


def test_configurations_are_those_of_torchrl_where_it_has_some():
    from torchrl.trainers.algorithms.configs import data

    for name, config in CLASSES.items():
        theirs = getattr(data, f"{name.removeprefix('Generational')}Config", data.ConfigBase)
        if name != "GenerationalPrioritizedSliceSampler":
            assert issubclass(config, theirs)
    assert {"tensordict.yaml", "base.yaml"} <= set(ConfigStore.instance().list("replay_buffer"))


def test_configurations_are_written_and_read_as_yaml(tmp_path):
    config = OmegaConf.structured(configs.GenerationalPrioritizedSamplerConfig(max_capacity=8, alpha=1.0, beta=0.0))
    OmegaConf.save(config, tmp_path / "sampler.yaml")
    sampler = instantiate(OmegaConf.load(tmp_path / "sampler.yaml"))
    assert type(sampler) is g.GenerationalPrioritizedSampler


def test_without_hydra_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "hydra.core.config_store", None)
    spec = importlib.util.spec_from_file_location("configs_without_hydra", configs.__file__)
    with pytest.raises(ImportError, match=r"pip install 'torchrl-generational\[hydra\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_configurations_are_registered_again_in_a_store_that_was_emptied(monkeypatch):
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", {})
    configs.register_configs()
    configs.register_configs()
    found = {(group, entry.removesuffix(".yaml")) for group in store.repo for entry in store.list(group)}
    examples = {(group, name) for group, name, _, _ in EXAMPLES.values()}
    assert found == examples | {("replay_buffer", "generational_ensemble")}
