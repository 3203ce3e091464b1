"""Item assignment and changes of fields, checked before anything changes."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, is_tensor_collection

from torchrl_generational.buffers.base import BufferBase
from torchrl_generational.records.cursors import plain_cursor, rows_named
from torchrl_generational.records.write_checks import check_fields, check_write
from torchrl_generational.tensors.same_width import assign, holds_unindexed

__all__ = ["FieldUpdates"]


class FieldUpdates(BufferBase):
    """TorchRL's unconditional changes of fields, which change all of what they were given or nothing.

    The records stay, and so do their stamps.
    """

    @torch.no_grad()  # what needs a gradient is written without it
    def set_at_(self, key: Any, value: Any, index: Any) -> Any:
        """Sets a field of the records at ``index``; see TorchRL's.

        Raises:
            KeyError: if there is no such field.
            RuntimeError, TypeError, IndexError: if the values do not fit; nothing has changed then.
        """
        self._ready()
        self._refuse_write()
        with self._exclusive():
            self._check_fields([(key, value)], index)
            held = self._storage._storage
            if is_tensor_collection(held) and holds_unindexed(held.get(key)):
                assign(self._storage.get(slice(None)).get(key), plain_cursor(index, len(self._storage)), value)
                self._storage._bump_mutation_revision()
                return self
            return super().set_at_(key, value, index)

    @torch.no_grad()  # what needs a gradient is written without it
    def set_(self, key: Any, value: Any) -> Any:
        """Sets a field of all records; see TorchRL's. Raises as :meth:`set_at_`."""
        self._ready()
        self._refuse_write()
        with self._exclusive():
            self._check_fields([(key, value)])
            return super().set_(key, value)

    @torch.no_grad()  # what needs a gradient is written without it
    def update_(self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None) -> Any:
        """Sets fields of all records; see TorchRL's. Raises as :meth:`set_at_`."""
        self._ready()
        self._refuse_write()
        with self._exclusive():
            if is_tensor_collection(input_dict_or_td) or isinstance(input_dict_or_td, dict):
                given = input_dict_or_td
                if keys_to_update is not None and is_tensor_collection(given):
                    given = given.select(*keys_to_update, strict=False)
                elif keys_to_update is not None:
                    given = {key: value for key, value in given.items() if key in keys_to_update}
                self._check_fields(list(given.items()))
                if isinstance(given, LazyStackedTensorDict):
                    _refuse_of_some(given)
            return super().update_(input_dict_or_td, clone, keys_to_update=keys_to_update)

    def _check_fields(self, fields: Any, index: Any = slice(None)) -> None:
        """Refuses fields of which one does not fit. Lock held."""
        storage = self._storage
        held = storage._storage
        if is_tensor_collection(held):  # others TorchRL refuses itself
            records = storage.get(slice(None))
            check_fields(records, plain_cursor(index, len(records)), fields)

    def _set_field(self, key: Any, value: Any) -> None:
        """``self[key] = value``. Lock held."""
        held = self._storage._storage
        if is_tensor_collection(held) and key in held.keys(True):
            # TorchRL writes to a copy unless the buffer is full, and then puts the caller's tensor in place
            self.set_(key, value)
        elif is_tensor_collection(held) and self._storage._is_full:
            held[key] = value
            self._storage._bump_mutation_revision()
        else:
            raise KeyError(
                f"The records have no entry {key!r}, and only a full buffer of tensordicts can be given a new one. "
                "Nothing was written. Give every record the entry when it is written."
            )

    def _checked_view(self, index: tuple[Any, ...], value: Any) -> tuple[Any, Any, Any, torch.Tensor]:
        """The records that are there, as ``self[:]`` has them; where to write; what; and the rows of that. Lock held.

        Raises:
            TypeError, ValueError, RuntimeError, IndexError: if ``self[:][index] = value`` would fail, or leave new
                records with entries of their predecessors.
        """
        storage = self._storage
        if not getattr(storage, "initialized", True):
            raise RuntimeError("Cannot set records of an empty buffer. Nothing was written. Use add() or extend().")
        held = storage.get(slice(None))
        if not isinstance(held, torch.Tensor) and not is_tensor_collection(held):
            raise TypeError(
                f"Records of type {type(held).__name__} take no coordinates. Nothing was written. Name whole rows: "
                "buffer[rows] = records."
            )
        index = plain_cursor(index)
        rows = rows_named(index, held.shape, self.dim_extend)
        view = held.transpose(0, self.dim_extend) if self.dim_extend else held
        return view, index, check_write(storage, view, index, value), rows

    def _check_consumed(self, data: Any, count: int | None) -> None:
        """Refuses what the storage would, before a consuming sampler gives up the slots for it. Lock held."""
        if self._is_consuming() and self._storage.ndim == 1 and hasattr(self._storage, "check"):
            self._storage.check(data, count)


def _refuse_of_some(given: LazyStackedTensorDict) -> None:
    """Refuses entries that only some of the records have, which such a stack does not name."""
    named, some = set(given.keys(True, True)), {key for data in given.tensordicts for key in data.keys(True, True)}
    if some - named:
        raise KeyError(
            f"Only some of the records have the entries {sorted(map(str, some - named))}. Nothing was changed. Give "
            "them to all, or to none."
        )
