"""Entries that checkpoints keep as they are, and those that are refused when they are saved."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from damage import everything, tree
from support import AFTER_0_14, prioritized, records, transfer
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torchrl.checkpoint import Checkpoint
from torchrl.data import FlatStorageCheckpointer

import torchrl_generational as g


class Mission:
    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return type(other) is Mission and other.name == self.name

    __hash__ = None


OBJECTS: dict[str, list[Any]] = {
    "texts": ["a", "b", "c", "d"],
    "dicts": [{"k": 1}, {"k": None}, {}, {"z": [1, {"y": 0.5}]}],
    "None": [None, "x", None, "y"],
    "numbers": [1, 2.5, "3", True],
    "lists": [[1], [2], [3, 4], []],
    "others": [Mission(name) for name in "abcd"],
    "dicts with other keys": [{"a": {1: 2}}, {}, {2: 3}, {}],
    "bytes": [b"a", b"b", b"c", b"d"],
}
LOSSY: dict[str, list[Any]] = {
    "tuples": [(1,), (2, 3), (), (4,)],
    "lists of one length": [[1, 2], [3, 4], [5, 6], [7, 8]],
    "NaN": [float("nan"), 1.0, 2.0, 3.0],
    "sets": [{1}, {2}, {3}, {4}],
    "large numbers": [2**70, 1, 2, 3],
}


def data(objects: list[Any], layout: str = "plain") -> TensorDict:
    count = len(objects)
    stack = NonTensorStack(*(NonTensorData(value) for value in objects))
    if layout == "nested":
        return records(count, n=TensorDict({"deep": TensorDict({"o": stack}, [count])}, [count]))
    found = records(count, o=stack)
    return lazy_stack(list(found.unbind(0))) if layout == "lazy" else found


def held(rb: Any, count: int, layout: str = "plain") -> list[Any]:
    key = ("n", "deep", "o") if layout == "nested" else "o"
    return [rb.storage[slot].get(key).data for slot in range(count)]


def same(one: list[Any], other: list[Any]) -> bool:
    return one == other and list(map(type, one)) == list(map(type, other))


@pytest.mark.filterwarnings("ignore:TensorDict.load_memmap is loading a pickled")  # tensordict's, of other objects
@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("layout", ["plain", "nested", "lazy"])
@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_that_differ_between_records_come_back_each_to_its_own(kind, layout, how, tmp_path):
    """C49: all records got the first text, or kept those of before."""
    rb, target, fresh = (prioritized(4) for _ in range(3))
    rb.extend(data(OBJECTS[kind][:3], layout))
    target.extend(data(OBJECTS[kind][::-1], layout))
    transfer(rb, target, how, tmp_path)
    assert same(held(target, 3, layout), OBJECTS[kind][:3])
    assert target[:]["x"].tolist() == [0, 1, 2]
    target.extend(data(OBJECTS[kind], layout))  # goes on
    transfer(target, fresh, how, tmp_path)
    assert same(held(fresh, 4, layout), held(target, 4, layout))


@pytest.mark.parametrize("layout", ["plain", "nested", "lazy"])
@pytest.mark.parametrize("kind", LOSSY)
def test_objects_that_files_do_not_keep_are_refused_when_they_are_dumped(kind, layout, tmp_path):
    rb = prioritized(4)
    rb.extend(data(OBJECTS["texts"], layout))
    rb.dumps(tmp_path)
    rb = prioritized(4)
    rb.extend(data(LOSSY[kind], layout))
    name = r"\('n', 'deep', 'o'\)" if layout == "nested" else r"\('o',\)"
    before, saved = everything(rb), tree(tmp_path)
    if AFTER_0_14 and kind in ("sets", "large numbers"):  # which it pickles
        target = prioritized(4)
        transfer(rb, target, "dumps", tmp_path)
        assert same(held(target, 4, layout), held(rb, 4, layout))
        return
    with pytest.raises(ValueError, match=f"The entry {name} holds objects that would not come back.*state_dict"):
        rb.dumps(tmp_path)
    assert everything(rb) == before
    assert tree(tmp_path) == saved
    target = prioritized(4)
    target.load_state_dict(rb.state_dict())
    assert str(held(target, 4, layout)) == str(held(rb, 4, layout))


def test_one_object_for_all_records_replaces_the_one_of_before(tmp_path):
    for make in (g.GenerationalLazyTensorStorage, g.GenerationalLazyMemmapStorage):
        rb, target = prioritized(4, storage=make(4)), prioritized(4, storage=make(4))
        rb.extend(data(["s"] * 4))
        target.extend(data(["t"] * 4))
        rb.dumps(tmp_path / make.__name__)
        target.loads(tmp_path / make.__name__)
        assert held(target, 4) == ["s"] * 4
        target.dumps(tmp_path / make.__name__)
        rb.loads(tmp_path / make.__name__)
        assert held(rb, 4) == ["s"] * 4


def test_objects_survive_torchrls_checkpoint(tmp_path):
    rb, target = prioritized(4), prioritized(4)
    rb.extend(data(OBJECTS["texts"]))
    target.extend(data(OBJECTS["texts"][::-1]))
    Checkpoint(rb=rb).save(tmp_path / "all")
    Checkpoint(rb=target).load(tmp_path / "all")
    assert held(target, 4) == OBJECTS["texts"]


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("who", ["checkpoint", "buffer"])
def test_objects_that_only_one_of_checkpoint_and_buffer_has_are_refused(who, how, tmp_path):
    """The buffer's would stay, beside records of the checkpoint."""
    rb, target = prioritized(4), prioritized(4)
    (rb if who == "checkpoint" else target).extend(data(OBJECTS["texts"]))
    (target if who == "checkpoint" else rb).extend(records(4))
    before = everything(target)
    with pytest.raises(ValueError, match="that are no tensors"):
        transfer(rb, target, how, tmp_path)
    assert everything(target) == before


def test_compressed_storages_refuse_objects(tmp_path):
    storage = g.GenerationalLazyTensorStorage(4)
    rb = prioritized(4, storage=storage)
    storage.checkpointer = FlatStorageCheckpointer()
    rb.extend(data(OBJECTS["texts"]))
    with pytest.raises(ValueError, match="compressed storages keep no objects"):
        rb.dumps(tmp_path)


# ------------------------------------------------------------------ names

LOST = {
    "dumps": ["shape", "device", "_type"],
    "state_dict": ["a.b", "x.y", ".", "..", "../up", "x.memmap", "meta.json"],
}
FOLDERS = ["x.memmap", "meta.json", "storage_metadata.json", ".generational-dump"]  # would lie where files do
KEPT = ["batch_size", "meta", "is_shared", "_is_shared", "", "a/b", "type", "dtype", "data", "stack_dim", "_tensordict",
        "metadata", "storage", "names", "_len", "is_nested", "a b", "a%b", "%", "%2E", "\\", "c:", "é", "a\nb", "0",
        "None", "_metadata"]  # fmt: skip


def named(name: str, nested: str, start: int = 0) -> TensorDict:
    values = torch.arange(start + 10, start + 14)
    if nested == "leaf":
        return records(4, start, **{name: values})
    if nested == "within":
        return records(4, start, n=TensorDict({name: values, "z": values}, [4]))
    return records(4, start, **{name: TensorDict({"z": values}, [4])})


@pytest.mark.parametrize(
    ("how", "name", "nested"),
    [
        *((how, name, nested) for how in LOST for name in LOST[how] for nested in ("leaf", "within", "above")),
        *(
            ("dumps", name, "above")
            for name in ("x.memmap", "meta.json", "storage_metadata.json", ".generational-dump")
        ),
    ],
)
def test_an_entry_of_a_name_that_is_not_kept_is_refused_when_it_is_saved(how, name, nested, tmp_path):
    """C69: entries ``shape`` or ``device`` were lost, and ``a.b`` came back as ``("a", "b")``."""
    rb = prioritized(4)
    rb.extend(named(name, nested))
    before = everything(rb)
    with pytest.raises(ValueError, match=r"The entry .* would (be lost|come back .*)") as refusal:
        rb.dumps(tmp_path) if how == "dumps" else rb.state_dict()
    assert repr(("n", name) if nested == "within" else (name,)) in str(refusal.value)
    assert {file.name for file in tmp_path.rglob("*")} <= {"generational.lock"}
    assert everything(rb) == before


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("nested", ["leaf", "within", "above"])
@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_entries_of_all_other_names_come_back(how, nested, live, tmp_path):
    other = "state_dict" if how == "dumps" else "dumps"
    names = [*KEPT, *(name for name in LOST[other] if nested != "above" or name not in ("x.memmap", "meta.json"))]
    if AFTER_0_14 and (how, nested) == ("state_dict", "above"):
        names = [name for name in names if name]  # tensordict refuses it
    path = tmp_path / "checkpoint"
    rb, target = prioritized(4), prioritized(4)
    for buffer, start in ((rb, 0), (target, 1000)):
        if buffer is rb or live:
            found = named(names[0], nested, start)
            for number, name in enumerate(names):
                found.update(
                    named(name, nested, start + 10 * number).select(*([("n", name)] if nested == "within" else [name]))
                )
            buffer.extend(found)
    transfer(rb, target, how, path)
    wanted, found = rb[:], target[:]
    assert set(wanted.keys(True, True)) == set(found.keys(True, True))
    assert all(torch.equal(found.get(key), wanted.get(key)) for key in wanted.keys(True, True))
    assert {entry.name for entry in tmp_path.iterdir()} <= {"checkpoint"}


def test_an_ensemble_is_saved_only_if_each_member_can_be(tmp_path):
    rb = g.GenerationalReplayBufferEnsemble(prioritized(4), prioritized(4), batch_size=4)
    rb[0].extend(records(4))
    rb[1].extend(named("shape", "leaf"))
    with pytest.raises(ValueError, match="'shape'"):
        rb.dumps(tmp_path)
    assert {file.name for file in tmp_path.rglob("*")} <= {"generational.lock"}


Pair = namedtuple("Pair", "a b")
TREES = {
    "tuple": (lambda t: (t, t + 1), True),
    "dict": (lambda t: {"a": t, "b": {"c": t + 1}}, True),
    "list in dict": (lambda t: {"a": [t, t + 1]}, True),
    "dot": (lambda t: {"a.b": t}, False),
    "dot and nested": (lambda t: {"a.b": t, "a": {"c": t}}, False),
    "slash": (lambda t: {"a/b": t}, False),
    "up": (lambda t: {"../../escaped": t}, False),
    "absolute": (lambda t: {"/escaped": t}, False),
    "number": (lambda t: {"0": t}, False),
    "named tuple": (lambda t: Pair(t, t + 1), False),
    "empty": (lambda t: {"": t}, False),
    "empty and below": (lambda t: {"": {"escaped": t}}, False),
}


def tree_buffer() -> Any:
    return g.GenerationalReplayBuffer(storage=g.GenerationalLazyTensorStorage(4), batch_size=4)


@pytest.mark.parametrize("kind", TREES)
def test_leaves_of_pytrees_come_back_or_are_refused_when_they_are_dumped(kind, tmp_path):
    make, kept = TREES[kind]
    path = tmp_path / "a" / "b" / "checkpoint"
    path.mkdir(parents=True)
    rb, target = tree_buffer(), tree_buffer()
    rb.extend(make(torch.arange(4)))
    target.extend(make(torch.arange(100, 104)))
    before = everything(rb)
    if not kept:
        with pytest.raises(ValueError, match="would not be found again in a checkpoint directory"):
            rb.dumps(path)
        assert everything(rb) == before
        assert {file.name for file in tmp_path.rglob("*")} <= {"a", "b", "checkpoint", "generational.lock"}
        return
    rb.dumps(path)
    target.loads(path)
    assert everything(target)["records"] == before["records"]
