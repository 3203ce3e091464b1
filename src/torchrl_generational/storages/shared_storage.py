"""Storages that several processes write to: memory that they share, counters without locks, and a first write by any.

Nothing here outlives a process that is killed: there is no lock but the storage's, which the kernel gives back, and
what a first write left half-made is made again by the next one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor, is_tensor_collection
from torchrl.data.replay_buffers.storages import LazyMemmapStorage

from torchrl_generational.concurrency.folder_lock import FolderLock, refuse_used_folder
from torchrl_generational.concurrency.process_lock import renew_in_forked_children
from torchrl_generational.concurrency.shared_counter import SharedCounter
from torchrl_generational.concurrency.write_access import refuse_left_behind, refuse_write
from torchrl_generational.generations.slot_generations import SlotGenerations
from torchrl_generational.storages.first_write import FirstWrites, refuse_objects, tensors_of
from torchrl_generational.storages.storage_counters import COUNTERS

__all__ = ["SharableStorage"]

_MEMORY = "/dev/shm"  # Linux's directory of shared memory


class SharableStorage(FirstWrites):
    """The part of a generational storage that lets processes share it. See *Sharing between processes*."""

    _generations: SlotGenerations
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
            for name, unset in zip(COUNTERS, (0, 0, -1), strict=True):
                held = getattr(self, name, None)
                if not isinstance(held, SharedCounter):
                    setattr(self, name, SharedCounter(unset if held is None else held.value))

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
        return self.initialized and any(map(_is_shared, tensors_of(self._storage)))

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
        for name in COUNTERS:
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
            private = [leaf for leaf in tensors_of(self._storage) if not _is_shared(leaf)]
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
            refuse_objects(self._storage, name)
        elif not hasattr(self, "shared_init"):
            raise ValueError(f"{name} cannot be shared before it is initialized. Write one record first.")
        self._check_room()

    def _share_records(self) -> None:
        for leaf in tensors_of(self._storage):
            if not isinstance(leaf, MemoryMappedTensor):
                leaf.share_memory_()  # type: ignore[no-untyped-call]

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


def _is_shared(leaf: torch.Tensor) -> bool:
    """Whether a forked child would see changes of a tensor."""
    shared: bool = isinstance(leaf, MemoryMappedTensor) or leaf.is_shared()  # type: ignore[no-untyped-call]
    return leaf.is_cpu and shared
