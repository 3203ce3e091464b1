"""``sync=False``: the learner's priorities follow the records, whoever wrote them where."""

from __future__ import annotations

import pytest
import torch
from support import prioritized, records

import torchrl_generational as g


def learner(**kwargs):
    return prioritized(8, sync=False, **kwargs)


def known(rb):
    rb.sample()
    held = rb.prioritized_sampler._sum_tree[torch.arange(8)]
    return [round(value, 4) for value in held.tolist()]


def test_records_written_after_a_sibling_emptied_the_storage_are_known():
    storage = g.GenerationalLazyTensorStorage(8)
    first, second = learner(storage=storage), learner(storage=storage)
    first.extend(records(5))
    first.sample()
    second.empty()
    first.extend(records(2))
    assert known(first)[:2] == [1, 1]


def test_records_that_a_sibling_wrote_are_known():
    storage = g.GenerationalLazyTensorStorage(8)
    first, second = learner(storage=storage), learner(storage=storage)
    first.extend(records(5))
    assert known(second) == [1, 1, 1, 1, 1, 0, 0, 0]


def test_records_in_an_exchanged_storage_are_known():
    rb = learner()
    rb.extend(records(8))
    rb.sample()
    other = prioritized(8)
    other.extend(records(3))
    rb.set_storage(other.storage)
    rb.extend(records(2))
    assert known(rb) == [1, 1, 1, 1, 1, 0, 0, 0]


def test_records_written_after_an_emptying_that_goes_on_counting_are_known():
    rb = learner()
    rb.extend(records(5))
    rb.sample()
    rb.empty(empty_write_count=False)
    for _ in range(2):
        rb.extend(records(1))
        rb.sample()
    assert known(rb)[:2] == [1, 1]


def test_records_that_were_there_before_the_buffer_are_known():
    storage = g.GenerationalTensorStorage(records(8))
    assert known(learner(storage=storage)) == [1] * 8


def test_an_assigned_record_gets_the_default_priority():
    rb = learner()
    rb.extend(records(8))
    rb.sample()
    rb.update_priority(torch.tensor([2]), 0.25)
    assert known(rb)[2] == 0.25
    rb[2] = records(1, 100, index=torch.tensor([2]))[0]
    assert known(rb)[2] == 1


@pytest.mark.parametrize("raw", [True, False])
def test_a_fresh_priority_is_not_overwritten_by_the_catching_up(raw):
    """C21."""
    rb = learner()
    rb.extend(records(8))
    sample = rb.sample().set("td_error", torch.full((8,), 0.5))
    rb.extend(records(3, 100))
    if raw:
        rb.update_priority(torch.tensor([0]), 0.25)
        assert known(rb)[0] == 0.25
        return
    result = rb.update_tensordict_priority_if_present(sample)
    assert torch.equal(result.stale_mask, sample["index"] < 3)
    updated = sample["index"][result.updated_mask].unique().tolist()
    assert known(rb) == [0.5 if slot in updated else 1 for slot in range(8)]


def test_a_restore_brings_records_that_the_learner_knows():
    rb, source = learner(), learner()
    source.extend(records(8))
    rb.extend(records(8, 100))
    rb.sample()
    rb.update_priority(torch.tensor([3]), 0.25)
    rb.load_state_dict(source.state_dict())
    assert known(rb) == [1] * 8
