"""Slot generations: the stamps, the only code that reads or changes them, and the protocols to join in.

A slot's generation is an int64 that changes whenever the slot receives a new record: -1 while it was never written,
0 for its first record, one more for each further record. ``(slot, generation)`` therefore names one record for ever.
"""

from __future__ import annotations

import secrets
from copy import copy
from multiprocessing.context import get_spawning_popen
from typing import Any, Protocol, runtime_checkable

import torch

from torchrl_generational.locks import StorageLock

__all__ = ["GENERATION_KEY", "SlotGenerations", "SupportsGenerations", "TracksGenerations", "generations_on"]

#: The key (and info entry) under which a sample carries the generations of its records. TorchRL's own name.
GENERATION_KEY = "index_generation"

NEVER_WRITTEN = -1


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

    The tensor is allocated once, at its full size, and only ever changed in place: it can be shared between
    processes, incarnation included, and a view taken once stays good.

    Args:
        num_rows: number of rows that can be stamped.
        device: where the stamps live; lookups are free of synchronisation when it is the storage's device.

    Concurrency: no method locks. Whoever calls a method that changes stamps, and whoever needs a lookup to agree with
    the data, holds the storage's lock.

    Example:
        >>> generations = SlotGenerations(4)
        >>> generations.advance(torch.tensor([0, 1, 0]))  # row 0 received two records
        >>> generations.values
        tensor([ 1,  0, -1, -1])
        >>> generations.live(torch.tensor([0, 0, 2]), torch.tensor([1, 0, -1]))
        tensor([ True, False, False])
    """

    __slots__ = ("_loaded", "_state", "_values", "lineage")

    def __init__(self, num_rows: int, *, device: torch.device | str = "cpu") -> None:
        if num_rows < 0:
            raise ValueError(f"num_rows must be >= 0, got {num_rows}.")
        # The stamps, and in the last place the smallest stamp of this incarnation. Guarded by the storage's lock.
        self._state = torch.full((num_rows + 1,), NEVER_WRITTEN, dtype=torch.int64, device=device)
        self._state[-1] = 0
        self._values = self._state[:-1]
        #: Number of the family of timelines that these stamps belong to; equal stamps of one family name one record.
        self.lineage = secrets.randbits(62)
        self._loaded: int | None = None  # the stamp of records loaded where there were none; guarded by the same lock

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

    def advance(self, rows: int | slice | torch.Tensor) -> None:
        """Gives ``rows`` new records: one more generation for every time a row is named. O(rows).

        Call it *before* the data changes, so that a write that fails half-way leaves no handle live on a torn record.

        Args:
            rows: rows within ``[0, num_rows)``, as an int, a slice, a mask, or int64 of any shape on any device.
        """
        self._loaded = None
        least = self._state[-1:] - 1
        if isinstance(rows, torch.Tensor):
            if rows.dtype == torch.bool:
                rows = rows.nonzero()
            rows = rows.reshape(-1).to(self._values.device)
            # the same value wherever a row is named more than once, so the order of these writes does not matter
            self._values[rows] = torch.maximum(self._values.index_select(0, rows), least)
            self._values.index_add_(0, rows, torch.ones_like(rows))
        else:
            part = self._values[slice(rows, rows + 1) if isinstance(rows, int) else rows]
            torch.maximum(part, least, out=part)
            part += 1

    def invalidate(self) -> None:
        """Makes every handle ever taken stale: each row that was written moves on by one. O(num_rows)."""
        self.advance(self._values >= 0)

    def mark_written(self, num_rows: int) -> None:
        """Stamps the first ``num_rows`` rows as holding a first record where they had none. O(num_rows)."""
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
        self._loaded = int(self._state[-1]) if unused and num_rows else None

    def _issued(self) -> bool:
        """Whether a handle may be about that was taken before the records that are here were loaded."""
        written = self._values >= 0
        return bool((written if self._loaded is None else written & (self._values != self._loaded)).any())

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """Current stamps of ``rows``, which must lie within ``[0, num_rows)``. O(rows).

        Returns:
            int64 tensor of the shape and on the device of ``rows``.
        """
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
        return (self._values.index_select(0, rows) == generation).logical_and_(generation >= 0)

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
        latest = max(int(values.max()) >> COUNT_BITS, incarnation) if values.numel() else incarnation
        self.begin_incarnation(after=latest)
        self._values[values.shape[0] :] = NEVER_WRITTEN
        saved = values.to(self._values.device)
        if foreign:
            saved = torch.where(saved >= 0, self._state[-1:], NEVER_WRITTEN)
        elif lineage is not None:
            self.lineage = lineage
        self._values[: values.shape[0]] = saved
        self._loaded = None

    def to(self, device: torch.device | str) -> None:
        """Moves the stamps, e.g. when a storage with ``device="auto"`` learns where its data lives."""
        self._state = self._state.to(device)
        self._values = self._state[:-1]

    def clone(self) -> SlotGenerations:
        """These stamps as they are now, for a copy that is being pickled. O(num_rows)."""
        twin = copy(self)
        twin._state = self._state.clone()
        twin._values = twin._state[:-1]
        return twin

    def __getstate__(self) -> dict[str, Any]:
        # For a process being spawned the tensor goes to shared memory: one timeline. Any other copy begins its own.
        copy = get_spawning_popen() is None
        return {"state": self._state, "lineage": self.lineage, "loaded": self._loaded, "copy": copy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._state, self.lineage, self._loaded = state["state"], state["lineage"], state["loaded"]
        self._values = self._state[:-1]
        if state["copy"]:
            self.begin_incarnation()

    def __repr__(self) -> str:
        return f"SlotGenerations(num_rows={self.num_rows}, incarnation={self.incarnation}, device={self.device})"


@runtime_checkable
class SupportsGenerations(Protocol):
    """What a storage offers so that buffers, writers and samplers of this package work on it.

    The storage promises that every road by which a slot receives a new record (its ``set``, and ``_empty`` and loads,
    which replace all records) advances the stamps first, and that its ``state_dict`` is a snapshot. It does not lock;
    buffers hold :attr:`lock` around it. *Testing your own writer or storage* in the documentation has an example.

    Example:
        >>> from torchrl_generational import GenerationalLazyTensorStorage
        >>> isinstance(GenerationalLazyTensorStorage(4), SupportsGenerations)
        True
    """

    @property
    def supports_generations(self) -> bool:
        """True."""

    @property
    def slot_generations(self) -> SlotGenerations:
        """The stamps of the storage's dim-0 rows."""

    @property
    def generations(self) -> torch.Tensor:
        """The stamps in the storage's index space: its shape is the range of valid indices."""

    @property
    def lock(self) -> StorageLock:
        """The lock of everything that reads or changes this storage, held by all buffers on it. Can be set."""


@runtime_checkable
class TracksGenerations(Protocol):
    """What a writer offers: TorchRL's own two names.

    Example:
        >>> from torchrl_generational import GenerationalRoundRobinWriter
        >>> isinstance(GenerationalRoundRobinWriter(), TracksGenerations)
        True
    """

    @property
    def tracks_generations(self) -> bool:
        """True."""

    def generations_of(self, index: Any) -> torch.Tensor:
        """Current stamps of the slots in ``index``, -1 for those never written or outside the storage."""


def generations_on(storage: Any, *, user: str) -> SlotGenerations:
    """The stamps of ``storage``, or a refusal that names the class to use.

    Raises:
        TypeError: if the storage cannot carry generations.
    """
    if not getattr(storage, "supports_generations", False):
        raise TypeError(
            f"{user} needs a storage that carries slot generations, got {type(storage).__name__}. Use "
            "GenerationalLazyTensorStorage, GenerationalLazyMemmapStorage or GenerationalTensorStorage."
        )
    generations: SlotGenerations = storage.slot_generations
    return generations
