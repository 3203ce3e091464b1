"""The one way of a conditional priority update: prepared before the lock, applied in one section under it.

What is prepared has been checked against a storage and a sampler. If either was exchanged while this thread waited for
the lock, nothing is applied, and the caller prepares again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrl_generational.buffers.base import BufferBase
from torchrl_generational.generations.indexing import Handles, as_generation, as_int64, normalise_handles, repeats_from
from torchrl_generational.generations.update_result import UpdateResult
from torchrl_generational.priorities.segment_trees import array_dtype
from torchrl_generational.priorities.tree_updates import checked_priority, limits_of, store_arrays
from torchrl_generational.priorities.validation import match_shape
from torchrl_generational.samplers.prioritized import store_checked, stores_arrays
from torchrl_generational.storages.tensor_storages import GenerationalStorageMixin
from torchrl_generational.tensors.arrays import array_of, index_array, priority_array

__all__ = ["PreparedUpdate", "apply", "prepared_arrays", "prepared_rows", "update"]


class PreparedUpdate(NamedTuple):
    """Rows of an update, checked, and what they were checked against.

    Attributes:
        storage: whose stamps decide.
        sampler: whose trees are written.
        shape: of the result.
        rows: int64 ``[M]`` within the rows of the stamps.
        cells: int64 ``[M]`` within the trees.
        stamps: int64 ``[M]``.
        values: priorities that fit the trees, 0-d or ``[M]``.
        highest: the largest of them; ``None`` where all of these are tensors and not arrays, because stamps or trees
            are on an accelerator, or the sampler stores in a way of its own.
    """

    storage: Any
    sampler: Any
    shape: Any
    rows: Any
    cells: Any
    stamps: Any
    values: Any
    highest: float | None = None


def update(rb: BufferBase, index: Any, generation: Any, priority: Any) -> UpdateResult:
    """Prepares an update of ``rb`` and applies it; arguments and errors as for ``update_priority_if_present``."""
    prepared = prepared_arrays(rb, index, generation, priority)
    while True:
        if prepared is None:
            prepared = prepare(rb, index, generation, priority)
        result = apply(rb, prepared)
        if result is not None:
            return result
        prepared = None  # once more: a part was exchanged, or the exponents were


def prepare(rb: BufferBase, index: Any, generation: Any, priority: Any) -> PreparedUpdate:
    """Checks an update and brings it into the form in which it is applied; arguments and errors as for :func:`update`.

    Changes nothing.
    """
    rb._refuse_write()
    storage = rb._written_storage("update_priority_if_present")
    sampler = rb._priority_sampler("update_priority_if_present")
    device = storage.slot_generations.device
    # Copies from an accelerator wait for its queue: never under the lock.
    generation = as_generation(generation, device)
    if isinstance(index, tuple):
        index = tuple(as_int64("index", part, device) for part in index)
    else:
        index = as_int64("index", index, device)
    values = checked_priority(sampler, priority)
    # the index space of a storage never changes once it is written
    inner = int(getattr(storage, "record_ndim", 0))
    handles = normalise_handles(index, generation, storage.generations.shape, device, inner=inner)
    shape, parts = handles.shape, (handles.generation, handles.cells)
    values = match_shape(values, shape, lambda dim: repeats_from([part.reshape(shape) for part in parts], dim, inner))
    return prepared_rows(storage, sampler, handles, values)


def prepared_rows(storage: Any, sampler: Any, handles: Handles, values: torch.Tensor) -> PreparedUpdate:
    """The update of checked handles by checked priorities, 0-d or one per handle."""
    rows, cells, stamps, shape = handles.rows, handles.cells, handles.generation, handles.shape
    if not rows.is_cpu or not stores_arrays(sampler):
        return PreparedUpdate(storage, sampler, shape, rows, cells, stamps, values)
    highest = float(values.numpy().max(initial=0))
    rows, cells, stamps, values = (part.numpy() for part in (rows, cells, stamps, values))  # type: ignore[assignment]
    return PreparedUpdate(storage, sampler, shape, rows, cells, stamps, values, highest)


def prepared_arrays(rb: BufferBase, index: Any, generation: Any, priority: Any) -> PreparedUpdate | None:
    """:func:`prepare` for what a training loop on the CPU has: three tensors that need no conversion.

    ``None`` for anything else, and where something is wrong: :func:`prepare` converts the one and names the other.
    """
    stamps, settled = array_of(generation), rb._settled_for_arrays
    if stamps is None or stamps.dtype != np.int64 or not (settled is not None or rb.initialized):
        return None
    storage, sampler = rb._storage, rb._learners_sampler()
    if settled is None or settled[0] is not storage or settled[1] is not sampler:
        plain = isinstance(storage, GenerationalStorageMixin) and storage.ndim == 1 and stores_arrays(sampler)
        settled = rb._settled_for_arrays = storage, sampler, array_dtype(sampler) if plain else None
    dtype = settled[2]
    if dtype is None or not storage.initialized:
        return None
    if storage.lock.elsewhere:
        rb._refuse_write()
    generations = storage.slot_generations
    rows = index_array(index, generations.num_rows) if generations.on_cpu else None
    checked = None if rows is None else priority_array(priority, dtype, math.inf)
    if rows is None or checked is None or rows.shape != stamps.shape:
        return None
    values, highest = checked
    shape = rows.shape
    if values.shape != shape and values.shape != (*shape, 1):
        return None
    if values.ndim != 1:
        rows, stamps, values = rows.reshape(-1), stamps.reshape(-1), values.reshape(-1)
    return PreparedUpdate(storage, sampler, shape, rows, rows, stamps, values, highest)


def apply(rb: BufferBase, prepared: PreparedUpdate) -> UpdateResult | None:
    """Compares the handles with the slots, and writes what is still there, in one section. O(rows log capacity).

    Returns:
        The result; ``None``, and nothing has changed, if storage or sampler are no longer those of ``prepared``, or
        the sampler was given exponents for which a priority is too large.
    """
    storage, sampler, shape, rows, cells, stamps, values, highest = prepared
    with rb._exclusive():
        if storage is not rb._storage or sampler is not rb._learners_sampler():
            return None
        generations = storage.slot_generations
        if generations.log is not None:
            rb._refuse_elsewhere()
            rb._catch_up()
        reached = len(storage)
        if highest is None:
            live = generations.live(rows, stamps)
            if reached < storage.generations.numel():
                live &= cells < reached
            if not bool(live.all()):
                cells, values = cells[live], values[live.to(values.device)] if values.ndim else values
            store_checked(sampler, cells, values)
            result = UpdateResult(live.reshape(shape))
            rb._count(result)
            return result
        limits = limits_of(sampler)
        if highest > limits.bound:
            return None
        marks = generations.live_array(rows, stamps)
        if reached < storage.max_size:
            marks &= cells < reached
        updated = int(np.count_nonzero(marks))
        if updated and updated == len(cells):
            store_arrays(sampler, cells, values, highest, limits)
        elif updated:
            store_arrays(sampler, cells[marks], values[marks] if values.ndim else values, highest, limits)
        rb._conditional_rows += len(cells)
        rb._conditional_updated = rb._conditional_updated + updated
    return UpdateResult(torch.from_numpy(marks if len(shape) == 1 else marks.reshape(shape)))
