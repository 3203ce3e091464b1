"""Drawing by priority: from the sums of a sampler's trees to cells and importance weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchrl_generational.priorities.segment_trees import array_dtype
from torchrl_generational.tensors.default_devices import CPU

__all__ = ["draw", "weights"]


def draw(sampler: Any, num_cells: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws cells below ``num_cells`` in proportion to their leaves, with replacement. O(batch log capacity).

    Inverse-transform sampling: a mass uniform in ``(0, total]`` falls into the first cell whose cumulative sum
    reaches it. Mass and sums are float64, whatever the dtype of the priorities: 24 bits cannot tell the neighbours of
    a ring of a million apart. Randomness comes from the sampler's generator, else from torch's global one.

    Args:
        sampler: a prioritized sampler on the CPU; the caller holds the storage's lock.
        num_cells: the storage's length.
        batch_size: number of draws.

    Returns:
        Cells, int64 ``[batch_size]``, none of them with a leaf of zero; and the weights
        ``(leaf / smallest positive leaf) ** -beta`` of the same shape, in the dtype of the priorities.

    Raises:
        RuntimeError: if no cell has a positive leaf.
    """
    sums = sampler._sum_tree
    total = sums.query(0, num_cells)
    if not total > 0:
        raise RuntimeError(
            f"Cannot sample by priority: those of all {num_cells} records are zero. Update one of them, or give the "
            "sampler eps > 0. If their last write did not end, write new ones over them."
        )
    cells = _landing(sums, total, sampler._rng, batch_size)
    inside = not batch_size or int(cells.max()) < num_cells
    leaf = sums[cells if inside else np.minimum(cells, num_cells - 1)]
    while not inside or (batch_size and not leaf.min() > 0):
        # only where rounding carries a mass over the end of the sums
        again = np.flatnonzero((leaf == 0) | (cells >= num_cells))
        cells[again] = _landing(sums, total, sampler._rng, len(again))
        inside = int(cells.max()) < num_cells
        leaf = sums[np.minimum(cells, num_cells - 1)]
    return torch.from_numpy(cells), weights(sampler, num_cells, leaf)


def weights(sampler: Any, num_cells: int, leaf: np.ndarray[Any, Any]) -> torch.Tensor:
    """Importance weights of draws that landed on leaves ``[B]``, in the dtype of the priorities; see :func:`draw`."""
    minimum = sampler._min_tree.query(0, num_cells)
    ratio = leaf.astype(array_dtype(sampler), copy=False)
    with np.errstate(over="ignore"):  # a weight of zero then
        ratio = ratio / ratio.dtype.type(minimum)
    return torch.pow(torch.from_numpy(ratio), -sampler._beta)


def _landing(sums: Any, total: float, generator: torch.Generator | None, count: int) -> np.ndarray[Any, Any]:
    """Where ``count`` masses fall."""
    mass = torch.rand(count, dtype=torch.float64, generator=generator, device=CPU).numpy()
    np.subtract(1.0, mass, out=mass)
    mass *= total
    cells: np.ndarray[Any, Any] = sums.scan_lower_bound(mass)
    return cells
