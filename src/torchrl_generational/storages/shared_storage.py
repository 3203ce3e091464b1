"""Storages that several processes write to: memory that they share, counters without locks, and a first write by any.

Nothing here outlives a process that is killed: there is no lock but the storage's, which the kernel gives back, and
what a first write left half-made is made again by the next one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import MemoryMappedTensor, TensorDictBase, is_tensor_collection
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers.storages import LazyMemmapStorage, LazyTensorStorage

from torchrl_generational.concurrency.folder_lock import FolderLock, refuse_used_folder
from torchrl_generational.concurrency.process_lock import renew_in_forked_children
from torchrl_generational.concurrency.shared_counter import SharedCounter
from torchrl_generational.concurrency.storage_lock import StorageLock
from torchrl_generational.concurrency.write_access import refuse_left_behind, refuse_write
from torchrl_generational.generations.slot_generations import SlotGenerations
from torchrl_generational.persistence.serialization import objects_in
from torchrl_generational.tensors.compilation import is_traced

__all__ = ["SharableStorage"]

_MEMORY = "/dev/shm"  # Linux's directory of shared memory
_POLL = 0.001  # seconds between two looks for the first write of another process

# TorchRL's numbers, each in a multiprocessing.Value with a lock of its own.
_COUNTERS = ("_len_value", "_mutation_revision_value", "_last_cursor_index_value")

# A plain class, which stands in front of one of TorchRL's.
if TYPE_CHECKING:
    _Base = LazyTensorStorage
else:
    _Base = object


class SharableStorage(_Base):
    """The part of a generational storage that lets processes share it. See *Sharing between processes*."""

    lock: StorageLock
    _generations: SlotGenerations
    # TorchRL's; guarded by lock
    _storage: Any
    initialized: bool
    shared_init: bool
    _len_value: Any = None  # a counter, or with compilable a number
    _mutation_revision_value: Any
    _last_cursor_index_value: Any
    # Which directory has the files, from 1; 0 before the first write. Guarded by lock, as the next.
    _published: SharedCounter | None = None
    _begun: SharedCounter | None = None  # 1 since a first write began to make them
    _directories: list[str]  # where the files may lie, best first
    _maker: int  # the process that removes files when it ends
    _folder_lock: FolderLock | None = None  # of the folder that was asked for; guarded by lock
    # Counts the writes to records that forked children see too, shared or not: those begun, for all of them, and those
    # that were through when a child was forked. Guarded by lock.
    _writes: SharedCounter | None = None
    _writes_here: int = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._maker = os.getpid()
        super().__init__(*args, **kwargs)
        self._own_counters()
        folder = self._folder_asked_for()
        if folder is not None and self._folder_lock is None:
            refuse_used_folder(folder)

    def _own_counters(self) -> None:
        renew_in_forked_children(self, "_left_behind")
        if self._writes is None and self._is_mapped():
            self._writes = SharedCounter(self._writes_here, shared=True)
        if not self._compilable:
            for name, unset in zip(_COUNTERS, (0, 0, -1), strict=True):
                held = getattr(self, name, None)
                if not isinstance(held, SharedCounter):
                    setattr(self, name, SharedCounter(unset if held is None else held.value))

    # TorchRL's three numbers. Whenever any thread of the process compiles, it puts a plain one in the counter's place,
    # and hands out the tensors behind the other two.
    def __len__(self) -> int:
        # TorchRL's goes through a wrapper that keeps Dynamo out, which takes longer than the answer
        return super().__len__() if is_traced() else self._len

    @property
    def _len(self) -> int:
        length: int = self._len_value if self._compilable else self._len_value.value
        return length

    @_len.setter
    def _len(self, value: int) -> None:
        if self._compilable:
            self._len_value = value
        elif self._len_value is None:
            self._len_value = SharedCounter(value)
        else:
            self._len_value.value = value

    @property
    def _mutation_revision(self) -> int | torch.Tensor:
        revision: int | torch.Tensor = _number(self._mutation_revision_value)
        return revision

    @property
    def _last_cursor_index(self) -> int | torch.Tensor | None:
        row = _number(self._last_cursor_index_value)
        return None if type(row) is int and row < 0 else row

    # TorchRL keeps the cursor of the last write in one process, and the row of the newest record for all.
    @property
    def _last_cursor(self) -> Any:
        if self._compilable:
            return self.__dict__.get("_last_cursor")
        row = self._last_cursor_index
        return None if row is None else torch.tensor([row], device="cpu")

    @_last_cursor.setter
    def _last_cursor(self, cursor: Any) -> None:
        if self._compilable:
            self.__dict__["_last_cursor"] = cursor

    # ---------------------------------------------------------------- who may write

    def _about_to_write(self) -> None:
        """Refuses a process that must not write, and another storage on the same files. Lock held.

        Every change of records comes here before it changes anything.
        """
        refuse_write(self.lock)
        if self._writes is not None and not self.lock.is_shared:
            self._claim_folder()
            self._writes.value = self._writes_here + 1

    def _wrote(self) -> None:
        """The change that was announced is made: a child that is forked from now on has all of it. Lock held."""
        if self._writes is not None:
            self._writes_here = self._writes.value

    def _is_mapped(self) -> bool:
        """Whether the records lie, or will, in memory that a forked child shares in any case."""
        if isinstance(self, LazyMemmapStorage) or getattr(self, "shared_init", False):
            return True
        return self.initialized and any(map(_is_shared, _tensors(self._storage)))

    def _folder_asked_for(self) -> str | None:
        """The folder that the records were asked to lie in, where others may look for them too."""
        if isinstance(self, LazyMemmapStorage):
            return None if self._scratch_dir_is_temp else self.scratch_dir
        records: Any = self._storage if self.initialized else None
        for key, leaf in records.items(True, True) if is_tensor_collection(records) else ():
            if isinstance(leaf, MemoryMappedTensor) and leaf._filename is not None:
                depth = len(key) if isinstance(key, tuple) else 1
                return str(Path(leaf._filename).parents[depth - 1])
        return None

    def _claim_folder(self) -> None:
        """Takes the lock of the folder that was asked for. Idempotent."""
        if self._folder_lock is None:
            folder = self._folder_asked_for()
            if folder is not None:
                self._folder_lock = FolderLock(folder)

    def _left_behind(self) -> None:
        """In a forked child: where it does not share the storage, what it has is that of the moment of the fork."""
        lock = getattr(self, "lock", None)
        if lock is not None and not lock.is_shared:
            if self._folder_lock is not None:
                self._folder_lock.close()
            self._generations.left_behind()

    @contextlib.contextmanager
    def _of_one_moment(self) -> Iterator[None]:
        """Refuses a copy by a forked child of records that its parent has written over meanwhile."""
        asked = self._writes if self.lock.elsewhere and not self.lock.is_shared else None
        for _ in range(2):
            if asked is not None and asked.value != self._writes_here:
                raise RuntimeError(
                    f"This process ({os.getpid()}) was forked from the one that made the buffer, which has written to "
                    "the same files or memory since: their generations and priorities are known there only, and a "
                    "checkpoint or copy from here would mix records with those of others. Save or copy there, or "
                    "before the fork. Sampling goes on to work here."
                )
            if not _:
                yield

    # ---------------------------------------------------------------- sharing

    def share(self) -> None:
        """Moves records and stamps to memory that processes share, and lets the lock exclude processes. Idempotent.

        A storage that was never written is made by the first write of any process, in files of a temporary directory
        (of ``scratch_dir`` where there is one) that goes when this process ends.

        Raises:
            ValueError, TypeError: if it cannot be shared.
            RuntimeError: if there is no room in shared memory, or this process was forked and does not share it.

            Whatever is raised, nothing is shared then.
        """
        refuse_left_behind(self.lock)
        self.check_sharable()
        with self.lock:
            before = {name: getattr(self, name, None) for name in ("shared_init", "scratch_dir", "_init_directory")}
            log = self._generations.log
            fresh = not self._generations.is_shared
            try:
                if self.initialized:
                    self._share_records()
                elif not self.shared_init:
                    self._make_init_directory()
                    self.shared_init = True
                self._share_counters()
                self._generations.share()
                self.lock.share()  # last: from here on it is shared
            except BaseException:
                if fresh:
                    self._generations.unshare(log)
                for name, value in before.items():
                    setattr(self, name, value)
                self._own_counters()  # some records may have moved, where forked children see them
                raise

    def _share_counters(self) -> None:
        for name in _COUNTERS:
            getattr(self, name).share()
        for buffer in self._attached_entities:
            writer = vars(buffer).get("_writer")
            if hasattr(writer, "share_counters"):
                writer.share_counters()

    def _check_room(self) -> None:
        """Refuses to share more than there is shared memory for."""
        if self.lock.is_shared or not os.path.isdir(_MEMORY):
            return
        needed = self._generations.bytes_to_share()
        if self.initialized:
            private = [leaf for leaf in _tensors(self._storage) if not _is_shared(leaf)]
            needed += sum(leaf.numel() * leaf.element_size() for leaf in private)
        room = os.statvfs(_MEMORY)
        free = room.f_bavail * room.f_frsize
        if needed > free:
            raise RuntimeError(
                f"{type(self).__name__} cannot be shared: that takes {needed:,} bytes of shared memory, and {_MEMORY} "
                f"has {free:,} left. Nothing was changed. Make room there, raise its size (docker run --shm-size=...), "
                "or use a GenerationalLazyMemmapStorage, whose records lie on the disk."
            )

    def check_sharable(self) -> None:
        """Refuses a storage that processes cannot share."""
        name = type(self).__name__
        if self._compilable:
            raise ValueError(f"{name} with compilable=True keeps its counters in one process and cannot be shared.")
        device = self.device
        if device not in (None, "auto") and torch.device(device).type != "cpu":
            raise ValueError(
                f"{name} on device {device} cannot be shared between processes. Use device='cpu', and move batches to "
                "the accelerator with .to(...) or a transform."
            )
        if self.initialized:
            _refuse_objects(self._storage, name)
        elif not hasattr(self, "shared_init"):
            raise ValueError(f"{name} cannot be shared before it is initialized. Write one record first.")
        self._check_room()

    def check_first_records(self, records: Any, objects: bool = False) -> None:
        """Refuses first records that other processes could not join."""
        name = type(self).__name__
        if not isinstance(records, TensorDictBase | dict):
            raise TypeError(
                f"The first records of a {name} that processes share must be tensordicts, got "
                f"{type(records).__name__}. Write or load them before sharing it."
            )
        if objects:
            raise TypeError(f"A {name} that processes share cannot take records with entries that are no tensors.")

    def _share_records(self) -> None:
        for leaf in _tensors(self._storage):
            if not isinstance(leaf, MemoryMappedTensor):
                leaf.share_memory_()  # type: ignore[no-untyped-call]

    # ---------------------------------------------------------------- the first write

    # TorchRL's collectors put multiprocessing primitives here, which a killed process keeps for good.
    @property
    def _init_lock(self) -> Any:
        return self.lock

    @_init_lock.setter
    def _init_lock(self, lock: Any) -> None:
        pass

    @property
    def _init_event(self) -> _FirstWrite:
        return _FirstWrite(self)

    @_init_event.setter
    def _init_event(self, event: Any) -> None:
        pass

    def _make_init_directory(self) -> None:
        super()._make_init_directory()
        self._claim_folder()
        self._published, self._begun = SharedCounter(0, shared=True), SharedCounter(0, shared=True)
        self._directories = [self._init_directory]
        if isinstance(self, LazyMemmapStorage):
            return  # it says where its files lie, and cleans up on its own
        if os.access(_MEMORY, os.W_OK):
            self._directories.insert(0, tempfile.mkdtemp(prefix="torchrl_storage_init_", dir=_MEMORY))
        for directory in self._directories:
            weakref.finalize(self, _remove, directory, self._maker)

    def _choose_directory(self, data: Any) -> None:
        """Memory, if there is room for the records, else the disk."""
        *memory, chosen = self._directories
        size = sum(leaf.numel() * leaf.element_size() for leaf in _tensors(data)) * self.max_size
        for directory in filter(os.path.isdir, memory):
            room = os.statvfs(directory)
            if size < room.f_bavail * room.f_frsize:
                chosen = directory
        if memory and not os.path.isdir(chosen):
            raise RuntimeError(
                f"The folder {chosen} for the records is gone: the process that made this buffer has ended, or has "
                "let go of it before the first write."
            )
        self.scratch_dir = self._init_directory = chosen

    def _init(self, data: Any) -> None:
        if not self.shared_init:
            super()._init(data)
            return
        self.check_first_records(data)
        _refuse_objects(data, type(self).__name__)
        with self.lock:
            if not self.join():
                assert self._begun is not None
                if self._begun.value:  # the process that began is gone, or failed
                    self.clear_files()
                self._begun.value = 1
                self._choose_directory(data)
                self._init_coordinator(data)
                self._publish(self._storage)
        self.initialized = True

    def place(self, records: Any) -> Any:
        """Puts first records, which were loaded, where other processes will find them. Lock held; see :meth:`adopt`.

        Raises:
            TypeError: if other processes could not join them.
        """
        self.check_first_records(records)
        _refuse_objects(records, type(self).__name__)
        assert self._begun is not None
        if self._begun.value:  # the process that began is gone, or failed
            self.clear_files()
        self._begun.value = 1
        self._choose_directory(records[0])
        return records.memmap(self._init_directory, copy_existing=True)

    def adopt(self, records: Any) -> None:
        """Takes over first records that are in their place, as other processes may do from now on. Lock held."""
        self._publish(records)
        self.initialized = True

    def _publish(self, records: Any) -> None:
        assert self._published is not None
        self._storage = records
        self._published.value = 1 + self._directories.index(self._init_directory)

    def clear_files(self) -> None:
        """Removes what a first write that did not end has left. Lock held, and nothing published."""
        for directory in filter(os.path.isdir, self._directories):
            for path in os.scandir(directory):
                shutil.rmtree(path) if path.is_dir() else os.unlink(path)

    def join(self) -> bool:
        """Takes over the records if another process has written the first ones. Returns whether there are any."""
        if self.initialized:
            return True
        if self._published is None or not self._published.value:
            return False
        self._wait_for_init()
        self.initialized = True
        return True

    def _wait_for_init(self) -> None:
        if self._published is not None:
            self._init_event.wait()
            self.scratch_dir = self._init_directory = self._directories[self._published.value - 1]
        super()._wait_for_init()

    # ---------------------------------------------------------------- copies

    def _without_files(self, state: dict[str, Any]) -> None:
        """Lets a copy that is being pickled do without the files that processes find each other by."""
        for name in ("_published", "_begun", "_writes", "_folder_lock"):
            state.pop(name, None)
        state["_auto_cleanup"] = False  # they are the original's
        if getattr(self, "_init_directory", None) is not None and not isinstance(self, LazyMemmapStorage):
            state["scratch_dir"] = state["_init_directory"] = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._own_counters()
        if not self._generations.is_shared:  # a copy, not the storage itself in a process being started
            self._maker = os.getpid()
            if self.lock.is_shared:
                self._generations.share()
                if self.initialized:
                    self._share_records()
                else:
                    self._make_init_directory()


class _FirstWrite:
    """What TorchRL waits for in the place of a ``multiprocessing.Event``."""

    def __init__(self, storage: SharableStorage) -> None:
        self._storage = storage

    def is_set(self) -> bool:
        published = self._storage._published
        return published is not None and bool(published.value)

    def set(self) -> None:
        """Nothing: the storage says so once the files are there."""

    def wait(self) -> None:
        while not self.is_set():
            time.sleep(_POLL)


def _number(held: Any) -> Any:
    """What a counter holds, or a tensor in the place of one; the tensor itself while it is traced."""
    if isinstance(held, torch.Tensor):
        return held if is_traced() else int(held)
    return held.value


def _tensors(data: Any) -> list[torch.Tensor]:
    """The tensors of a storage's records, in an order that depends on their names only."""
    if is_tensor_collection(data):
        return [
            leaf
            for _, leaf in sorted(data.items(True, True), key=lambda item: str(item[0]))
            if isinstance(leaf, torch.Tensor)
        ]
    return [leaf for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor)]


def _is_shared(leaf: torch.Tensor) -> bool:
    """Whether a forked child would see changes of a tensor."""
    shared: bool = isinstance(leaf, MemoryMappedTensor) or leaf.is_shared()  # type: ignore[no-untyped-call]
    return leaf.is_cpu and shared


def _refuse_objects(data: Any, name: str) -> None:
    entries = [key for key, _ in objects_in(data)] if is_tensor_collection(data) else []
    if entries:
        raise TypeError(
            f"{name} holds entries that are no tensors, which processes cannot share: {entries}. Leave them out, or "
            "encode them as tensors."
        )


def _remove(folder: str, maker: int) -> None:
    if os.getpid() == maker:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
