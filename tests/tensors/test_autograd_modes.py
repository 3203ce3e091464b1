"""Buffers on both sides of ``torch.inference_mode``: made or written inside, used outside, and the other way round."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import filled, prioritized, records, transfer
from tensordict import is_tensor_collection
from test_beside_compile import plain
from test_default_devices import BUFFERS, steps_of
from test_gradients import LAYOUTS, buffer_for

import torchrl_generational as g


def nowhere() -> Any:
    return contextlib.nullcontext()


def inside() -> Any:
    return torch.inference_mode()


#: What is exchanged at each update, and never changed in place.
EXCHANGED = ("_max_priority", "_sample_list", "_conditional_updated", "_conditional_rejected")


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor that hangs on an object of this package or of TorchRL."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif is_tensor_collection(value):
        yield from (leaf for leaf in value.values(True, True) if isinstance(leaf, torch.Tensor))
    elif isinstance(value, dict | list | tuple | set):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(entry, seen)
    elif type(value).__module__.startswith("torchrl"):
        slots = itertools.chain(*(getattr(base, "__slots__", ()) for base in type(value).__mro__))
        held = {name: getattr(value, name, None) for name in slots if name != "__weakref__"}
        held |= getattr(value, "__dict__", {})
        yield from tensors_of({name: entry for name, entry in held.items() if name not in EXCHANGED}, seen)


def life(make: Callable[[], Any], folder: Path, sides: list[Callable[[], Any]]) -> list[Any]:
    """What a buffer does, step by step, each on the side whose turn it is."""
    torch.manual_seed(0)
    turn = itertools.cycle(sides)
    seen: list[Any] = []

    def see(step: Callable[[], Any]) -> Any:
        with next(turn)():
            found = step()
            seen.append(plain(found))
        return found

    def made() -> Any:
        rb = make()
        rb.set_rng(torch.Generator().manual_seed(1))
        return rb

    rb = see(made)
    ndim = rb.storage.ndim
    for count, start in ((3, 0), (5, 20), (3, 40)):
        see(lambda count=count, start=start: rb.extend(steps_of(ndim, count, start)))
    if ndim == 1:
        see(lambda: rb.add(steps_of(1, 1, 60)[0]))
    _, info = see(lambda: rb.sample(return_info=True))
    handles = {"index": info["index"], "generation": info["index_generation"]}
    rows = handles["generation"].numel()
    if rb.keeps_priorities:
        see(lambda: rb.update_priority_if_present(**handles, priority=torch.linspace(1, 2, rows)))
        see(lambda: rb.update_priority_if_present(**handles, priority=3.0))
    see(lambda: rb.update_if_present(**handles, patch={"rank": torch.zeros(rows)}))
    see(lambda: rb.__setitem__(slice(0, 2), rb[:2].clone()))
    see(lambda: rb.mark_update(torch.tensor([1])))
    see(lambda: rb.sample())
    other = see(made)
    see(lambda: other.extend(steps_of(ndim, 1, 90)))
    for how in ("state_dict", "dumps"):
        see(lambda how=how: transfer(rb, other, how, folder))
        see(lambda: [len(other), other[:]])
        see(lambda: other.extend(steps_of(ndim, 3, 100)))
    twins = [other]
    if not rb.storage.lock.is_shared:
        for copied in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
            twins.append(see(lambda copied=copied: copied(other)))
            see(lambda: twins[-1].extend(steps_of(ndim, 2, 110)))
            see(lambda: [twins[-1][:], twins[-1].storage.generations])
    see(lambda: rb.empty())
    see(lambda: rb.extend(steps_of(ndim, 4, 70)))
    see(lambda: rb.sample())
    see(lambda: [rb[:], rb.storage.generations])
    for held in (rb, *twins):
        assert [tensor.shape for tensor in tensors_of(held) if tensor.is_inference()] == []
        held.shutdown()
    return seen


ORDERS = {
    "made inside": [inside, *[nowhere] * 99],
    "first write inside": [nowhere, inside, *[nowhere] * 99],
    "made and first written inside": [inside, inside, *[nowhere] * 99],
    "later writes inside": [nowhere, nowhere, *[inside] * 99],
    "only made outside": [nowhere, *[inside] * 99],
    "by turns": [inside, nowhere],
    "by other turns": [nowhere, inside],
    "all inside": [inside],
}


OFTEN_KINDS = ("memory", "memmap", "compilable", "two dimensions", "shared", "the best")
OFTEN_ORDERS = ("made inside", "first write inside", "later writes inside", "by turns")
GRID = list(itertools.product(BUFFERS, ORDERS))
OFTEN = [(kind, order) for kind, order in GRID if kind in OFTEN_KINDS and order in OFTEN_ORDERS]


@pytest.mark.parametrize(("kind", "order"), OFTEN)
def test_a_buffer_does_the_same_on_either_side(kind, order, tmp_path):
    expected = life(BUFFERS[kind], tmp_path / "a", [nowhere])
    assert life(BUFFERS[kind], tmp_path / "b", ORDERS[order]) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "order"), [pair for pair in GRID if pair not in OFTEN])
def test_so_does_every_buffer_in_every_order(kind, order, tmp_path):
    expected = life(BUFFERS[kind], tmp_path / "a", [nowhere])
    assert life(BUFFERS[kind], tmp_path / "b", ORDERS[order]) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_of_every_layout_are_stored_as_normal_tensors(layout):
    with torch.inference_mode():
        rb = buffer_for(layout)
        rb.extend(LAYOUTS[layout](torch.arange(6.0)))
    rb.extend(LAYOUTS[layout](torch.arange(6.0, 12.0)))
    with torch.inference_mode():
        later = LAYOUTS[layout](torch.arange(12.0, 15.0))
    rb.extend(later)  # written outside, made inside
    if layout not in ("a tuple", "two dimensions"):  # which TorchRL does not take
        rb[0] = {"x": torch.tensor(20.0)} if layout == "a dict" else LAYOUTS[layout](torch.full((1,), 20.0))[0]
    assert [leaf for leaf in tensors_of(rb) if leaf.is_inference()] == []
    drawn, _ = rb.sample(return_info=True)
    assert [leaf for leaf in tensors_of(drawn) if leaf.is_inference()] == []


def test_a_state_taken_inside_can_be_loaded_outside_where_there_is_nothing_yet():
    with torch.inference_mode():
        state = filled().state_dict()
    rb = prioritized()
    rb.load_state_dict(state)
    rb.extend(records(3, 50))
    assert rb[:]["x"].tolist() == [50, 51, 52, 3, 4, 5, 6, 7]


def test_a_storage_around_records_that_were_made_inside_can_be_written_outside():
    with torch.inference_mode():
        held = records(4)
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalTensorStorage(held), batch_size=4)
    rb.extend(records(2, 50))
    assert sorted(rb[:]["x"].tolist()) == [2, 3, 50, 51]


def test_an_ensemble_works_on_either_side():
    with torch.inference_mode():
        ensemble = g.GenerationalReplayBufferEnsemble(filled(seed=1), filled(seed=2), batch_size=8)
        sample = ensemble.sample()
    ensemble[0].extend(records(8, 50))
    with torch.inference_mode():
        sample["td_error"] = torch.ones(sample.shape)
        result = ensemble.update_tensordict_priority_if_present(sample)
    assert result.updated_mask.tolist() == (sample["x"] < 8).logical_and(ids_of_members(sample) == 1).tolist()
    ensemble.empty()
    assert [leaf for member in (ensemble[0], ensemble[1]) for leaf in tensors_of(member) if leaf.is_inference()] == []


def ids_of_members(sample: Any) -> torch.Tensor:
    """The member of each row: the first half of the batch comes from the first one."""
    return torch.tensor([0, 1])[:, None].expand(sample.shape)


def test_a_learner_inside_and_an_actor_outside_share_one_buffer(actors):
    rb = filled()
    with torch.inference_mode():
        sample = rb.sample()
        actors.writer(lambda: rb.extend(records(4, 50)))  # the mode is the thread's own
        sample["td_error"] = torch.full((8,), 2.0)
        result = rb.update_tensordict_priority_if_present(sample)
    assert result.updated_mask.tolist() == (sample["index"] >= 4).tolist()
    actors.writer(lambda: rb.extend(records(8, 60)))
    assert rb.sample()["x"].min() >= 60
