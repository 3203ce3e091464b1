"""Plain round trips: stamps, priorities and handles survive, and TorchRL's own checkpoints load."""

from __future__ import annotations

import pytest
import torch
from support import leaves, prioritized, records
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

import torchrl_generational as g

STORAGES = [g.GenerationalLazyTensorStorage, g.GenerationalLazyMemmapStorage]

pytestmark = pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")


def transfer(source, target, how, path):
    if how == "state_dict":
        target.load_state_dict(source.state_dict())
    else:
        source.dumps(path)
        target.loads(path)


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("make", STORAGES)
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("written", [3, 8, 11])
def test_a_round_trip_keeps_stamps_priorities_and_handles(how, make, fresh, written, tmp_path):
    """R8: into a new buffer, and back into one that has gone on."""
    rb = prioritized(8, storage=make(8))
    rb.extend(records(written, td_error=torch.arange(1.0, written + 1)))
    sample = rb.sample()
    stamps, held = rb.storage.generations.clone(), leaves(rb)
    target = prioritized(8, storage=make(8))
    if not fresh:
        target.extend(records(5, 500, td_error=torch.full((5,), 0.5)))
    transfer(rb, target, how, tmp_path)
    assert torch.equal(target.storage.generations, stamps)
    assert torch.equal(leaves(target), held)
    assert len(target) == len(rb)
    assert torch.equal(target[:]["x"], rb[:]["x"])
    sample["td_error"] = torch.full((8,), 0.25)
    assert target.update_tensordict_priority_if_present(sample).num_stale == 0
    target.extend(records(8))
    assert target.update_tensordict_priority_if_present(sample).num_stale == 8
    assert torch.equal(rb.storage.generations, stamps)


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_a_round_trip_of_several_dimensions(how, tmp_path):
    rb, target = (prioritized(12, storage=g.GenerationalLazyTensorStorage(12, ndim=2)) for _ in range(2))
    for start in (0, 100):
        rb.extend(TensorDict({"x": torch.arange(start, start + 9).reshape(3, 3)}, [3, 3]))
    transfer(rb, target, how, tmp_path)
    assert torch.equal(target.storage.generations, rb.storage.generations)
    sample = rb.sample().set("td_error", torch.ones(8))
    assert target.update_tensordict_priority_if_present(sample).num_stale == 0


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("fresh", [True, False])
def test_checkpoints_of_stock_buffers_load(how, tracked, fresh, tmp_path):
    """C13: without stamps in the checkpoint, every handle from before is stale."""
    stock = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=PrioritizedSampler(8, 1.0, 1.0),
        writer=TensorDictRoundRobinWriter(track_generations=tracked),
        batch_size=8,
    )
    stock.extend(records(11, td_error=torch.arange(1.0, 12.0)))
    rb = prioritized(8)
    old = None
    if not fresh:
        rb.extend(records(8, 500, td_error=torch.full((8,), 0.5)))
        old = rb.sample().set("td_error", torch.full((8,), 99.0))
    transfer(stock, rb, how, tmp_path)
    assert leaves(rb).tolist() == [9, 10, 11, 4, 5, 6, 7, 8]
    assert rb[:]["x"].tolist() == stock[:]["x"].tolist()
    if tracked:
        assert rb.storage.generations.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    elif old is not None:
        assert rb.update_tensordict_priority_if_present(old).num_stale == 8
    sample = rb.sample()
    assert (sample["index_generation"] >= 0).all()
    sample["td_error"] = torch.full((8,), 2.0)
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 0


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_our_checkpoints_load_in_stock(how, tmp_path):
    rb = prioritized(8)
    rb.extend(records(11, td_error=torch.arange(1.0, 12.0)))
    stock = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=PrioritizedSampler(8, 1.0, 1.0),
        writer=TensorDictRoundRobinWriter(track_generations=True),
        batch_size=8,
    )
    transfer(rb, stock, how, tmp_path)
    assert stock[:]["x"].tolist() == rb[:]["x"].tolist()
    assert stock.writer.generations_of(torch.arange(8)).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_a_memmap_storage_checkpoints_where_it_lies(tmp_path):
    rb = prioritized(8, storage=g.GenerationalLazyMemmapStorage(8, scratch_dir=tmp_path / "storage"))
    rb.extend(records(11))
    rb.dumps(tmp_path)
    target = prioritized(8, storage=g.GenerationalLazyMemmapStorage(8, scratch_dir=tmp_path / "storage"))
    target.loads(tmp_path)
    assert torch.equal(target.storage.generations, rb.storage.generations)
    assert isinstance(rb.storage, LazyMemmapStorage)


def test_the_layout_of_a_checkpoint_is_that_of_torchrl(tmp_path):
    rb = prioritized(8)
    rb.extend(records(5))
    assert set(rb.state_dict()["_writer"]) == {"_cursor", "_write_count", "_generation"}
    rb.dumps(tmp_path)
    assert (tmp_path / "writer" / "generation.memmap").stat().st_size == 8 * 8


def test_prefetched_batches_in_a_checkpoint_keep_their_handles():
    rb = prioritized(8, prefetch=2)
    rb.extend(records(8))
    rb.sample()
    state = rb.state_dict()
    target = prioritized(8, prefetch=2)
    target.load_state_dict(state)
    target.extend(records(5))
    for _ in range(2):
        sample = target.sample().set("td_error", torch.full((8,), 2.0))
        result = target.update_tensordict_priority_if_present(sample)
        assert torch.equal(result.stale_mask, sample["index"] < 5)
    for buffer in (rb, target):
        buffer.shutdown()
