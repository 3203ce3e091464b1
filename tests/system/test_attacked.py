"""Inputs by which a buffer was attacked: refused before anything changes, or taken as TorchRL takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import buffer_state, prioritized, records
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torchrl.data.replay_buffers import FlatStorageCheckpointer, NestedStorageCheckpointer

import torchrl_generational as g

STEPS = {"backwards": slice(None, None, -1), "a part backwards": slice(3, 1, -1), "every second": slice(None, None, -2)}


def filled(count: int = 8) -> Any:
    rb = prioritized(8)
    rb.extend(records(count))
    return rb


@pytest.mark.parametrize("index", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_slice_that_runs_backwards_is_refused(index, wrapped):
    rb = filled()
    before = buffer_state(rb)
    with pytest.raises(ValueError, match="runs backwards"):
        rb[(index,) if wrapped else index] = records(len(range(8)[index]), 100)
    assert buffer_state(rb) == before


@pytest.mark.parametrize("count", [3, 8])
def test_a_new_entry_that_records_cannot_be_given_is_refused(count):
    rb = filled(count)
    before = buffer_state(rb)
    ragged = lazy_stack([TensorDict({"q": torch.ones(2)}), TensorDict({"q": torch.ones(3)})])
    for entry in (NonTensorStack("a", "b"), ragged):
        with pytest.raises(TypeError, match="is new, and a .*Stack"):
            rb.extend(records(2, 100, t=entry))
        assert buffer_state(rb) == before
    rb.extend(records(2, 300))
    rb.sample()


def test_more_records_than_an_index_with_repeats_names_are_refused():
    rb = filled()
    before = buffer_state(rb)
    with pytest.raises(RuntimeError, match="Got 8 records for 2 rows"):
        rb[[1, 1]] = records(8, 100)
    assert buffer_state(rb) == before


def test_a_field_update_outside_the_records_changes_none_of_them():
    rb = filled(5)
    for index in ([0, 9], [0, -9]):
        with pytest.raises(IndexError, match="Nothing was changed"):
            rb.set_at_("x", torch.tensor([50, 60]), torch.tensor(index))
    assert rb[:]["x"].tolist() == [0, 1, 2, 3, 4]


def test_a_mask_of_a_storage_of_two_dimensions_has_one_entry_per_row():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(16, ndim=2), batch_size=4, dim_extend=0
    )
    rb.extend(TensorDict({"x": torch.arange(16).reshape(8, 2)}, [8, 2]))
    mask = torch.zeros(8, dtype=torch.bool)
    mask[[1, 3]] = True
    rb[mask] = TensorDict({"x": torch.full((2, 2), 100)}, [2, 2])
    assert rb.storage.generations[:, 0].tolist() == [0, 1, 0, 1, 0, 0, 0, 0]


def test_a_batch_without_a_dimension_does_not_change_the_ranking():
    writer = g.GenerationalTensorDictMaxValueWriter(rank_key="v")
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(4), batch_size=4, writer=writer)
    rb.extend(TensorDict({"v": torch.tensor([1.0, 2, 3, 4])}, [4]))
    before = sorted(writer._current_top_values)
    with pytest.raises(RuntimeError, match="batch size"):
        rb.extend(TensorDict({"v": torch.tensor([9.0, 8])}))
    assert sorted(writer._current_top_values) == before


def test_a_checkpoint_loads_whether_or_not_its_records_were_told_their_index():
    def make() -> Any:
        return g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalTensorStorage(records(8)), batch_size=4)

    source, target = make(), make()
    source.extend(records(3, 50))
    target.load_state_dict(source.state_dict())
    assert target[:]["x"].tolist() == [50, 51, 52, 3, 4, 5, 6, 7]
    source.load_state_dict(make().state_dict())
    assert source[:]["x"].tolist() == list(range(8))


@pytest.mark.parametrize("kind", [FlatStorageCheckpointer, NestedStorageCheckpointer])
def test_a_buffer_that_was_loaded_from_a_compact_layout_goes_on(kind, tmp_path):
    def steps(count: int, start: int) -> TensorDict:
        done, x = torch.zeros(count, 1, dtype=torch.bool), torch.arange(start, start + count)
        then = {"observation": x + 1, "reward": torch.rand(count, 1), "done": done}
        return TensorDict({"observation": x, "done": done, "next": then}, [count])

    source, target = prioritized(8), prioritized(8)
    for rb in (source, target):
        rb.storage.checkpointer = kind()
        rb.extend(steps(8, 0))  # else the layout finds ends of trajectories in memory that was never written
        rb.empty()
    source.extend(steps(6, 0))
    source.dumps(tmp_path)
    target.loads(tmp_path)
    target.extend(steps(3, 50))
    source.loads(tmp_path)
    source.extend(steps(3, 50))
    assert target[:]["observation"].tolist() == source[:]["observation"].tolist()


def test_a_writer_without_a_storage_takes_over_the_ranking_that_was_saved(tmp_path):
    writer = g.GenerationalTensorDictMaxValueWriter(rank_key="v")
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(4), batch_size=4, writer=writer)
    rb.extend(TensorDict({"v": torch.tensor([1.0, 2, 3, 4])}, [4]))
    writer.dumps(tmp_path)
    other = g.GenerationalTensorDictMaxValueWriter(rank_key="v")
    other.loads(tmp_path)
    assert sorted(other._current_top_values) == sorted(writer._current_top_values)


def meta(values: torch.Tensor) -> torch.Tensor:
    return values.to("meta")


def sparse(values: torch.Tensor) -> torch.Tensor:
    return values.to_sparse()


def imaginary(values: torch.Tensor) -> torch.Tensor:
    return values * 1j


def quantized(values: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(values, 0.1, 0, torch.quint8)


WRITES = {
    "extend": (3, lambda rb, data: rb.extend(data)),
    "extend by more than there is": (11, lambda rb, data: rb.extend(data)),
    "add": (1, lambda rb, data: rb.add(data[0])),
    "one": (1, lambda rb, data: rb.__setitem__(3, data[0])),
    "slice": (3, lambda rb, data: rb.__setitem__(slice(2, 5), data)),
    "all": (8, lambda rb, data: rb.__setitem__(slice(None), data)),
    "list": (2, lambda rb, data: rb.__setitem__([1, 2], data)),
    "mask": (3, lambda rb, data: rb.__setitem__(torch.arange(8) < 3, data)),
    "write_all": (8, lambda rb, data: rb.write_all(data)),
    "the writer": (3, lambda rb, data: rb.writer.extend(data)),
    "the storage": (3, lambda rb, data: rb.storage.set(slice(0, 3), data)),
    "update_": (8, lambda rb, data: rb.update_(data)),
    "set_": (8, lambda rb, data: rb.set_("y", data["y"])),
    "set_at_": (2, lambda rb, data: rb.set_at_("y", data["y"], [0, 1])),
    "entry": (8, lambda rb, data: rb.__setitem__("y", data["y"])),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # torch's
@pytest.mark.parametrize("made", [g.GenerationalLazyTensorStorage, g.GenerationalLazyMemmapStorage])
@pytest.mark.parametrize("fault", [meta, sparse, imaginary, quantized])
@pytest.mark.parametrize("write", WRITES)
def test_values_that_cannot_be_stored_are_refused_in_every_form(write, fault, made):
    count, act = WRITES[write]
    if fault is sparse and write in ("add", "one"):
        pytest.skip("one value of such a tensor is dense")
    rb = prioritized(8, storage=made(8))
    rb.extend(records(8, y=torch.ones(8)))
    before = buffer_state(rb)
    data = TensorDict({"x": torch.arange(count), "y": fault(torch.ones(count))}, [count])
    with pytest.raises((RuntimeError, NotImplementedError), match="'y'|[Ss]parse|[Qq]uantized"):
        act(rb, data)
    assert buffer_state(rb) == before


@pytest.mark.parametrize("nested", [False, True])
def test_an_entry_that_only_some_of_the_records_have_is_no_field_of_all(nested):
    rb = prioritized(8)
    rb.extend(records(8, n=TensorDict({"y": torch.zeros(8)}, [8])))
    before = rb[:].clone()
    given = [TensorDict({"x": torch.tensor(70), "n": {"y": torch.tensor(1.0)}}) for _ in range(8)]
    given[-1].set(("n", "z") if nested else "z", torch.ones(()))
    with pytest.raises(KeyError, match=r"Nothing was changed"):
        rb.update_(lazy_stack(given))
    assert (rb[:] == before).all()


@pytest.mark.parametrize(
    "made", [NonTensorData("abc", batch_size=[3]), TensorDict({"x": torch.ones(3)}, [3])], ids=type
)
@pytest.mark.parametrize("which", ["index", "generation", "priority"])
def test_a_tensordict_is_neither_a_handle_nor_a_priority(which, made):
    """NumPy reads one that holds objects without an end."""
    rb = filled()
    before = buffer_state(rb)
    given = {"index": torch.arange(3), "generation": torch.zeros(3, dtype=torch.int64), "priority": torch.ones(3)}
    with pytest.raises(TypeError, match=f"{which}.*got a (NonTensorData|TensorDict)"):
        rb.update_priority_if_present(**given | {which: made})
    if which != "generation":
        with pytest.raises((TypeError, ValueError), match=which):
            rb.update_priority(**{"index": given["index"], "priority": given["priority"]} | {which: made})
    assert buffer_state(rb) == before


def test_a_first_priority_that_is_no_tensor_is_refused():
    rb = filled()
    before = buffer_state(rb)
    with pytest.raises(TypeError, match="td_error.*got a NonTensorData"):
        rb.extend(records(3, 100, td_error=NonTensorData("abc", batch_size=[3])))
    assert buffer_state(rb) == before
