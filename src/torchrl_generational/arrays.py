"""What a training loop on the CPU hands in, seen as NumPy arrays, which cost a fraction of small tensors.

Each function answers ``None`` for whatever takes a conversion or has a fault; the general road then does the one and
names the other. So nothing here raises, and nothing here changes anything.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

__all__ = ["index_array", "priority_array"]

_Cells = np.ndarray[Any, np.dtype[np.int64]]


def index_array(index: Any, limit: int) -> _Cells | None:
    """An int64 tensor within ``[0, limit)`` as an array of its shape, without a copy; not for an empty one."""
    if type(index) is not torch.Tensor or index.dtype is not torch.int64 or not index.is_cpu or not index.numel():
        return None
    cells = index.numpy()
    # one reduction for both bounds: as an unsigned number, a negative one is larger than any limit
    return cells if cells.ndim and int(cells.view(np.uint64).max()) < limit else None


def priority_array(priority: Any, dtype: torch.dtype, most: float) -> tuple[np.ndarray[Any, Any], float] | None:
    """A tensor of priorities that fit into a tree as an array of its shape, without a copy, and the largest of them.

    Args:
        priority: what was handed in.
        dtype: the tree's dtype.
        most: the largest priority that fits into the tree.
    """
    if type(priority) is not torch.Tensor or priority.dtype is not dtype or not priority.is_cpu or not priority.numel():
        return None
    values = priority.detach().numpy()
    low, high = float(values.min()), float(values.max())
    # NaN fails the comparisons
    return (values, high) if low >= 0 and high <= most and high < math.inf else None
