"""Slot generations: the stamps, and the only code that reads or changes them.

A slot's generation is an int64 that changes whenever the slot receives a new record: -1 while it was never written,
0 for its first record, one more for each further record. ``(slot, generation)`` therefore names one record for ever.
"""

from __future__ import annotations

import secrets
from copy import copy
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch

from torchrl_generational.changes import ChangeLog

__all__ = ["GENERATION_KEY", "SlotGenerations"]

#: The key (and info entry) under which a sample carries the generations of its records. TorchRL's own name.
GENERATION_KEY = "index_generation"

NEVER_WRITTEN = -1

_Rows = np.ndarray[Any, np.dtype[np.int64]]

#: Bits of a stamp that count records; those above number the incarnation.
COUNT_BITS = 32
_LONGEST_STEP = 2**16


class SlotGenerations:
    """One int64 generation per dim-0 row of a storage.

    A stamp is ``incarnation * 2**32 + count``. Incarnation 0 gives plain 0, 1, 2, ...; each restore, copy or exchange
    moves on to a later incarnation, by a random step between 1 and 2**16. Records that a restore brings back keep
    their stamps, and records written afterwards get stamps that no earlier or abandoned timeline could have issued:
    the next stamp of a row is ``max(stamp, incarnation * 2**32 - 1) + 1``. A row that is rewritten 2**32 times within
    one incarnation carries into the next: still growing, still unique in its row. The sign bit is out of reach: 2**31
    incarnations last for 2**16 restores on average, and a restore beyond is refused.

    Two restores of *one* checkpoint that both live on draw the same step with probability 2**-16, per pair; a handle of
    the one can be live in the other only then. A checkpoint of *another* buffer, known by its lineage, brings no
    stamps into a buffer that has issued some of its own: its records count as new there.

    A slot whose last write did not end (it raised, or its process was killed) holds no record. Its stamp says so: it is
    ``-2 - stamp``, which no handle carries, until the next record replaces what is there.

    The tensor is allocated once, at its full size, and only ever changed in place: it can be shared between
    processes, incarnation included.

    Args:
        num_rows: number of rows that can be stamped.
        device: where the stamps live; lookups are free of synchronisation when it is the storage's device.

    Concurrency: no method locks. Whoever calls a method that changes stamps, and whoever needs a lookup to agree with
    the data, holds the storage's lock. Once shared, a process may be killed anywhere in :meth:`begin`,
    :meth:`complete`, or between them.

    Example:
        >>> generations = SlotGenerations(4)
        >>> generations.advance(torch.tensor([0, 1, 0]))  # row 0 received two records
        >>> generations.values
        tensor([ 1,  0, -1, -1])
        >>> generations.live(torch.tensor([0, 0, 2]), torch.tensor([1, 0, -1]))
        tensor([ True, False, False])
        >>> generations.abandon(1)  # a write to row 1 did not end: it holds no record
        >>> generations.values
        tensor([ 1, -2, -1, -1])
        >>> generations.begin(1)  # the next one
        >>> generations.complete(1)
        >>> generations.values
        tensor([ 1,  1, -1, -1])
    """

    __slots__ = ("_array", "_interrupted", "_loaded", "_shared", "_state", "_values", "lineage", "log")

    def __init__(self, num_rows: int, *, device: torch.device | str = "cpu") -> None:
        if num_rows < 0:
            raise ValueError(f"num_rows must be >= 0, got {num_rows}.")
        # The stamps, and in the last place the smallest stamp of this incarnation. Guarded by the storage's lock.
        self._state = torch.full((num_rows + 1,), NEVER_WRITTEN, dtype=torch.int64, device=device)
        self._state[-1] = 0
        self._look()
        #: Number of the family of timelines that these stamps belong to; equal stamps of one family name one record.
        self.lineage = secrets.randbits(62)
        # The stamp of records loaded where there were none, and the log's time then; guarded by the same lock, as all.
        self._loaded: tuple[int, int] | None = None
        self._interrupted = False  # whether a write was ever left incomplete; in the log once shared
        self._shared = False
        #: What changed when, where a learner follows; see :meth:`keep_log`.
        self.log: ChangeLog | None = None

    def _look(self) -> None:
        """Views of the state: what it holds without the last place, and what NumPy can work on in less time."""
        self._values = self._state[:-1]
        self._array: Any = self._state.numpy() if self._state.is_cpu else None

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
    def incarnation(self) -> int:
        """Number of the timeline that new stamps belong to; 0 until the first restore."""
        return int(self._state[-1]) >> COUNT_BITS

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
        log = self.keep_log()
        log.share()
        self._state.share_memory_()  # type: ignore[no-untyped-call]
        self._look()
        self._shared = True
        if self._interrupted:
            log.begin()

    def advance(self, rows: int | slice | torch.Tensor) -> None:
        """Gives ``rows`` new records: one more generation for every time a row is named. O(rows).

        Call it *before* the data changes, so that a write that fails half-way leaves no handle live on a torn record.
        :meth:`begin` and :meth:`complete` around the write also keep torn records out of samples.

        Args:
            rows: rows within ``[0, num_rows)``, as an int, a slice, a mask, or int64 of any shape on any device.
        """
        self._loaded = None
        rows = self._named(rows)
        if self.log is not None:
            self.log.note(rows)
            self.log.forget(rows)
        if isinstance(rows, torch.Tensor):
            least = self._state[-1:] - 1
            # the same value wherever a row is named more than once, so the order of these writes does not matter
            self._values[rows] = torch.maximum(self._counted(self._values.index_select(0, rows)), least)
            self._values.index_add_(0, rows, torch.ones_like(rows))
        elif self._array is not None and not self.interrupted:
            stamped = self._array[:-1][rows]
            np.maximum(stamped, self._array[-1] - 1, out=stamped)
            stamped += 1
        else:
            part = self._values[rows]
            torch.maximum(self._counted(part), self._state[-1:] - 1, out=part)
            part += 1

    def begin(self, rows: int | slice | torch.Tensor) -> None:
        """Advances the stamps of ``rows``, whose records are about to be replaced; see :meth:`advance`.

        Once shared, it marks them as being written as well, in the same step. Call :meth:`complete` after the data has
        changed, or :meth:`abandon` if that fails.
        """
        log = self.log
        if not self._shared or log is None:
            self.advance(rows)
            return
        places, count = self._places(rows)
        log.note(rows)
        stamps = self._array[:-1]
        last = stamps[places]
        if log.interrupted:
            last = np.where(last < NEVER_WRITTEN, _flipped(last), last)
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
            stamps[places] = np.where(now < NEVER_WRITTEN, now, _flipped(now))

    def complete(self, rows: int | slice | torch.Tensor) -> None:
        """The data of ``rows`` has changed: they hold their new records. O(rows)."""
        if self._shared and self.log is not None:
            places, _ = self._places(rows)
            stamps = self._array[:-1]
            now = stamps[places]
            stamps[places] = np.where(now < NEVER_WRITTEN, _flipped(now), now)
            self.log.complete()

    def _places(self, rows: int | slice | torch.Tensor) -> tuple[Any, Any]:
        """Each of ``rows`` once, as NumPy indexes them, and how often it is named."""
        if isinstance(rows, int):
            return slice(rows, rows + 1), 1
        if isinstance(rows, slice):
            return rows, 1
        if rows.dtype == torch.bool:
            return rows.numpy(), 1
        return np.unique(rows.numpy(), return_counts=True)

    def abandon(self, rows: int | slice | torch.Tensor) -> None:
        """The data of ``rows`` may have changed in part: they hold no record until the next one is written. O(rows)."""
        rows = self._named(rows)
        stamps = self._values[rows]
        self._values[rows] = torch.where(stamps < NEVER_WRITTEN, stamps, _flipped(stamps))
        self._interrupted = True

    def _named(self, rows: int | slice | torch.Tensor) -> slice | torch.Tensor:
        """Rows as a slice, or as one int64 dimension on the stamps' device."""
        if isinstance(rows, int):
            return slice(rows, rows + 1)
        if isinstance(rows, torch.Tensor):
            if rows.dtype == torch.bool:
                rows = rows.nonzero()
            rows = rows.reshape(-1).to(self._values.device)
        return rows

    def _counted(self, stamps: torch.Tensor) -> torch.Tensor:
        """Stamps without the mark of an incomplete write."""
        return torch.where(stamps < NEVER_WRITTEN, _flipped(stamps), stamps) if self.interrupted else stamps

    def invalidate(self) -> None:
        """Makes every handle ever taken stale: each row that was written moves on by one. O(num_rows)."""
        if self.log is not None:
            self.log.note_all()
        self.advance(self._values >= 0)

    def mark_written(self, num_rows: int) -> None:
        """Stamps the first ``num_rows`` rows as holding a first record where they had none. O(num_rows)."""
        if self.log is not None:
            self.log.note(slice(num_rows))
        head = self._values[:num_rows]
        head.masked_fill_(head < 0, int(self._state[-1]))

    def begin_incarnation(self, *, after: int = 0) -> None:
        """Moves on to an incarnation later than this one and than ``after``, by a random step. O(1).

        Raises:
            OverflowError: after some 2**16 restores, when no later incarnation fits into a stamp.
        """
        incarnation = max(self.incarnation, after) + 1 + secrets.randbelow(_LONGEST_STEP)
        if incarnation >= 2 ** (63 - COUNT_BITS):
            raise OverflowError(
                "These generations have been restored so often that no later incarnation fits into 64 bits. Write the "
                "records into a new storage."
            )
        self._state[-1] = incarnation << COUNT_BITS

    def replaced(self, num_rows: int, *, after: int = 0) -> None:
        """All records were replaced and the first ``num_rows`` rows hold one: no earlier handle names any. O(rows)."""
        unused = not self._issued()
        self.begin_incarnation(after=after)
        self.invalidate()
        self.mark_written(num_rows)
        self._loaded = (int(self._state[-1]), self._time()) if unused and num_rows else None

    def _time(self) -> int:
        return 0 if self.log is None else self.log.clock

    def _issued(self) -> bool:
        """Whether a handle may be about that was taken before the records that are here were loaded."""
        written = self._values != NEVER_WRITTEN
        if self._loaded is not None and self._loaded[1] == self._time():
            written &= self._values != self._loaded[0]
        return bool(written.any())

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """Current stamps of ``rows``, which must lie within ``[0, num_rows)``. O(rows).

        Returns:
            int64 tensor of the shape and on the device of ``rows``.
        """
        if rows.ndim == 1 and rows.device == self._values.device:
            return self._values.index_select(0, rows)
        found = self._values.index_select(0, rows.reshape(-1).to(self._values.device)).reshape(rows.shape)
        return found.to(rows.device)

    def live(self, rows: torch.Tensor, generation: torch.Tensor) -> torch.Tensor:
        """Which handles still name the record in their row. O(rows), no synchronisation.

        Args:
            rows: int64 rows within ``[0, num_rows)``, on the stamps' device.
            generation: int64 stamps of the same shape, on the same device.

        Returns:
            bool tensor of that shape: the stamp is one that a record can have, and it is the row's stamp now.
        """
        if self._array is not None:
            return torch.from_numpy(self._live(rows.numpy(), generation.numpy()))
        return (self._values.index_select(0, rows) == generation).logical_and_(generation >= 0)

    def live_array(self, rows: _Rows, generation: torch.Tensor) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """:meth:`live` for an array of rows; ``None`` unless stamps and ``generation`` are on the CPU."""
        if self._array is None or not generation.is_cpu:
            return None
        return self._live(rows, generation.numpy())

    def _live(self, rows: _Rows, stamps: _Rows) -> np.ndarray[Any, np.dtype[np.bool_]]:
        live: np.ndarray[Any, np.dtype[np.bool_]] = self._array[rows] == stamps
        live &= stamps >= 0
        return live

    def origin(self) -> dict[str, int]:
        """What :meth:`restore` needs besides the stamps to know where they come from."""
        return {"lineage": self.lineage, "incarnation": self.incarnation}

    def check(self, values: torch.Tensor) -> None:
        """Refuses saved stamps that do not fit; see :meth:`restore`.

        Raises:
            ValueError: if ``values`` is not a 1-D int64 tensor or has more rows than this object.
        """
        if values.dtype != torch.int64 or values.ndim != 1:
            raise ValueError(
                f"Saved generations must be a 1-D int64 tensor, got {values.dtype} of shape {tuple(values.shape)}."
            )
        if values.shape[0] > self.num_rows:
            raise ValueError(
                f"Saved generations cover {values.shape[0]} slots but this storage has {self.num_rows}. Load the "
                "checkpoint into a storage of the capacity that it was saved from."
            )

    def restore(self, values: torch.Tensor, *, lineage: int | None = None, incarnation: int = 0) -> None:
        """Takes over the stamps of a checkpoint whose records are in place; rows beyond them become never written.

        Where this object has issued stamps of another lineage, those of the checkpoint cannot be told from them:
        then its records get new ones.

        Complexity: O(num_rows).

        Args:
            values: int64 ``[rows]``.
            lineage: of the generations saved; ``None`` for a checkpoint of TorchRL's, which has none.
            incarnation: of the generations saved.

        Raises:
            ValueError: if ``values`` is not a 1-D int64 tensor or has more rows than this object; nothing has changed.
        """
        self.check(values)
        foreign = self.lineage != lineage and self._issued()
        if self.log is not None:
            self.log.note_all()
        latest = max(int(values.max()) >> COUNT_BITS, incarnation) if values.numel() else incarnation
        self.begin_incarnation(after=latest)
        self._values[values.shape[0] :] = NEVER_WRITTEN
        saved = values.to(self._values.device)
        if foreign:
            base = torch.where(saved >= 0, self._state[-1:], _flipped(self._state[-1:]))
            saved = torch.where(saved == NEVER_WRITTEN, NEVER_WRITTEN, base)
        elif lineage is not None:
            self.lineage = lineage
        self._values[: values.shape[0]] = saved
        self._loaded = None
        if bool((saved < NEVER_WRITTEN).any()):
            self._interrupted = True
            if self._shared and self.log is not None:
                self.log.begin()

    def to(self, device: torch.device | str) -> None:
        """Moves the stamps, e.g. when a storage with ``device="auto"`` learns where its data lives."""
        self._state = self._state.to(device)
        self._look()

    def clone(self) -> SlotGenerations:
        """These stamps as they are now, for a copy that is being pickled. O(num_rows)."""
        twin = copy(self)
        twin._interrupted = self.interrupted
        twin._shared = False
        twin._state = self._state.clone()
        twin._look()
        twin.log = None if self.log is None else self.log.clone()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        # For a process being spawned the tensor goes to shared memory: one timeline. Any other copy begins its own.
        if get_spawning_popen() is not None:
            self.share()
        state = {name: getattr(self, name) for name in self.__slots__ if name not in ("_values", "_array")}
        return state | {"copy": get_spawning_popen() is None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        new_timeline = state.pop("copy")
        for name, value in state.items():
            setattr(self, name, value)
        self._look()
        if new_timeline:
            self.begin_incarnation()


def _flipped(stamps: Any) -> Any:
    """Stamps, as a tensor or an array, as marked while their slots are being written; and back."""
    return -2 - stamps
