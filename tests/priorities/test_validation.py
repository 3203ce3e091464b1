from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrl_generational.priorities.validation import as_priority, largest_priority, match_shape

VALUES = [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "given",
    [
        *(torch.tensor(VALUES).to(dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)),
        *(torch.tensor(VALUES).to(dtype) for dtype in (torch.int64, torch.int32, torch.uint8)),
        *(np.array(VALUES, dtype=dtype) for dtype in ("f8", "f4", "f2", "i8", "u1", ">f8", "longdouble")),
        VALUES,
        tuple(VALUES),
        torch.tensor(VALUES, requires_grad=True),
        torch.tensor(VALUES).flip(0)[[3, 2, 1, 0]],
    ],
    ids=lambda given: f"{type(given).__name__}-{getattr(given, 'dtype', '')}",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_priorities_of_any_real_kind_are_cast_to_the_tree(given, dtype):
    values = as_priority(given, dtype=dtype, device="cpu")
    assert values.dtype == dtype
    assert not values.requires_grad
    assert values.tolist() == VALUES


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0, -1e-30])
def test_a_value_that_no_tree_can_hold_is_refused_by_row(bad):
    with pytest.raises(ValueError, match=r"priority must be finite and >= 0 .* got .* at row 2\. Nothing was updated"):
        as_priority([1.0, 2.0, bad, 3.0], dtype=torch.float32, device="cpu")


def test_a_value_that_overflows_the_tree_is_refused_as_it_came():
    with pytest.raises(ValueError, match=r"got 1e\+300 at row 1"):
        as_priority(torch.tensor([1.0, 1e300], dtype=torch.float64), dtype=torch.float32, device="cpu")
    assert as_priority(1e300, dtype=torch.float64, device="cpu").item() == 1e300


@pytest.mark.parametrize(
    "bad", ["high", [True, False], torch.tensor([True]), torch.tensor([1j]), [[1.0], [1.0, 2.0]], None, object()]
)
def test_what_is_no_real_number_is_refused(bad):
    with pytest.raises(TypeError, match="priority must hold"):
        as_priority(bad, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("given", "handles", "expected"),
    [
        ((), (3,), ()),
        ((3,), (3,), (3,)),
        ((3, 1), (3,), (3,)),
        ((2, 3), (2, 3), (6,)),
        ((2, 3, 1), (2, 3), (6,)),
        ((2,), (2, 3), (6,)),  # one priority per stored trajectory, handles expanded over its steps
        ((3,), (3, 1), (3,)),
        ((1,), (), (1,)),
        ((0,), (0,), (0,)),
    ],
)
def test_shapes_that_fit_the_handles(given, handles, expected):
    assert match_shape(torch.zeros(given), torch.Size(handles), repeats=lambda dim: True).shape == expected


def test_a_priority_per_trajectory_is_repeated_over_its_steps():
    given = torch.tensor([1.0, 2.0])
    assert match_shape(given, torch.Size([2, 3]), lambda dim: dim == 1).tolist() == [1, 1, 1, 2, 2, 2]
    with pytest.raises(ValueError, match="priority has shape"):
        match_shape(given, torch.Size([2, 3]), lambda dim: False)  # three records each


@pytest.mark.parametrize(
    ("given", "handles"), [((1,), (3,)), ((4,), (3,)), ((3, 2), (3,)), ((1, 3), (3,)), ((6,), (2, 3))]
)
def test_shapes_that_do_not_fit_are_refused(given, handles):
    with pytest.raises(ValueError, match="priority has shape .* but the handles have shape"):
        match_shape(torch.ones(given), torch.Size(handles), lambda dim: True)


@pytest.mark.parametrize(("priority", "alpha"), [(1e38, 1.0), (1e20, 2.0), (1e200, 5.0)])
def test_a_priority_whose_total_would_overflow_is_refused(priority, alpha):
    dtype = torch.float64 if priority > 1e38 else torch.float32
    bound = largest_priority(alpha=alpha, eps=1e-8, capacity=10, dtype=dtype)
    with pytest.raises(ValueError, match="is too large"):
        as_priority([1.0, priority], dtype=dtype, device="cpu", bound=bound)


@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_priority_in_every_slot_leaves_the_total_finite(alpha, dtype):
    bound = min(largest_priority(alpha=alpha, eps=1e-8, capacity=64, dtype=dtype), torch.finfo(dtype).max / 2)
    leaf = (torch.full((64,), bound, dtype=dtype) * 0.999 + 1e-8) ** alpha
    assert leaf.sum().isfinite()
    as_priority(bound * 0.999, dtype=dtype, device="cpu", bound=bound)
