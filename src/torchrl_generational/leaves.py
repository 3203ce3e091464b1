"""What a priority becomes in the trees of a sampler: its leaf, and its claim to the maximum."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import PrioritizedSampler

from torchrl_generational.indexing import keep_last
from torchrl_generational.priorities import just_within, largest_priority
from torchrl_generational.trees import read_leaves, tree_dtype, write_leaves

__all__ = ["forget", "largest_but", "retransform", "store_priorities"]


def store_priorities(sampler: PrioritizedSampler, cells: torch.Tensor, priority: torch.Tensor) -> None:
    """Writes checked priorities to checked cells. The caller holds the storage's lock.

    Where a cell stands more than once, the last row wins, and the running maximum sees only that one. Otherwise the
    sampler's leaves and maximum are left bit for bit as TorchRL's ``update_priority`` leaves them.

    Args:
        sampler: any prioritized sampler.
        cells: int64 ``[M]`` within the sampler's capacity.
        priority: 0-d or ``[M]``, of the tree's dtype, finite and >= 0.
    """
    if not cells.numel():
        return
    maximum, where = sampler._max_priority
    known = -1.0 if maximum is None else float(maximum)
    if _highest(priority) > known:
        # only a row that raises the maximum can raise it wrongly: look for repeated cells then
        keep = keep_last(cells) if priority.ndim else None
        if keep is not None:
            cells, priority = cells[keep], priority[keep]
        highest, row = priority.max(0)
        if float(highest) > known:
            maximum, where = sampler._max_priority = (highest, cells[row])
    if sampler.device.type != "cpu":
        PrioritizedSampler.update_priority(sampler, cells, priority)
        return
    write_leaves(sampler, cells, torch.pow(priority + sampler._eps, sampler._alpha))
    tracked = sampler._max_priority_within_buffer and sampler._alpha != 0 and where is not None
    if tracked and bool((cells == where).any()):
        sampler._max_priority = largest_but(sampler)


def _highest(priority: torch.Tensor) -> float:
    return float(priority.numpy().max() if priority.is_cpu else priority.max())


def forget(sampler: PrioritizedSampler, cells: torch.Tensor) -> None:
    """Has ``cells``, int64 ``[M]``, not drawn: they hold no record. The caller holds the storage's lock."""
    write_leaves(sampler, cells, torch.zeros(cells.shape, dtype=tree_dtype(sampler), device=cells.device))
    where = sampler._max_priority[1]
    if sampler._max_priority_within_buffer and where is not None and bool((cells == where).any()):
        sampler._max_priority = largest_but(sampler)


def largest_but(sampler: PrioritizedSampler, cells: torch.Tensor | None = None) -> tuple[Any, Any]:
    """The largest raw priority outside ``cells`` and its cell; two ``None`` where there is no other. O(capacity).

    Of several it takes the one that a ring which is just writing ``cells`` will reach last.
    """
    leaves = read_leaves(sampler._sum_tree, torch.arange(sampler._max_capacity, device=sampler.device))
    leaves = leaves.to(tree_dtype(sampler))
    if cells is not None:
        leaves[cells] = 0
    highest, cell = leaves.max(0)
    if highest <= 0:
        return None, None
    if cells is not None:
        alike = (leaves == highest).nonzero()[:, 0]
        cell = alike[int((alike < cells[0]).sum()) - 1]
    return (highest ** (1.0 / sampler._alpha) - sampler._eps).clamp_min(0), cell


def retransform(sampler: PrioritizedSampler, old_alpha: float, new_alpha: float) -> None:
    """Rewrites all leaves for another exponent. O(capacity).

    Leaves of zero stay: they belong to cells without a record, or to records of priority zero.

    Raises:
        ValueError: if a leaf would be too large for the tree; nothing has changed then.
    """
    cells = torch.arange(sampler._max_capacity, device=sampler.device)
    leaves = read_leaves(sampler._sum_tree, cells)
    cells = cells[leaves > 0]
    dtype = tree_dtype(sampler)
    most = largest_priority(alpha=new_alpha, eps=sampler._eps, capacity=sampler._max_capacity, dtype=dtype)
    if not cells.numel() or old_alpha == 0:
        _lower_maximum(sampler, most)
        if cells.numel():
            warnings.warn(
                "Changing alpha away from 0 cannot recover the priorities of the records that are there: with alpha=0 "
                "every leaf is 1. They stay alike until their next update.",
                stacklevel=4,
            )
        return
    raw = (leaves[cells].double() ** (1.0 / old_alpha) - sampler._eps).clamp_min(0)
    if raw.max() > most:
        raise ValueError(
            f"alpha={new_alpha} would raise the priority {float(raw.max()):.3g} of a record beyond what the tree's "
            f"{dtype} can hold. Nothing was changed. Use a smaller alpha, or a sampler with dtype=torch.float64."
        )
    _lower_maximum(sampler, most)
    leaf = ((raw + sampler._eps) ** new_alpha).to(dtype)
    write_leaves(sampler, cells, leaf.clamp_min(torch.finfo(dtype).tiny))  # a positive priority stays one


def _lower_maximum(sampler: PrioritizedSampler, most: float) -> None:
    """Keeps the running maximum, which may be of a record long gone, to what the tree can hold for a new one."""
    maximum, where = sampler._max_priority
    if maximum is not None and maximum > most:
        sampler._max_priority = (just_within(most, tree_dtype(sampler)), where)
