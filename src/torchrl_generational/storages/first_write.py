"""The first write to a storage that processes share: one of them makes the files of the records, the others join.

A process that is killed in its first write leaves nothing taken: what it left half-made is made again by the next one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import weakref
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers.storages import LazyMemmapStorage

from torchrl_generational.concurrency.shared_counter import SharedCounter
from torchrl_generational.persistence.serialization import objects_in
from torchrl_generational.storages.storage_counters import StorageCounters

__all__ = ["FirstWrites", "refuse_objects", "tensors_of"]

_MEMORY = "/dev/shm"  # Linux's directory of shared memory
_POLL = 0.001  # seconds between two looks for the first write of another process


class FirstWrites(StorageCounters):
    """Where the records of a shared storage are made, and how other processes find them."""

    # Which directory has the files, from 1; 0 before the first write. Guarded by lock, as the next.
    _published: SharedCounter | None = None
    _begun: SharedCounter | None = None  # 1 since a first write began to make them
    _directories: list[str]  # where the files may lie, best first
    _maker: int  # the process that removes files when it ends

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

    def _claim_folder(self) -> None:
        """Takes the folder of the records for this process and those that it shares the storage with."""
        raise NotImplementedError

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
        size = sum(leaf.numel() * leaf.element_size() for leaf in tensors_of(data)) * self.max_size
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
        refuse_objects(data, type(self).__name__)
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
        refuse_objects(records, type(self).__name__)
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


class _FirstWrite:
    """What TorchRL waits for in the place of a ``multiprocessing.Event``."""

    def __init__(self, storage: FirstWrites) -> None:
        self._storage = storage

    def is_set(self) -> bool:
        published = self._storage._published
        return published is not None and bool(published.value)

    def set(self) -> None:
        """Nothing: the storage says so once the files are there."""

    def wait(self) -> None:
        while not self.is_set():
            time.sleep(_POLL)


def tensors_of(data: Any) -> list[torch.Tensor]:
    """The tensors of a storage's records, in an order that depends on their names only."""
    if is_tensor_collection(data):
        return [
            leaf
            for _, leaf in sorted(data.items(True, True), key=lambda item: str(item[0]))
            if isinstance(leaf, torch.Tensor)
        ]
    return [leaf for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor)]


def refuse_objects(data: Any, name: str) -> None:
    """Refuses records with entries that processes cannot share."""
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
