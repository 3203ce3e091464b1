"""Which member each row of a batch is from, and the rows of each member, checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torchrl.data.replay_buffers.samplers import PrioritizedSampler
from torchrl.data.replay_buffers.utils import _reduce

from torchrl_generational.buffers.conditional_updates import ConditionalUpdates
from torchrl_generational.buffers.priority_updates import apply, prepared_rows
from torchrl_generational.ensembles.base import EnsembleBase
from torchrl_generational.generations.indexing import (
    Handles,
    as_int64,
    cells_of,
    normalise_handles,
)
from torchrl_generational.generations.update_result import UpdateResult
from torchrl_generational.generations.write_protocol import NEVER_WRITTEN
from torchrl_generational.priorities.segment_trees import tree_dtype
from torchrl_generational.priorities.tree_updates import checked_array, checked_priority
from torchrl_generational.samplers.prioritized import stores_arrays
from torchrl_generational.tensors.arrays import index_array

__all__ = ["Route", "common_device", "inner_of", "owners_of", "routes_of"]


class Route(NamedTuple):
    """Rows of a batch that are one member's, checked.

    Attributes:
        member: the buffer.
        storage: of it, against which the rows were checked.
        sampler: of it, likewise.
        rows: their numbers in the batch, int64 ``[M]``.
        places: their index within the member, ``[M]``, or ``[M, n]`` coordinates.
        priority: that of each, ``[M]``, or 0-d.
    """

    member: Any
    storage: Any
    sampler: Any
    rows: torch.Tensor
    places: torch.Tensor
    priority: torch.Tensor

    def apply(self, stamps: torch.Tensor, priority: torch.Tensor) -> UpdateResult:
        """The member's own conditional update of these rows, which have been checked."""
        ours = type(self.member).update_priority_if_present is ConditionalUpdates.update_priority_if_present
        if ours and stamps.device == self.storage.slot_generations.device:
            rows = self.places if self.places.ndim == 1 else self.places[:, 0]
            cells = cells_of(self.places.reshape(len(rows), -1), self.storage.generations.shape)
            handles = Handles(rows, cells, stamps, stamps.shape)
            done = apply(self.member, prepared_rows(self.storage, self.sampler, handles, priority))
            if done is not None:
                return done
        # a class of somebody's, another device, or a part that was exchanged meanwhile
        result: UpdateResult = self.member.update_priority_if_present(
            index=self.places, generation=stamps, priority=priority
        )
        return result


def routes_of(
    ensemble: EnsembleBase, index: Any, buffer_ids: Any, generation: torch.Tensor, values: torch.Tensor, method: str
) -> list[Route]:
    """The rows of each member, all of them checked. Rows of other members take no part in a member's checks."""
    shape, device = generation.shape, generation.device
    owner = owners_of(ensemble, buffer_ids, shape, device)
    routes = []
    for number in sorted(set(owner.tolist())):
        rb, mine = ensemble._rbs[number], owner == number
        rb._refuse_write()
        storage, sampler = rb._written_storage(method), rb._drawing_sampler()
        if not isinstance(sampler, PrioritizedSampler):
            raise TypeError(
                f"{type(ensemble).__name__}.{method}: {int(mine.sum())} rows of the batch are from member {number}, "
                f"which draws without priorities ({type(sampler).__name__}). Leave out the rows whose buffer_ids "
                f"are {number}, or build that member with sampler=GenerationalPrioritizedSampler(...)."
            )
        space, rows = storage.generations.shape, mine.nonzero()[:, 0]
        places = _plain_places(index, rows, shape, space)
        if places is None:
            stamps = torch.where(mine, generation.reshape(-1), NEVER_WRITTEN).reshape(shape)
            places = normalise_handles(index, stamps, space, device, inner=inner_of(storage)).cells[rows]
            if len(space) > 1:
                places = torch.stack(torch.unravel_index(places, space), -1)
        priority = _plain_priority(sampler, values, rows)
        if priority is None:
            others = (~mine).reshape((-1, *(1,) * (values.ndim - 1)))
            priority = checked_priority(sampler, values.masked_fill(others, 0) if values.ndim else values)
            priority = priority[rows.to(priority.device)] if values.ndim else priority
        if priority.ndim > 1:
            priority = _reduce(priority, sampler.reduction, dim=-1) if priority.shape[-1] > 1 else priority[:, 0]
        routes.append(Route(rb, storage, sampler, rows, places, priority))
    return routes


def owners_of(ensemble: EnsembleBase, buffer_ids: Any, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """The member of each row, ``[rows]``; the first of several numbers, where one buffer stands more than once."""
    ids = as_int64("buffer_ids", buffer_ids, device)
    if ids.shape != shape[: ids.ndim]:
        raise ValueError(
            f"buffer_ids has shape {tuple(ids.shape)} but generation has shape {tuple(shape)}. Pass one member per "
            "handle, both as the sample carries them."
        )
    ids = ids.reshape((*ids.shape, *(1,) * (len(shape) - ids.ndim))).expand(shape).reshape(-1)
    wrong = (ids < 0) | (ids >= len(ensemble._rbs))
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"buffer_ids must lie within the {len(ensemble._rbs)} members of this ensemble, got {int(ids[row])} (row "
            f"{row} of the batch). Pass those of a sample of this very ensemble."
        )
    members = [id(rb) for rb in ensemble._rbs]
    return torch.tensor([members.index(member) for member in members], device=device)[ids]


def common_device(ensemble: EnsembleBase) -> torch.device:
    """The device of the members' stamps, if they have one."""
    devices = {rb.storage.slot_generations.device for rb in ensemble._rbs}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def inner_of(storage: Any) -> int:
    """Dimensions of one record: 1 where each slot stores a trajectory."""
    return int(getattr(storage, "record_ndim", 0))


def _plain_places(index: Any, rows: torch.Tensor, shape: torch.Size, space: torch.Size) -> torch.Tensor | None:
    """The index of ``rows``, if no conversion and no look at the stamps is needed to know that it is one."""
    if len(space) > 1 or not isinstance(index, torch.Tensor) or index.shape != shape or index.device != rows.device:
        return None
    places = index.reshape(-1).index_select(0, rows)
    return places if index_array(places, space[0]) is not None else None


def _plain_priority(sampler: Any, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """The priorities of ``rows``, if they are on the CPU and the sampler's trees can hold them."""
    if not values.ndim or not stores_arrays(sampler):
        return None
    priority = values.index_select(0, rows).to(tree_dtype(sampler))
    return priority if checked_array(sampler, priority) is not None else None
