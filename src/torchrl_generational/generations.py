"""Slot generations: the stamps, the only code that reads or changes them, and the protocols to join in.

A slot's generation is an int64 that changes whenever the slot receives a new record: -1 while it was never written,
0 for its first record, one more for each further record. ``(slot, generation)`` therefore names one record for ever.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from torchrl_generational.locks import StorageLock

__all__ = ["GENERATION_KEY", "SlotGenerations", "SupportsGenerations", "TracksGenerations", "generations_on"]

#: The key (and info entry) under which a sample carries the generations of its records. TorchRL's own name.
GENERATION_KEY = "index_generation"

NEVER_WRITTEN = -1


class SlotGenerations:
    """One int64 generation per dim-0 row of a storage.

    The tensor is allocated once, at its full size, and only ever changed in place: it can be shared between
    processes, and a view taken once stays good.

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

    __slots__ = ("_values",)

    def __init__(self, num_rows: int, *, device: torch.device | str = "cpu") -> None:
        if num_rows < 0:
            raise ValueError(f"num_rows must be >= 0, got {num_rows}.")
        # guarded by the storage's lock
        self._values = torch.full((num_rows,), NEVER_WRITTEN, dtype=torch.int64, device=device)

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

    def advance(self, rows: int | slice | torch.Tensor) -> None:
        """Gives ``rows`` new records: one more generation for every time a row is named. O(rows).

        Call it *before* the data changes, so that a write that fails half-way leaves no handle live on a torn record.

        Args:
            rows: rows within ``[0, num_rows)``, as an int, a slice or an int64 tensor of any shape on any device.
        """
        if isinstance(rows, torch.Tensor):
            rows = rows.reshape(-1).to(self._values.device)
            self._values.index_add_(0, rows, torch.ones_like(rows))
        else:
            self._values[rows] += 1

    def invalidate(self) -> None:
        """Makes every handle ever taken stale: each row that was written moves on by one. O(num_rows)."""
        self._values += self._values >= 0

    def mark_written(self, num_rows: int) -> None:
        """Stamps the first ``num_rows`` rows as holding a first record where they had none. O(num_rows)."""
        head = self._values[:num_rows]
        head.clamp_(min=0)

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """Current stamps of ``rows``, which must lie within ``[0, num_rows)``. O(rows).

        Returns:
            int64 tensor of the shape and on the device of ``rows``.
        """
        found = self._values[rows.to(self._values.device)]
        return found.to(rows.device)

    def live(self, rows: torch.Tensor, generation: torch.Tensor) -> torch.Tensor:
        """Which handles still name the record in their row. O(rows), no synchronisation.

        Args:
            rows: int64 rows within ``[0, num_rows)``, on the stamps' device.
            generation: int64 stamps of the same shape, on the same device.

        Returns:
            bool tensor of that shape: the stamp is one that a record can have, and it is the row's stamp now.
        """
        return (self._values[rows] == generation) & (generation >= 0)

    def restore(self, values: torch.Tensor) -> None:
        """Takes over saved stamps; rows beyond them become never written. O(num_rows).

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
        self._values[: values.shape[0]] = values.to(self._values.device)
        self._values[values.shape[0] :] = NEVER_WRITTEN

    def to(self, device: torch.device | str) -> None:
        """Moves the stamps, e.g. when a storage with ``device="auto"`` learns where its data lives."""
        self._values = self._values.to(device)

    def __repr__(self) -> str:
        return f"SlotGenerations(num_rows={self.num_rows}, device={self.device})"


@runtime_checkable
class SupportsGenerations(Protocol):
    """What a storage offers so that buffers, writers and samplers of this package work on it.

    The storage promises that every road by which a slot receives a new record (its ``set``, and ``_empty`` and loads,
    which replace all records) advances the stamps first. It does not lock; buffers hold :attr:`lock` around it.
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
    """What a writer offers: TorchRL's own two names."""

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
