"""Priorities as callers hand them in -> values that a priority tree can hold, or an error before anything changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchrl_generational.generations.indexing import as_array
from torchrl_generational.tensors.default_devices import as_tensor

__all__ = ["as_priority", "just_within", "largest_priority", "match_shape"]


def as_priority(
    priority: Any, *, dtype: torch.dtype, device: torch.device, bound: float = math.inf, name: str = "priority"
) -> torch.Tensor:
    """``priority`` cast to the tree's dtype, on the tree's device, shape kept.

    Args:
        priority: a number, tensor, array or (nested) list of any real dtype.
        dtype: the tree's dtype.
        device: the tree's device.
        bound: the largest priority that fits into the tree.
        name: what the caller calls it.

    Raises:
        TypeError: if it does not hold real numbers.
        ValueError: if a value is NaN, infinite (also after the cast), negative or above ``bound``; names the row.
    """
    if not isinstance(priority, torch.Tensor):
        array = as_array(name, priority, "numbers")
        if array.dtype.kind not in "iuf":
            raise TypeError(f"{name} must hold real numbers, got {type(priority).__name__} of {array.dtype}.")
        # NumPy's long double and big-endian arrays have no torch dtype
        priority = torch.from_numpy(np.array(array, dtype=np.float64 if array.dtype.kind == "f" else np.int64))
    elif priority.dtype == torch.bool or priority.is_complex():
        raise TypeError(f"{name} must hold real numbers, got a tensor of {priority.dtype}.")
    values: torch.Tensor = priority.detach().to(device=device, dtype=dtype)
    if values.numel():
        if values.is_cpu:
            array = values.numpy()
            low, high = float(array.min()), float(array.max())
        else:
            low, high = (float(bound) for bound in values.aminmax())
        # NaN fails both comparisons
        if not (low >= 0 and high < math.inf):
            _refuse_value(values, priority, name)
        if high > bound:
            raise ValueError(
                f"{name} {high} is too large: the tree's {dtype} holds at most {bound:.3g} for every slot. Nothing was "
                "updated. Clip the TD errors, or use a sampler with dtype=torch.float64."
            )
    return values


def _refuse_value(values: torch.Tensor, given: torch.Tensor, name: str) -> None:
    flat = values.reshape(-1)
    row = int((~((flat >= 0) & (flat < math.inf))).nonzero()[0, 0])
    came = given.detach().reshape(-1)[row].item()
    where = f" at row {row}" if flat.numel() > 1 else ""
    raise ValueError(
        f"{name} must be finite and >= 0 in the tree's {values.dtype}, got {came}{where}. Nothing was updated. Pass "
        "the absolute TD error, and look for the step of the learner that produced this value."
    )


def match_shape(priority: torch.Tensor, shape: torch.Size, repeats: Callable[[int], bool]) -> torch.Tensor:
    """One priority per handle: a 0-d tensor for all of them, else a flat ``[M]`` tensor.

    ``priority`` may be a number, ``shape``, ``shape + [1]``, or the beginning of ``shape`` where handles were
    expanded over the dimensions of a stored trajectory.

    Args:
        priority: of any shape.
        shape: that of the handles.
        repeats: whether the handles are the same all along their dimensions from this one on.

    Raises:
        ValueError: for any other shape.
    """
    given = priority.shape
    if priority.ndim == 0:
        return priority
    if given == shape:
        return priority if priority.ndim == 1 else priority.reshape(-1)
    if given == (*shape, 1):
        return priority.reshape(-1)
    if tuple(shape[: len(given)]) == tuple(given) and repeats(len(given)):
        return priority.reshape(*given, *(1,) * (len(shape) - len(given))).expand(shape).reshape(-1)
    raise ValueError(
        f"priority has shape {tuple(given)} but the handles have shape {tuple(shape)}. Pass a number, or one priority "
        f"per handle: shape {tuple(shape)} or {(*shape, 1)}."
    )


def largest_priority(*, alpha: float, eps: float, capacity: int, dtype: torch.dtype) -> float:
    """The largest priority whose leaf ``(priority + eps) ** alpha`` cannot overflow the tree's total.

    The largest leaf times the capacity must be representable, so that no sum over the ring is ever infinite.
    """
    if alpha == 0:
        return math.inf
    try:
        return float((torch.finfo(dtype).max / capacity) ** (1.0 / alpha)) - eps
    except OverflowError:  # alpha is small: every number fits
        return math.inf


def just_within(bound: float, dtype: torch.dtype) -> torch.Tensor:
    """The largest number of ``dtype`` below ``bound``, 0-d."""
    return torch.tensor(bound, dtype=dtype, device="cpu").nextafter(torch.zeros((), dtype=dtype, device="cpu"))


def some_each(priority: Any, shape: torch.Size, name: Any) -> torch.Tensor:
    """First priorities of records of this shape, of which each may have several.

    Raises:
        ValueError: if a record has none.
    """
    values: torch.Tensor = as_tensor(priority)
    if values.shape[: len(shape)] != shape or not values.numel():
        raise ValueError(
            f"{name!r} has shape {tuple(values.shape)} for records of shape {tuple(shape)}. Nothing was written. "
            "Pass one priority or more per record, or leave the entry out."
        )
    return values
