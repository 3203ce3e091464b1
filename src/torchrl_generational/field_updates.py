"""Changes of stored fields: checked before the first field changes. The records stay, and so do their stamps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensordict import is_tensor_collection
from torchrl.data.replay_buffers import ReplayBuffer

from torchrl_generational.cursors import plain_cursor
from torchrl_generational.write_checks import check_fields

__all__ = ["FieldUpdates"]

# A plain class in front of a buffer, because TorchRL's buffers have a metaclass of their own.
_Buffer: Any = ReplayBuffer if TYPE_CHECKING else object


class FieldUpdates(_Buffer):  # type: ignore[misc]  # TorchRL is untyped
    """TorchRL's unconditional changes of fields, which change all of what they were given or nothing."""

    def set_at_(self, key: Any, value: Any, index: Any) -> Any:
        """Sets a field of the records at ``index``; see TorchRL's.

        Raises:
            KeyError: if there is no such field.
            RuntimeError, TypeError, IndexError: if the values do not fit; nothing has changed then.
        """
        self._ready()
        with self._exclusive():
            self._check_fields([(key, value)], index)
            return super().set_at_(key, value, index)

    def set_(self, key: Any, value: Any) -> Any:
        """Sets a field of all records; see TorchRL's. Raises as :meth:`set_at_`."""
        self._ready()
        with self._exclusive():
            self._check_fields([(key, value)])
            return super().set_(key, value)

    def update_(self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None) -> Any:
        """Sets fields of all records; see TorchRL's. Raises as :meth:`set_at_`."""
        self._ready()
        with self._exclusive():
            if is_tensor_collection(input_dict_or_td) or isinstance(input_dict_or_td, dict):
                given = input_dict_or_td
                if keys_to_update is not None and is_tensor_collection(given):
                    given = given.select(*keys_to_update, strict=False)
                elif keys_to_update is not None:
                    given = {key: value for key, value in given.items() if key in keys_to_update}
                self._check_fields(list(given.items()))
            return super().update_(input_dict_or_td, clone, keys_to_update=keys_to_update)

    def _check_fields(self, fields: Any, index: Any = slice(None)) -> None:
        """Refuses fields of which one does not fit. Lock held."""
        storage = self._storage
        held = storage._storage
        if is_tensor_collection(held):  # others TorchRL refuses itself
            records = storage.get(slice(None))
            check_fields(records, plain_cursor(index, len(records)), fields)
