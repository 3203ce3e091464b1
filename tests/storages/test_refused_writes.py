"""A write that is refused changes nothing; one that is accepted does what TorchRL does. For every form of both."""

from __future__ import annotations

import copy
import itertools
import re
import warnings

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection, tensorclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers import PrioritizedSampler
from torchrl.envs.transforms import Transform

import torchrl_generational as g

SLOTS = 8


@tensorclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


def flat(data):
    """Every leaf of records, by name, as values that compare bit for bit."""
    if is_tensor_collection(data):
        pairs = sorted(data.items(True, True), key=lambda pair: str(pair[0]))
    else:
        leaves, spec = tree_flatten(data)
        pairs = [(str(spec), ""), *enumerate(leaves)]
    return [(str(key), leaf_bits(leaf)) for key, leaf in pairs]


def leaf_bits(leaf):
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.as_subclass(torch.Tensor).detach().contiguous()
        return leaf.dtype, tuple(leaf.shape), leaf.reshape(-1).view(torch.uint8).tolist() if leaf.numel() else []
    return str(leaf.tolist() if hasattr(leaf, "tolist") else leaf)


def snapshot(rb):
    """All that a write can change: records, stamps, length, cursors, counters, priorities, running maximum."""
    storage, writer, sampler = rb._storage, rb._writer, rb._sampler
    state = [
        storage.initialized,
        storage._generations._state.tolist(),
        storage._generations.interrupted,
        len(storage),
        storage._last_cursor_index,
        storage.max_size,
        getattr(writer, "_cursor", None),
        getattr(writer, "_write_count", None),
        list(getattr(writer, "_current_top_values", [])),
        flat(storage._storage) if storage.initialized else None,
    ]
    if isinstance(sampler, PrioritizedSampler):
        cells = torch.arange(sampler.max_size)
        state += [sampler._sum_tree[cells].tolist(), sampler._min_tree[cells].tolist(), str(sampler._max_priority)]
    return state


def fields(n, inner=(), start=100.0):
    count = torch.Size((n, *inner)).numel()
    x = torch.arange(start, start + count).reshape(n, *inner)
    return {"x": x, "y": x.unsqueeze(-1).expand(n, *inner, 3) * 10}


def plain(n, inner=(), **more):
    return TensorDict({**fields(n, inner), **more}, [n, *inner])


def nested(n, inner=()):
    x = fields(n, inner)
    return TensorDict({"x": x["x"], "a": TensorDict({"y": x["y"], "b": {"z": x["x"] + 1}}, [n, *inner])}, [n, *inner])


def lazy(n, inner=()):
    return LazyStackedTensorDict(*plain(n, inner).unbind(0)) if n else plain(n, inner)


LAYOUTS = {
    "tensordict": plain,
    "nested": nested,
    "lazy stack": lazy,
    "tensorclass": lambda n, inner=(): Pair(**fields(n, inner), batch_size=[n, *inner]),
    "tensor": lambda n, inner=(): fields(n, inner)["y"],
    "dict": lambda n, inner=(): {"x": fields(n, inner)["x"], "more": {"y": fields(n, inner)["y"]}},
    "tuple": lambda n, inner=(): tuple(fields(n, inner).values()),
}
INDICES = {
    "int": 1,
    "last": -1,
    "numpy int": np.int64(2),
    "tensor of no dimension": torch.tensor(2),
    "all": slice(None),
    "ellipsis": Ellipsis,
    "none": None,
    "slice": slice(1, 4),
    "from the end": slice(-3, None),
    "steps": slice(0, 8, 2),
    "range": range(3),
    "list": [3, 0],
    "array": np.array([2, 0, 1]),
    "mask": torch.tensor([True, False] * 4),
    "mask of what is written": torch.tensor([True, False, True, True]),
    "mask as a list": [True, False] * 4,
    "int64": torch.tensor([3, 1]),
    "int32": torch.tensor([3, 1], dtype=torch.int32),
    "int8": torch.tensor([3, 1], dtype=torch.int8),
    "two dimensions": torch.tensor([[3, 1], [0, 2]]),
    "outside": torch.tensor([3, 8]),
    "nowhere": torch.tensor([], dtype=torch.long),
    "float": torch.tensor([1.0]),
    "false": False,
}
TUPLES = {
    "one part": (torch.tensor([2, 0]),),
    "cell": (1, 2),
    "column": (slice(None), 1),
    "last column": (Ellipsis, -1),
    "row": (2, slice(None)),
    "row and more": (2, Ellipsis),
    "new dimension": (None, 1),
    "cells": (torch.tensor([0, 1]), torch.tensor([2, 0])),
    "cells of lists": ([0, 1], [2, 0]),
    "a mask of cells": (torch.tensor([[True, False, False]] * 2),),
    "a mask and a place": (torch.tensor([True, False]), 2),
    "too many": (0, 0, 0, 0, 0),
    "outside": (0, 7),
}


def shape_of(index, space):
    """Leading shape of what an index names, or of something like it where it names nothing that is there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tuple(torch.zeros(space)[index].shape)
    except (IndexError, TypeError):
        return (2, *space[1:])


def change(data, how):
    """The records with one fault."""

    def each(function, one=lambda value: value):
        if isinstance(data, torch.Tensor):
            return function(data)
        if isinstance(data, dict):
            return {"x": one(data["x"]), "more": {"y": function(data["more"]["y"])}}
        if isinstance(data, tuple):
            return (one(data[0]), function(data[1]))
        twin = LazyStackedTensorDict(*data.unbind(0)) if isinstance(data, LazyStackedTensorDict) else data.clone()
        key = ("a", "y") if data.get("a", None) is not None else "y"
        twin.set(key, function(data.get(key)))
        return twin

    if how == "shape":
        return each(lambda y: torch.cat([y, y], -1))
    if how == "dtype":
        return each(lambda y: y.double())
    if how == "broadcast":
        return each(lambda y: y[..., :1])
    if how == "missing":
        if isinstance(data, dict):
            return {"x": data["x"]}
        if is_tensor_collection(data) and not isinstance(data, Pair):
            return data.exclude(("a", "y") if data.get("a", None) is not None else "y")
        return "skip"
    if how == "extra":
        if is_tensor_collection(data) and not isinstance(data, Pair):
            return data.clone().set("w", torch.ones(data.batch_size))
        return "skip"
    if how == "no entries":
        return TensorDict({}, data.batch_size) if type(data) is TensorDict else "skip"
    if how == "number":
        return 7
    if how == "text":
        return "text"
    return data


FAULTS = ["none", "short", "long", "shape", "dtype", "broadcast", "missing", "extra", "no entries", "number", "text"]


def pair(layout, memory="memory", length=8, ndim=1, tuples=False, dim_extend=0):
    """Ours and TorchRL's with the same records."""
    ours, stock = {
        "memory": (g.GenerationalLazyTensorStorage, LazyTensorStorage),
        "files": (g.GenerationalLazyMemmapStorage, LazyMemmapStorage),
    }[memory]
    sampler = g.GenerationalPrioritizedSampler(SLOTS * 3, 1.0, 1.0, eps=0.0)
    size = SLOTS * 3 if ndim > 1 else SLOTS
    buffers = (
        g.GenerationalReplayBuffer(storage=ours(size, ndim=ndim), sampler=sampler, batch_size=4, dim_extend=dim_extend),
        ReplayBuffer(storage=stock(size, ndim=ndim), batch_size=4, dim_extend=dim_extend),
    )
    inner = (3,) if ndim > 1 or tuples else ()
    for rb in buffers:
        make = LAYOUTS["tensordict" if layout == "lazy stack" else layout]
        rb.extend(make(3, (length,)) if dim_extend else make(length, inner))
        for leaf in tree_leaves(rb.storage._storage):  # memory that nothing was written to
            leaf[length:] = 0
    cells = torch.arange(length * 3 if ndim > 1 else length)
    if ndim == 1:
        buffers[0].update_priority(cells, cells + 1.0)
    return *buffers, inner


def outcome(write):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            write()
        except Exception as error:
            return error
    return None


def attempt(layout, index, fault, *, memory="memory", length=8, ndim=1, tuples=False, path="item", dim_extend=0):
    """One write to both. Returns what was raised by each; asserts what has to hold whatever that was."""
    ours, stock, inner = pair(layout, memory, length, ndim, tuples, dim_extend)
    space = (SLOTS if length == 8 or not isinstance(index, tuple) else length, *inner)
    if dim_extend:
        space = space[::-1]
    lead = shape_of(index, space)
    if fault in ("short", "long") and lead:
        lead = (lead[0] + (1 if fault == "long" else -1), *lead[1:])
    elif fault in ("short", "long"):
        return None
    if any(size < 0 for size in lead):
        return None
    data = LAYOUTS[layout](*(lead[:1] or (1,)), lead[1:])
    if not lead:
        data = data[0] if not isinstance(data, dict | tuple) else tree_map(lambda leaf: leaf[0], data)
    data = change(data, fault)
    if isinstance(data, str) and data == "skip":
        return None
    before, old = snapshot(ours), ours.storage._generations.values.clone()

    def write(rb):
        value = copy.deepcopy(data)
        if path == "item":
            rb[index] = value
        elif path == "storage":
            rb.storage[index] = value
        else:
            rb.storage.set(index, value)

    raised = outcome(lambda: write(ours)), outcome(lambda: write(stock))
    if raised[0] is not None:
        assert snapshot(ours) == before, raised[0]
    elif raised[1] is None:
        got, expected = (rb.storage._storage for rb in (ours, stock))
        if (layout, fault) == ("lazy stack", "extra"):  # TorchRL loses it
            got, expected = (held.exclude("w") for held in (got, expected))
        if 0 not in lead:  # TorchRL makes an entry of which nothing is written
            assert flat(got) == flat(expected)
        named = torch.zeros(len(old), dtype=torch.bool)
        numbers = torch.arange(SLOTS).reshape(-1, *(1,) * len(inner)).expand(-1, *inner)
        view = numbers[:length] if isinstance(index, tuple) and len(index) > 1 and path == "item" else numbers
        view = view.mT if dim_extend else view
        index = index.long() if isinstance(index, torch.Tensor) and index.dtype == torch.int8 else index
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            named[torch.as_tensor(view[index]).reshape(-1)] = True
        assert ((ours.storage._generations.values != old) == named).all(), "stamps"
    return raised


def product(tuples: bool):
    """Every form of index, with every fault, on every layout and path."""
    found = []
    spaces = [(1, True, 0), (2, False, 0), (2, False, 1)] if tuples else [(1, False, 0)]
    for ndim, several, dim_extend in spaces:
        for layout, length, path, name, fault in itertools.product(
            LAYOUTS, (8, 4), ("item", "storage"), TUPLES if tuples else INDICES, FAULTS
        ):
            if path == "item" or not dim_extend:
                kwargs = {"ndim": ndim, "tuples": several, "dim_extend": dim_extend, "length": length, "path": path}
                found.append((layout, name, fault, kwargs))
    return found


def check(layout, name, fault, kwargs):
    index = (TUPLES | INDICES if name in INDICES and kwargs["ndim"] == 1 and not kwargs["tuples"] else TUPLES)[name]
    if layout == "tensor" and name == "last column" and kwargs["dim_extend"]:
        return  # names features
    raised = attempt(layout, index, fault, **kwargs)
    if raised is None or raised[0] is None or raised[1] is not None:
        return
    # what TorchRL takes and ours does not
    assert (
        fault in ("missing", "no entries")  # it would mix two records
        or (
            layout == "dict" and (isinstance(index, tuple) or fault in ("number", "text"))
        )  # it stores nothing, or damage
        or (layout == "lazy stack" and fault in ("short", "long", "shape"))  # it resizes what is not the storage
        or name == "float"
    ), raised[0]


@pytest.mark.parametrize("tuples", [False, True], ids=["of rows", "of coordinates"])
def test_a_refused_write_changes_nothing_and_an_accepted_one_is_torchrls(tuples):
    cases = product(tuples)
    for case in cases[:: len(cases) // 120 | 1]:  # some of each
        check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("tuples", [False, True], ids=["of rows", "of coordinates"])
@pytest.mark.parametrize("part", range(8))
def test_a_refused_write_changes_nothing_whatever_its_form(part, tuples):
    for case in product(tuples)[part::8]:
        check(*case)


# ---------------------------------------------------------------- the paths of writers


def prioritized(storage=None, **kwargs):
    storage = g.GenerationalLazyTensorStorage(SLOTS) if storage is None else storage
    rb = g.GenerationalTensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, batch_size=4, **kwargs)
    rb.extend(nested(SLOTS))
    rb.update_priority(torch.arange(SLOTS), torch.arange(SLOTS) + 1.0)
    return rb


PATHS = {
    "extend": lambda rb, data: rb.extend(data),
    "around the end": lambda rb, data: (rb.writer.__setattr__("_cursor", SLOTS - 1), rb.extend(data)),
    "add": lambda rb, data: rb.add(data[0]),
    "write_at": lambda rb, data: rb.writer.write_at(torch.arange(len(data)), data),
    "write_all": lambda rb, data: rb.write_all(data),
    "set": lambda rb, data: rb.storage.set(torch.arange(len(data)), data),
    "item": lambda rb, data: rb.__setitem__(slice(0, len(data)), data),
}
STORAGES = {
    "memory": lambda: g.GenerationalLazyTensorStorage(SLOTS),
    "files": lambda: g.GenerationalLazyMemmapStorage(SLOTS),
}


@pytest.mark.parametrize("fault", ["shape", "missing", "missing below", "nothing", "two kinds"])
@pytest.mark.parametrize("lazily", [False, True], ids=["dense", "lazy"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("memory", [*STORAGES, "shared"])
def test_every_path_refuses_records_that_do_not_fit_before_anything_changes(memory, path, lazily, fault):
    rb = prioritized(STORAGES.get(memory, STORAGES["memory"])(), shared=memory == "shared")
    if path == "around the end":
        rb.writer._cursor = SLOTS - 1
    count = SLOTS if path == "write_all" else 3
    data, names = nested(count), "z"
    if fault == "shape":
        data["a", "b", "z"] = torch.zeros(count, 2)
    elif fault == "missing":
        data, names = data.exclude("x"), "the entry 'x'"
    elif fault == "missing below":
        data, names = data.exclude(("a", "b", "z")), "the entry ('a', 'b', 'z')"
    elif fault == "nothing":
        data, names = TensorDict({}, [count]), "('a', 'b', 'z')"
    else:
        data["a"], names = torch.zeros(count), "'a'"
    if lazily:
        data = LazyStackedTensorDict(*data.unbind(0))
    before = snapshot(rb)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=f"(?s){re.escape(names)}.*Nothing was written"):
        PATHS[path](rb, data)
    assert snapshot(rb) == before


def test_assignment_to_the_whole_of_a_buffer_that_is_half_full_leaves_its_records():
    """C38, as it was reported."""
    rb = g.GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=g.GenerationalLazyTensorStorage(8), batch_size=8
    )
    rb.extend(plain(4))
    sample = rb.sample()
    before = snapshot(rb)
    for index in (slice(None), Ellipsis, torch.tensor([True] * 4)):
        with pytest.raises((RuntimeError, IndexError)):
            rb[index] = plain(4)
        assert snapshot(rb) == before
    with pytest.raises(RuntimeError, match="dtype torch.float64 but the storage holds torch.float32"):
        rb.extend(LazyStackedTensorDict(*change(plain(2), "dtype").unbind(0)))
    assert snapshot(rb) == before
    assert rb.update_tensordict_priority_if_present(sample.set("td_error", torch.ones(8))).num_updated == 8


@pytest.mark.parametrize("memory", [*STORAGES, "shared"])
def test_a_first_write_that_is_refused_leaves_an_empty_buffer(memory):
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=STORAGES.get(memory, STORAGES["memory"])(), batch_size=4, shared=memory == "shared"
    )
    before = snapshot(rb)
    for data in (TensorDict({}, [3]), LazyStackedTensorDict(plain(1)[0], change(plain(1), "shape")[0])):
        with pytest.raises((ValueError, RuntimeError), match="Nothing was written"):
            rb.extend(data)
        assert snapshot(rb) == before
    rb.extend(nested(3))
    assert len(rb) == 3


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_trajectory_that_lacks_an_entry_is_refused_in_several_dimensions(ndim):
    storage = g.GenerationalLazyTensorStorage(48, ndim=ndim)
    rb = g.GenerationalTensorDictReplayBuffer(storage=storage, batch_size=4, dim_extend=0)
    inner = (3, 2)[: max(ndim - 1, 1)]
    rb.extend(nested(2, inner))
    before = snapshot(rb)
    data = nested(2, inner).exclude(("a", "y"))
    for write in (lambda d: rb.extend(d), lambda d: rb.add(d[0]), lambda d: rb.__setitem__((0, 1), d[0, 1])):
        with pytest.raises(ValueError, match=r"\('a', 'y'\), which the storage has"):
            write(data.copy())
        assert snapshot(rb) == before


# ---------------------------------------------------------------- entries that buffers manage, and new ones


def test_a_record_without_a_priority_shows_the_default_not_its_predecessors():
    rb = g.GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=g.GenerationalLazyTensorStorage(4), batch_size=4
    )
    rb.extend(plain(4, td_error=torch.tensor([9.0, 5.0, 5.0, 5.0])))
    rb.extend(plain(1))
    assert rb[0]["td_error"] == rb.sampler._sum_tree[0] == 9  # the default: the largest there was
    rb.extend(plain(1, td_error=torch.tensor([3.0])))
    assert rb[1]["td_error"] == 3
    rb[2] = plain(1)[0]  # its index is that of its slot
    assert rb[2]["index"] == 2
    assert rb[2]["td_error"] == 9


def test_without_priorities_an_entry_of_that_name_is_like_any_other():
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(4), batch_size=4)
    rb.extend(plain(4, td_error=torch.ones(4)), update_priority=False)
    with pytest.raises(ValueError, match="lack the entry 'td_error'"):
        rb.extend(plain(1))


@pytest.mark.parametrize("memory", ["files", "shared"])
def test_entries_that_the_memory_has_no_room_for_are_told_once(memory):
    rb = prioritized(STORAGES.get(memory, STORAGES["memory"])(), shared=memory == "shared")
    with pytest.warns(UserWarning, match=r"does not store the entries \('a', 'v'\), 'w'"):
        rb.extend(nested(2).set("w", torch.ones(2)).set(("a", "v"), torch.ones(2)))
    rb.extend(nested(2).set("w", torch.ones(2)))  # silent
    rb.extend(rb.sample().exclude("index_generation"))  # what a sample brings along is not worth a warning
    assert len(rb) == 8
    assert set(rb.storage._storage.keys()) == {"x", "a", "index"}


@pytest.mark.parametrize("kind", [lambda data: data, lambda data: LazyStackedTensorDict(*data.unbind(0))])
def test_entries_that_are_new_are_stored_in_memory(kind):
    rb = prioritized()
    rb.extend(kind(nested(2).set("w", torch.ones(2))))
    assert rb[:]["w"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="lack the entry 'w'"):
        rb.extend(nested(2))


# ---------------------------------------------------------------- changes of fields


def test_a_change_of_fields_of_which_one_does_not_fit_changes_none():
    rb = prioritized()
    before = snapshot(rb)
    good = torch.zeros(SLOTS)
    bad = {"x": good, "a": TensorDict({"y": torch.zeros(SLOTS, 2)}, [SLOTS])}
    for write in (
        lambda: rb.update_(bad),
        lambda: rb.update_(TensorDict(bad, [SLOTS])),
        lambda: rb.update_({"x": good, "unknown": good}),
        lambda: rb.set_("a", TensorDict({"b": {"z": good}, "y": torch.zeros(SLOTS, 2)}, [SLOTS])),
        lambda: rb.set_at_("a", TensorDict({"b": {"z": good[:2]}, "y": torch.zeros(2, 2)}, [2]), torch.tensor([0, 1])),
        lambda: rb.set_at_("x", good[:3], slice(0, 2)),
        lambda: rb.__setitem__("a", TensorDict({"b": {"z": good}, "y": torch.zeros(SLOTS, 2)}, [SLOTS])),
    ):
        with pytest.raises((RuntimeError, KeyError)):
            write()
        assert snapshot(rb) == before
    rb.update_({"x": good})
    rb.set_at_(("a", "b", "z"), good[:2], slice(0, 2))
    rb["x"] = good + 1
    assert rb[:]["x"].tolist() == [1.0] * 8
    assert rb[:]["a", "b", "z"][:3].tolist() == [0.0, 0.0, 103.0]
    assert rb.storage.generations.tolist() == [0] * 8


def test_an_entry_that_would_be_lost_is_refused():
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=4)
    rb.extend(plain(4))
    with pytest.raises(KeyError, match="no entry 'w'.*Nothing was written"):
        rb["w"] = torch.zeros(4)


# ---------------------------------------------------------------- other writers


@pytest.mark.parametrize("path", ["add", "extend"])
def test_a_ranking_does_not_change_with_a_refused_write(path):
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(4),
        writer=g.GenerationalTensorDictMaxValueWriter(rank_key="x"),
        batch_size=4,
    )
    rb.extend(plain(3))
    before = snapshot(rb)
    for fault in ("shape", "missing"):
        data = change(plain(3), fault)
        with pytest.raises((RuntimeError, ValueError), match="Nothing was written"):
            rb.extend(data) if path == "extend" else rb.add(data[0])
        assert snapshot(rb) == before


@pytest.mark.parametrize("cls", [g.GenerationalTensorDictReplayBuffer, g.GenerationalReplayBuffer])
def test_a_refusal_by_one_member_of_an_ensemble_leaves_all_as_they_were(cls):
    members = [cls(storage=g.GenerationalLazyTensorStorage(4), batch_size=2) for _ in range(3)]
    for member in members[:2]:
        member.extend(plain(4, to=torch.zeros(4, dtype=torch.long)))
    rb = g.GenerationalReplayBufferEnsemble(*members, batch_size=6, routing_key="to")
    before = [snapshot(member) for member in members]
    data = plain(4, to=torch.tensor([0, 0, 1, 2]))
    for bad in (data.exclude("y"), change(data, "shape"), change(data, "dtype")):
        with pytest.raises((ValueError, RuntimeError), match="Member 0 .*Nothing was written to any member"):
            rb.extend(bad)
        assert [snapshot(member) for member in members] == before
    rb.extend(data)
    assert [len(member) for member in members] == [4, 4, 1]


def test_consumed_slots_are_kept_for_the_next_write_when_one_is_refused():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), batch_size=4, consume_after_n_samples=1
    )
    rb.extend(plain(8))
    rb.sample()
    consumed = copy.deepcopy(rb.sampler.state_dict())
    before = snapshot(rb)
    for write in (lambda: rb.extend(change(plain(2), "missing")), lambda: rb.add(change(plain(2), "missing")[0])):
        with pytest.raises(ValueError, match="lack the entry 'y'"):
            write()
        assert snapshot(rb) == before
        assert str(rb.sampler.state_dict()) == str(consumed)


def test_a_transform_of_a_member_runs_once_and_what_it_makes_is_checked_before_any_member_is_written_to():
    calls = []

    class Dropping(Transform):
        def _inv_call(self, data):
            calls.append(len(data))
            return data.exclude("y") if bool(data["x"].max() > 500) else data

    members = [g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(4)) for _ in range(2)]
    members[1].append_transform(Dropping())
    rb = g.GenerationalReplayBufferEnsemble(*members, batch_size=4, routing_key="to")
    data = plain(4, to=torch.tensor([0, 0, 1, 1]))
    rb.extend(data)
    assert calls == [2]
    before = [snapshot(member) for member in members]
    with pytest.raises(ValueError, match="lack the entry 'y'.* Member 1 .*Nothing was written to any member"):
        rb.extend(data.clone().set("x", data["x"] + 1000))
    assert [snapshot(member) for member in members] == before


def test_first_priorities_that_a_later_member_refuses_write_to_none():
    members = (
        g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(4)),
        g.GenerationalTensorDictPrioritizedReplayBuffer(alpha=1, beta=1, storage=g.GenerationalLazyTensorStorage(4)),
    )
    rb = g.GenerationalReplayBufferEnsemble(*members, batch_size=4, routing_key="to")
    with pytest.raises(RuntimeError, match="Failed to update priority.*Nothing was written to any member"):
        rb.extend(plain(4, to=torch.tensor([0, 0, 1, 1]), td_error=torch.ones(4, 2)))
    assert [len(member) for member in members] == [0, 0]


# ---------------------------------------------------------------- indices that are read in more than one way


@pytest.mark.parametrize("index", [torch.tensor([1, 0], dtype=torch.uint8), np.array([1, 0], np.uint8)])
def test_an_index_of_uint8_is_refused(index):
    rb = prioritized()
    before = snapshot(rb)
    for write in (lambda: rb.__setitem__(index, nested(2)), lambda: rb.storage.set(index, nested(2))):
        with pytest.raises(TypeError, match="uint8, which torch takes for a mask.*Nothing was written"):
            write()
        assert snapshot(rb) == before


def test_coordinates_that_name_a_cell_twice_are_refused():
    rb, _, _ = pair("tensordict", ndim=2)
    before = snapshot(rb)
    places = (torch.tensor([1, 1, 2]), torch.tensor([0, 0, 2]))
    with pytest.raises(ValueError, match="names a place more than once.*Nothing was written"):
        rb[places] = plain(3)
    assert snapshot(rb) == before


def test_a_lazy_stack_whose_items_differ_is_refused_though_each_would_fit():
    rb, _, _ = pair("tensordict")
    before = snapshot(rb)
    items = plain(2)[0], change(plain(2), "broadcast")[1]
    with pytest.raises(RuntimeError, match="The entry 'y' has shape"):
        rb.extend(LazyStackedTensorDict(*items))
    assert snapshot(rb) == before
