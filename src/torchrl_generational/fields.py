"""Writes to fields of the records that are there, which keep their handles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torchrl.data.replay_buffers import ReplayBuffer

__all__ = ["FieldWrites"]

# A plain class in front of a buffer, because TorchRL's buffers have a metaclass of their own.
_Buffer: Any = ReplayBuffer if TYPE_CHECKING else object


class FieldWrites(_Buffer):  # type: ignore[misc]  # TorchRL is untyped
    """TorchRL's writes to fields: what needs a gradient is written without it."""

    @torch.no_grad()
    def set_(self, key: Any, value: Any) -> Any:
        """Sets an entry of all records in place; see TorchRL's ``set_``."""
        return super().set_(key, value)

    @torch.no_grad()
    def set_at_(self, key: Any, value: Any, index: Any) -> Any:
        """Sets an entry of some records in place; see TorchRL's ``set_at_``."""
        return super().set_at_(key, value, index)

    @torch.no_grad()
    def update_(self, input_dict_or_td: Any, clone: bool = False, **kwargs: Any) -> Any:
        """Updates entries of all records in place; see TorchRL's ``update_``."""
        return super().update_(input_dict_or_td, clone, **kwargs)
