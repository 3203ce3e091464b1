"""First priorities: what records bring with them, checked before they are written, and where it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import is_tensor_collection
from torchrl.data.replay_buffers import TensorDictReplayBuffer
from torchrl.data.replay_buffers.utils import _reduce

from torchrl_generational.buffers.absent_sampler import keeps_priorities
from torchrl_generational.buffers.base import BufferBase
from torchrl_generational.generations.indexing import keep_last
from torchrl_generational.priorities.tree_updates import checked_priority
from torchrl_generational.records.incoming import refuse_layout
from torchrl_generational.records.record_io import entries_of
from torchrl_generational.storages.round_robin_writers import (
    GenerationalTensorDictRoundRobinWriter,
    GenerationalWriterMixin,
)
from torchrl_generational.tensors.default_devices import as_tensor

__all__ = ["FirstPriorities"]

if TYPE_CHECKING:
    _Buffer = TensorDictReplayBuffer
else:
    _Buffer = object


class FirstPriorities(BufferBase, _Buffer):
    """The first priorities of :class:`GenerationalTensorDictReplayBufferMixin`."""

    def _check_incoming(self, data: Any, update_priority: bool = True) -> Any:
        """First priorities of records, refused if no tree can hold them, or if the samples could not hold handles."""
        refuse_layout(self, data, self._storage.ndim)
        if not update_priority:
            return None
        priority = self._first_priority(data)
        records = data.batch_size[: self._storage.ndim].numel()
        if priority is not None and priority.numel() != records and keeps_priorities(self._learners_sampler()):
            raise RuntimeError(
                f"Failed to update priority of extended data: {records} records came with {self.priority_key!r} "
                f"of shape {tuple(priority.shape)}. Nothing was written. Pass one priority per record, or set "
                "update_priority=False in the extend method and update the priority manually."
            )
        return priority

    def _leave_first_priority(self, index: Any, priority: Any, records: int) -> None:
        """Leaves the first priorities of records just written where the learner finds them. Lock held."""
        log = self._storage.slot_generations.log
        if priority is None or log is None or self._storage.ndim > 1 or not records:
            return
        first = self._per_record(as_tensor(priority).detach().double().cpu(), records)
        rows = as_tensor(index).reshape(-1).cpu()
        if not isinstance(self._writer, GenerationalWriterMixin) or len(rows) > self._storage.max_size:
            real = rows >= 0  # -1: not stored
            rows, first = rows[real], first[real]
            keep = keep_last(rows)
            if keep is not None:
                rows, first = rows[keep], first[keep]
        log.give(rows, first)

    def _first_priority(self, data: Any) -> Any:
        """The priority entry of data about to be written, refused before anything is if no tree can hold it."""
        entries, key = entries_of(data), self.priority_key
        if entries is not None and isinstance(key, str) and key not in entries:
            return None
        priority = data.get(key, None) if is_tensor_collection(data) else None
        sampler = self._learners_sampler()
        if priority is not None and keeps_priorities(sampler):
            checked_priority(sampler, priority, name=f"entry {key!r}")
        return priority

    def _per_record(self, priority: torch.Tensor, records: int) -> torch.Tensor:
        """First priorities of records, or of the cells of one row: ``[records]``."""
        priority = priority.reshape(records, -1)
        reduction: str = getattr(self._learners_sampler(), "reduction", "max")
        reduced: torch.Tensor = _reduce(priority, reduction, dim=-1) if priority.shape[-1] > 1 else priority[:, 0]
        return reduced

    def _writer_tells(self) -> bool:
        """Whether the writer tells the data which slots it goes to."""
        return self._storage.ndim == 1 and isinstance(self._writer, GenerationalTensorDictRoundRobinWriter)
