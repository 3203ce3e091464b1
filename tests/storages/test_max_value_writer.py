"""The writer that keeps the best records: against TorchRL's, with stamps."""

from __future__ import annotations

import pickle

import pytest
import torch
from support import buffer_state, leaves, prioritized, records
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer

import torchrl_generational as g


def scored(scores, start=0):
    scores = torch.as_tensor(scores, dtype=torch.float32)
    return TensorDict({"score": scores, "x": torch.arange(start, start + len(scores))}, [len(scores)])


def keeping_best(capacity=4, **kwargs):
    return prioritized(capacity, writer=g.GenerationalTensorDictMaxValueWriter(rank_key="score"), **kwargs)


def kept(rb):
    return rb.storage._storage["x"][: len(rb)].tolist()


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("reduction", ["sum", "max", "mean"])
def test_it_keeps_the_records_that_torchrl_keeps_in_the_same_slots(shape, reduction):
    generator = torch.Generator().manual_seed(0)
    ours = prioritized(5, writer=g.GenerationalTensorDictMaxValueWriter(rank_key="score", reduction=reduction))
    stock = TensorDictReplayBuffer(
        storage=LazyTensorStorage(5),
        writer=TensorDictMaxValueWriter(rank_key="score", reduction=reduction),
        batch_size=2,
    )
    serial = 0
    for _ in range(60):
        count = int(torch.randint(1, 9, (), generator=generator))
        data = TensorDict({"score": torch.randn(count, *shape, generator=generator)}, [count])
        data["x"] = torch.arange(serial, serial + count)
        serial += count
        single = bool(torch.rand((), generator=generator) < 0.3)
        indices = []
        for rb in (ours, stock):
            mine = data.clone()
            indices.append(rb.add(mine[0]) if single else rb.extend(mine).tolist())
        assert indices[0] == indices[1]
        assert kept(ours) == kept(stock)
        assert ours.write_count == stock.write_count


def test_a_slot_s_generation_advances_when_a_better_record_replaces_the_one_in_it():
    """C29."""
    rb = keeping_best()
    rb.extend(scored([1, 2, 3, 4]))
    assert rb.extend(scored([0.5, 5.0, 2.5], 100)).tolist() == [-1, 0, 1]
    assert rb.storage.generations.tolist() == [1, 1, 0, 0]
    assert rb.writer.generations_of(torch.tensor([0, 2, -1, 9])).tolist() == [1, 0, -1, -1]
    assert rb.add(scored([0.1], 200)[0]) is None
    assert rb.storage.generations.tolist() == [1, 1, 0, 0]


def test_a_slot_replaced_twice_by_one_batch_holds_the_better_record_once_stamped():
    rb = keeping_best(1)
    assert rb.extend(scored([1, 2, 3])).tolist() == [-1, -1, 0]
    assert rb.storage.generations.tolist() == [0]
    assert kept(rb) == [2]


def test_a_td_error_does_not_reach_the_better_record():
    rb = keeping_best()
    rb.extend(scored([1, 2, 3, 4]))
    sample = rb.sample().set("td_error", torch.full((8,), 50.0))
    rb.extend(scored([9, 8], 100))
    result = rb.update_tensordict_priority_if_present(sample)
    assert torch.equal(result.stale_mask, sample["index"] < 2)
    assert (leaves(rb)[:2] == 1.0).all()


def test_first_priorities_go_to_the_records_that_were_kept():
    rb = keeping_best()
    data = scored([1, 2, 3, 4, 0]).set("td_error", torch.tensor([5.0, 6.0, 7.0, 8.0, 99.0]))
    rb.extend(data)
    assert leaves(rb).tolist() == [5, 6, 7, 8]
    rb.extend(scored([0.5, 9.0], 100).set("td_error", torch.tensor([70.0, 3.0])))
    assert leaves(rb).tolist() == [3, 6, 7, 8]
    assert rb.sampler.default_priority == 8.0


def test_stored_records_carry_the_index_of_their_slot():
    """C32: a sample that is written back has the index of before."""
    rb = keeping_best()
    rb.extend(scored([1, 2, 3, 4]))
    sample = rb.sample()
    sample["score"] = torch.arange(10.0, 18.0)
    rb.extend(sample)
    assert rb.storage._storage["index"].tolist() == [0, 1, 2, 3]
    assert "index_generation" not in rb.storage._storage


# ------------------------------------------------------------------ the ranking is that of the records


def somebody_else(rb):
    sibling = prioritized(4, storage=rb.storage)
    sibling.extend(TensorDict({"score": torch.tensor([9.0]), "x": torch.tensor([100])}, [1]))


def assignment(rb):
    rb[0] = TensorDict({"score": torch.tensor(9.0), "x": torch.tensor(100), "index": torch.tensor(0)}, [])


@pytest.mark.parametrize("act", [somebody_else, assignment])
def test_what_others_write_is_ranked_too(act):
    """TorchRL goes on with the ranks of records that are gone."""
    rb = keeping_best()
    rb.extend(scored([1, 2, 3, 4]))
    act(rb)  # slot 0 has rank 9 now
    assert rb.extend(scored([5.0], 200)).tolist() == [1]
    assert kept(rb) == [100, 200, 2, 3]


def test_what_could_not_be_written_is_not_ranked():
    rb = keeping_best()
    rb.extend(scored([1, 2, 3, 4]))
    with pytest.raises(RuntimeError, match="has shape"):
        rb.extend(TensorDict({"score": torch.tensor([9.0]), "x": torch.zeros(1, 2).long()}, [1]))
    assert rb.extend(scored([1.5], 100)).tolist() == [0]


@pytest.mark.parametrize("way", ["state_dict", "dumps", "pickle"])
def test_a_restored_buffer_keeps_the_best_of_its_records_and_its_handles(way, tmp_path):
    rb, target = keeping_best(), keeping_best()
    rb.extend(scored([1, 2, 3, 4]))
    rb.extend(scored([5], 100))
    sample = rb.sample().set("td_error", torch.full((8,), 7.0))
    if way == "pickle":
        target = pickle.loads(pickle.dumps(rb))
    elif way == "dumps":
        rb.dumps(tmp_path)
        target.loads(tmp_path)
    else:
        target.load_state_dict(rb.state_dict())
    assert target.write_count == 5
    assert target.update_tensordict_priority_if_present(sample).num_stale == 0
    assert target.extend(scored([2.5], 200)).tolist() == [1]
    assert torch.equal(target.update_tensordict_priority_if_present(sample).stale_mask, sample["index"] == 1)


def test_an_emptied_writer_starts_again():
    rb = keeping_best()
    rb.extend(scored([7, 8, 9, 6]))
    rb.empty()
    assert rb.extend(scored([1, 2], 50)).tolist() == [0, 1]
    assert kept(rb) == [50, 51]


def test_stamps_loaded_before_there_is_a_storage_wait_for_it():
    """C34."""
    rb = keeping_best()
    rb.extend(scored([1, 2, 3, 4]))
    rb.extend(scored([5], 100))
    writer = g.GenerationalTensorDictMaxValueWriter(rank_key="score")
    assert writer.generations_of(torch.arange(2)).tolist() == [-1, -1]
    assert repr(writer) == "GenerationalTensorDictMaxValueWriter(rank_key='score', reduction='sum')"
    writer.load_state_dict(rb.writer.state_dict())
    storage = g.GenerationalLazyTensorStorage(4)
    writer.register_storage(storage)
    assert storage.generations.tolist() == [1, 0, 0, 0]


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (scored([1.0, float("nan"), 3.0]), ValueError, "ranks the record at row 1 by NaN. Nothing was written"),
        (records(2), KeyError, "Rank key 'score' not found"),
        (scored([1.0, 2.0]).reshape(2, 1), RuntimeError, "Flatten the data"),
        (torch.zeros(3), RuntimeError, "a tensordict, got Tensor"),
    ],
)
def test_bad_records_change_nothing(data, error, message):
    rb = keeping_best()
    rb.extend(scored([1, 2, 3, 4]))
    before = buffer_state(rb)
    with pytest.raises(error, match=message):
        rb.writer.extend(data)
    assert buffer_state(rb) == before


def test_storages_of_several_dimensions_and_without_stamps_are_refused():
    with pytest.raises(ValueError, match="not compatible with storages with more than one dimension"):
        g.GenerationalTensorDictReplayBuffer(
            storage=g.GenerationalLazyTensorStorage(8, ndim=2),
            writer=g.GenerationalTensorDictMaxValueWriter(rank_key="score"),
        )
    with pytest.raises(TypeError, match="needs a storage that carries slot generations"):
        g.GenerationalTensorDictMaxValueWriter().register_storage(LazyTensorStorage(4))
    with pytest.raises(ValueError, match="always tracks generations"):
        g.GenerationalTensorDictMaxValueWriter(track_generations=False)


@pytest.mark.parametrize("data", [torch.zeros(4), {"x": torch.zeros(4)}, [1.0, 2.0]])
@pytest.mark.parametrize("method", ["add", "extend"])
def test_what_has_no_entries_to_rank_is_refused_in_torchrls_words(method, data):
    writer = g.GenerationalTensorDictMaxValueWriter()
    writer.register_storage(g.GenerationalLazyTensorStorage(4))
    with pytest.raises(RuntimeError, match="expects data to be a tensor collection"):
        getattr(writer, method)(data)
