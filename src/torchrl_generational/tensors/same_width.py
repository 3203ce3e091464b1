"""Numbers that torch stores but does not scatter, written as integers of the same width."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, is_tensor_collection, is_tensorclass

__all__ = ["apart", "as_integers", "assign", "copies_rows", "holds_unindexed", "indexes", "is_storable"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def indexes(dtype: torch.dtype) -> bool:
    """Whether torch writes numbers of this dtype to places that a tensor names."""
    return _works(dtype, lambda values, index: values.index_put_((index,), values.clone()))


@cache
def copies_rows(dtype: torch.dtype) -> bool:
    """Whether ``index_copy_`` takes this dtype."""
    return _works(dtype, lambda values, index: values.index_copy_(0, index, values.clone()))


@cache
def is_storable(dtype: torch.dtype) -> bool:
    """Whether records of this dtype can be written and drawn."""
    return _works(dtype, lambda values, index: (values.index_select(0, index), values[index], as_integers(values)))


def _works(dtype: torch.dtype, operation: Callable[[torch.Tensor, torch.Tensor], Any]) -> bool:
    try:
        operation(
            torch.zeros(1, dtype=torch.int64, device="cpu").new_empty(1, dtype=dtype),
            torch.zeros(1, dtype=torch.int64, device="cpu"),
        )
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def as_integers(values: Any) -> Any:
    """A view of numbers that torch does not scatter as integers that it does; anything else as it is."""
    if not isinstance(values, torch.Tensor) or (indexes(values.dtype) and copies_rows(values.dtype)):
        return values
    return values.resolve_conj().resolve_neg().view(_INTEGERS[values.dtype.itemsize])


def holds_unindexed(stored: Any) -> bool:
    """Whether a dtype is among the records that torch does not write to places that a tensor names."""
    if isinstance(stored, torch.Tensor):
        return not indexes(stored.dtype)
    if not is_tensor_collection(stored) or isinstance(stored, LazyStackedTensorDict):
        return False
    return any(isinstance(old, torch.Tensor) and not indexes(old.dtype) for old in stored.values(True, True))


def apart(stored: Any, data: Any) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The data without entries that torch does not scatter, and those: stored ones and new ones, as integers.

    Raises:
        TypeError: if the data cannot be taken apart.
    """
    if not is_tensor_collection(stored) or not is_tensor_collection(data) or isinstance(stored, LazyStackedTensorDict):
        return data, []
    held = [key for key, old in stored.items(True, True) if isinstance(old, torch.Tensor) and not indexes(old.dtype)]
    keys = [key for key in held if isinstance(data.get(key, None), torch.Tensor)]
    if not keys:
        return data, []
    if is_tensorclass(data):
        raise TypeError(
            f"The fields {keys} have dtypes that torch does not write to places named by tensors. Nothing was written. "
            "Name whole rows, or store them as integers of the same width (.view)."
        )
    return data.exclude(*keys), [(as_integers(stored.get(key)), as_integers(data.get(key))) for key in keys]


def assign(stored: Any, cursor: Any, data: Any) -> None:
    """``stored[cursor] = data``, whatever the dtypes are."""
    data, pairs = apart(stored, data)
    if isinstance(stored, torch.Tensor) and isinstance(data, torch.Tensor) and not indexes(stored.dtype):
        stored, data = as_integers(stored), as_integers(data)
    stored[cursor] = data
    for old, new in pairs:
        old[cursor] = new
