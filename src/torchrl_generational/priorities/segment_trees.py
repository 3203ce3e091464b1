"""The priority trees of a sampler: their kinds, and reading and writing their leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrl._torchrl import SumSegmentTreeFp32, SumSegmentTreeFp64

__all__ = [
    "array_dtype",
    "double_sums",
    "on_cpu",
    "read_leaves",
    "tree_dtype",
    "write_arrays",
    "write_leaves",
]

_ON_CPU = (SumSegmentTreeFp64, SumSegmentTreeFp32)


def tree_dtype(sampler: Any) -> torch.dtype:
    """The dtype of a sampler's trees (TorchRL also accepts tensor types in its place)."""
    return torch.float64 if sampler.dtype in (torch.float64, torch.DoubleTensor) else torch.float32


def array_dtype(sampler: Any) -> type[np.floating[Any]]:
    """:func:`tree_dtype` as NumPy's."""
    return np.float64 if tree_dtype(sampler) is torch.float64 else np.float32


def on_cpu(sampler: Any) -> bool:
    """Whether a sampler's trees are on the CPU, where NumPy reads and writes them."""
    return type(sampler._sum_tree) in _ON_CPU or bool(sampler.device.type == "cpu")  # asking for a device is slow


def double_sums(sampler: Any) -> None:
    """Lets the sum tree of a sampler on the CPU add in float64, whatever the dtype of its priorities.

    From a million slots on, float32 sums draw single records up to a tenth too often or too seldom.
    """
    if sampler.device.type == "cpu":
        sampler._sum_tree = SumSegmentTreeFp64(sampler._max_capacity)


def read_leaves(tree: Any, cells: torch.Tensor) -> torch.Tensor:
    """Leaves of ``tree``, of the shape of ``cells``; TorchRL's trees answer one cell with a number."""
    found = tree[cells]
    if not isinstance(found, torch.Tensor):  # torch would make float32 of a number
        found = torch.tensor(found, dtype=torch.float64, device=cells.device)
    return found.reshape(cells.shape)


def write_leaves(sampler: Any, cells: torch.Tensor, leaf: torch.Tensor) -> None:
    """Writes leaves, 0-d or one per cell, to both trees of ``sampler``. O(cells log capacity).

    A leaf of zero, which is never drawn, is left out of the minimum that importance weights are normalised by.
    """
    if not on_cpu(sampler):
        _write_both(sampler, cells, leaf, leaf.masked_fill(leaf == 0, torch.finfo(leaf.dtype).max))
        return
    write_arrays(sampler, cells.numpy(), leaf.numpy())


def write_arrays(sampler: Any, cells: Any, leaf: Any, *, positive: bool = False) -> None:
    """:func:`write_leaves` on the CPU, where NumPy's arrays take half the time of tensors.

    Args:
        sampler: a prioritized sampler whose trees are on the CPU.
        cells: an int, or int64 ``[M]``.
        leaf: an array of the tree's dtype, 0-d or ``[M]``.
        positive: whether it is known that no leaf is zero.
    """
    minimum = leaf if positive or leaf.all() else np.where(leaf == 0, np.finfo(leaf.dtype).max, leaf)
    # The trees read arrays as if they were contiguous, and convert other dtypes more slowly than NumPy.
    if type(cells) is not int and not cells.flags.c_contiguous:
        cells = np.ascontiguousarray(cells)
    sums, minima = (
        (leaf.astype(np.float64, order="C", copy=False), np.ascontiguousarray(minimum))
        if leaf.ndim
        else (float(leaf), float(minimum))
    )
    _write_both(sampler, cells, sums, minima)


def _write_both(sampler: Any, cells: Any, sums: Any, minima: Any) -> None:
    """Writes what is ready to both trees, or after an exception in between as well: the trees agree."""
    try:
        sampler._sum_tree[cells] = sums
        sampler._min_tree[cells] = minima
    except BaseException:
        sampler._sum_tree[cells] = sums
        sampler._min_tree[cells] = minima
        raise
