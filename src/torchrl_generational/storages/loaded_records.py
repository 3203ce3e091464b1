"""Saved records beside a storage: read, checked against what it holds, and put in place by steps without a way back."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor, NonTensorData, NonTensorStack, TensorDict
from tensordict import is_tensor_collection as is_collection
from torch.utils._pytree import tree_map
from torchrl.data.replay_buffers import TensorStorage
from torchrl.data.replay_buffers.checkpointers import TensorStorageCheckpointer
from torchrl.data.replay_buffers.storages import LazyMemmapStorage
from torchrl.data.replay_buffers.utils import Flat2TED

from torchrl_generational.concurrency.shared_counter import SharedCounter
from torchrl_generational.persistence.kept_objects import refuse_other_objects, take_objects
from torchrl_generational.persistence.reading import read_json, reading
from torchrl_generational.persistence.restores import Saved, fitting
from torchrl_generational.persistence.serialization import RECORD_OBJECTS, from_plain, objects_in
from torchrl_generational.records.saved_records import (
    check_pytree,
    check_records,
    file_of,
    leaves_of,
    refuse_length,
    refuse_unlike,
)

__all__ = ["METADATA", "NEVER_WRITTEN_MARK", "LoadedRecords"]

METADATA = "storage_metadata.json"  # TorchRL's
NEVER_WRITTEN_MARK = "never_written"  # in it: saved before the first write

_LIKE = "Nothing was loaded. Load it into a buffer like the one that it was saved from."
_SAME = "Nothing was loaded. Load it into a buffer of the same capacity."
_APART = ("_generations", "_attached_entities_list", "_checkpointer", "lock")  # of a storage, not of its records


class LoadedRecords:
    """The records of a checkpoint, ready to take the place of those in a storage.

    Attributes:
        length: how many there are.
        capacity: rows along dim 0.
        rows: how many of them hold one.
        install: puts them in place, in a step that can be taken again wherever it was left; stamps come after it.
        discard: clears away what was made on the disk for them, if they are not installed after all.
    """

    __slots__ = ("capacity", "discard", "install", "length", "rows")

    def __init__(
        self, storage: Any, records: Any, length: int, install: Callable[[], None], discard: Callable[[], None]
    ) -> None:
        self.length, self.discard = length, discard
        leaf = next(iter(leaves_of(records).values()), None)
        self.capacity = storage.slot_generations.num_rows if leaf is None else leaf.shape[0]
        self.rows = length if leaf is None else -(-length // max(math.prod(leaf.shape[1 : storage.ndim]), 1))

        def put() -> None:
            install()
            storage._len = length
            if storage.initialized and storage.ndim > 1 and storage._storage is not None:
                # as at a first write; TorchRL leaves the capacity that was asked for, and misjudges when it is full
                storage.max_size = max(storage.max_size, storage._total_shape.numel())
            storage._bump_mutation_revision()

        self.install = put

    @classmethod
    def of(cls, storage: TensorStorage, saved: Saved) -> LoadedRecords:
        """Reads a storage's state, or what it saved in a folder; neither: no records were saved.

        Raises:
            FileNotFoundError: if a file is missing.
            ValueError: if it does not fit, or is damaged.
        """
        if saved.nothing:
            return cls._none(storage)
        return cls._from_state(storage, saved.state) if saved.folder is None else cls._from_path(storage, saved.folder)

    @classmethod
    def _from_state(cls, storage: TensorStorage, state: Any) -> LoadedRecords:
        names = ("_storage", "initialized", "_len")
        if not isinstance(state, dict) or any(name not in state for name in names):
            has = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"The storage's state should have {list(names)}, got {has}. {_LIKE}")
        length = state["_len"]
        refuse_length(length)
        if type(state["initialized"]) is not bool:
            raise ValueError(
                f"The storage's state has initialized={state['initialized']!r:.80}: it is damaged. {_LIKE}"
            )
        if not state["initialized"]:
            return cls._none(storage)
        saved = _records_in(state["_storage"], storage)
        objects = _objects(state.get(RECORD_OBJECTS, ()))
        check_records(storage, saved, length)
        if storage.initialized:
            kept = {key for key, _ in objects}
            lacking = [key for key, _ in _objects_of(storage._storage) if key not in kept]
            if lacking:
                raise ValueError(
                    f"The checkpoint lacks the entries {lacking} that are no tensors, as TorchRL's state_dict does: "
                    f"records would keep those of others. {_LIKE}"
                )
            return cls._over(storage, saved, length, objects)
        what = "What the checkpoint has as records"
        with _scratch(storage) as discard, stand_in(storage) as twin, _loading(discard, what):
            twin._load_as_torchrl(state)
            _set_objects(twin._storage, objects)
            check_records(storage, twin._storage, length)
            return cls._first(storage, twin, length, discard)

    @classmethod
    def _from_path(cls, storage: TensorStorage, folder: Path) -> LoadedRecords:
        checkpointer = storage.checkpointer
        plain = type(checkpointer) is TensorStorageCheckpointer and not checkpointer._load_hooks
        file = folder / METADATA
        if file.exists() or plain:
            metadata = read_json(file)
            if metadata.get(NEVER_WRITTEN_MARK):
                return cls._none(storage)
            refuse_length(metadata.get("len"))
            if plain and metadata.get("is_pytree") is False:
                with reading(folder):
                    saved = TensorDict.load_memmap(folder)
                check_records(storage, saved, metadata["len"])
                if storage.initialized:
                    return cls._over(storage, saved, metadata["len"], list(_objects_of(saved)), everything=True)
            if plain and storage.initialized:
                check_pytree(storage, metadata)
        with _scratch(storage) as discard, stand_in(storage) as twin, _loading(discard, f"{folder}"):
            twin._checkpointer.loads(twin, folder)
            if plain:  # other layouts keep numbers of their own there
                take_objects(twin._storage, folder)
            length = twin._len
            check_records(storage, twin._storage, length)
            if storage.initialized:
                return cls._over(storage, twin._storage, length, list(_objects_of(twin._storage)))
            return cls._first(storage, twin, length, discard)

    @classmethod
    def _none(cls, storage: Any) -> LoadedRecords:
        """Saved before the first write. TorchRL's storages have no way back to one that knows no shapes."""
        return cls(storage, None, 0, _nothing, _nothing)

    @classmethod
    def _over(
        cls, storage: Any, saved: Any, length: int, objects: list[tuple[Any, Any]], everything: bool = False
    ) -> LoadedRecords:
        """Over the records of a storage that has some: in place, where processes and other views of them look."""
        refuse_other_objects(storage._storage, (key for key, _ in objects))
        own = leaves_of(storage._storage)
        pairs = [(own[name], leaf) for name, leaf in leaves_of(saved, like=storage._storage).items() if name in own]
        pairs = [(held, leaf) for held, leaf in pairs if file_of(held) is None or file_of(held) != file_of(leaf)]
        if everything:  # objects that lie in the files are those of both
            same = storage._storage is not None and _same_files(storage._storage, saved)
            objects = [] if same else objects

        def install() -> None:
            for held, leaf in pairs:
                held.copy_(leaf)
            _set_objects(storage._storage, objects)

        return cls(storage, saved, length, install, _nothing)

    @classmethod
    def _first(cls, storage: Any, twin: Any, length: int, discard: Callable[[], None]) -> LoadedRecords:
        """Into a storage that has never been written, as a first write."""
        if storage._published is not None:  # other processes join it
            try:
                records = storage.place(twin._storage)
            except TypeError as error:
                raise ValueError(f"{error} Nothing was loaded.") from error
            return cls(storage, records, length, lambda: storage.adopt(records), discard)
        kept = {name for name, held in vars(twin).items() if isinstance(held, SharedCounter)} | set(_APART)
        changed = {
            name: held
            for name, held in vars(twin).items()
            if name not in kept and vars(storage).get(name, storage) is not held
        }
        changed.pop("_auto_cleanup", None)
        return cls(storage, twin._storage, length, lambda: vars(storage).update(changed), discard)


def _nothing() -> None:
    pass


# ---------------------------------------------------------------- states


def _records_in(saved: Any, storage: Any) -> Any:
    """The tensors of a storage's state, as one tensor or in a tensordict that shares them."""
    if isinstance(saved, torch.Tensor):
        return saved
    if not isinstance(saved, dict):
        raise ValueError(f"The records of the checkpoint are a {type(saved).__name__}, which no state has. {_LIKE}")
    wrong = {str(key): type(entry).__name__ for key, entry in saved.items() if not _belongs(key, entry)}
    if wrong or not saved:
        raise ValueError(f"The checkpoint has {wrong or 'nothing'} where tensors belong: it is damaged. {_LIKE}")
    with fitting("What the checkpoint has as records"):
        if hasattr(saved, "_metadata") or "__batch_size" in saved:
            return TensorDict().load_state_dict(copy(saved), strict=False)
        return TensorDict(saved, []).unflatten_keys(".")  # a copy without the attribute in which tensordict keeps sizes


def _belongs(key: Any, entry: Any) -> bool:
    """Whether an entry is one that the state of a tensordict has: flat, nested, or of an earlier version's sizes."""
    return isinstance(entry, torch.Tensor | dict) or key in ("__batch_size", "__device")


def _same_files(own: Any, saved: Any) -> bool:
    theirs = [file_of(leaf) for leaf in leaves_of(saved).values()]
    return bool(theirs) and None not in theirs and theirs == [file_of(leaf) for leaf in leaves_of(own).values()]


# ---------------------------------------------------------------- entries that are no tensors


def _objects_of(records: Any) -> Iterator[tuple[Any, Any]]:
    yield from objects_in(records) if is_collection(records) else ()


def _objects(saved: Any) -> list[tuple[Any, Any]]:
    with fitting("What the checkpoint has as entries that are no tensors"):
        objects = [(tuple(key), from_plain(entry)) for key, entry in saved]
    for key, entry in objects:
        if not all(isinstance(part, str) for part in key) or not isinstance(entry, NonTensorData | NonTensorStack):
            raise ValueError(f"The checkpoint's entry {key} that is no tensor is a {type(entry).__name__}. {_LIKE}")
    return objects


def _set_objects(records: Any, objects: list[tuple[Any, Any]]) -> None:
    for key, entry in objects:
        with records.unlock_():
            records.set(key, entry)


# ---------------------------------------------------------------- what only TorchRL's code can read


@contextlib.contextmanager
def stand_in(storage: Any) -> Iterator[Any]:
    """A storage like another, with blank records where that has some, for TorchRL's code to load into."""
    twin: Any = object.__new__(type(storage))
    held = vars(twin)
    held.update(vars(storage))
    for name, counter in vars(storage).items():
        if isinstance(counter, SharedCounter):
            held[name] = SharedCounter(counter.value)
    held["_attached_entities_list"], held["_auto_cleanup"] = [], False  # files are the storage's
    if storage._published is not None:
        held["shared_init"], held["scratch_dir"] = False, None
    if storage.initialized:
        data = storage._storage
        held["_storage"] = data.apply(_blank) if is_collection(data) else tree_map(_blank, data)
    checkpointer = held["_checkpointer"] = copy(storage.checkpointer)
    hooks = getattr(checkpointer, "_load_hooks", None)
    if hooks:
        checkpointer._load_hooks = [_turning(hook) if isinstance(hook, Flat2TED) else hook for hook in hooks]
    try:
        yield twin
    finally:
        held["_cleaned_up"] = True


def _blank(leaf: torch.Tensor) -> torch.Tensor:
    """Zeros like a tensor, in a file where that is in one: there may not be the memory."""
    if isinstance(leaf, MemoryMappedTensor):
        blank: torch.Tensor = MemoryMappedTensor.zeros(leaf.shape, dtype=leaf.dtype)
        return blank
    return torch.zeros_like(leaf)


def _turning(hook: Any) -> Callable[..., Any]:
    """TorchRL's hook of the compact layouts, with what it gets wrong about full rings.

    Its ``_roll_inplace`` fails for a roll by the whole length, which is that of a ring whose cursor is back at slot 0:
    a slice ``[:-length]`` is empty, and ``[-0:]`` everything. So in 0.14.1 and on main as of 2026-08-22; once it is
    mended there, dropping the shift changes nothing.
    """

    def turn(data: Any, out: Any = None) -> Any:
        shift = data.get_non_tensor(hook.shift_key, default=None)
        shape = data.get_non_tensor("_storage_shape", default=None)
        rows = shape if isinstance(shape, int) else shape[0]
        if shift is not None and data.get_non_tensor(hook.is_full_key, default=None) and shift % rows == 0:
            data = data.exclude(hook.shift_key)
        if out is not None:  # it would cast
            own = leaves_of(out)
            for name, leaf in leaves_of(data).items():
                held = own.get(name, own.get(f"next.{name}"))
                if held is not None and held.dtype != leaf.dtype:
                    refuse_unlike(name, (), leaf.dtype, held.new_empty(()))
        return hook(data, out=out)

    return turn


@contextlib.contextmanager
def _loading(discard: Callable[[], None], what: str) -> Iterator[None]:
    """Clears away what a load that fails has made, and says what does not fit."""
    try:
        with fitting(what):
            yield
    except BaseException:
        discard()
        raise


@contextlib.contextmanager
def _scratch(storage: Any) -> Iterator[Callable[[], None]]:
    """What removes the files that a first load makes in the folder of a memory-mapped storage."""
    folder = getattr(storage, "scratch_dir", None)
    if storage._published is not None:
        yield storage.clear_files
        return
    if storage.initialized or not isinstance(storage, LazyMemmapStorage) or folder is None:
        yield _nothing
        return
    was_there = os.path.isdir(folder)
    before = set(os.listdir(folder)) if was_there else set()

    def discard() -> None:
        with contextlib.suppress(OSError):
            for name in set(os.listdir(folder)) - before:
                path = os.path.join(folder, name)
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
            if not was_there:
                os.rmdir(folder)

    yield discard
