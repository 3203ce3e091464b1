"""Handles that stand in several rows of a batch: one priority for each of them."""

from __future__ import annotations

import torch

from torchrl_generational.generations.write_protocol import NEVER_WRITTEN

__all__ = ["once_each", "per_anchor", "per_handle"]


def per_anchor(
    index: torch.Tensor, generation: torch.Tensor, priority: torch.Tensor, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """For every row, the largest priority among the valid rows of its anchor, and the anchor's generation.

    An anchor of which a part of a sample has no valid row gets no priority: its rows name no record.
    """
    shape = priority.shape
    if not priority.numel():
        return priority, generation
    generation = generation.reshape(-1).to(priority.device)
    group, _ = _groups(index, generation, priority.device)
    source = priority.reshape(-1)
    if valid is not None:
        source = torch.where(valid.reshape(-1).to(priority.device), source, -torch.inf)
    largest = torch.full_like(source, -torch.inf).scatter_reduce(0, group, source, "amax")[group]
    none = largest == -torch.inf
    return (
        torch.where(none, 0, largest).reshape(shape),
        torch.where(none, NEVER_WRITTEN, generation).reshape(shape),
    )


def once_each(handle: torch.Tensor, whole: int, ndim: int) -> torch.Tensor | None:
    """A handle without the dimensions ``whole`` to ``ndim``, all along which it is the same; ``None`` if it is not."""
    if handle.ndim < ndim:
        return handle
    steps = handle.flatten(whole, ndim - 1)
    first = steps.select(whole, 0)
    return first if bool((steps == first.unsqueeze(whole)).all()) else None


def per_handle(index: torch.Tensor, generation: torch.Tensor, priority: torch.Tensor, reduction: str) -> torch.Tensor:
    """For every row, the priorities of all rows with its handle, reduced to one. O(rows · log rows).

    Args:
        index: int64, ``[rows]``, or ``[rows, ndim]`` coordinates; of any shape whose numbers are in this order.
        generation: int64 ``[...]``.
        priority: ``[...]``.
        reduction: TorchRL's ``"max"``, ``"min"``, ``"mean"``, ``"sum"`` or ``"median"`` (the lower one of two).

    Example:
        >>> index, generation = torch.tensor([3, 5, 3]), torch.tensor([0, 0, 0])
        >>> per_handle(index, generation, torch.tensor([1.0, 2.0, 4.0]), "max")
        tensor([4., 2., 4.])
    """
    source = priority.reshape(-1)
    group, count = _groups(index, generation, source.device)
    if reduction == "median":
        order = torch.argsort(source, stable=True)
        order = order[torch.argsort(group[order], stable=True)]
        reduced = source[order[count.cumsum(0) - count + (count - 1) // 2]]
    else:
        kind = {"max": "amax", "min": "amin"}.get(reduction, reduction)  # "mean" and "sum" are called so there too
        reduced = source.new_zeros(len(count)).scatter_reduce(0, group, source, kind, include_self=False)
    return reduced[group].reshape(priority.shape)


def _groups(index: torch.Tensor, generation: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of each row's handle, and how many rows each handle has."""
    stamps = generation.reshape(-1, 1).to(device)
    handle = torch.cat([index.reshape(len(stamps), -1).to(device), stamps], -1)
    found = torch.unique(handle, dim=0, return_inverse=True, return_counts=True)
    return found[1], found[2]
