"""Several TD errors of one record: add() reduces them before anything is written, as an update does."""

from __future__ import annotations

import pytest
import torch
from support import buffer_state, leaves
from tensordict import TensorDict

import torchrl_generational as g

REDUCED = {"max": 6.0, "min": 1.0, "mean": 3.5, "median": 3.0}


def buffer(ndim=1, reduction="max", **kwargs):
    return g.GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        eps=0.0,
        reduction=reduction,
        storage=g.GenerationalLazyTensorStorage(12, ndim=ndim),
        batch_size=4,
        **kwargs,
    )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reduction", REDUCED)
def test_the_heads_of_one_record_are_reduced(reduction, shared):
    rb = buffer(reduction=reduction, shared=shared)
    errors = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    rb.add(TensorDict({"x": torch.zeros(()), "td_error": errors}))
    rb.sample()  # a learner catches up
    assert leaves(rb)[0] == REDUCED[reduction]
    sample = rb.sample()
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 4  # which reduces in the same way
    assert leaves(rb)[0] == REDUCED[reduction]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
def test_the_steps_of_a_stored_trajectory_are_reduced(shape):
    rb = buffer()
    errors = torch.arange(torch.Size((4, *shape)).numel(), 0, -1.0).reshape(4, *shape)
    rb.add(TensorDict({"x": torch.zeros(4), "td_error": errors}, [4]))
    assert leaves(rb)[0] == errors.max()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
def test_each_cell_of_a_row_gets_its_own(shape):
    rb = buffer(ndim=2)
    errors = torch.arange(1.0, 1 + torch.Size((3, *shape)).numel()).reshape(3, *shape)
    rb.add(TensorDict({"x": torch.zeros(3), "td_error": errors}, [3]))
    assert leaves(rb)[:3].tolist() == errors.reshape(3, -1).amax(-1).tolist()


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_record_with_none_is_refused_before_it_is_written(ndim):
    rb = buffer(ndim)
    rb.extend(TensorDict({"x": torch.zeros(3, 2)}, [3, 2][:ndim]))
    before = buffer_state(rb)
    inner = [3][: ndim - 1]
    data = TensorDict({"x": torch.zeros(inner or 2), "td_error": torch.zeros(*inner, 0)}, inner)
    with pytest.raises(ValueError, match=r"'td_error' has shape .*Nothing was written. Pass one priority or more"):
        rb.add(data)
    assert buffer_state(rb) == before


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0,)])
def test_extend_refuses_several_before_anything_is_written(shape, ndim):
    rb = buffer(ndim)
    batch = [3, 2][:ndim]
    rb.extend(TensorDict({"x": torch.zeros(batch)}, batch))
    before = buffer_state(rb)
    with pytest.raises(RuntimeError, match="Nothing was written. Pass one priority per record"):
        rb.extend(TensorDict({"x": torch.ones(batch), "td_error": torch.ones(*batch, *shape)}, batch))
    assert buffer_state(rb) == before
