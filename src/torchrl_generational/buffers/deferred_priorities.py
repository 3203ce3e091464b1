"""A learner that keeps the priorities of a storage, and catches up with what others have written to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrl.data.replay_buffers.samplers import PrioritizedSampler

from torchrl_generational.generations.change_log import BLOCK
from torchrl_generational.generations.indexing import cells_in
from torchrl_generational.generations.slot_generations import SlotGenerations
from torchrl_generational.generations.write_protocol import NEVER_WRITTEN
from torchrl_generational.priorities.segment_trees import tree_dtype
from torchrl_generational.priorities.tree_updates import forget, priority_bound
from torchrl_generational.priorities.validation import just_within
from torchrl_generational.samplers.prioritized import store_checked

__all__ = ["Follower"]

_Rows = np.ndarray[Any, np.dtype[np.int64]]


class Follower:
    """What a learner has seen of a storage: the stamps, and the time of the log up to which it has seen them.

    Args:
        storage: a storage that keeps a log. The caller holds its lock, here and in every method.
        known: whether the learner has the priorities of all records that are there.

    Memory: 8 bytes per slot.
    """

    __slots__ = ("_clock", "_length", "_seen")

    def __init__(self, storage: Any, *, known: bool) -> None:
        self._clock, self._length = 0, 0
        self._seen: _Rows = np.full(storage.slot_generations.num_rows, NEVER_WRITTEN)
        if known:
            self.has_seen_all(storage)

    def has_seen_all(self, storage: Any) -> None:
        """The learner has the priorities of all records that are there now. O(capacity)."""
        generations = storage.slot_generations
        self._clock, self._length = generations.log.clock, int(storage._len_along_dim0 or 0)
        self._seen[:] = generations.values.cpu().numpy()

    def catch_up(self, sampler: PrioritizedSampler, storage: Any) -> None:
        """Gives records written since the last call their first priority: the writer's, else the sampler's default.

        A slot whose last write did not end is not drawn. O(rows written), and O(capacity / 256) if there are any.
        """
        generations: SlotGenerations = storage.slot_generations
        log = generations.log
        assert log is not None
        clock, length = log.clock, int(storage._len_along_dim0 or 0)
        if clock == self._clock and length == self._length:
            return
        if log.emptied > self._clock:
            sampler._empty()
            self._seen[:] = NEVER_WRITTEN
            self._length = 0
        rows = self._rows_of(log.changed_since(self._clock), length)
        stamps = generations.lookup(torch.from_numpy(rows)).numpy()
        new = stamps != self._seen[rows]
        seen = rows, stamps = rows[new], stamps[new]
        whole = stamps >= 0
        space = storage.generations.shape
        if not whole.all():
            forget(sampler, cells_in(torch.from_numpy(rows[~whole]), space).to(sampler.device))
            rows = rows[whole]
        given = log.given(rows) if len(space) == 1 else None
        if given is not None:
            known = ~np.isnan(given)
            if known.any():
                if sampler._max_priority[0] is None or sampler._max_priority_within_buffer:
                    # as where the learner writes itself: a record is born with the default, which enters the maximum
                    sampler.mark_update(torch.from_numpy(rows[known]), storage=storage)
                store_checked(sampler, torch.from_numpy(rows[known]), _fitting(sampler, given[known]))
                rows = rows[~known]
        if len(rows):
            sampler.mark_update(cells_in(torch.from_numpy(rows), space), storage=storage)
        # last: whatever fails before is done again
        self._seen[seen[0]] = seen[1]
        self._clock, self._length = clock, length

    def _rows_of(self, blocks: _Rows, length: int) -> _Rows:
        """Rows below ``length`` in blocks that changed, and those that the storage has reached since."""
        if length > self._length:
            blocks = np.union1d(blocks, np.arange(self._length // BLOCK, -(-length // BLOCK)))
        rows = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        return rows[rows < length]


def _fitting(sampler: PrioritizedSampler, given: np.ndarray[Any, np.dtype[np.float64]]) -> torch.Tensor:
    """First priorities in the tree's dtype: the exponent may have changed since their writer checked them."""
    dtype = tree_dtype(sampler)
    bound = priority_bound(sampler)
    priority = torch.from_numpy(given).to(dtype)
    return priority if float(given.max()) < bound else priority.clamp_max(just_within(bound, dtype))
