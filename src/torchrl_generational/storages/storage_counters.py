"""TorchRL's three numbers of a storage, in counters without locks that processes share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torchrl.data.replay_buffers.storages import LazyTensorStorage

from torchrl_generational.concurrency.shared_counter import SharedCounter
from torchrl_generational.concurrency.storage_lock import StorageLock
from torchrl_generational.tensors.compilation import is_traced

__all__ = ["COUNTERS", "StorageCounters"]

# TorchRL's numbers, each in a multiprocessing.Value with a lock of its own.
COUNTERS = ("_len_value", "_mutation_revision_value", "_last_cursor_index_value")

# A plain class, which stands in front of one of TorchRL's.
if TYPE_CHECKING:
    _Base = LazyTensorStorage
else:
    _Base = object


class StorageCounters(_Base):
    """The length, the revision and the newest row of a storage; see *Sharing between processes*."""

    lock: StorageLock
    # TorchRL's; guarded by lock
    _storage: Any
    initialized: bool
    shared_init: bool
    _len_value: Any = None  # a counter, or with compilable a number
    _mutation_revision_value: Any
    _last_cursor_index_value: Any

    # TorchRL's three numbers. Whenever any thread of the process compiles, it puts a plain one in the counter's place,
    # and hands out the tensors behind the other two.
    def __len__(self) -> int:
        # TorchRL's goes through a wrapper that keeps Dynamo out, which takes longer than the answer
        return super().__len__() if is_traced() else self._len

    @property
    def _len(self) -> int:
        length: int = self._len_value if self._compilable else self._len_value.value
        return length

    @_len.setter
    def _len(self, value: int) -> None:
        if self._compilable:
            self._len_value = value
        elif self._len_value is None:
            self._len_value = SharedCounter(value)
        else:
            self._len_value.value = value

    @property
    def _mutation_revision(self) -> int | torch.Tensor:
        revision: int | torch.Tensor = _number(self._mutation_revision_value)
        return revision

    @property
    def _last_cursor_index(self) -> int | torch.Tensor | None:
        row = _number(self._last_cursor_index_value)
        return None if type(row) is int and row < 0 else row

    # TorchRL keeps the cursor of the last write in one process, and the row of the newest record for all.
    @property
    def _last_cursor(self) -> Any:
        if self._compilable:
            return self.__dict__.get("_last_cursor")
        row = self._last_cursor_index
        return None if row is None else torch.tensor([row], device="cpu")

    @_last_cursor.setter
    def _last_cursor(self, cursor: Any) -> None:
        if self._compilable:
            self.__dict__["_last_cursor"] = cursor


def _number(held: Any) -> Any:
    """What a counter holds, or a tensor in the place of one; the tensor itself while it is traced."""
    if isinstance(held, torch.Tensor):
        return held if is_traced() else int(held)
    return held.value
