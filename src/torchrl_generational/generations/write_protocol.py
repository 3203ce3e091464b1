"""The stamps of slots while records are written: a new generation first, then the data.

What a stamp means, and what restores and copies do to it, stands in :mod:`.slot_generations`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchrl_generational.generations.change_log import ChangeLog
from torchrl_generational.tensors.compilation import is_traced

__all__ = ["NEVER_WRITTEN", "WrittenStamps", "flipped"]

NEVER_WRITTEN = -1


class WrittenStamps:
    """The part of :class:`SlotGenerations` that a write goes through."""

    __slots__ = ("_array", "_interrupted", "_loaded", "_shared", "_state", "_values", "_writing", "log", "opened")

    def __init__(self, num_rows: int, *, device: torch.device | str = "cpu") -> None:
        if num_rows < 0:
            raise ValueError(f"num_rows must be >= 0, got {num_rows}.")
        # The stamps, and in the last place the smallest stamp of this incarnation. Guarded by the storage's lock.
        self._state = torch.full((num_rows + 1,), NEVER_WRITTEN, dtype=torch.int64, device=device)
        self._state[-1] = 0
        self._look()
        # The stamp of records loaded where there were none, and the log's time then; guarded by the same lock, as all.
        self._loaded: tuple[int, int] | None = None
        self._interrupted = False  # whether a write was ever left incomplete; in the log once shared
        self._writing: int | slice | torch.Tensor | None = None  # rows whose data is about to change, unless shared
        self._shared = False
        #: The rows of the section that is under way whose records may lack data or a priority, see
        #: :meth:`GenerationalReplayBufferMixin._exclusive`; ``None`` outside of sections. Guarded by the same lock.
        self.opened: list[Any] | None = None
        #: What changed when, where a learner follows; see :meth:`keep_log`.
        self.log: ChangeLog | None = None

    def _look(self) -> None:
        """Views of the state: what it holds without the last place, and what NumPy can work on in less time."""
        self._values = self._state[:-1]
        self._array: Any = self._state.numpy() if self._state.is_cpu else None

    @property
    def on_cpu(self) -> bool:
        """Whether the stamps are on the CPU, where NumPy compares them."""
        return self._array is not None

    @property
    def values(self) -> torch.Tensor:
        """The stamps, int64 of shape ``[num_rows]``: the live tensor, to be read and never written. O(1)."""
        return self._values

    @property
    def num_rows(self) -> int:
        """Number of rows that can be stamped."""
        return self._values.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the stamps live."""
        return self._values.device

    @property
    def is_shared(self) -> bool:
        """Whether the stamps lie in memory that processes share."""
        return self._shared

    @property
    def interrupted(self) -> bool:
        """Whether a write was ever left incomplete, so that a slot may hold no record. O(1)."""
        return self.log.interrupted if self._shared and self.log is not None else self._interrupted

    def keep_log(self) -> ChangeLog:
        """Has every change noted from now on, for learners that catch up with it. Idempotent."""
        if self.log is None:
            self.log = ChangeLog(self.num_rows)
        return self.log

    def share(self) -> None:
        """Moves stamps and log to shared memory; from now on a slot is marked while it is being written. Idempotent."""
        if self._shared:
            return
        log = self.log or ChangeLog(self.num_rows)
        try:
            log.share()
            self._state.share_memory_()  # type: ignore[no-untyped-call]
        finally:
            self._look()  # what has moved is no longer where the views were
        self.log, self._shared = log, True
        if self._interrupted:
            log.begin()

    def unshare(self, log: ChangeLog | None) -> None:
        """Undoes :meth:`share` with the log of before, while no other process has them."""
        self.log, self._shared = log, False

    def bytes_to_share(self) -> int:
        """What :meth:`share` takes of shared memory."""
        if self._shared:
            return 0
        return ChangeLog.bytes_for(self.num_rows) + self._state.numel() * self._state.element_size()

    def advance(self, rows: int | slice | torch.Tensor) -> None:
        """Gives ``rows`` new records: one more generation for every time a row is named. O(rows).

        Call it *before* the data changes, so that a write that fails half-way leaves no handle live on a torn record.
        :meth:`begin` and :meth:`complete` around the write also keep torn records out of samples.

        Args:
            rows: rows within ``[0, num_rows)``, as an int, a slice, a mask, or int64 of any shape on any device.
        """
        self._loaded = None
        if self.log is not None:
            self.log.note(rows)
        # One step of torch or NumPy changes the stamps, so that an exception finds all of them changed, or none.
        if is_traced():
            self._advance_traced(rows)
        elif self._array is not None:
            places, count = self._places(rows)
            stamps = self._array[:-1]
            stamps[places] = count + np.maximum(self._counted(stamps[places]), self._array[-1] - 1)
        else:
            named, repeats = self._named(rows), torch.ones((), dtype=torch.int64, device=self.device)
            if isinstance(named, torch.Tensor):
                named, repeats = torch.unique(named, return_counts=True)
            self._values[named] = repeats + torch.maximum(self._counted(self._values[named]), self._state[-1:] - 1)
        if self.log is not None:
            self.log.forget(rows)

    def _advance_traced(self, rows: int | slice | torch.Tensor) -> None:
        """:meth:`advance` in a graph, which cannot say how many different rows there are."""
        named = self._named(rows)
        if not isinstance(named, torch.Tensor):
            named = torch.arange(self.num_rows, device=self.device)[named]
        # the same value wherever a row is named more than once, so the order of these writes does not matter
        self._values[named] = torch.maximum(self._counted(self._values.index_select(0, named)), self._state[-1:] - 1)
        self._values.index_add_(0, named, torch.ones_like(named))

    def begin(self, rows: int | slice | torch.Tensor) -> None:
        """Advances the stamps of ``rows``, whose records are about to be replaced; see :meth:`advance`.

        Once shared, it marks them as being written as well, in the same step. Call :meth:`complete` after the data has
        changed, or :meth:`abandon` if that fails.
        """
        log = self.log
        if self.opened is not None:
            self.opened.append(rows)
        if not self._shared or log is None:
            self._writing = rows
            self.advance(rows)
            return
        places, count = self._places(rows)
        log.note(rows)
        stamps = self._array[:-1]
        last = self._counted(stamps[places])
        log.begin()
        stamps[places] = (-2 - count) - np.maximum(last, self._array[-1] - 1)
        log.forget(rows)  # those of records that are there must outlive a process that is killed before

    def mark(self, rows: int | slice | torch.Tensor) -> None:
        """Fields of the records in ``rows`` are about to change: marks them as :meth:`begin` does, once shared."""
        if self._shared and self.log is not None:
            places, _ = self._places(rows)
            self.log.note(rows)
            self.log.begin()
            stamps = self._array[:-1]
            now = stamps[places]
            stamps[places] = np.where(now < NEVER_WRITTEN, now, flipped(now))

    def complete(self, rows: int | slice | torch.Tensor) -> None:
        """The data of ``rows`` has changed: they hold their new records. O(rows)."""
        if self._shared and self.log is not None:
            places, _ = self._places(rows)
            stamps = self._array[:-1]
            now = stamps[places]
            stamps[places] = np.where(now < NEVER_WRITTEN, flipped(now), now)
            self.log.complete()
        else:
            self._writing = None

    def left_behind(self) -> None:
        """In a child that was forked without sharing: the write of another thread does not end here."""
        rows, self._writing = self._writing, None
        if rows is not None and self._array is not None:
            places, _ = self._places(rows)
            stamps = self._array[:-1]  # not by torch, whose threads do not exist in a forked child
            stamps[places] = np.where(stamps[places] < NEVER_WRITTEN, stamps[places], flipped(stamps[places]))
            self._interrupted = True

    def _places(self, rows: int | slice | torch.Tensor) -> tuple[Any, Any]:
        """Each of ``rows`` once, as NumPy indexes them, and how often it is named."""
        if isinstance(rows, int):
            return slice(rows, rows + 1), 1
        if isinstance(rows, slice):
            return rows, 1
        if rows.dtype == torch.bool:
            return rows.cpu().numpy(), 1
        return np.unique(rows.cpu().numpy(), return_counts=True)

    def abandon(self, rows: int | slice | torch.Tensor) -> None:
        """The data of ``rows`` may have changed in part: they hold no record until the next one is written. O(rows)."""
        # said first: nobody may draw a slot that is marked and take it for one that holds a record
        self._interrupted = True
        if self._shared and self.log is not None:
            self.log.note(rows)
            if not self.log.interrupted:
                self.log.begin()
        rows = self._named(rows)
        stamps = self._values[rows]
        self._values[rows] = torch.where(stamps < NEVER_WRITTEN, stamps, flipped(stamps))
        self._writing = None

    def _named(self, rows: int | slice | torch.Tensor) -> slice | torch.Tensor:
        """Rows as a slice, or as one int64 dimension on the stamps' device."""
        if isinstance(rows, int):
            return slice(rows, rows + 1)
        if isinstance(rows, torch.Tensor):
            if rows.dtype == torch.bool:
                rows = rows.nonzero()
            rows = rows.reshape(-1).to(self._values.device)
        return rows

    def _counted(self, stamps: Any) -> Any:
        """Stamps, as a tensor or an array, without the mark of an incomplete write."""
        if not self.interrupted:
            return stamps
        where: Any = torch.where if isinstance(stamps, torch.Tensor) else np.where
        return where(stamps < NEVER_WRITTEN, flipped(stamps), stamps)


def flipped(stamps: Any) -> Any:
    """Stamps, as a tensor or an array, as marked while their slots are being written; and back."""
    return -2 - stamps
