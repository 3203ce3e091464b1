from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from torchrl_generational import UpdateResult

UPDATED = torch.tensor([[True, False, False], [True, False, False]])
REJECTED = torch.tensor([[False, True, False], [False, False, False]])


def test_every_row_is_exactly_one_of_updated_stale_and_rejected():
    result = UpdateResult(UPDATED, REJECTED)
    assert (result.updated_mask.int() + result.stale_mask.int() + result.rejected_mask.int() == 1).all()
    assert (result.num_updated, result.num_stale, result.num_rejected) == (2, 3, 1)


def test_without_versions_no_row_is_rejected():
    result = UpdateResult(UPDATED)
    assert result.rejected_mask is None
    assert (result.num_updated, result.num_stale, result.num_rejected) == (2, 4, 0)
    assert torch.equal(result.stale_mask, ~UPDATED)


def test_torchrl_spellings_give_the_same_values():
    result = UpdateResult(UPDATED, REJECTED)
    assert result.updated is result.updated_mask
    assert result.version_rejected is result.rejected_mask
    counts = (result.updated_count, result.stale_count, result.version_rejected_count)
    assert counts == (result.num_updated, result.num_stale, result.num_rejected)


def test_a_result_survives_pickling():
    result = pickle.loads(pickle.dumps(UpdateResult(UPDATED, REJECTED)))
    assert torch.equal(result.updated_mask, UPDATED)
    assert torch.equal(result.rejected_mask, REJECTED)


def test_a_result_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        UpdateResult(UPDATED).updated_mask = REJECTED


def test_the_repr_gives_counts_and_shape():
    assert repr(UpdateResult(UPDATED)) == "UpdateResult(num_updated=2, num_stale=4, num_rejected=0, shape=(2, 3))"
