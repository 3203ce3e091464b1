"""What the writers of a storage leave for a learner that keeps its priorities apart: where to look, and what for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchrl_generational.tensors.autograd_modes import as_normal, making_what_is_kept

__all__ = ["BLOCK", "ChangeLog"]

#: Slots per entry of the table of changes.
BLOCK = 256

_CLOCK, _EMPTIED, _BEGUN, _COMPLETED, _GIVEN, _HEADER = range(6)


class ChangeLog:
    """A clock that each write advances, its time at the last write to each block of slots, and first priorities.

    A learner that remembers the time at which it last looked finds what was written since in time proportional to
    that, whoever wrote it and where. 8 bytes per 256 slots, and 8 bytes per slot for the priorities.

    It lies in one piece of memory of fixed size, which processes can share.

    Args:
        num_rows: slots of the storage.

    Concurrency: no method locks; the storage's lock guards everything here. A process that is killed between any two
    of its steps leaves a log from which nothing is missing: the clock and the blocks come before what they announce.
    """

    __slots__ = ("_first", "_numbers", "_priorities", "_state")

    def __init__(self, num_rows: int) -> None:
        blocks = -(-num_rows // BLOCK)
        with making_what_is_kept():
            self._state = torch.zeros(_HEADER + blocks, dtype=torch.int64, device="cpu")
            self._priorities = torch.full((num_rows,), torch.nan, dtype=torch.float64, device="cpu")
        self._look()

    def _look(self) -> None:
        """Views of the two, which NumPy reads and writes in a fraction of the time."""
        self._numbers: np.ndarray[Any, np.dtype[np.int64]] = self._state.numpy()
        self._first: np.ndarray[Any, np.dtype[np.float64]] = self._priorities.numpy()

    @staticmethod
    def bytes_for(num_rows: int) -> int:
        """How much memory a log takes."""
        return 8 * (_HEADER + -(-num_rows // BLOCK) + num_rows)

    def share(self) -> None:
        """Moves the log to shared memory."""
        try:
            self._state.share_memory_()  # type: ignore[no-untyped-call]
            self._priorities.share_memory_()  # type: ignore[no-untyped-call]
        finally:
            self._look()  # what has moved is no longer where the views were

    @property
    def clock(self) -> int:
        """The time of the last change."""
        return int(self._numbers[_CLOCK])

    @property
    def emptied(self) -> int:
        """The time at which all records were last removed or replaced, 0 if never."""
        return int(self._numbers[_EMPTIED])

    def note(self, rows: int | slice | torch.Tensor) -> None:
        """Says that ``rows`` are about to change. O(rows)."""
        numbers = self._numbers
        blocks = numbers[_HEADER:]
        numbers[_CLOCK] += 1
        clock = numbers[_CLOCK]
        if isinstance(rows, int):
            blocks[rows // BLOCK] = clock
        elif isinstance(rows, slice):
            named = range(len(self._priorities))[rows]
            if named:
                first, last = sorted((named[0], named[-1]))
                blocks[first // BLOCK : last // BLOCK + 1] = clock
        else:
            which = rows.nonzero() if rows.dtype == torch.bool else rows
            blocks[which.reshape(-1).cpu().numpy() // BLOCK] = clock

    def note_all(self) -> None:
        """Says that all records are about to be removed or replaced. O(capacity / 256)."""
        self.note(slice(None))
        self._numbers[_EMPTIED] = self.clock

    def changed_since(self, time: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Blocks with a change after ``time``. O(capacity / 256)."""
        return np.flatnonzero(self._numbers[_HEADER:] > time)

    def begin(self) -> None:
        """A write begins. Where one has not been completed when the next process enters, its writer is gone."""
        self._numbers[_BEGUN] += 1

    def complete(self) -> None:
        """The write that began last is complete."""
        self._numbers[_COMPLETED] += 1

    def settle(self) -> None:
        """No slot is left whose last write did not end."""
        self._numbers[_COMPLETED] = self._numbers[_BEGUN]

    @property
    def interrupted(self) -> bool:
        """Whether a write was ever left incomplete. Meant for whoever holds the lock and does not write."""
        return bool(self._numbers[_BEGUN] != self._numbers[_COMPLETED])

    def forget(self, rows: int | slice | torch.Tensor) -> None:
        """The records in ``rows`` are being replaced: their first priorities are not those of the next. O(rows)."""
        if self._numbers[_GIVEN]:  # else there is none
            self._first[rows.cpu().numpy() if isinstance(rows, torch.Tensor) else rows] = np.nan

    def give(self, rows: torch.Tensor, priority: torch.Tensor) -> None:
        """First priorities of the records that were just written to ``rows``: float64 ``[rows]``, CPU. O(rows)."""
        self._numbers[_GIVEN] = 1
        self._first[rows.numpy()] = priority.numpy()

    def given(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.float64]] | None:
        """First priorities of the records in ``rows``, NaN where there is none; ``None`` if none was ever given."""
        return self._first[rows] if self._numbers[_GIVEN] else None

    def clone(self) -> ChangeLog:
        """This log as it is now, in memory of its own."""
        twin = ChangeLog.__new__(ChangeLog)
        twin.__setstate__({"state": self._state.clone(), "priorities": self._priorities.clone()})
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self._state, "priorities": self._priorities}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._state, self._priorities = as_normal(state["state"]), as_normal(state["priorities"])
        self._look()
