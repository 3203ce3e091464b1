"""A Ray buffer that was closed, and its clients, say so, and start no Ray of their own."""

from __future__ import annotations

import importlib
import inspect
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from support import RAY_TOKEN, records
from tensordict import TensorDict

import torchrl_generational as g

ray = pytest.importorskip("ray")
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    importlib.import_module("torchrl.collectors.distributed.ray")  # warns of its own classes; Ray buffers import it

from torchrl_generational.ray import GenerationalRayReplayBuffer  # noqa: E402

pytestmark = pytest.mark.ray

INDEX = torch.zeros(1, dtype=torch.int64)
SAMPLE = TensorDict({"index": INDEX, "index_generation": INDEX, "td_error": torch.ones(1)}, [1])
HANDLES = {"index": INDEX, "generation": INDEX}
PATCH = {**HANDLES, "patch": {"x": INDEX}}

#: A call of every public method that leads to the actor.
CALLS: dict[str, Any] = {
    "add": lambda rb: rb.add(records(1)[0]),
    "append_transform": lambda rb: rb.append_transform(None),
    "batch_size": lambda rb: rb.batch_size,
    "client": lambda rb: rb.client(),
    "clients": lambda rb: rb.clients(2),
    "conditional_updates": lambda rb: rb.conditional_updates,
    "dim_extend": lambda rb: rb.dim_extend,
    "dump": lambda rb: rb.dump("/nowhere"),
    "dumps": lambda rb: rb.dumps("/nowhere"),
    "empty": lambda rb: rb.empty(),
    "extend": lambda rb: rb.extend(records(1)),
    "insert_transform": lambda rb: rb.insert_transform(0, None),
    "keeps_priorities": lambda rb: rb.keeps_priorities,
    "load": lambda rb: rb.load("/nowhere"),
    "load_state_dict": lambda rb: rb.load_state_dict({}),
    "loads": lambda rb: rb.loads("/nowhere"),
    "mark_update": lambda rb: rb.mark_update(0),
    "next": lambda rb: rb.next(),
    "priority_key": lambda rb: rb.priority_key,
    "register_load_hook": lambda rb: rb.register_load_hook(print),
    "register_save_hook": lambda rb: rb.register_save_hook(print),
    "sample": lambda rb: rb.sample(),
    "save": lambda rb: rb.save("/nowhere"),
    "set_rng": lambda rb: rb.set_rng(None),
    "set_sampler": lambda rb: rb.set_sampler(None),
    "set_storage": lambda rb: rb.set_storage(None),
    "set_writer": lambda rb: rb.set_writer(None),
    "share": lambda rb: rb.share(),
    "start": lambda rb: rb.start(),
    "state_dict": lambda rb: rb.state_dict(),
    "stats": lambda rb: rb.stats(),
    "submit_update_if_present": lambda rb: rb.submit_update_if_present(**PATCH),
    "submit_update_priority_if_present": lambda rb: rb.submit_update_priority_if_present(**HANDLES, priority=1.0),
    "submit_update_tensordict_priority_if_present": lambda rb: rb.submit_update_tensordict_priority_if_present(SAMPLE),
    "synchronize": lambda rb: rb.synchronize(),
    "update_if_present": lambda rb: rb.update_if_present(**PATCH),
    "update_priority": lambda rb: rb.update_priority(SAMPLE),
    "update_priority_if_present": lambda rb: rb.update_priority_if_present(**HANDLES, priority=1.0),
    "update_tensordict_priority": lambda rb: rb.update_tensordict_priority(SAMPLE),
    "update_tensordict_priority_if_present": lambda rb: rb.update_tensordict_priority_if_present(SAMPLE),
    "write_count": lambda rb: rb.write_count,
    "__getitem__": lambda rb: rb[0],
    "__iter__": lambda rb: next(iter(rb)),
    "__len__": lambda rb: len(rb),
    "__setitem__": lambda rb: rb.__setitem__(0, records(1)[0]),
    "dim_extend =": lambda rb: setattr(rb, "dim_extend", 0),
    "conditional_updates =": lambda rb: setattr(rb, "conditional_updates", True),
    "storage": lambda rb: rb.storage,
    "sampler": lambda rb: rb.sampler,
}
#: Those that say what was always so, or end the buffer once more.
QUIET = {"close", "shutdown", "is_alive", "service_backend", "transport_kind"}
OF_CLIENTS = {
    *("add", "conditional_updates", "conditional_updates =", "dim_extend", "dim_extend =", "extend"),
    *("keeps_priorities", "priority_key", "sample", "share", "stats"),
    *(name for name in CALLS if "if_present" in name),
    *("write_count", "__len__"),
}


def make(transport: str) -> GenerationalRayReplayBuffer:
    return GenerationalRayReplayBuffer(
        replay_buffer_cls=g.GenerationalTensorDictPrioritizedReplayBuffer,
        alpha=1.0,
        beta=1.0,
        storage=partial(g.GenerationalLazyTensorStorage, 8),
        batch_size=4,
        transport=transport,
        ray_init_config={"num_cpus": 1, "include_dashboard": False, "log_to_driver": False},
        remote_config={"num_cpus": 0},
    )


def outcome(call: Any, user: Any) -> str:
    try:
        return f"returned {call(user)}"
    except RuntimeError as error:
        return str(error)


def test_the_list_of_calls_is_complete():
    public = {
        name
        for cls in (GenerationalRayReplayBuffer, *GenerationalRayReplayBuffer.__mro__[1:3])
        for name, value in vars(cls).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    }
    assert public - set(CALLS) == QUIET


@pytest.mark.parametrize(
    ("transport", "end"),
    [
        ("ray", "close"),
        ("distributed", "close"),
        ("ray", "Ray ended"),
        ("ray", "Ray goes on"),
        pytest.param("distributed", "Ray ended", marks=pytest.mark.slow),
        pytest.param("distributed", "Ray goes on", marks=pytest.mark.slow),
    ],
)
def test_whatever_is_asked_of_a_closed_buffer_is_refused_without_another_ray(monkeypatch, transport, end):
    """C59."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_TOKEN", RAY_TOKEN)
    assert not ray.is_initialized()
    if end == "Ray goes on":
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        rb = make(transport)
        rb.extend(records(8))
        client = rb.client()
        other = pickle.loads(pickle.dumps(client))
        if end == "Ray ended":
            ray.shutdown()
        else:
            rb.close()
        assert ray.is_initialized() == (end == "Ray goes on")
        clients = [client] if end == "Ray goes on" else [client, other]
        for user, names in ((rb, set(CALLS)), *((one, OF_CLIENTS) for one in clients)):
            said = {name: outcome(CALLS[name], user) for name in sorted(names)}
            assert {name: what for name, what in said.items() if "closed" not in what} == {}
            assert ray.is_initialized() == (end == "Ray goes on")
        with pytest.raises(RuntimeError, match=r"is closed, or Ray was shut down in this process. Make another"):
            rb.sample()
        assert not rb.is_alive
        assert "closed" in repr(rb) or end == "Ray ended"
        rb.close()
        rb.shutdown()
        with pytest.raises(RuntimeError, match="closed"):
            rb.sample()
    finally:
        ray.shutdown()
