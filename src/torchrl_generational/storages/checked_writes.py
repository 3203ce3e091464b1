"""What a storage does with records before it writes them: it checks them, and makes room for the first ones."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection
from torch.utils._pytree import tree_leaves, tree_map

from torchrl_generational.records import record_io as records
from torchrl_generational.records.cursors import advanced, rows_named
from torchrl_generational.records.incoming import names_rows, without_handles
from torchrl_generational.records.write_checks import check_first, check_write
from torchrl_generational.storages.shared_storage import SharableStorage
from torchrl_generational.tensors.autograd_modes import making_what_is_kept
from torchrl_generational.tensors.compilation import is_traced
from torchrl_generational.tensors.same_width import apart, as_integers, holds_unindexed

__all__ = ["CheckedWrites"]


class CheckedWrites(SharableStorage):
    """The part of a generational storage that looks at records before any stamp moves."""

    def _checked(
        self, cursor: Any, data: Any, rows: Any, num_rows: int, *, exact: bool
    ) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]] | None]:
        """Refuses records that would not be written whole; returns them, and what of them can just be copied.

        Makes the records' memory if these are the first ones.
        """
        stored = self._storage if self.initialized else check_first(cursor, data, num_rows)
        # torch would convert what goes to a slice, and does not once the ring wraps: a writer's records go to either
        data = check_write(self, stored, cursor, data, exact=exact and isinstance(cursor, slice))
        self._refuse_objects(data)
        if not self.initialized:
            first = data
            if not isinstance(cursor, int):
                first = data[0] if is_tensor_collection(data) else tree_map(lambda leaf: leaf[0], data)
            if isinstance(first, TensorDict) and first.device is not None and self.device != "auto":
                first = (
                    first.copy().clear_device_()
                )  # with one, tensordict copies by additions: not all dtypes have any
            with making_what_is_kept():
                self._init(first)
        if advanced(cursor) and isinstance(data, LazyStackedTensorDict) and holds_unindexed(self._storage):
            data = data.contiguous()
        pairs = records.matched(self._storage, data, rows) if names_rows(cursor) else None
        if pairs is None and advanced(cursor):
            apart(self._storage, data)
        return data, pairs

    def check(self, data: Any, count: int | None) -> None:
        """Refuses what :meth:`set` would refuse, whatever rows it goes to; see there. Changes nothing.

        Args:
            data: records.
            count: how many; ``None`` for a single one without a dimension for them.
        """
        data, cursor = without_handles(data), 0 if count is None else torch.arange(count, device="cpu")
        if self.initialized or self.join():
            stored = self._storage
        else:
            stored = check_first(cursor, data, self._rows_for(cursor, data))
        check_write(self, stored, cursor, data)
        self._refuse_objects(data)

    def _num_rows(self) -> int:
        """Rows along dim 0 of an initialised storage."""
        return int(self.max_size) if self.ndim == 1 else int(self._total_shape[0])

    def _rows_for(self, cursor: Any, data: Any) -> int:
        if self.initialized or self.ndim == 1:
            return self._num_rows()
        if isinstance(cursor, int) or (isinstance(cursor, torch.Tensor) and cursor.ndim == 0):
            return int(self._max_size_along_dim0(single_data=data))
        if isinstance(data, list):
            return int(self._max_size_along_dim0(single_data=data[0]))
        return int(self._max_size_along_dim0(batched_data=data))

    def _rows_of_cells(self, cursor: tuple[Any, ...]) -> torch.Tensor:
        """The rows of which a tuple of coordinates names any part."""
        if not self.initialized and not self.join():
            raise IndexError(
                "The first records of a storage cannot go to coordinates, since its shape is not known yet. Nothing "
                "was written. Write whole rows first."
            )
        held = self._storage if is_tensor_collection(self._storage) else tree_leaves(self._storage)[0]
        return rows_named(cursor, held.shape)

    def _set_tree_map(self, cursor: Any, data: Any, storage: Any) -> None:
        if advanced(cursor) and not is_traced():
            data, storage = (tree_map(as_integers, part) for part in (data, storage))
        super()._set_tree_map(cursor, data, storage)

    def _refuse_objects(self, data: Any) -> None:
        """Refuses entries that are no tensors, where the storage cannot keep them."""
