from __future__ import annotations

import pickle

import pytest
import torch
from support import records
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, tensorclass
from torch.utils._pytree import tree_leaves, tree_map
from torchrl.data import TensorStorage

import torchrl_generational as g

LAZY = [g.GenerationalLazyTensorStorage, g.GenerationalLazyMemmapStorage]


@pytest.mark.parametrize("make", LAZY)
def test_a_slot_counts_its_records_from_minus_one(make):
    storage = make(4)
    assert storage.supports_generations
    assert storage.generations.tolist() == [-1] * 4
    storage.set(0, records(1)[0])
    storage.set(torch.tensor([0, 1]), records(2))
    assert storage.generations.tolist() == [1, 0, -1, -1]
    assert storage.generations.dtype == torch.int64


def test_records_that_a_storage_is_built_around_count_as_first():
    assert g.GenerationalTensorStorage(records(3)).generations.tolist() == [0, 0, 0]
    assert g.GenerationalTensorStorage(None, max_size=3).generations.tolist() == [-1] * 3


@pytest.mark.parametrize(
    ("cursor", "data", "rows"),
    [
        (2, records(1)[0], [2]),
        (-1, records(1)[0], [3]),
        (slice(1, 3), records(2), [1, 2]),
        (range(2), records(2), [0, 1]),
        ([3, 0], records(2), [0, 3]),
        (torch.tensor([True, False, True, False]), records(2), [0, 2]),
        (Ellipsis, records(4), [0, 1, 2, 3]),
    ],
)
def test_item_assignment_puts_new_records_in_the_slots_it_names(cursor, data, rows):
    storage = g.GenerationalTensorStorage(records(4, 100))
    storage[cursor] = data
    assert [row for row, stamp in enumerate(storage.generations.tolist()) if stamp == 1] == rows
    assert sorted(storage._storage["x"][rows].tolist()) == data["x"].reshape(-1).tolist()


def test_changing_fields_of_records_leaves_the_stamps():
    storage = g.GenerationalTensorStorage(records(4))
    storage._apply_conditional_patch(torch.tensor([1]), {"x": torch.tensor([50])})
    assert storage.generations.tolist() == [0] * 4


@pytest.mark.parametrize("make", LAZY)
@pytest.mark.parametrize("kind", ["tensordict", "tensor", "pytree", "list", "lazy stack", "tensorclass"])
def test_a_write_longer_than_the_ring_leaves_the_last_record_in_every_slot(make, kind):
    """C04: survivors and stamps agree; a stamp counts every record."""

    @tensorclass
    class Record:
        x: torch.Tensor

    data = {
        "tensordict": records(20),
        "tensor": torch.arange(20),
        "pytree": {"x": torch.arange(20)},
        "list": list(records(20).unbind(0)),
        "lazy stack": LazyStackedTensorDict(*records(20).unbind(0)),
        "tensorclass": Record(x=torch.arange(20), batch_size=[20]),
    }[kind]
    storage = make(8)
    storage.set(torch.arange(20) % 8, data)
    stored = storage._storage
    x = stored if isinstance(stored, torch.Tensor) else stored["x"] if isinstance(stored, dict) else stored.get("x")
    assert x.tolist() == [16, 17, 18, 19, 12, 13, 14, 15]
    assert storage.generations.tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
    assert len(storage) == 8


def test_torch_never_gets_to_choose_between_records_for_one_row(monkeypatch):
    """Which of several writes to one row stays is up to its threads: with millions of rows it is not the last."""
    written = []
    original = TensorStorage.set

    def recording(self, cursor, data, *, set_cursor=True):
        written.append(torch.as_tensor(cursor))
        original(self, cursor, data, set_cursor=set_cursor)

    monkeypatch.setattr(TensorStorage, "set", recording)
    storage = g.GenerationalTensorStorage(torch.zeros(8))
    for cursor in (torch.arange(20) % 8, torch.arange(5, 25) % 8, torch.tensor([3, 1, 3]), torch.arange(6, 10) % 8):
        storage.set(cursor, torch.arange(float(len(cursor))))
        last = {row: position for position, row in enumerate(cursor.tolist())}
        assert all(storage._storage[row] == position for row, position in last.items())
    assert all(cursor.unique().numel() == cursor.numel() for cursor in written)


def test_explicit_rows_named_twice_keep_the_last_record():
    storage = g.GenerationalTensorStorage(records(4))
    storage.set(torch.tensor([2, 0, 2, 2]), records(4, 10), set_cursor=False)
    assert storage._storage["x"].tolist() == [11, 1, 13, 3]
    assert storage.generations.tolist() == [1, 0, 3, 0]


@pytest.mark.parametrize("make", [g.GenerationalLazyTensorStorage, g.GenerationalLazyMemmapStorage])
@pytest.mark.parametrize("kind", ["tensordict", "nested", "pytree"])
@pytest.mark.parametrize("cursor", [1, torch.tensor(1), torch.tensor([0, 1])])
def test_a_record_of_which_a_later_entry_does_not_fit_is_refused_before_the_first_is_written(make, kind, cursor):
    """C19: stock moves on, with the slot torn and its old handle live."""

    def data(a, b):
        if kind == "pytree":
            return {"a": a, "b": (b,)}
        return TensorDict({"a": a, "b": b} if kind == "tensordict" else {"a": a, "n": {"b": b}}, a.shape[:1])

    storage = make(4)
    storage.set(torch.arange(4), data(torch.zeros(4), torch.zeros(4, 3)))
    bad = data(torch.ones(2), torch.ones(2, 7))
    if not (isinstance(cursor, torch.Tensor) and cursor.ndim):
        bad = tree_map(lambda leaf: leaf[0], bad) if kind == "pytree" else bad[0]
    with pytest.raises(RuntimeError, match="Nothing was written. Give every record the shapes of the first one"):
        storage.set(cursor, bad)
    assert storage.generations.tolist() == [0] * 4
    stored = storage._storage if kind == "pytree" else storage._storage.to_dict()
    assert all((leaf == 0).all() for leaf in tree_leaves(stored))


def test_tensorclasses_and_data_that_is_no_tensor_are_written_again_and_again():
    @tensorclass
    class Record:
        x: torch.Tensor

    storage = g.GenerationalLazyTensorStorage(4)
    for _ in range(2):
        storage.set(torch.arange(2), Record(x=torch.arange(2), batch_size=[2]))
    with pytest.raises(RuntimeError, match="Nothing was written"):
        storage.set(torch.arange(2), Record(x=torch.zeros(2, 5), batch_size=[2]))
    assert storage.generations.tolist() == [1, 1, -1, -1]
    storage = g.GenerationalLazyTensorStorage(4)
    for _ in range(2):
        storage.set(torch.arange(2), TensorDict({"x": torch.arange(2), "text": NonTensorStack("a", "b")}, [2]))
    assert storage.generations.tolist() == [1, 1, -1, -1]


def test_records_that_torch_would_broadcast_are_still_taken():
    storage = g.GenerationalTensorStorage(TensorDict({"a": torch.zeros(4, 3)}, [4]))
    storage.set(torch.tensor([0, 1]), TensorDict({"a": torch.ones(2, 1)}, [2]))
    assert storage._storage["a"].sum() == 6


@pytest.mark.parametrize("cursor", [4, torch.tensor([0, 4]), [-5, 0]])
def test_a_row_outside_the_storage_changes_nothing(cursor):
    storage = g.GenerationalTensorStorage(records(4))
    data = records(1)[0] if isinstance(cursor, int) else records(2)
    with pytest.raises(IndexError, match="the storage"):
        storage.set(cursor, data)
    assert storage.generations.tolist() == [0] * 4
    assert storage._storage["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("make", LAZY)
def test_handles_among_the_data_are_never_stored(make):
    """C32: also where they come with the very first record, which decides what is stored."""
    storage = make(4)
    sample = records(2, index_generation=torch.tensor([5, 6]))
    storage.set(range(2), sample)
    assert set(storage._storage.keys()) == {"x"}
    storage[3] = sample[0]
    assert set(storage._storage.keys()) == {"x"}
    assert "index_generation" in sample  # the caller's own data is left alone


def test_emptying_makes_written_slots_move_on():
    storage = g.GenerationalLazyTensorStorage(4)
    storage.set(range(2), records(2))
    storage._empty()
    assert storage.generations.tolist() == [1, 1, -1, -1]
    assert len(storage) == 0


@pytest.mark.parametrize("max_size", [12, 10, 7])
def test_the_stamps_of_several_dimensions_are_per_row_and_shaped_like_the_index_space(max_size):
    storage = g.GenerationalLazyTensorStorage(max_size, ndim=2)
    assert storage.generations.shape == (max_size,)
    storage.set(torch.arange(2), TensorDict({"x": torch.arange(6).reshape(2, 3)}, [2, 3]))
    rows = -(-max_size // 3)
    assert storage.generations.shape == (rows, 3) == tuple(storage._total_shape)
    assert storage.generations[:, 0].tolist() == [0, 0] + [-1] * (rows - 2)
    storage[1, 2] = TensorDict({"x": torch.tensor(9)}, [])
    assert storage.generations[:, 2].tolist()[:2] == [0, 1]


def test_the_stamps_of_a_storage_around_several_dimensions_match_its_rows():
    storage = g.GenerationalTensorStorage(TensorDict({"x": torch.zeros(4, 3)}, [4, 3]), ndim=2)
    assert storage.generations.tolist() == [[0] * 3] * 4


def test_a_storage_with_device_auto_stamps_where_its_data_is():
    storage = g.GenerationalLazyTensorStorage(4, device="auto")
    storage.set(range(2), records(2).to("cpu"))
    assert storage.generations.device == storage.device
    assert storage.generations.tolist() == [0, 0, -1, -1]


def test_stamps_survive_pickling_and_the_copy_goes_its_own_way():
    storage = g.GenerationalLazyTensorStorage(4)  # TorchRL cannot pickle an unnamed memmap storage either
    storage.set(range(3), records(3))
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.generations.tolist() == [0, 0, 0, -1]
    copy.set(0, records(1)[0])
    assert copy.generations.tolist()[1:] == [0, 0, -1]
    assert copy.generations[0] >= 2**32
    assert storage.generations.tolist() == [0, 0, 0, -1]


@pytest.mark.parametrize("make", LAZY)
@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
def test_a_storage_that_is_loaded_alone_holds_new_records(make, how, tmp_path):
    """C13: handles from before the load are stale, and the records loaded have stamps that can be live."""
    source, target = make(4), make(4)
    source.set(range(3), records(3, 50))
    target.set(range(2), records(2))
    if how == "state_dict":
        target.load_state_dict(source.state_dict())
    else:
        source.dumps(tmp_path)
        target.loads(tmp_path)
    assert (target.generations[:3] >= 2**32).all()
    assert target.generations[3] == -1
    assert target._storage["x"][:3].tolist() == [50, 51, 52]


def test_trajectories_stored_as_records_are_known_as_such():
    storage = g.GenerationalLazyTensorStorage(4)
    assert storage.record_ndim == 0
    storage.set(range(2), TensorDict({"x": torch.zeros(2, 3)}, [2, 3]))
    assert storage.record_ndim == 1
