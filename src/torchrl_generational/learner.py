"""A learner that keeps the priorities of a storage, and catches up with what others have written to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrl.data.replay_buffers.samplers import PrioritizedSampler

from torchrl_generational.changes import BLOCK
from torchrl_generational.generations import NEVER_WRITTEN, SlotGenerations
from torchrl_generational.indexing import cells_in
from torchrl_generational.leaves import forget
from torchrl_generational.priorities import just_within
from torchrl_generational.samplers import most_priority
from torchrl_generational.trees import tree_dtype

__all__ = ["Follower"]


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
        self._seen = torch.full_like(storage.slot_generations.values, NEVER_WRITTEN)
        if known:
            self.has_seen_all(storage)

    def has_seen_all(self, storage: Any) -> None:
        """The learner has the priorities of all records that are there now. O(capacity)."""
        generations = storage.slot_generations
        self._clock, self._length = generations.log.clock, int(storage._len_along_dim0 or 0)
        self._seen.copy_(generations.values)

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
            self._seen.fill_(NEVER_WRITTEN)
            self._length = 0
        rows = self._rows_of(log.changed_since(self._clock), length)
        stamps = generations.values.index_select(0, rows)
        new = stamps != self._seen.index_select(0, rows)
        rows, stamps = rows[new], stamps[new]
        self._seen[rows] = stamps
        self._clock, self._length = clock, length
        whole = stamps >= 0
        if not bool(whole.all()):
            forget(sampler, cells_in(rows[~whole], storage.generations.shape).to(sampler.device))
            rows = rows[whole]
        given = log.given(rows.cpu()) if storage.ndim == 1 else None
        if given is not None:
            known = ~given.isnan()
            if bool(known.any()):
                # the exponent may have changed since the writer checked them
                most = just_within(most_priority(sampler), tree_dtype(sampler))
                priority = given[known].to(most.dtype).clamp_max(most)
                sampler.update_priority(rows[known.to(rows.device)], priority, storage=storage)
                rows = rows[~known.to(rows.device)]
        if rows.numel():
            sampler.mark_update(cells_in(rows, storage.generations.shape), storage=storage)

    def _rows_of(self, blocks: np.ndarray[Any, np.dtype[np.int64]], length: int) -> torch.Tensor:
        """Rows below ``length`` in blocks that changed, and those that the storage has reached since."""
        if length > self._length:
            blocks = np.union1d(blocks, np.arange(self._length // BLOCK, -(-length // BLOCK)))
        rows = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        return torch.from_numpy(rows[rows < length]).to(self._seen.device)
