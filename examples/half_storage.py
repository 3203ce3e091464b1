"""A storage of one's own that joins: it keeps floating-point entries in half precision, and stamps its slots.

Written against the protocol ``SupportsGenerations`` alone. ``test_half_storage.py`` runs the race suite on it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage

from torchrl_generational import SlotGenerations, StorageLock


class HalfStorage(LazyTensorStorage):
    """TorchRL's storage of one dimension, at half the memory for observations and rewards."""

    supports_generations = True

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.lock = StorageLock()  # buffers hold it; nothing here takes it
        self.slot_generations = SlotGenerations(max_size)

    @property
    def generations(self) -> torch.Tensor:
        """One generation per valid index."""
        return self.slot_generations.values

    def set(self, cursor: Any, data: TensorDictBase, *, set_cursor: bool = True) -> None:
        """New records: their stamps advance first, then their data changes."""
        self.slot_generations.advance(torch.as_tensor(cursor).reshape(-1))
        super().set(cursor, data.apply(_halved), set_cursor=set_cursor)

    def _empty(self) -> None:
        self.slot_generations.invalidate()
        super()._empty()

    def state_dict(self) -> dict[str, Any]:
        """A snapshot: TorchRL's is a view of live records, beside a copy of their stamps."""
        return copy.deepcopy(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Other records: every handle is stale, unless the writer's state brings their stamps back."""
        super().load_state_dict(state_dict)
        self.slot_generations.replaced(len(self))

    def loads(self, path: Any) -> None:
        """As :meth:`load_state_dict`."""
        super().loads(path)
        self.slot_generations.replaced(len(self))


def _halved(entry: torch.Tensor) -> torch.Tensor:
    return entry.half() if entry.is_floating_point() else entry
