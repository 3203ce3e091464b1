"""Saving and restoring a buffer: everything that can be checked is checked before anything is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, PrioritizedSliceSampler

from torchrl_generational.buffers.base import BufferBase
from torchrl_generational.buffers.work_in_flight import refuse_in_own_draw
from torchrl_generational.concurrency.folder_lock import refuse_used_folder
from torchrl_generational.generations.slot_generations import ReadyStamps
from torchrl_generational.persistence import manifest
from torchrl_generational.persistence.kept_objects import refuse_lost_in_files
from torchrl_generational.persistence.restores import PREFETCHED, Plan, Rest, Saved, carry_out, load_part
from torchrl_generational.persistence.serialization import to_plain, unshared
from torchrl_generational.priorities.tree_state import TreeState
from torchrl_generational.records.saved_records import file_of
from torchrl_generational.samplers.prioritized import GenerationalPrioritizedSampler
from torchrl_generational.storages.loaded_records import LoadedRecords
from torchrl_generational.storages.max_value_writer import GenerationalTensorDictMaxValueWriter
from torchrl_generational.storages.round_robin_writers import GenerationalWriterMixin
from torchrl_generational.storages.tensor_storages import GenerationalStorageMixin
from torchrl_generational.storages.writer_state import WriterState
from torchrl_generational.tensors.autograd_modes import making_what_is_kept

__all__ = ["CheckedCheckpoints", "parts_of_state", "plain_state", "refuse_no_dict"]


class CheckedCheckpoints(BufferBase):
    """The checkpoints of :class:`GenerationalReplayBufferMixin`, which supplies storage and lock."""

    def state_dict(self) -> dict[str, Any]:
        """One consistent snapshot under TorchRL's keys, of tensors, numbers, dicts and lists only.

        ``torch.load(..., weights_only=True)`` reads it, unless records or transforms hold other objects; so it is with
        TorchRL's own prioritized samplers, whose trees are objects in TorchRL's states and tensors here. TorchRL reads
        records and stamps, and neither the priorities nor the prefetched batches.
        """
        self._ready()
        refuse_in_own_draw(self, "state_dict")
        with self._futures_lock:
            self.synchronize()  # work in flight needs the storage's lock
            with self._exclusive():
                self._catch_up_here()
                state: dict[str, Any] = super().state_dict()
                state["_sampler"] = plain_state(self._sampler, state["_sampler"])
        prefetched = state["_prefetch_state"]
        state[PREFETCHED] = to_plain(prefetched["queue"])
        state["_prefetch_state"] = prefetched | {"queue": ()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state of this class, or of the TorchRL class behind it. See *Guarantees* for its handles.

        Raises:
            ValueError: if a part of it does not fit, is damaged, or belongs to another kind of part.

        Whatever is raised, and wherever: all of it has been taken over then, or nothing has changed.
        """
        self._ready()
        self._refuse_write()
        refuse_in_own_draw(self, "load_state_dict")
        parts = parts_of_state(state_dict)
        with self._futures_lock:
            self.synchronize()  # work in flight needs the storage's lock
            with self._exclusive():

                def make(plan: Plan) -> None:
                    self._plan_parts(plan, *(Saved(part) for part in parts))
                    Rest.from_state_dict(self, state_dict).plan(plan, self)

                carry_out(make)

    def _plan_parts(
        self, plan: Plan, storage: Saved, sampler: Saved, writer: Saved, *, may_be_newer: bool = False
    ) -> None:
        """Plans to take over the three parts, refusing what does not fit. Lock held until it is carried out.

        Args:
            plan: of the restore.
            storage: its records; empty: none were saved.
            sampler: its priorities, or what else it has.
            writer: its cursor, and the stamps.
            may_be_newer: whether the records may be newer than the stamps.
        """
        self._refuse_restore()
        held, reader = self._storage, state_reader(self._writer)
        own = isinstance(held, GenerationalStorageMixin)
        state = None if reader is None else reader(writer)
        if state is None or not own:
            plan.load(held.slot_generations.keep, _nothing)  # which parts that load themselves may replace
        loaded = LoadedRecords.of(held, storage) if own else None
        if loaded is not None:
            plan.discard(loaded.discard)
        stamps = None if state is None or may_be_newer else state.ready_stamps(held.slot_generations)
        if state is None:
            load_part(plan, self._writer, "writer", writer)
        else:
            state.plan(plan, self._writer)
        if loaded is None:
            if storage.nothing:
                plan.install(held._empty)
            else:
                load_part(plan, held, "storage", storage)
        else:
            if state is not None:
                state.check(loaded.capacity, loaded.rows)
            held.plan(plan, loaded, stamps, loader=self)
        self._plan_sampler(plan, sampler)
        newest = None if state is None else state.newest
        plan.install(lambda: self._go_on(stamps, newest), last=True)

    def _plan_sampler(self, plan: Plan, saved: Saved) -> None:
        sampler = self._sampler
        if not keeps_plain_trees(sampler):
            load_part(plan, sampler, "sampler", saved)
            return
        state = TreeState.from_state_dict(saved.state) if saved.folder is None else TreeState.from_path(saved.folder)
        grows = isinstance(sampler, GenerationalPrioritizedSampler) and self._storage.ndim > 1
        # it may have been saved after its storage had rounded its capacity up to whole rows
        rounded = grows and not getattr(self._storage, "initialized", True)
        state.check(sampler, capacity=state.sums.numel() if rounded else None)
        plan.install(state.ready(sampler))

    def _go_on(self, stamps: ReadyStamps | None, newest: int | None) -> None:
        """What the parts need to know of each other, once they have been loaded. Can be called again. Lock held.

        TorchRL keeps the place of the newest record of before, by which slices and trajectories are told apart.
        """
        storage = self._storage
        if stamps is not None and not isinstance(storage, GenerationalStorageMixin):
            storage.slot_generations.install(stamps)  # which a storage that loads itself knows nothing of
        if self._follower is not None and self._drawing_sampler() is self._sampler:  # which was loaded
            self._follower.has_seen_all(storage)
        rows = int(storage._len_along_dim0 or 0) if storage.initialized else 0
        if rows and newest is None and hasattr(self._writer, "_cursor"):
            newest = (self._writer._cursor - 1) % rows
        if rows and newest is not None:
            with making_what_is_kept():
                storage._set_last_cursor(torch.tensor([newest % rows], device="cpu"))

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
            path: an existing directory, or one to make in an existing directory. While another thread or process saves
                to it or loads from it, this waits.

        Raises:
            ValueError: if the directory holds files or folders of a checkpoint's names that are of none; nothing has
                changed then.
        """
        self._ready()
        refuse_in_own_draw(self, "dumps")
        path = Path(path).absolute()
        path.mkdir(exist_ok=True)
        with self._futures_lock:
            self.synchronize()
            in_place = self._lies_in(path / "storage")
            # where the storage lies must not change before it is saved
            with manifest.locked_for_writing(path, in_place=in_place), self._exclusive():
                self._catch_up_here()
                refuse_lost_in_files(self._storage)
                in_place = self._lies_in(path / "storage")
                if in_place:
                    self._refuse_write()
                else:
                    refuse_used_folder(path / "storage")
                with manifest.writing(path, in_place=in_place) as folder:
                    super().dumps(folder)

    def _lies_in(self, folder: Path) -> bool:
        """Whether the storage's own files are those in ``folder``."""
        folder = folder.resolve()
        scratch = getattr(self._storage, "scratch_dir", None)
        if scratch is not None and Path(scratch).resolve() == folder:
            return True
        files = map(file_of, tree_leaves(getattr(self._storage, "_storage", None)))
        return any(folder in file.parents for file in files if file is not None)

    def loads(self, path: str | Path) -> None:
        """Takes over what ``dumps`` of this class, or of the TorchRL class behind it, saved at ``path``.

        Raises:
            FileNotFoundError: if a part is missing.
            ValueError: if parts are torn or do not belong together, come from a later version, or do not fit.

        Whatever is raised, and wherever: all of it has been taken over then, or nothing has changed.
        """
        self._ready()
        self._refuse_write()
        refuse_in_own_draw(self, "loads")
        path = Path(path).absolute()
        with self._futures_lock:
            self.synchronize()
            with manifest.reading(path) as found, self._exclusive():

                def make(plan: Plan) -> None:
                    parts = (Saved(folder=path / part) for part in ("storage", "sampler", "writer"))
                    self._plan_parts(plan, *parts, may_be_newer=found.records_may_be_newer)
                    Rest.from_path(self, path).plan(plan, self)
                    found.refuse_change()
                    if self._lies_in(path / "storage"):
                        found.goes_on_in_place()

                carry_out(make)


def parts_of_state(state: Any, kind: str = "a buffer") -> list[Any]:
    """The states of storage, sampler and writer in that of a buffer, or of an ensemble.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(state, dict):
        raise ValueError(f"The state of {kind} should be a dict, got {type(state).__name__}. Nothing was loaded.")
    names = ("_storage", "_sampler", "_writer", "_transforms", "_batch_size")
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(
            f"The state is not that of {kind}: it lacks {missing} and has {sorted(map(str, state))}. Nothing was "
            f"loaded. Pass what state_dict() of {kind} gave."
        )
    for name in names[:4]:
        refuse_no_dict(name, state[name])
    return [state[name] for name in names[:3]]


def refuse_no_dict(name: str, state: Any) -> None:
    """Refuses what no ``state_dict`` of a part gives.

    Raises:
        ValueError: naming the part.
    """
    if not isinstance(state, dict):
        raise ValueError(
            f"The state of a buffer has a dict under {name!r}, got {type(state).__name__}: it is damaged. Nothing was "
            "loaded. Pass what state_dict() of a buffer gave."
        )


def plain_state(sampler: Any, state: Any) -> Any:
    """The state of a sampler with its trees as tensors, which are objects in that of TorchRL's own. Lock held."""
    if keeps_plain_trees(sampler) and not isinstance(sampler, GenerationalPrioritizedSampler):
        return TreeState.of(sampler).state_dict()
    return state


def state_reader(writer: Any) -> Any:
    """What reads a saved state of a writer of this package; ``None`` for others, which load themselves."""
    kinds = (GenerationalWriterMixin, GenerationalTensorDictMaxValueWriter)
    for kind in kinds:
        if isinstance(writer, kind) and type(writer).load_state_dict is kind.load_state_dict:
            return lambda saved: WriterState.of(writer, saved, ranks=kind is GenerationalTensorDictMaxValueWriter)
    return None


def keeps_plain_trees(sampler: Any) -> bool:
    """Whether the trees, exponents and running maximum are all that a sampler saves."""
    own = type(sampler)
    return any(
        isinstance(sampler, kind) and own.load_state_dict is kind.load_state_dict and own.loads is kind.loads
        for kind in (GenerationalPrioritizedSampler, PrioritizedSliceSampler, PrioritizedSampler)
    )


def _nothing() -> None:
    pass
