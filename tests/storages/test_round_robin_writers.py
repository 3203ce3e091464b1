from __future__ import annotations

import pickle

import pytest
import torch
from support import records
from torchrl.data import LazyTensorStorage, ListStorage

import torchrl_generational as g

WRITERS = [g.GenerationalRoundRobinWriter, g.GenerationalTensorDictRoundRobinWriter]


def bound(make, capacity=4):
    writer = make()
    writer.register_storage(g.GenerationalLazyTensorStorage(capacity))
    return writer


@pytest.mark.parametrize("make", WRITERS)
def test_every_path_of_a_writer_stamps_once_per_record(make):
    writer = bound(make)
    writer.extend(records(3))
    writer.add(records(1)[0])
    writer.add(records(1)[0])
    writer.write_at(torch.tensor([2, 2, 1]), records(3))
    writer.write_at(3, records(1)[0])
    assert writer.generations_of(torch.arange(4)).tolist() == [1, 1, 2, 1]
    assert writer.tracks_generations


@pytest.mark.parametrize("make", WRITERS)
def test_a_batch_longer_than_the_ring_counts_once_per_record(make):
    """C04."""
    writer = bound(make, 8)
    writer.extend(records(20))
    assert writer.generations_of(torch.arange(8)).tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
    assert writer._storage._storage["x"].tolist() == [16, 17, 18, 19, 12, 13, 14, 15]
    if make is g.GenerationalTensorDictRoundRobinWriter:
        assert writer._storage._storage["index"].tolist() == list(range(8))


@pytest.mark.parametrize("make", WRITERS)
def test_generations_of_answers_minus_one_where_no_record_can_be(make):
    writer = bound(make)
    assert writer.generations_of(torch.arange(4)).tolist() == [-1] * 4
    writer.extend(records(2))
    assert writer.generations_of(torch.tensor([-5, -1, 0, 1, 2, 4, 99])).tolist() == [-1, -1, 0, 0, -1, -1, -1]


@pytest.mark.parametrize("make", WRITERS)
def test_tracking_cannot_be_switched_off(make):
    assert make(track_generations=True).tracks_generations
    with pytest.raises(ValueError, match="always tracks generations, got track_generations=False. Use TorchRL's"):
        make(track_generations=False)


@pytest.mark.parametrize("make", WRITERS)
@pytest.mark.parametrize("storage", [LazyTensorStorage(4), ListStorage(4)])
def test_a_storage_without_stamps_is_refused(make, storage):
    writer = make()
    with pytest.raises(
        TypeError, match="needs a storage that carries slot generations, got L.*Use GenerationalLazyTens"
    ):
        writer.register_storage(storage)
    assert writer._storage is None


@pytest.mark.parametrize("make", WRITERS)
@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_stamps_loaded_before_a_storage_is_registered_wait_for_it(make, how, tmp_path):
    """C34."""
    writer, loaded = bound(make), make()
    writer.extend(records(6))
    if how == "state_dict":
        loaded.load_state_dict(writer.state_dict())
    else:
        writer.dumps(tmp_path)
        loaded.loads(tmp_path)
    loaded.register_storage(g.GenerationalLazyTensorStorage(4))
    assert loaded.generations_of(torch.arange(4)).tolist() == [1, 1, 0, 0]
    assert loaded._cursor == 2


@pytest.mark.parametrize("make", WRITERS)
def test_live_stamps_of_a_storage_win_over_loaded_ones(make):
    writer, loaded = bound(make), make()
    writer.extend(records(6))
    loaded.load_state_dict(writer.state_dict())
    storage = g.GenerationalLazyTensorStorage(4)
    storage.set(range(4), records(4))
    loaded.register_storage(storage)
    assert storage.generations.tolist() == [0] * 4


@pytest.mark.parametrize("make", WRITERS)
def test_stamps_of_another_capacity_are_refused(make):
    writer = bound(make, 8)
    writer.extend(records(8))
    with pytest.raises(ValueError, match="cover 8 slots but this storage has 4"):
        bound(make).load_state_dict(writer.state_dict())


def test_the_old_stamp_of_a_sample_never_stands_beside_its_new_index():
    """C32: a writer changes the index in the data that it is given."""
    writer = bound(g.GenerationalTensorDictRoundRobinWriter)
    sample = records(2, index=torch.tensor([7, 7]), index_generation=torch.tensor([0, 0]))
    writer.extend(sample)
    assert sample["index"].tolist() == [0, 1]
    assert sample["index_generation"].tolist() == [-1, -1]


@pytest.mark.parametrize("make", WRITERS)
@pytest.mark.parametrize("compilable", [True, False])
def test_more_records_than_32_bits_count_are_counted(make, compilable):
    """C22: stock wraps to a negative count."""
    writer = make(compilable=compilable)
    writer.register_storage(g.GenerationalLazyTensorStorage(4))
    writer._write_count = 2**31 - 2
    writer.extend(records(4))
    assert writer._write_count == 2**31 + 2
    copy = pickle.loads(pickle.dumps(writer))
    copy.add(records(1)[0])
    assert copy._write_count == 2**31 + 3
    loaded = make(compilable=compilable)
    loaded.load_state_dict(writer.state_dict())
    assert loaded._write_count == 2**31 + 2
