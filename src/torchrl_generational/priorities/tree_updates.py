"""What a priority becomes in the trees of a sampler: its leaf, and its claim to the maximum."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torchrl.data.replay_buffers.samplers import PrioritizedSampler

from torchrl_generational.concurrency.deferred_signals import run_through
from torchrl_generational.generations.indexing import keep_last
from torchrl_generational.priorities.segment_trees import (
    on_cpu,
    read_leaves,
    tree_dtype,
    write_arrays,
    write_leaves,
)
from torchrl_generational.priorities.validation import as_priority, just_within, largest_priority
from torchrl_generational.tensors.arrays import priority_array
from torchrl_generational.tensors.compilation import is_traced

__all__ = [
    "Limits",
    "checked_array",
    "checked_priority",
    "forget",
    "largest_but",
    "limits_of",
    "priority_bound",
    "retransform",
    "store_arrays",
    "store_default",
    "store_priorities",
]

_SMALLEST = 1e-30  # nowhere near what float32 rounds to zero
_ROUNDED = 1 + 1e-5  # above what float32 makes of a number in a few operations


def checked_priority(sampler: Any, priority: Any, *, name: str = "priority") -> torch.Tensor:
    """``priority`` as values that ``sampler``'s trees can hold; see :func:`as_priority`."""
    return as_priority(
        priority, dtype=tree_dtype(sampler), device=sampler.device, bound=priority_bound(sampler), name=name
    )


def checked_array(sampler: Any, priority: Any) -> tuple[Any, float, Limits] | None:
    """:func:`checked_priority` for :func:`store_arrays`; ``None`` where that takes more than a look at it.

    Returns:
        An array, the largest of it, and what follows from the configuration of ``sampler``.
    """
    limits = limits_of(sampler)
    checked = priority_array(priority, limits.dtype, limits.bound)
    return None if checked is None else (*checked, limits)


def priority_bound(sampler: Any) -> float:
    """The largest priority that ``sampler``'s trees can hold in every slot."""
    return limits_of(sampler).bound


class Limits(NamedTuple):
    """What follows from the configuration of a sampler.

    Attributes:
        bound: the largest priority that its trees can hold in every slot.
        dtype: of its priorities, as NumPy's.
        eps: in that dtype.
        positive: whether no leaf is zero, because that of priority zero is nowhere near what rounds to it.
    """

    bound: float
    dtype: Any
    eps: Any
    positive: bool


def limits_of(sampler: Any) -> Limits:
    """What follows from the configuration that ``sampler`` has now. O(1)."""
    # a stock sampler's exponents may be tensors, which change in place
    limits = _limits.__wrapped__ if is_traced() else _limits
    return limits(float(sampler._alpha), float(sampler._eps), sampler._max_capacity, tree_dtype(sampler))


@lru_cache(maxsize=64)
def _limits(alpha: float, eps: float, capacity: int, dtype: torch.dtype) -> Limits:
    array_dtype = np.dtype(np.float64 if dtype is torch.float64 else np.float32)
    bound = largest_priority(alpha=alpha, eps=eps, capacity=capacity, dtype=dtype)
    return Limits(bound, array_dtype, array_dtype.type(eps), eps > _SMALLEST and eps**alpha > _SMALLEST)


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
    if on_cpu(sampler):
        values = priority.numpy()
        store_arrays(sampler, cells.numpy(), values, float(values.max()), limits_of(sampler))
        return
    if float(priority.max()) > _known_maximum(sampler):
        (cells, priority), sampler._max_priority = _raised_maximum(sampler, cells, priority)
    PrioritizedSampler.update_priority(sampler, cells, priority)
    maximum = sampler._max_priority[0]
    if maximum is not None and not _is_positive(sampler, maximum):
        sampler._max_priority = (None, None)


def store_arrays(sampler: PrioritizedSampler, cells: Any, priority: Any, highest: float, limits: Limits) -> None:
    """:func:`store_priorities` for arrays, and trees on the CPU.

    Args:
        sampler: any prioritized sampler.
        cells: int64 ``[M]``, ``M > 0``.
        priority: 0-d or ``[M]``, of the tree's dtype.
        highest: the largest of ``priority``, or more.
        limits: as :func:`checked_array` says.
    """
    maximum = sampler._max_priority
    if highest > _known_maximum(sampler):
        kept, maximum = _raised_maximum(sampler, torch.from_numpy(cells), torch.from_numpy(priority))
        cells, priority = (part.numpy() for part in kept)
    raised = priority + limits.eps
    if not priority.ndim:
        raised = np.asarray(raised)
    # torch's power and not NumPy's: they differ in the last bit, and TorchRL takes this one
    leaf = torch.pow(torch.from_numpy(raised), sampler._alpha).numpy()
    try:
        _put(sampler, cells, leaf, maximum, limits.positive)
    except BaseException:  # in between: all of it
        _put(sampler, cells, leaf, maximum, limits.positive)
        raise


def _put(sampler: PrioritizedSampler, cells: Any, leaf: Any, maximum: tuple[Any, Any], positive: bool) -> None:
    """Writes leaves that are ready, and the running maximum that belongs to them."""
    write_arrays(sampler, cells, leaf, positive=positive)
    sampler._max_priority = maximum
    where = maximum[1]
    tracked = sampler._max_priority_within_buffer and sampler._alpha != 0 and where is not None
    if tracked and bool((cells == int(where)).any()):
        sampler._max_priority = largest_but(sampler)


def store_default(sampler: PrioritizedSampler, cells: Any) -> None:
    """Gives the default priority to ``cells``, an int or int64 ``[M]``, where there is a running maximum to give.

    For trees on the CPU, and samplers that do not track the maximum within the buffer.
    """
    maximum, eps, alpha = float(sampler._max_priority[0]), float(sampler._eps), float(sampler._alpha)
    leaf = _leaf_of(maximum, eps, alpha, tree_dtype(sampler))
    write_arrays(sampler, cells, leaf)


@lru_cache(maxsize=64)
def _leaf_of(priority: float, eps: float, alpha: float, dtype: torch.dtype) -> Any:
    leaf = torch.pow(torch.tensor(priority, dtype=dtype, device="cpu") + eps, alpha).numpy()
    leaf.flags.writeable = False
    return leaf


def _known_maximum(sampler: PrioritizedSampler) -> float:
    maximum = sampler._max_priority[0]
    return 0.0 if maximum is None else float(maximum)


def _is_positive(sampler: PrioritizedSampler, priority: Any) -> bool:
    """Whether a record that was born at ``priority`` would be drawn any more often than one of priority zero."""
    eps, alpha = float(sampler._eps), float(sampler._alpha)
    if alpha == 0:
        return float(priority) > 0
    return _above_zero(sampler, _leaf_of.__wrapped__(float(priority), eps, alpha, tree_dtype(sampler)))


def _above_zero(sampler: PrioritizedSampler, leaf: Any) -> bool:
    """Whether ``leaf`` is that of a positive priority, however the one of zero was rounded when alpha changed."""
    zero = _leaf_of(0.0, float(sampler._eps), float(sampler._alpha), tree_dtype(sampler))
    return float(leaf) > float(zero) * _ROUNDED


def _raised_maximum(
    sampler: PrioritizedSampler, cells: torch.Tensor, priority: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[Any, Any]]:
    """The rows that stay, one per cell, and the running maximum when it has seen them.

    Only a row that raises the maximum can raise it wrongly, so repeated cells are looked for here only.
    """
    keep = keep_last(cells) if priority.ndim else None
    if keep is not None:
        cells, priority = cells[keep], priority[keep]
    maximum: tuple[Any, Any] = sampler._max_priority
    highest, row = priority.max(0)
    if float(highest) > _known_maximum(sampler) and _is_positive(sampler, highest):
        maximum = highest, cells[row].clone()  # not a view of the caller's index
    return (cells, priority), maximum


def forget(sampler: PrioritizedSampler, cells: torch.Tensor) -> None:
    """Has ``cells``, int64 ``[M]``, not drawn: they hold no record. The caller holds the storage's lock."""
    write_leaves(sampler, cells, torch.zeros(cells.shape, dtype=tree_dtype(sampler), device=cells.device))
    where = sampler._max_priority[1]
    tracked = sampler._max_priority_within_buffer and sampler._alpha != 0 and where is not None
    if tracked and bool((cells == where).any()):
        sampler._max_priority = largest_but(sampler)


def largest_but(sampler: PrioritizedSampler, cells: torch.Tensor | None = None) -> tuple[Any, Any]:
    """The largest raw priority outside ``cells`` and its cell; two ``None`` where none is positive. O(capacity).

    Of several it takes the one that a ring which is just writing ``cells`` will reach last.
    """
    leaves = read_leaves(sampler._sum_tree, torch.arange(sampler._max_capacity, device=sampler.device))
    leaves = leaves.to(tree_dtype(sampler))
    if cells is not None:
        leaves[cells] = 0
    highest, cell = leaves.max(0)
    if not _above_zero(sampler, highest):
        return None, None
    if cells is not None:
        alike = (leaves == highest).nonzero()[:, 0]
        cell = alike[int((alike < cells[0]).sum()) - 1]
    return (highest ** (1.0 / sampler._alpha) - sampler._eps).clamp_min(0), cell


def retransform(sampler: PrioritizedSampler, old_alpha: float, new_alpha: float) -> None:
    """Takes over another exponent and rewrites all leaves for it. O(capacity).

    Leaves of zero stay: they belong to cells without a record, or to records of priority zero.

    Raises:
        ValueError: if a leaf would be too large for the tree; nothing has changed then.
    """
    cells = torch.arange(sampler._max_capacity, device=sampler.device)
    leaves = read_leaves(sampler._sum_tree, cells)
    cells = cells[leaves > 0]
    dtype = tree_dtype(sampler)
    bound = largest_priority(alpha=new_alpha, eps=sampler._eps, capacity=sampler._max_capacity, dtype=dtype)
    if not cells.numel() or old_alpha == 0:
        _lower_maximum(sampler, bound)
        sampler._alpha = new_alpha
        if cells.numel():
            warnings.warn(
                "Changing alpha away from 0 cannot recover the priorities of the records that are there: with alpha=0 "
                "every leaf is 1. They stay alike until their next update.",
                stacklevel=4,
            )
        return
    raw = (leaves[cells].double() ** (1.0 / old_alpha) - sampler._eps).clamp_min(0)
    if raw.max() > bound:
        raise ValueError(
            f"alpha={new_alpha} would raise the priority {float(raw.max()):.3g} of a record beyond what the tree's "
            f"{dtype} can hold. Nothing was changed. Use a smaller alpha, or a sampler with dtype=torch.float64."
        )
    leaf = ((raw + sampler._eps) ** new_alpha).to(dtype).clamp_min(torch.finfo(dtype).tiny)  # positive ones stay so

    def take_over() -> None:
        _lower_maximum(sampler, bound)
        write_leaves(sampler, cells, leaf)
        sampler._alpha = new_alpha

    run_through(take_over)


def _lower_maximum(sampler: PrioritizedSampler, bound: float) -> None:
    """Keeps the running maximum, which may be of a record long gone, to what the tree can hold for a new one."""
    maximum, where = sampler._max_priority
    if maximum is not None and maximum > bound:
        sampler._max_priority = (just_within(bound, tree_dtype(sampler)), where)
