"""Slot generations: the stamps, and the only code that reads or changes them.

A slot's generation is an int64 that changes whenever the slot receives a new record: -1 while it was never written,
0 for its first record, one more for each further record. ``(slot, generation)`` therefore names one record for ever.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch

from torchrl_generational.generations.write_protocol import NEVER_WRITTEN, WrittenStamps, flipped
from torchrl_generational.tensors.autograd_modes import as_normal, making_what_is_kept

__all__ = ["GENERATION_KEY", "ReadyStamps", "SlotGenerations"]

#: The key (and info entry) under which a sample carries the generations of its records. TorchRL's own name.
GENERATION_KEY = "index_generation"

_Rows = np.ndarray[Any, np.dtype[np.int64]]

#: Bits of a stamp that count records; those above number the incarnation.
COUNT_BITS = 32
_LONGEST_STEP = 2**16
_LAST_INCARNATION = 2 ** (63 - COUNT_BITS) - 1


@dataclass(frozen=True, slots=True)
class ReadyStamps:
    """Stamps that are checked and ready to take the place of others; see :meth:`SlotGenerations.install`.

    Attributes:
        state: int64 ``[num_rows + 1]``: the stamps, and the smallest one of the incarnation that begins with them.
        lineage: of the stamps.
        loaded: whether they are those of records loaded where no handle had been taken.
    """

    state: torch.Tensor
    lineage: int
    loaded: bool = False


class SlotGenerations(WrittenStamps):
    """One int64 generation per dim-0 row of a storage.

    A stamp is ``incarnation * 2**32 + count``. Incarnation 0 gives plain 0, 1, 2, ...; each restore, copy or exchange
    moves on to a later incarnation, by a random step between 1 and 2**16. Records that a restore brings back keep
    their stamps, and records written afterwards get stamps that no earlier or abandoned timeline could have issued:
    the next stamp of a row is ``max(stamp, incarnation * 2**32 - 1) + 1``. A row that is rewritten 2**32 times within
    one incarnation carries into the next: still growing, still unique in its row. The sign bit is out of reach: 2**31
    incarnations last for 32,767 restores at least and 65,533 on average, and one beyond is refused before it changes
    anything. A checkpoint of the 2**15th restore counts like the restores themselves: incarnations are saved.

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

    __slots__ = ("lineage",)

    def __init__(self, num_rows: int, *, device: torch.device | str = "cpu") -> None:
        with making_what_is_kept():
            super().__init__(num_rows, device=device)
        #: Number of the family of timelines that these stamps belong to; equal stamps of one family name one record.
        self.lineage = secrets.randbits(62)

    @property
    def incarnation(self) -> int:
        """Number of the timeline that new stamps belong to; 0 until the first restore."""
        return int(self._state[-1]) >> COUNT_BITS

    def invalidate(self) -> None:
        """Makes every handle ever taken stale: each row that was written moves on by one. O(num_rows)."""
        self._loaded = None
        if self.log is not None:
            self.log.note_all()
            self.log.forget(slice(None))
        moved = torch.maximum(self._counted(self._values), self._state[-1:] - 1).add_(1)
        torch.where(self._values >= 0, moved, self._values, out=self._values)

    def mark_written(self, num_rows: int) -> None:
        """Stamps the first ``num_rows`` rows as holding a first record where they had none. O(num_rows)."""
        if self.log is not None:
            self.log.note(slice(num_rows))
        head = self._values[:num_rows]
        head.masked_fill_(head < 0, int(self._state[-1]))

    def begin_incarnation(self, *, after: int = 0) -> None:
        """Moves on to an incarnation later than this one and than ``after``, by a random step. O(1).

        Raises:
            OverflowError: when no later incarnation fits into a stamp, whatever the step.
        """
        self._state[-1] = self._later(after) << COUNT_BITS

    def check_later(self, after: int = 0) -> None:
        """Refuses what needs an incarnation later than this one and than ``after``, where there is none. O(1).

        Raises:
            OverflowError: when no later incarnation fits into a stamp, whatever the step.
        """
        self._later(after)

    def _later(self, after: int = 0) -> int:
        latest = max(self.incarnation, after)
        if latest > _LAST_INCARNATION - _LONGEST_STEP:
            raise OverflowError(
                f"These generations, or those of the checkpoint, are of incarnation {latest}: they have been restored "
                "so often that no later incarnation fits into 64 bits. Write the records into a new storage."
            )
        return latest + 1 + secrets.randbelow(_LONGEST_STEP)

    def replaced(self, num_rows: int, *, after: int = 0) -> None:
        """All records were replaced and the first ``num_rows`` rows hold one: no earlier handle names any. O(rows).

        Raises:
            OverflowError: when no later incarnation fits into a stamp; nothing has changed then.
        """
        self.install(self.replacement(num_rows, after=after))

    def replacement(self, num_rows: int, *, after: int = 0) -> ReadyStamps:
        """What :meth:`replaced` installs. O(rows).

        Raises:
            OverflowError: when no later incarnation fits into a stamp.
        """
        minimum = self._later(after) << COUNT_BITS
        state = torch.where(self._state >= 0, (self._state + 1).clamp_min_(minimum), self._state)
        state[-1] = minimum
        state[:num_rows].masked_fill_(state[:num_rows] < 0, minimum)
        return ReadyStamps(state, self.lineage, loaded=bool(num_rows) and not self._issued())

    def withdraw(self) -> None:
        """All records are about to be replaced: no slot holds one until stamps are installed. O(rows).

        Whoever is killed or fails for good in between leaves slots that the next writes fill.
        """
        if self.log is not None:
            self.log.note_all()
        self._interrupted = True
        if self._shared and self.log is not None:
            self.log.begin()
        torch.where(self._values >= 0, flipped(self._values), self._values, out=self._values)

    def keep(self) -> Callable[[], None]:
        """Keeps these stamps and returns the way back to them. O(rows)."""
        loaded = self._loaded is not None and self._loaded[1] == self._time()
        held = ReadyStamps(self._state.clone(), self.lineage, loaded)
        return lambda: self.install(held)

    def install(self, ready: ReadyStamps) -> None:
        """Puts stamps in place, whose records are there. Can be called again wherever it was left. O(rows)."""
        torn = bool((ready.state < NEVER_WRITTEN).any())
        log = self.log
        if log is not None:
            log.note_all()
            log.forget(slice(None))
        if torn:
            self._interrupted = True
            if self._shared and log is not None:
                log.begin()
        self._state[-1:] = ready.state[-1:]  # first: a process that is killed in between must not count on from before
        self._values.copy_(ready.state[:-1])
        self.lineage = ready.lineage
        self._loaded = (int(ready.state[-1]), self._time()) if ready.loaded else None
        if not torn:
            self._interrupted = False
            if self._shared and log is not None:
                log.settle()

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

        Raises:
            TypeError: if ``generation`` is not int64: a stamp that was cast may equal that of another record.
        """
        if generation.dtype != torch.int64:
            raise TypeError(f"generation must be int64, got a tensor of {generation.dtype}. Do not cast stamps.")
        if self._array is not None:
            return torch.from_numpy(self._live(rows.numpy(), generation.numpy()))
        return (self._values.index_select(0, rows) == generation).logical_and_(generation >= 0)

    def live_array(self, rows: _Rows, stamps: _Rows) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """:meth:`live` for arrays; ``None`` unless the stamps are on the CPU."""
        return None if self._array is None else self._live(rows, stamps)

    def _live(self, rows: _Rows, stamps: _Rows) -> np.ndarray[Any, np.dtype[np.bool_]]:
        live: np.ndarray[Any, np.dtype[np.bool_]] = self._array[rows] == stamps
        live &= stamps >= 0
        return live

    def origin(self) -> dict[str, int]:
        """What :meth:`restore` needs besides the stamps to know where they come from."""
        return {"lineage": self.lineage, "incarnation": self.incarnation}

    def check(self, values: torch.Tensor, *, lineage: Any = None, incarnation: Any = None) -> None:
        """Refuses saved stamps that do not fit; see :meth:`restore`.

        Raises:
            ValueError: if ``values`` is not a 1-D int64 tensor or has more rows than this object, if ``lineage`` or
                ``incarnation`` is no number that one can have, or if a stamp is of a later incarnation.
        """
        if not isinstance(values, torch.Tensor) or values.dtype != torch.int64 or values.ndim != 1:
            shown = f"{values.dtype} of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else values
            raise ValueError(f"Saved generations must be a 1-D int64 tensor, got {shown!s:.80}.")
        if values.shape[0] > self.num_rows:
            raise ValueError(
                f"Saved generations cover {values.shape[0]} slots but this storage has {self.num_rows}. Load the "
                "checkpoint into a storage of the capacity that it was saved from."
            )
        for name, number, end in (
            ("lineage", lineage, 2**63),
            ("incarnation", incarnation, _LAST_INCARNATION + 1),
        ):
            if number is not None and not (type(number) is int and 0 <= number < end):
                raise ValueError(
                    f"The checkpoint says that its generations have the {name} {number!r:.80}, which should be an int "
                    f"in [0, {end}): it is damaged. Nothing was loaded. Use another checkpoint."
                )
        latest = _latest(values)
        if incarnation is not None and latest > incarnation:
            raise ValueError(
                f"The checkpoint holds generations of incarnation {latest} and says that {incarnation} is its last: it "
                "is damaged. Nothing was loaded. Use another checkpoint."
            )

    def restore(self, values: torch.Tensor, *, lineage: int | None = None, incarnation: int | None = None) -> None:
        """Takes over the stamps of a checkpoint whose records are in place; rows beyond them become never written.

        Where this object has issued stamps of another lineage, those of the checkpoint cannot be told from them:
        then its records get new ones.

        Complexity: O(num_rows).

        Args:
            values: int64 ``[rows]``.
            lineage: of the generations saved; ``None`` for a checkpoint of TorchRL's, which has none.
            incarnation: of the generations saved, which no stamp is later than; ``None`` if that is not known.

        Raises:
            ValueError: as :meth:`check`, or if no later incarnation fits into a stamp; nothing has changed.
        """
        self.install(self.restored(values, lineage=lineage, incarnation=incarnation))

    def restored(
        self, values: torch.Tensor, *, lineage: int | None = None, incarnation: int | None = None
    ) -> ReadyStamps:
        """What :meth:`restore` installs.

        Raises:
            ValueError: as :meth:`restore`.
        """
        self.check(values, lineage=lineage, incarnation=incarnation)
        foreign = self.lineage != lineage and self._issued()
        try:
            minimum = self._later(max(_latest(values), incarnation or 0)) << COUNT_BITS
        except OverflowError as error:
            raise ValueError(f"{error} Nothing was loaded.") from None
        state = torch.full_like(self._state, NEVER_WRITTEN)
        state[-1] = minimum
        state[: values.shape[0]] = values
        if foreign:
            state[:-1].masked_fill_(state[:-1] >= 0, minimum)
            state[:-1].masked_fill_(state[:-1] < NEVER_WRITTEN, flipped(minimum))
        return ReadyStamps(state, self.lineage if foreign or lineage is None else lineage)

    @making_what_is_kept()
    def to(self, device: torch.device | str) -> None:
        """Moves the stamps, e.g. when a storage with ``device="auto"`` learns where its data lives."""
        self._state = self._state.to(device)
        self._look()

    @making_what_is_kept()
    def clone(self) -> SlotGenerations:
        """These stamps as they are now, for a copy that is being pickled. O(num_rows)."""
        twin = copy(self)
        twin._interrupted = self.interrupted
        twin._shared = False
        twin.opened = None
        twin._state = self._state.clone()
        twin._look()
        twin.log = None if self.log is None else self.log.clone()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        # For a process being spawned the tensor goes to shared memory: one timeline. Any other copy begins its own.
        if get_spawning_popen() is not None:
            self.share()
        names = {*WrittenStamps.__slots__, *self.__slots__} - {"_values", "_array", "opened"}  # views, and a section
        state = {name: getattr(self, name) for name in names}
        return state | {"copy": get_spawning_popen() is None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        new_timeline = state.pop("copy")
        for name, value in state.items():
            setattr(self, name, as_normal(value))
        self.opened = None
        self._look()
        if new_timeline:
            self.begin_incarnation()


def _latest(stamps: torch.Tensor) -> int:
    """The latest incarnation among stamps, those of slots whose last write did not end included; 0 without any."""
    if not stamps.numel():
        return 0
    latest: int = max(int(stamps.max()), flipped(int(stamps.min())), 0) >> COUNT_BITS
    return latest
