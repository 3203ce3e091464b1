"""What storages and writers offer in order to join: small protocols that can be checked at run time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from torchrl_generational.concurrency.storage_lock import StorageLock
from torchrl_generational.generations.slot_generations import SlotGenerations

__all__ = ["StorageObserver", "SupportsGenerations", "TracksGenerations", "generations_on", "observers_of"]


@runtime_checkable
class SupportsGenerations(Protocol):
    """What a storage offers so that buffers, writers and samplers of this package work on it.

    The storage promises that every path by which a slot receives a new record (its ``set``, and ``_empty`` and loads,
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


@runtime_checkable
class StorageObserver(Protocol):
    """What a storage has to tell the buffers on it, each time with its lock held.

    TorchRL's storages know their buffers and mark records there; what this package adds stands here. Buffers of other
    kinds on the same storage are told nothing.
    """

    def _on_records_replaced(self) -> None:
        """All records are others: a restore or :meth:`empty` of another buffer replaced them."""

    def _on_records_torn(self, rows: torch.Tensor) -> None:
        """The slots ``rows``, int64 and below the storage's length, hold no record: a write to them did not end."""

    def _on_storage_unpickled(self) -> None:
        """The storage is complete. The buffer may not be yet, and hears of it anyway."""


def observers_of(storage: Any) -> Iterator[StorageObserver]:
    """The buffers on ``storage`` that are told what happens to it."""
    return (buffer for buffer in storage._attached_entities if isinstance(buffer, StorageObserver))


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
