"""What a training loop on the CPU hands in, seen as NumPy arrays, which cost a fraction of small tensors.

Each function answers ``None`` for whatever takes a conversion or has a fault; the general path then does the one and
names the other. So nothing here raises, and nothing here changes anything.

Between two calls of a training loop the caches forget these lines, and every other operation is one more miss. So a
tensor is asked for nothing but its array, and one reduction checks what two or three would.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["array_of", "index_array", "priority_array"]

_Array = np.ndarray[Any, Any]

_INT64 = np.dtype(np.int64)
#: For each dtype of priorities the unsigned numbers of its size, and infinity read as one of those.
_BITS: dict[Any, tuple[Any, int]] = {
    np.dtype(number): (bits, int(np.array(np.inf, number).view(bits)))
    for number, bits in ((np.float32, np.uint32), (np.float64, np.uint64))
}
_largest = np.maximum.reduce


def array_of(tensor: Any) -> _Array | None:
    """A tensor of the CPU as an array, without a copy; ``None`` for anything else."""
    if type(tensor) is not torch.Tensor:
        return None
    try:
        array: _Array = tensor.numpy()  # refuses an accelerator's, without waiting for it
    except (TypeError, RuntimeError):
        return None
    return array


def index_array(index: Any, limit: int) -> _Array | None:
    """An int64 tensor within ``[0, limit)`` as an array of its shape, without a copy; not for an empty one."""
    cells = array_of(index)
    if cells is None or cells.dtype != _INT64 or not cells.ndim or not cells.size:
        return None
    # as an unsigned number, a negative one is larger than any limit
    return cells if _largest(cells.view(np.uint64), axis=None) < limit else None


def priority_array(priority: Any, dtype: Any, bound: float) -> tuple[_Array, float] | None:
    """A tensor of priorities that fit into a tree as an array of its shape, without a copy, and the largest of them.

    Args:
        priority: what was handed in.
        dtype: the tree's, as NumPy's.
        bound: the largest priority that fits into the tree.
    """
    values = array_of(priority)
    if values is None or values.dtype != dtype or not values.ndim or not values.size:
        return None
    # Read as unsigned numbers, floats that are not negative keep their order, infinity and NaN come after them, and
    # negative ones last.
    unsigned, infinite = _BITS[values.dtype]
    bits = _largest(values.view(unsigned), axis=None)
    highest = float(bits.view(values.dtype))
    return (values, highest) if bits < infinite and highest <= bound else None
