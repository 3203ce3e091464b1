"""What depends on an exchanged part is rebuilt: priorities, cursors, and the state of samplers."""

from __future__ import annotations

import pytest
import torch
from support import filled, leaves, plain_prioritized, prioritized, records
from tensordict import TensorDict
from torchrl.data import SamplerWithoutReplacement

import torchrl_generational as g


def test_a_new_sampler_knows_the_records_that_are_there():
    """TorchRL's draws from empty trees: 'non-positive p_sum'."""
    rb = filled()
    rb.extend(records(3, 100))
    rb.set_sampler(g.GenerationalPrioritizedSampler(8, 0.7, 0.5))
    assert leaves(rb).tolist() == [1.0] * 8
    sample = rb.sample().set("td_error", torch.full((8,), 4.0))
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 0


def test_a_new_sampler_of_a_half_filled_buffer_knows_only_its_records():
    rb = prioritized(8)
    rb.extend(records(3))
    rb.set_sampler(g.GenerationalPrioritizedSampler(8, 1.0, 1.0))
    assert leaves(rb).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_a_sampler_that_has_priorities_keeps_them():
    rb = prioritized(8)
    rb.extend(records(5))
    sampler = g.GenerationalPrioritizedSampler(8, 1.0, 1.0, eps=0.0)
    sampler.update_priority([0, 1, 2], [5.0, 2.0, 3.0])
    rb.set_sampler(sampler)
    assert leaves(rb).tolist() == [5, 2, 3, 5, 5, 0, 0, 0]


def test_a_sampler_of_several_dimensions_is_rebuilt_cell_by_cell():
    rb = plain_prioritized(12, ndim=2)
    rb.extend(torch.arange(6).reshape(3, 2))
    rb.set_sampler(g.GenerationalPrioritizedSampler(12, 1.0, 1.0))
    assert leaves(rb).tolist() == [1.0] * 6 + [0.0] * 6


def test_uniform_to_prioritized_and_back():
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=8)
    rb.extend(records(8))
    uniform = rb.set_sampler(g.GenerationalPrioritizedSampler(8, 1.0, 1.0))
    sample = rb.sample().set("td_error", torch.ones(8))
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 0
    rb.set_sampler(uniform)
    with pytest.raises(TypeError, match="needs a sampler with priorities"):
        rb.update_tensordict_priority_if_present(sample)


@pytest.mark.parametrize("count", [0, 3, 8])
def test_a_new_storage_starts_the_sampler_and_the_writer_again(count):
    rb = filled()
    rb.extend(records(5))
    rb.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    other = prioritized(8)
    if count:
        other.extend(records(count, 500))
    rb.set_storage(other.storage)
    assert leaves(rb).tolist() == [1.0] * count + [0.0] * (8 - count)
    assert rb.sampler.default_priority == 1.0
    rb.extend(records(2, 900))
    held = rb.storage._storage["x"][: len(rb)].tolist()
    expected = [*range(500, 500 + count), 900, 901]
    assert held == ([900, 901, *range(502, 508)] if count == 8 else expected)
    assert (rb.sample()["index_generation"] >= 0).all()


def test_samplers_without_replacement_follow_a_new_storage():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), sampler=SamplerWithoutReplacement(), batch_size=3
    )
    rb.extend(records(8))
    rb.sample()
    other = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=3)
    other.extend(records(3, 500))
    rb.set_storage(other.storage)
    assert sorted(rb.sample()["x"].tolist()) == [500, 501, 502]


def test_a_new_writer_goes_on_where_the_previous_one_was():
    rb = prioritized(8)
    rb.extend(records(5))
    rb.set_writer(g.GenerationalTensorDictRoundRobinWriter())
    rb.extend(records(2, 100))
    assert rb.storage._storage["x"][: len(rb)].tolist() == [0, 1, 2, 3, 4, 100, 101]


def test_a_used_writer_keeps_its_cursor_where_no_slot_before_it_is_empty():
    used = filled()
    used.extend(records(6))
    rb = prioritized(8)
    rb.extend(records(2))
    rb.set_writer(used.writer)
    rb.extend(records(1, 100))  # at slot 6 the slots 2 to 5 would count as records
    assert rb.storage._storage["x"][: len(rb)].tolist() == [0, 1, 100]


def test_writing_all_slots_at_once_puts_new_records_into_them():
    rb = filled()
    sample = rb.sample().set("td_error", torch.ones(8))
    rb.update_priority(torch.arange(8), 5.0)
    rb.write_all(records(8, 100, index=torch.arange(8)))
    assert rb.storage._storage["x"].tolist() == list(range(100, 108))
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 8


@pytest.mark.parametrize("way", ["state_dict", "dumps"])
def test_siblings_on_a_grid_that_rounds_its_capacity_up_load_as_one(way, tmp_path):
    def pair():
        storage = g.GenerationalLazyTensorStorage(10, ndim=2)
        return prioritized(10, storage=storage), prioritized(10, storage=storage)

    source, _ = pair()
    source.extend(TensorDict({"x": torch.arange(12).reshape(4, 3)}, [4, 3]))  # three rows of four cells
    rb, sibling = pair()
    if way == "dumps":
        source.dumps(tmp_path)
        rb.loads(tmp_path)
    else:
        rb.load_state_dict(source.state_dict())
    for buffer in (rb, sibling):
        assert len(buffer) == 12
        assert (leaves(buffer)[:12] > 0).all()
        buffer.sample()
