"""Saving and restoring a buffer: everything that can be checked is checked before anything is replaced."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, is_tensor_collection
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers import ReplayBuffer
from torchrl.data.replay_buffers.checkpointers import H5StorageCheckpointer

from torchrl_generational import manifest
from torchrl_generational.modes import as_normal
from torchrl_generational.plain import RECORD_OBJECTS, from_plain, objects_in, to_plain, unshared
from torchrl_generational.samplers import GenerationalPrioritizedSampler
from torchrl_generational.trees import TreeState

__all__ = ["PREFETCHED", "CheckedCheckpoints"]

PREFETCHED = "_generational_prefetched"  # the queue of prefetched batches, which TorchRL keeps as objects

# A plain class in front of a buffer, because TorchRL's buffers have a metaclass of their own.
_Buffer: Any = ReplayBuffer if TYPE_CHECKING else object


class CheckedCheckpoints(_Buffer):  # type: ignore[misc]  # TorchRL is untyped
    """The checkpoints of :class:`GenerationalReplayBufferMixin`, which supplies storage and lock."""

    def state_dict(self) -> dict[str, Any]:
        """One consistent snapshot under TorchRL's keys, of tensors, numbers, dicts and lists only.

        ``torch.load(..., weights_only=True)`` reads it, unless records or transforms hold other objects. TorchRL reads
        records and stamps, and neither the priorities nor the prefetched batches.
        """
        self._ready()
        with self._futures_lock:
            self.synchronize()  # work in flight needs the storage's lock
            with self._exclusive():
                self._catch_up_here()
                state: dict[str, Any] = super().state_dict()
        prefetched = state["_prefetch_state"]
        state[PREFETCHED] = to_plain(prefetched["queue"])
        state["_prefetch_state"] = prefetched | {"queue": ()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state of this class, or of the TorchRL class behind it. See *Guarantees* for its handles.

        Raises:
            ValueError: if capacity, shapes or priorities do not fit; nothing has changed then.
        """
        self._ready()
        if PREFETCHED in state_dict:
            queue = from_plain(state_dict[PREFETCHED])
            state_dict = state_dict | {"_prefetch_state": state_dict["_prefetch_state"] | {"queue": queue}}
        self._validate_prefetch_state(state_dict.get("_prefetch_state"))
        with self._futures_lock:
            self.synchronize()  # work in flight needs the storage's lock
            with self._exclusive():
                self._check_state(state_dict["_storage"], state_dict["_sampler"], state_dict["_writer"])
                with self._loading_storage():
                    super().load_state_dict(state_dict)

    def _check_state(self, storage: dict[str, Any], sampler: dict[str, Any], writer: dict[str, Any]) -> None:
        """Refuses the states of the three parts if they do not fit. Lock held."""
        self._refuse_restore()
        if self._storage.lock.is_shared and storage["initialized"]:
            self._storage.check_first_records(storage["_storage"], bool(storage.get(RECORD_OBJECTS)))
        self._check_records(_leaves(storage["_storage"]), storage["_len"])
        self._check_stamps(writer.get("_generation"))
        if isinstance(self._sampler, GenerationalPrioritizedSampler):
            self._check_priorities(TreeState.from_state_dict(sampler))

    def _check_saved(self, storage: Path | None, sampler: Path, writer: Path) -> None:
        """Refuses the folders of the three parts if they do not fit; ``None``: no records were saved. Lock held."""
        self._refuse_restore()
        if storage is not None:
            self._check_stored_records(storage)
        saved = json.loads((writer / "metadata.json").read_text()).get("generation_shape")
        self._check_stamps(None if saved is None else torch.empty(saved, dtype=torch.int64, device="meta"))
        if isinstance(self._sampler, GenerationalPrioritizedSampler):
            self._check_priorities(TreeState.from_path(sampler))

    def _clone_prefetch_result(self, result: Any) -> Any:
        """TorchRL's fails for samples with a stack of objects that are no tensors."""
        return unshared(result)

    def dumps(self, path: str | Path) -> None:
        """Saves the buffer in TorchRL's layout, with a manifest written last.

        Whenever the process is killed, :meth:`loads` finds the previous checkpoint of that directory or the new one,
        never a mixture. (Not after a power cut: nothing is flushed to the disk here.) Until it is complete, the new one
        takes room beside the old one. Other entries of the directory stay.

        Where the directory holds the storage itself (``scratch_dir`` of a memory-mapped storage is its ``storage``
        folder) nothing can be kept: a killed process leaves an incomplete checkpoint, and since records may be
        written after :meth:`dumps`, all handles are stale after loading it.

        Args:
            path: an existing directory, or one to make in an existing directory. One process at a time uses it.
        """
        self._ready()
        path = Path(path).absolute()
        path.mkdir(exist_ok=True)
        with self._futures_lock:
            self.synchronize()
            with self._exclusive():  # where the storage lies must not change before it is saved
                self._catch_up_here()
                with manifest.writing(path, in_place=self._lies_in(path / "storage")) as folder:
                    super().dumps(folder)

    def _lies_in(self, folder: Path) -> bool:
        """Whether the storage's own files are those in ``folder``."""
        folder = folder.resolve()
        scratch = getattr(self._storage, "scratch_dir", None)
        if scratch is not None and Path(scratch).resolve() == folder:
            return True
        files = map(_file_of, tree_leaves(getattr(self._storage, "_storage", None)))
        return any(folder in file.resolve().parents for file in files if file is not None)

    def loads(self, path: str | Path) -> None:
        """Takes over what ``dumps`` of this class, or of the TorchRL class behind it, saved at ``path``.

        Raises:
            FileNotFoundError: if a part is missing; nothing has changed then.
            ValueError: if parts are torn or do not belong together, come from a later version, or do not fit
                (capacity, shapes, priorities); nothing has changed then.
        """
        self._ready()
        path = Path(path).absolute()
        with self._futures_lock:
            self.synchronize()
            manifest.settle(path)
            records_may_be_newer = manifest.verify(path)
            with self._exclusive():
                self._check_saved(path / "storage", path / "sampler", path / "writer")
                if self._lies_in(path / "storage"):
                    manifest.complete_in_place(path)  # from now on its records may be newer than its stamps
                with self._loading_storage():
                    super().loads(path)
                if records_may_be_newer:
                    self._storage.slot_generations.replaced(int(self._storage._len_along_dim0 or 0))

    @contextlib.contextmanager
    def _loading_storage(self) -> Iterator[None]:
        """Tells the storage whose sampler and writer are about to be loaded too, and which record is its newest then.

        TorchRL keeps the place of the newest record of before, by which slices and trajectories are told apart. Lock
        held.
        """
        storage = self._storage
        storage._loading = self
        try:
            yield
        finally:
            storage._loading = None
        if self._follower is not None and self._drawing_sampler() is self._sampler:  # which was loaded
            self._follower.has_seen_all(storage)
        rows = int(storage._len_along_dim0 or 0) if storage.initialized else 0
        if rows and hasattr(self._writer, "_cursor"):
            storage._set_last_cursor(as_normal(torch.tensor([(self._writer._cursor - 1) % rows], device="cpu")))

    def _check_stored_records(self, folder: Path) -> None:
        if not (folder / "storage_metadata.json").exists():
            if isinstance(self._storage.checkpointer, H5StorageCheckpointer):
                return
            raise FileNotFoundError(f"{folder.parent} is not a complete checkpoint: storage_metadata.json is missing.")
        metadata = json.loads((folder / "storage_metadata.json").read_text())
        tensordicts = not metadata["is_pytree"] and (folder / "meta.json").exists()
        records = TensorDict.load_memmap(folder) if tensordicts else None
        if self._storage.lock.is_shared and metadata["len"]:
            self._storage.check_first_records(records, records is not None and any(objects_in(records)))
        compressed = bool(getattr(self._storage.checkpointer, "_load_hooks", None))
        if records is not None and not compressed:
            self._check_records(_leaves(records), metadata["len"])

    def _check_records(self, saved: dict[str, torch.Tensor], length: int) -> None:
        storage = self._storage
        own = _leaves(storage._storage) if getattr(storage, "initialized", False) else {}
        room = max(storage.max_size, storage.generations.numel())
        if own and saved and own.keys() != saved.keys():
            raise ValueError(
                f"The checkpoint holds the entries {sorted(saved)} but this storage {sorted(own)}. Load it into a "
                "buffer like the one that it was saved from."
            )
        for name, leaf in saved.items():
            if name in own and leaf.shape != own[name].shape:
                raise ValueError(
                    f"The checkpoint holds {name!r} of shape {tuple(leaf.shape)} but this storage has shape "
                    f"{tuple(own[name].shape)}. Load it into a buffer like the one that it was saved from."
                )
            if not own:
                # a storage without data rounds its capacity up to whole rows
                cells, row = math.prod(leaf.shape[: storage.ndim]), math.prod(leaf.shape[1 : storage.ndim])
                if not storage.max_size <= cells < storage.max_size + row:
                    raise ValueError(
                        f"The checkpoint was saved from a storage of {cells} records but this one holds "
                        f"{storage.max_size}. Load it into a buffer of the same capacity."
                    )
                room = max(room, cells)
        if not 0 <= length <= room:
            raise ValueError(
                f"The checkpoint holds {length} records but this storage has room for {room}. Load it into a buffer of "
                "the same capacity."
            )

    def _check_stamps(self, saved: torch.Tensor | None) -> None:
        if saved is not None:
            self._storage.slot_generations.check(saved)

    def _check_priorities(self, saved: TreeState) -> None:
        grown = saved.sums.numel() - self._sampler._max_capacity
        if grown > 0 and self._storage.ndim > 1 and not self._storage.initialized:
            self._sampler.grow(grown)  # saved after its storage had rounded its capacity up to whole rows
        saved.check(self._sampler)


def _file_of(leaf: Any) -> Path | None:
    """The file of a memory-mapped tensor, if it has one with a name."""
    try:
        return Path(leaf.filename)
    except (AttributeError, RuntimeError, TypeError):
        return None


def _leaves(data: Any) -> dict[str, torch.Tensor]:
    """Tensors by name, of a storage's data or of its state."""
    if isinstance(data, torch.Tensor):
        return {"data": data}
    if is_tensor_collection(data):
        return {
            ".".join(key) if isinstance(key, tuple) else key: leaf
            for key, leaf in data.items(True, True)
            if isinstance(leaf, torch.Tensor)
        }
    if isinstance(data, dict):
        return {key: leaf for key, leaf in data.items() if isinstance(leaf, torch.Tensor)}
    return {}
