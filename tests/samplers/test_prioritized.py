from __future__ import annotations

import numpy as np
import pytest
import torch
from support import leaves, plain_prioritized, prioritized, records, sampler_state
from torchrl.data import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer

import torchrl_generational as g


def filled(capacity=8, **kwargs):
    rb = plain_prioritized(capacity, **kwargs)
    rb.extend(torch.arange(capacity))
    return rb


def test_a_stock_buffer_hands_out_the_generations_of_its_sample():
    storage = g.GenerationalLazyTensorStorage(8)
    rb = TensorDictReplayBuffer(storage=storage, sampler=g.GenerationalPrioritizedSampler(8, 0.7, 0.5), batch_size=32)
    rb.extend(records(8))
    rb.extend(records(3))
    sample = rb.sample()
    assert sample["index_generation"].dtype == torch.int64
    assert torch.equal(sample["index_generation"], storage.generations[sample["index"]])


def test_coordinates_come_with_the_generation_of_their_row():
    rb = plain_prioritized(12, ndim=2, batch_size=64)
    rb.extend(torch.arange(12).reshape(3, 4))  # dim_extend 1: four rows of three cells
    rb.extend(torch.arange(6).reshape(3, 2))
    index, info = rb.sampler.sample(rb.storage, 64)
    assert isinstance(index, tuple)
    assert torch.equal(info["index_generation"], rb.storage.generations[index])
    assert set(info["index_generation"].tolist()) == {0, 1}


def test_a_storage_without_stamps_is_refused_when_it_is_sampled():
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=g.GenerationalPrioritizedSampler(8, 1.0, 1.0), batch_size=2)
    rb.extend(torch.arange(8))
    with pytest.raises(TypeError, match="GenerationalPrioritizedSampler needs a storage that carries slot generations"):
        rb.sample()


def test_the_last_of_two_values_for_one_slot_is_the_only_one_the_maximum_sees():
    """C05."""
    rb = filled()
    rb.update_priority(torch.tensor([2, 2]), torch.tensor([9.0, 3.0]))
    assert leaves(rb)[2].item() == 3.0
    assert rb.sampler.default_priority == 3.0
    rb.update_priority(torch.tensor([2, 2]), torch.tensor([3.0, 9.0]))
    assert rb.sampler.default_priority == 9.0


@pytest.mark.parametrize("within", [True, False])
def test_repeated_slots_leave_the_state_that_their_last_rows_alone_leave(within):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        cells = torch.randint(0, 8, (12,), generator=generator)
        priority = torch.rand(12, generator=generator) * 10
        last = {cell: position for position, cell in enumerate(cells.tolist())}
        keep = sorted(last.values())
        repeated, alone = (filled(max_priority_within_buffer=within) for _ in range(2))
        repeated.update_priority(cells, priority)
        alone.update_priority(cells[keep], priority[keep])
        assert sampler_state(repeated) == sampler_state(alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trees_of_either_dtype_take_records_and_priorities(dtype):
    """C25."""
    rb = filled(dtype=dtype)
    rb.update_priority([1, 2], np.array([3.0, 4.0]))
    assert leaves(rb).dtype == dtype
    assert leaves(rb)[[1, 2]].tolist() == pytest.approx([3.0, 4.0])
    assert rb.sample(return_info=True)[1]["priority_weight"].shape == (8,)


@pytest.mark.parametrize(
    ("index", "priority", "error", "message"),
    [
        ([0, 8], 1.0, IndexError, r"index 8 is outside \[0, 8\)"),
        ([0, 15], 1.0, IndexError, r"index 15 is outside"),  # still inside the tree's power of two
        ([0, 10**6], 1.0, IndexError, r"index 1000000 is outside"),
        ([-2, 0], 1.0, IndexError, "index -2 is outside"),
        ([0.5], 1.0, TypeError, "index must hold integers"),
        ([0, 1], [1.0, 2.0, 3.0], ValueError, "priority should be a number or an iterable of the same length as index"),
        ([0, 1], [1.0, float("nan")], ValueError, "at row 1"),
        ([0, 1], [-1.0, 1.0], ValueError, "at row 0"),
        ([0, 1], [float("inf"), 1.0], ValueError, "at row 0"),
        ([0, 1], [1e38, 1.0], ValueError, "too large"),
        ([0, 1], "high", TypeError, "priority must hold real numbers"),
        (torch.tensor([[0, 1]]), 1.0, ValueError, r"shape \(1, 2\) does not hold coordinates"),
    ],
)
def test_a_bad_raw_update_changes_nothing(index, priority, error, message):
    """C08, C09."""
    rb = filled()
    before = sampler_state(rb)
    with pytest.raises(error, match=message):
        rb.sampler.update_priority(index, priority, storage=rb.storage)
    assert sampler_state(rb) == before


def test_a_slot_not_yet_written_takes_no_priority():
    """C09: stock accepts it and raises the default of later records."""
    rb = plain_prioritized(8)
    rb.extend(torch.arange(3))
    before = sampler_state(rb)
    with pytest.raises(IndexError, match=r"index 5 is outside \[0, 3\), the number of records in the storage"):
        rb.update_priority(torch.tensor([5]), 1e6)
    assert sampler_state(rb) == before


def test_coordinates_outside_several_dimensions_are_refused():
    rb = plain_prioritized(12, ndim=2)
    rb.extend(torch.arange(6).reshape(3, 2))
    before = sampler_state(rb)
    for index in ([[0, 3]], [[2, 0]]):
        with pytest.raises(IndexError, match="outside the storage's written part"):
            rb.update_priority(torch.tensor(index), torch.ones(1))
    with pytest.raises(RuntimeError, match="storage should be provided"):
        rb.sampler.update_priority(torch.tensor([[0, 1]]), 1.0)
    assert sampler_state(rb) == before


def test_rows_marked_minus_one_are_ignored():
    rb = filled()
    rb.update_priority(torch.tensor([-1, 4, -1]), torch.tensor([50.0, 2.0, 70.0]))
    assert leaves(rb).tolist() == [1, 1, 1, 1, 2, 1, 1, 1]
    assert rb.sampler.default_priority == 2.0
    before = sampler_state(rb)
    rb.update_priority(torch.tensor([-1, -1]), torch.tensor([50.0, 70.0]))
    assert sampler_state(rb) == before


def test_a_sampler_smaller_than_its_storage_never_leaves_its_tree():
    storage = g.GenerationalLazyTensorStorage(100)
    sampler = g.GenerationalPrioritizedSampler(5, 1.0, 1.0)
    storage.set(range(5), torch.arange(5))
    sampler.update_priority(torch.arange(5), 1.0, storage=storage)
    storage.set(range(5, 10), torch.arange(5))
    with pytest.raises(IndexError, match=r"index 9 is outside \[0, 5\), the tree's capacity"):
        sampler.update_priority(torch.arange(10), 1.0, storage=storage)
    with pytest.raises(ValueError, match="max_capacity=5 but the storage holds 100 records"):
        sampler.sample(storage, 2)


@pytest.mark.parametrize("ndim", [2, 3])
def test_the_trees_grow_where_a_storage_rounds_its_capacity_up_to_whole_rows(ndim):
    rb = plain_prioritized(8, ndim=ndim, batch_size=64)
    shape = (3, 4) if ndim == 2 else (3, 4, 1)
    rb.extend(torch.arange(12).reshape(shape))
    rb.extend(torch.arange(12).reshape(shape))
    cells = rb.storage.generations.numel()
    assert cells > 8
    assert rb.sampler.max_size == cells == len(rb)
    _, info = rb.sample(return_info=True)
    assert (
        rb.update_priority_if_present(
            index=info["index"], generation=info["index_generation"], priority=torch.ones(64)
        ).num_stale
        == 0
    )


def test_a_sampler_like_another_has_its_configuration():
    theirs = PrioritizedSampler(6, 0.3, 0.4, 1e-3, torch.float64, "mean", max_priority_within_buffer=True, device="cpu")
    ours = g.GenerationalPrioritizedSampler.like(theirs)
    for name in (
        "_max_capacity",
        "_alpha",
        "_beta",
        "_eps",
        "dtype",
        "reduction",
        "_max_priority_within_buffer",
        "_device",
    ):
        assert getattr(ours, name) == getattr(theirs, name)


def test_new_records_are_born_at_the_largest_priority_in_use():
    rb = prioritized(8)
    rb.extend(records(4))
    rb.update_priority(torch.tensor([1]), torch.tensor([7.0]))
    rb.extend(records(2))
    assert leaves(rb)[:6].tolist() == [1, 7, 1, 1, 7, 7]


@pytest.mark.parametrize("priority", [5.0, torch.tensor([5.0, 0, 6.0, 0, 7.0, 0])[::2]])
def test_strided_views_reach_the_trees_in_order(priority):
    rb = filled()
    index = torch.tensor([[1, 0], [3, 0], [6, 0]])[:, 0]
    assert not index.is_contiguous()
    rb.update_priority(index, priority)
    expected = [5.0] * 3 if isinstance(priority, float) else [5.0, 6.0, 7.0]
    assert leaves(rb)[[1, 3, 6]].tolist() == expected
    assert leaves(rb).sum() == sum(expected) + 5
    generation = rb.writer.generations_of(index)
    rb.update_priority_if_present(
        index=index, generation=generation, priority=torch.tensor([2.0, 0, 3.0, 0, 4.0, 0])[::2]
    )
    assert leaves(rb)[[1, 3, 6]].tolist() == [2, 3, 4]
