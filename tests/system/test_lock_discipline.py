"""Every public method of every buffer: what it changes, it changes while it holds the locks, in their order.

The methods are found by introspection. One that is added later fails here until it is listed: as one that changes the
buffer, with a call of it, or as one that cannot, with the reason.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import TIMEOUT, announce_blocked, records, until_blocked_or_done
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.scheduler import LinearScheduler

import torchrl_generational as g

KINDS = {
    "plain": lambda **kw: g.GenerationalReplayBuffer(sampler=g.GenerationalPrioritizedSampler(8, 0.7, 0.5), **kw),
    "tensordict": lambda **kw: g.GenerationalTensorDictReplayBuffer(
        sampler=g.GenerationalPrioritizedSampler(8, 0.7, 0.5), **kw
    ),
    "slices of tensordict": lambda **kw: g.GenerationalTensorDictReplayBuffer(
        sampler=g.GenerationalPrioritizedSliceSampler(8, 0.7, 0.5, slice_len=1, end_key="x"),
        **kw,
    ),
    "prioritized": lambda **kw: g.GenerationalPrioritizedReplayBuffer(alpha=0.7, beta=0.5, **kw),
    "tensordict prioritized": lambda **kw: g.GenerationalTensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, **kw),
}


def build(kind: str, **kwargs: Any) -> Any:
    kwargs.setdefault("storage", g.GenerationalLazyTensorStorage(8))
    rb = KINDS[kind](batch_size=4, **kwargs)
    rb.set_rng(torch.Generator().manual_seed(0))
    rb.extend(records(8))
    return rb


def with_index(count: int) -> TensorDict:
    return records(count, 100, index=torch.arange(count))


def handles(info: dict[str, Any]) -> dict[str, Any]:
    return {"index": info["index"], "generation": info["index_generation"]}


# name -> a call of it, given a buffer, the info and the data of an earlier sample, and an empty directory
Act = Callable[[Any, dict[str, Any], Any, Any], Any]
ACTS: dict[str, Act] = {
    "add": lambda rb, info, td, path: rb.add(records(1)[0]),
    "dump": lambda rb, info, td, path: rb.dump(path),
    "dumps": lambda rb, info, td, path: rb.dumps(path),
    "empty": lambda rb, info, td, path: rb.empty(),
    "extend": lambda rb, info, td, path: rb.extend(records(3)),
    "load": lambda rb, info, td, path: rb.load(path / "before"),
    "load_state_dict": lambda rb, info, td, path: rb.load_state_dict(torch.load(path / "state.pt", weights_only=True)),
    "loads": lambda rb, info, td, path: rb.loads(path / "before"),
    "mark_update": lambda rb, info, td, path: rb.mark_update(torch.tensor([1])),
    "next": lambda rb, info, td, path: rb.next(),
    "sample": lambda rb, info, td, path: rb.sample(),
    "save": lambda rb, info, td, path: rb.save(path),
    "set_": lambda rb, info, td, path: rb.set_("x", torch.arange(8)),
    "set_at_": lambda rb, info, td, path: rb.set_at_("x", torch.tensor([0]), [0]),
    "set_rng": lambda rb, info, td, path: rb.set_rng(torch.Generator()),
    "set_sampler": lambda rb, info, td, path: rb.set_sampler(g.GenerationalPrioritizedSampler(8, 0.7, 0.5)),
    "set_storage": lambda rb, info, td, path: rb.set_storage(g.GenerationalLazyTensorStorage(8)),
    "set_writer": lambda rb, info, td, path: rb.set_writer(g.GenerationalRoundRobinWriter()),
    "state_dict": lambda rb, info, td, path: rb.state_dict(),
    "stats": lambda rb, info, td, path: rb.stats(),
    "submit_update_priority_if_present": lambda rb, info, td, path: rb.submit_update_priority_if_present(
        **handles(info), priority=torch.ones(4)
    ).result(),
    "submit_update_if_present": lambda rb, info, td, path: rb.submit_update_if_present(
        **handles(info), patch={"x": torch.zeros(4, dtype=torch.int64)}
    ).result(TIMEOUT),
    "update_": lambda rb, info, td, path: rb.update_(TensorDict({"x": torch.arange(8)}, [8])),
    "update_if_present": lambda rb, info, td, path: rb.update_if_present(
        **handles(info), patch={"x": torch.zeros(4, dtype=torch.int64)}
    ),
    "update_priority": lambda rb, info, td, path: rb.update_priority(torch.tensor([0]), 1.0),
    "update_priority_if_present": lambda rb, info, td, path: rb.update_priority_if_present(
        **handles(info), priority=2.0
    ),
    "update_tensordict_priority": lambda rb, info, td, path: rb.update_tensordict_priority(td),
    "update_tensordict_priority_if_present": lambda rb, info, td, path: rb.update_tensordict_priority_if_present(td),
    "write_all": lambda rb, info, td, path: rb.write_all(with_index(8)),
    "__setitem__": lambda rb, info, td, path: rb.__setitem__(slice(0, 2), with_index(2)),
    "__getstate__": lambda rb, info, td, path: rb.__getstate__(),
    "__deepcopy__": lambda rb, info, td, path: copy.deepcopy(rb),
    # reads that must see one state
    "__getitem__": lambda rb, info, td, path: rb[2:4],
    "__iter__": lambda rb, info, td, path: next(iter(rb)),
    "can_sample": lambda rb, info, td, path: rb.can_sample(4),
    "query": lambda rb, info, td, path: rb.query(trajectory_key="x"),
    "read_all_in_order": lambda rb, info, td, path: rb.read_all_in_order(),
}

# those of TorchRL after 0.14
LATER_ACTS: dict[str, Act] = {
    "export": lambda rb, info, td, path: rb.export(Exporter()),
    "wait_until_sampleable": lambda rb, info, td, path: rb.wait_until_sampleable(4),
}
ACTS |= {name: act for name, act in LATER_ACTS.items() if hasattr(ReplayBuffer, name)}


class Exporter:
    """What TorchRL's ``export`` takes."""

    def to_external(self, dataset: Any) -> list[Any]:
        return [dataset[number] for number in range(len(dataset))]


# name -> why it cannot change storage, sampler, writer or queue of a buffer in use
HARMLESS = {
    **dict.fromkeys(["append_transform", "insert_transform", "transform"], "only the chain of transforms"),
    **dict.fromkeys(["register_load_hook", "register_save_hook"], "only the storage's checkpointer"),
    **dict.fromkeys(["as_remote", "client", "service_backend", "is_alive", "start"], "only services"),
    **dict.fromkeys(["batch_size", "dim_extend", "initialized"], "a constant"),
    **dict.fromkeys(["sampler", "prioritized_sampler", "storage", "writer"], "a part"),
    "conditional_updates": "one flag, read once per update",
    "keeps_priorities": "the class of a part",
    "write_count": "one number of the writer",
    "share": "the lock itself; tested in buffers/test_mixin.py",
    "shutdown": "waits for the queue; the futures lock guards it",
    "synchronize": "waits for the queue; the futures lock guards it",
    **dict.fromkeys(["__init__", "__setstate__", "__init_subclass__", "__del__"], "no other thread has the buffer"),
    "__len__": "one number of the storage",
    **{name: "makes a view that samples" for name in ["as_dataset"] if hasattr(ReplayBuffer, name)},
    "__repr__": "for people",
    **dict.fromkeys(["__subclasshook__", "__class_getitem__"], "the class only"),
}


def names_of(rb: Any) -> set[str]:
    """All that a caller can name on a buffer: public names, and special methods that are not plain Python's."""
    classes = [base for base in type(rb).__mro__ if base.__module__.startswith("torchrl")]
    special = {
        name
        for base in classes
        for name, value in vars(base).items()
        if name.startswith("__") and name.endswith("__") and callable(getattr(value, "__func__", value))
    }
    return {name for name in dir(type(rb)) if not name.startswith("_")} | (special - {"__class__"})


@pytest.mark.parametrize("kind", KINDS)
def test_every_public_method_is_covered(kind):
    known = ACTS.keys() | HARMLESS.keys()
    assert names_of(build(kind)) - known == set(), "list it in ACTS, or in HARMLESS with the reason"


def test_nothing_is_listed_that_no_buffer_has():
    existing = set().union(*(names_of(build(kind)) for kind in KINDS))
    assert (ACTS.keys() | HARMLESS.keys()) - existing <= {"__del__", "__subclasshook__", "__class_getitem__"}


@pytest.mark.parametrize("kind", [g.GenerationalPrioritizedSampler, g.GenerationalPrioritizedSliceSampler])
def test_every_setting_of_the_sampler_is_covered(kind):
    settings = {
        name
        for name in dir(kind)
        if isinstance(value := getattr(kind, name), property) and value.fset is not None and not name.startswith("_")
    }
    assert settings == {"alpha", "beta"}


# ------------------------------------------------------------------ an instrumented buffer


class Watch(TorchDispatchMode):
    """Notes every change to a watched object, or to a tensor in it, that is made without the lock."""

    def __init__(self, rb: Any) -> None:
        super().__init__()
        self.lock = rb.storage.lock
        self.changes = 0
        self.unguarded: list[str] = []
        self.out_of_order: list[str] = []
        futures_lock, watch = rb._futures_lock, self

        class OrderedLock:
            def __enter__(self) -> Any:
                if watch.held() and not futures_lock._is_owned():
                    watch.out_of_order.append("the futures lock was taken under the storage's lock")
                return futures_lock.__enter__()

            def __exit__(self, *exc: object) -> Any:
                return futures_lock.__exit__(*exc)

        class GuardedQueue(deque):  # type: ignore[type-arg]
            def _noted(name: str) -> Any:  # noqa: N805
                def method(self: Any, *arguments: Any) -> Any:
                    watch.changes += 1
                    if not futures_lock._is_owned():
                        watch.unguarded.append(f"queue.{name}")
                    return getattr(deque, name)(self, *arguments)

                return method

            append, popleft, pop, clear, extend = map(_noted, ["append", "popleft", "pop", "clear", "extend"])

        rb._prefetch_queue = GuardedQueue(rb._prefetch_queue)
        rb._futures_lock = OrderedLock()
        self.tensors = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*rb.storage._storage.values(True, True), rb.storage.slot_generations.values)
        }
        for name in ("storage", "sampler", "writer"):
            part = getattr(rb, name)
            for attribute, value in list(vars(part).items()):
                if attribute in ("_sum_tree", "_min_tree"):
                    vars(part)[attribute] = Tree(value, self)
            part.__class__ = self.watching(type(part), name)
        rb.__class__ = self.watching(
            type(rb), "buffer", {"_storage", "_sampler", "_writer", "_rng", "_conditional_rows", "_batch_size"}
        )

    def held(self) -> bool:
        return self.lock._threads._is_owned()

    def note(self, what: str) -> None:
        self.changes += 1
        if not self.held():
            self.unguarded.append(what)

    def watching(self, cls: type, label: str, only: set[str] | None = None) -> type:
        watch = self

        def set_attribute(part: Any, name: str, value: Any) -> None:
            if name in only if only else not isinstance(getattr(type(part), name, None), property) or name[0] == "_":
                watch.note(f"{label}.{name}")
            if name in ("_sum_tree", "_min_tree"):
                value = Tree(value, watch)
            super(made, part).__setattr__(name, value)

        made = type(cls.__name__, (cls,), {"__setattr__": set_attribute, "__module__": cls.__module__})
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in value if isinstance(value, list) else [value]:
                    if tensor.untyped_storage().data_ptr() in self.tensors:
                        self.note(f"tensor.{func}")
        return func(*args, **(kwargs or {}))


class Tree:
    """A tree that reports writes."""

    def __init__(self, tree: Any, watch: Watch) -> None:
        self.tree, self.watch = tree, watch

    def __setitem__(self, cells: Any, leaf: Any) -> None:
        self.watch.note("tree")
        self.tree[cells] = leaf

    def __getitem__(self, cells: Any) -> Any:
        return self.tree[cells]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tree, name)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.tree, memo)


READS = {
    *LATER_ACTS,
    "can_sample",
    "query",
    "read_all_in_order",
    "__getitem__",
    "state_dict",
    "__getstate__",
    "__deepcopy__",
    "stats",
} | {
    *("dump", "dumps", "save"),
    *("sample", "next", "__iter__"),  # change the queue if there is one
}
ON_DISK = {"dump", "dumps", "save", "load", "loads"}  # memory-mapped tensors do not work with a dispatch mode
CALLS = [(kind, name) for kind in KINDS for name in ACTS if "tensordict" in kind or "_tensordict_" not in name]


def prepared(kind: str, tmp_path: Any, **kwargs: Any) -> tuple[Any, dict[str, Any], Any]:
    rb = build(kind, **kwargs)
    data, info = rb.sample(return_info=True)
    rb.dumps(tmp_path / "before")
    torch.save(rb.state_dict(), tmp_path / "state.pt")
    rb.extend(records(5, 50))
    return rb, info, data.set("td_error", torch.ones(4)) if "tensordict" in kind else None


@pytest.mark.parametrize(("kind", "name"), CALLS)
def test_what_a_method_changes_it_changes_under_the_lock(kind, name, tmp_path):
    rb, info, td = prepared(kind, tmp_path)
    watch = Watch(rb)
    with contextlib.nullcontext() if name in ON_DISK else watch:
        ACTS[name](rb, info, td, tmp_path)
    assert watch.unguarded == []
    assert watch.out_of_order == []
    assert (watch.changes > 0) >= (name not in READS)


@pytest.mark.parametrize(("kind", "name"), CALLS)
def test_a_method_waits_for_whoever_holds_the_lock(kind, name, tmp_path, actors):
    rb, info, td = prepared(kind, tmp_path)
    with rb.storage.lock:
        blocked = announce_blocked(rb.storage.lock, "")  # also a thread that the call hands its work to
        future = actors.start("caller", lambda: ACTS[name](rb, info, td, tmp_path))
        until_blocked_or_done(blocked, future)
        assert not future.done()
    future.result(TIMEOUT)
    rb.shutdown()


@pytest.mark.parametrize("name", ["sample", "empty", "extend", "set_storage", "load_state_dict", "state_dict", "dumps"])
def test_the_queue_of_prefetched_batches_changes_under_the_futures_lock(name, tmp_path):
    rb, info, td = prepared("tensordict prioritized", tmp_path, prefetch=2)
    watch = Watch(rb)
    with contextlib.nullcontext() if name in ON_DISK else watch:
        ACTS[name](rb, info, td, tmp_path)
    assert watch.unguarded == []
    assert watch.out_of_order == []
    rb.shutdown()


@pytest.mark.parametrize("setting", ["alpha", "beta"])
def test_annealing_changes_the_sampler_under_the_lock(setting, tmp_path, actors):
    rb, _, _ = prepared("tensordict prioritized", tmp_path)
    scheduler = LinearScheduler(rb, setting, final_value=0.1, num_steps=10)
    with rb.storage.lock:
        blocked = announce_blocked(rb.storage.lock, "scheduler")
        future = actors.start("scheduler", scheduler.step)
        until_blocked_or_done(blocked, future)
        assert not future.done()
    future.result(TIMEOUT)
    watch = Watch(rb)
    with watch:
        scheduler.step()
    assert watch.unguarded == []
    assert watch.changes > 0


def test_the_instrument_sees_a_change_without_the_lock(tmp_path):
    rb, _, _ = prepared("tensordict prioritized", tmp_path)
    watch = Watch(rb)
    with watch:
        rb.storage.set(0, records(1, index=torch.zeros(1, dtype=torch.int64))[0])
        rb.sampler.update_priority([0], 3.0)
        rb.writer._cursor = 3
        rb._sampler = rb.sampler
        with rb.storage.lock, rb._futures_lock:
            rb._prefetch_queue.append(None)
    assert any(what.startswith("tensor.") for what in watch.unguarded)
    assert {"tree", "sampler._max_priority", "writer._cursor", "buffer._sampler"} <= set(watch.unguarded)
    assert watch.out_of_order != []
