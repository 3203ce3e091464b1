"""Storages: TorchRL's, with a :class:`SlotGenerations` beside the data.

The storage is the only place where stamps advance: every path by which a slot receives a new record ends in its
``set``, ``_empty`` or loads, whoever calls them. Stamps advance *before* data changes.
"""

from __future__ import annotations

import contextlib
import json
import os
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from torchrl.data.replay_buffers.storages import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorStorage,
)

from torchrl_generational.concurrency.storage_lock import StorageLock
from torchrl_generational.concurrency.write_access import refuse_write
from torchrl_generational.generations.indexing import as_count, as_rows, leading_shape, rows_written
from torchrl_generational.generations.protocols import observers_of
from torchrl_generational.generations.slot_generations import ReadyStamps, SlotGenerations
from torchrl_generational.persistence.kept_objects import refuse_lost_in_files, refuse_lost_in_state
from torchrl_generational.persistence.reading import holds_json
from torchrl_generational.persistence.restores import Plan, Saved, carry_out
from torchrl_generational.persistence.serialization import RECORD_OBJECTS, objects_in, to_plain, unshared
from torchrl_generational.records import record_io as records
from torchrl_generational.records.cursors import advanced, is_plain, plain_cursor
from torchrl_generational.records.incoming import (
    last_of_each,
    names_rows,
    refuse_varying_objects,
    select,
    without_handles,
)
from torchrl_generational.storages.checked_writes import CheckedWrites
from torchrl_generational.storages.loaded_records import METADATA, NEVER_WRITTEN_MARK, LoadedRecords
from torchrl_generational.tensors.arrays import index_array
from torchrl_generational.tensors.autograd_modes import as_normal, kept, making_what_is_kept
from torchrl_generational.tensors.compilation import is_traced
from torchrl_generational.tensors.same_width import apart, as_integers, indexes

__all__ = ["GenerationalLazyMemmapStorage", "GenerationalLazyTensorStorage", "GenerationalTensorStorage"]


class GenerationalStorageMixin(CheckedWrites):
    """Adds stamps and the lock that guards them to one of TorchRL's tensor storages.

    Attributes:
        lock: guards everything about this storage: data, length, stamps, and the samplers and writers of all buffers
            on it. Buffers take it; the methods here do not.
    """

    lock: StorageLock
    _generations: SlotGenerations  # guarded by lock
    _len: int  # TorchRL's, as the next; guarded by lock
    max_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with making_what_is_kept():
            super().__init__(*args, **kwargs)
        self.lock = StorageLock()
        # Rows of an n-D storage are known only after its first write, and never more than max_size.
        rows = self._num_rows() if self.initialized else self.max_size
        self._generations = SlotGenerations(rows, device=self._stamp_device())
        if self.initialized:  # built around existing records
            self._storage = kept(self._storage)
            self._generations.mark_written(rows)

    @property
    def supports_generations(self) -> bool:
        """True: the slots of this storage carry generations."""
        return True

    @property
    def slot_generations(self) -> SlotGenerations:
        """The stamps of the storage's dim-0 rows."""
        return self._generations

    @property
    def generations(self) -> torch.Tensor:
        """The stamps in the storage's index space, int64, on the storage's device. O(1).

        Shape ``[max_size]``, or ``[rows, ...]`` for a storage of several dimensions: an expanded view, since a write
        replaces whole rows. This is the live tensor: read it under :attr:`lock`, never write to it.
        """
        values = self._generations.values
        if self.ndim == 1 or not self.initialized:
            return values
        rows, *inner = self._total_shape
        return values[:rows].reshape(-1, *(1,) * len(inner)).expand(rows, *inner)

    @property
    def record_ndim(self) -> int:
        """Batch dimensions of one record: 1 where each slot stores a trajectory. Its handle repeats over them."""
        data = self._storage
        return data.ndim - self.ndim if self.initialized and is_tensor_collection(data) else 0

    # The attribute that TorchRL's writers read and write stamps by (checkpoints go through it as well).
    @property
    def _slot_generations(self) -> torch.Tensor:
        values = self._generations.values
        return values[: self._num_rows()] if self.initialized else values

    @_slot_generations.setter
    def _slot_generations(self, values: torch.Tensor) -> None:
        self._generations.restore(values)

    def _stamp_device(self) -> torch.device | str:
        """The storage's device, as far as it is known and can hold numbers."""
        if self.device in (None, "auto") or torch.device(self.device).type == "meta":
            return "cpu"
        device: torch.device | str = self.device
        return device

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Puts new records into slots: their stamps advance, then their data changes.

        Where a slot is named more than once, its stamp counts every record and its data is the last one's. Handles
        among the data (``index_generation`` of a sample that is written back) are not stored.

        Args:
            cursor: rows to write, in any form that TorchRL's storages accept.
            data: the records, leading dimensions as ``cursor``.
            set_cursor: whether this write moves the storage's notion of its newest record, and its length.

        Raises:
            IndexError: if a row lies outside the storage; nothing has changed then.
            RuntimeError: if an entry has another shape than those stored; nothing has changed then.
        """
        if is_traced() and not self._compilable:
            self._set_untraced(cursor, data, set_cursor)
            return
        data = without_handles(data)
        if isinstance(cursor, np.integer):
            cursor = int(cursor)
        if is_traced() and isinstance(cursor, torch.Tensor):
            # A traced graph cannot branch on what the cursor holds: it stamps, and torch checks the bounds.
            self._generations.advance(cursor)
            TensorStorage.set(self, cursor, data, set_cursor=set_cursor)  # super() cannot be traced here
            return
        if self.lock.elsewhere:
            refuse_write(self.lock)
        num_rows = self._rows_for(cursor, data)
        if not is_plain(cursor):
            cursor = plain_cursor(cursor, num_rows)
        rows = self._rows_of_cells(cursor) if isinstance(cursor, tuple) else rows_written(cursor, num_rows)
        if isinstance(rows, slice | torch.Tensor) and not as_count(rows, num_rows):
            return  # no record; TorchRL forgets which one is the newest then
        known = self.initialized or self.join()
        written: Any = rows  # each row once
        if isinstance(rows, torch.Tensor) and isinstance(cursor, torch.Tensor) and cursor.shape == rows.shape:
            keep = last_of_each(rows, num_rows)
            if keep is not None:
                came = len(data) if isinstance(data, list) else (*leading_shape(data), 0)[0]
                if came != rows.numel():
                    raise RuntimeError(
                        f"Got {came} records for {rows.numel()} rows. Nothing was written. Pass one per row."
                    )
                cursor, data, written = cursor[keep], select(data, keep), rows[keep]
        pairs = records.matched(self._storage, data, written) if known and names_rows(cursor) else None
        if pairs is None:
            data, pairs = self._checked(cursor, data, written, num_rows, exact=set_cursor)
        if self._writes is not None:
            self._about_to_write()
        try:
            self._generations.begin(rows)
            if pairs is None:
                with making_what_is_kept():
                    data, separate = apart(self._storage, data) if advanced(cursor) else (data, ())
                    super().set(as_normal(cursor), data, set_cursor=set_cursor)
                    for old, new in separate:
                        old[cursor] = new
            else:
                if set_cursor:
                    with making_what_is_kept() if self._compilable else contextlib.nullcontext():
                        self._set_last_cursor(as_normal(cursor))
                records.copy(pairs, written)
                self._bump_mutation_revision()
            if set_cursor:
                self.reach(rows)
        except BaseException:
            self.abandon(rows)
            raise
        self._generations.complete(rows)
        if self._writes is not None:
            self._wrote()
        if not known and self._generations.device != torch.device(self._stamp_device()):
            self._generations.to(self._stamp_device())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _set_untraced(self, cursor: Any, data: Any, set_cursor: bool) -> None:
        """A write of traced code to a storage that is not ``compilable``: its counters cannot be traced."""
        self.set(cursor, data, set_cursor=set_cursor)

    def get(self, index: Any) -> Any:
        """Records at ``index``, in any form that TorchRL's storages accept."""
        if self.initialized and not is_traced():
            lone = type(index) is tuple and len(index) == 1 and isinstance(index[0], torch.Tensor)
            where = index[0] if lone else index
            ndim = len(where) if type(where) is tuple and len(where) == self.ndim else 1
            cells = self._cells_within(where, ndim)
            found = None if cells is None else records.select(self._storage, cells, ndim)
            if found is not None:
                return found
        return super().get(index)

    def _cells_within(self, index: Any, ndim: int) -> torch.Tensor | None:
        """An index of records that are there, as int64 ``[B]`` over the first ``ndim`` dimensions taken as one.

        ``None`` if it takes a conversion, or names anything else.
        """
        if ndim == 1:
            length = self._len if self.ndim == 1 else self._len_along_dim0
            rows = index_array(index, length)
            return index if rows is not None and rows.ndim == 1 else None
        space = (int(self._len_along_dim0), *self._total_shape[1:])
        found = [index_array(part, size) for part, size in zip(index, space, strict=True)]
        parts = [part for part in found if part is not None and part.ndim == 1]
        if len(parts) < ndim or len({part.shape for part in parts}) > 1:
            return None
        return torch.from_numpy(np.ravel_multi_index(parts, space))

    def _apply_conditional_patch(self, index: torch.Tensor, patch: Any) -> None:
        self._about_to_write()
        rows = index[:, 0] if index.ndim > 1 else index
        self._generations.mark(rows)
        coordinates = tuple(index.unbind(-1)) if index.ndim > 1 else (index,)
        separate = [key for key, value in patch.items() if not indexes(value.dtype)]
        with torch.no_grad():
            for key in separate:
                as_integers(self._conditional_patch_leaf(key))[coordinates] = as_integers(patch[key])
            super()._apply_conditional_patch(index, {key: patch[key] for key in patch if key not in separate})
        self._generations.complete(rows)
        self._wrote()

    def abandon(self, rows: int | slice | torch.Tensor) -> None:
        """A write to ``rows`` did not end: they hold no record until the next one, and are not drawn."""
        self._generations.abandon(rows)
        self._wrote()
        reached = int(self._len_along_dim0 or 0)
        torn = as_rows(rows, self._generations.num_rows)
        for observer in observers_of(self):
            observer._on_records_torn(torn[torn < reached])

    def _get_new_len(self, data: Any, cursor: Any) -> None:
        """TorchRL counts the records written, before it writes them. See :meth:`reach`."""
        if is_traced():
            super()._get_new_len(data, cursor)

    def reach(self, rows: int | slice | torch.Tensor) -> None:
        """Extends the length to the last row written, once its data is there.

        Where several buffers write with cursors of their own, a count would reach slots that were never written.
        """
        if isinstance(rows, slice):
            named = range(self._num_rows())[rows]
            end = max(named[0], named[-1]) + 1 if named else 0
        elif isinstance(rows, torch.Tensor):
            end = int(rows.max()) + 1 if rows.numel() else 0
        else:
            end = rows + 1
        cells = end if self.ndim == 1 else end * torch.Size(self._total_shape[1:]).numel()
        if cells > self._len:
            self._len = cells

    def _empty(self) -> None:
        self._about_to_write()
        self._generations.invalidate()
        super()._empty()
        self._wrote()

    def __getstate__(self) -> dict[str, Any]:
        """For a process being spawned the memory itself; any other copy gets records and stamps of one moment."""
        spawning = get_spawning_popen() is not None
        moment = contextlib.nullcontext() if spawning else self._of_one_moment()
        with self.lock, making_what_is_kept(), moment:
            if spawning:
                self.share()
            state: dict[str, Any] = super().__getstate__()
            if not spawning:
                state["_storage"] = unshared(state["_storage"])
                state["_generations"] = self._generations.clone()
                self._without_files(state)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        with making_what_is_kept():
            super().__setstate__(state)
        if self.initialized and not self._generations.is_shared:
            self._storage = kept(self._storage)
        for observer in observers_of(self):
            observer._on_storage_unpickled()

    @making_what_is_kept()
    def state_dict(self) -> dict[str, Any]:
        """One consistent snapshot: later writes do not show in it, as they do in TorchRL's.

        Entries that are no tensors, which TorchRL leaves out, are in it too.
        """
        refuse_lost_in_state(self._storage)
        with self._of_one_moment():
            state: dict[str, Any] = super().state_dict()
            state["_storage"] = unshared(state["_storage"])
        if is_tensor_collection(self._storage):
            state[RECORD_OBJECTS] = [[list(key), to_plain(entry)] for key, entry in objects_in(self._storage)]
        return state

    def _load_as_torchrl(self, state_dict: dict[str, Any]) -> None:
        """TorchRL's own, for a storage that stands in for this one until everything is checked."""
        super().load_state_dict(state_dict)

    @making_what_is_kept()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces all records: every handle taken before is stale, unless the writer's state brings stamps.

        Raises:
            ValueError: if the state does not fit; nothing has changed then.
        """
        carry_out(lambda plan: self.plan(plan, LoadedRecords.of(self, Saved(state_dict))))

    def dumps(self, path: str | Path) -> None:
        """Saves the records as TorchRL does, and also a storage without any."""
        refuse_lost_in_files(self)
        if self.initialized:
            if self._last_cursor is None:  # never written here: the records are in order
                self._set_last_cursor(as_normal(torch.tensor([max(int(self._len_along_dim0) - 1, 0)], device="cpu")))
            with self._of_one_moment():
                self._mend_metadata(Path(path))
                super().dumps(path)
            return
        Path(path).mkdir(exist_ok=True)
        nothing = {"metadata": {}, "is_pytree": False, "len": 0, NEVER_WRITTEN_MARK: True}
        (Path(path) / METADATA).write_text(json.dumps(nothing))

    def _mend_metadata(self, path: Path) -> None:
        """Writes the metadata of the storage's own files anew where a process was killed while it wrote them.

        tensordict reads them before it saves records to where they lie.
        """
        held = self._storage
        mapped = is_tensor_collection(held) and held.is_memmap() and held.saved_path
        in_place = mapped and Path(held.saved_path).absolute() == path.absolute()
        if in_place and not all(map(holds_json, {path / "meta.json", *path.rglob("meta.json")})):
            held.memmap_()

    @making_what_is_kept()
    def loads(self, path: str | Path) -> None:
        """Replaces all records: every handle taken before is stale, unless the writer's state brings stamps.

        Raises:
            FileNotFoundError: if a file is missing; nothing has changed then.
            ValueError: if what was saved does not fit, or is damaged; nothing has changed then.
        """
        carry_out(lambda plan: self.plan(plan, LoadedRecords.of(self, Saved(folder=Path(path)))))

    def plan(self, plan: Plan, loaded: LoadedRecords, stamps: ReadyStamps | None = None, *, loader: Any = None) -> None:
        """Plans to put loaded records in place.

        Args:
            plan: of the restore. Lock held until it is carried out.
            loaded: the records.
            stamps: theirs; ``None``: new ones, with which every handle is stale.
            loader: the buffer that takes over its sampler and writer as well. Others on this storage start again.

        Raises:
            ValueError: if this storage has been restored too often.
        """
        plan.discard(loaded.discard)
        try:
            ready = self._generations.replacement(loaded.rows) if stamps is None else stamps
        except OverflowError as error:
            raise ValueError(f"{error} Nothing was loaded.") from None

        refuse_write(self.lock)

        def install() -> None:
            self._about_to_write()
            self._generations.withdraw()
            loaded.install()
            if self.initialized and self._storage is not None:
                self._storage = kept(self._storage)
            if self._generations.device != torch.device(self._stamp_device()):
                self._generations.to(self._stamp_device())
            self._generations.install(ready)
            self._wrote()

        def start_others() -> None:
            for observer in observers_of(self):
                if observer is not loader:
                    observer._on_records_replaced()

        plan.install(install)
        plan.install(start_others, last=True)


class GenerationalTensorStorage(GenerationalStorageMixin, TensorStorage):
    """:class:`~torchrl.data.replay_buffers.storages.TensorStorage` with a generation per slot.

    Takes the arguments of its TorchRL parent, in their order. The records it is built around count as the first of
    their slots: generation 0. The stamps cost 8 bytes per row.

    Example:
        >>> storage = GenerationalTensorStorage(torch.zeros(3, 2))
        >>> storage.generations
        tensor([0, 0, 0])
        >>> storage[1] = torch.ones(2)
        >>> storage.generations
        tensor([0, 1, 0])
    """


class GenerationalLazyTensorStorage(GenerationalStorageMixin, LazyTensorStorage):
    """:class:`~torchrl.data.replay_buffers.storages.LazyTensorStorage` with a generation per slot.

    Takes the arguments of its TorchRL parent, in their order. The stamps cost 8 bytes per slot, allocated here.

    Example:
        >>> storage = GenerationalLazyTensorStorage(4)
        >>> storage.set(range(2), torch.zeros(2))
        >>> storage.generations
        tensor([ 0,  0, -1, -1])
    """


class GenerationalLazyMemmapStorage(GenerationalStorageMixin, LazyMemmapStorage):
    """:class:`~torchrl.data.replay_buffers.storages.LazyMemmapStorage` with a generation per slot.

    Takes the arguments of its TorchRL parent, in their order. The records lie in memory-mapped files, the stamps
    (8 bytes per slot) in memory.

    Example:
        >>> storage = GenerationalLazyMemmapStorage(4)
        >>> storage.set(range(2), torch.zeros(2))
        >>> storage.generations
        tensor([ 0,  0, -1, -1])
    """

    def _refuse_objects(self, data: Any) -> None:
        refuse_varying_objects(self._storage if self.initialized else None, data)

    def cleanup(self) -> bool:
        """Removes the files, in the process that made the storage; does nothing in others."""
        removed: bool = os.getpid() == self._maker and super().cleanup()
        if removed and self._folder_lock is not None:
            self._folder_lock.close()
        return removed
