"""The parts of a buffer: made and checked before they are tied together, and exchanged in one section."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import RoundRobinWriter, Writer

from torchrl_generational.buffers.absent_sampler import keeps_priorities
from torchrl_generational.buffers.base import BufferBase
from torchrl_generational.buffers.process_sharing import check_sharable, share_storage
from torchrl_generational.buffers.work_in_flight import drop_prefetched
from torchrl_generational.concurrency.deferred_signals import run_through
from torchrl_generational.generations.protocols import SupportsGenerations, generations_on
from torchrl_generational.generations.write_protocol import NEVER_WRITTEN
from torchrl_generational.priorities.segment_trees import read_leaves
from torchrl_generational.samplers.prioritized import GenerationalPrioritizedSampler, check_capacity
from torchrl_generational.storages.round_robin_writers import GenerationalRoundRobinWriter, GenerationalWriterMixin
from torchrl_generational.storages.tensor_storages import GenerationalLazyTensorStorage

__all__ = ["BufferParts"]


class BufferParts(BufferBase):
    """Storage, sampler and writer of :class:`GenerationalReplayBufferMixin`, which supplies the lock."""

    # TorchRL's; the last three guarded by the storage's lock
    _init_storage: Any
    _init_sampler: Any
    _storage: Any
    _sampler: Any
    _consume_after_n_samples: Any
    _follower: Any
    _default_writer: type[Writer] = GenerationalRoundRobinWriter

    def __init__(self, *, writer: Any = None, **kwargs: Any) -> None:
        self._wanted_writer = writer
        super().__init__(**kwargs)

    def _init(self) -> None:
        with self.__dict__["_replay_lock"]:  # the buffer's own: it has no storage yet
            if self._initialized:
                return
            self._initializing = threading.get_ident()
            try:
                self._make_parts()
                super()._init()
                self._tie_parts()
            except BaseException:
                if self._initialized:  # there is no way back
                    self._tie_parts()
                raise
            finally:
                self._initializing = None

    def _tie_parts(self) -> None:
        """What parts need that have just been put in place. Can be called again where it was left."""
        self._wanted_writer = None
        self._lend_lock()
        if self.shared:
            share_storage(self)
        elif not getattr(self, "_sync", True) or self._storage.slot_generations.log is not None:
            with self._storage.lock:
                self._keep_log(known=False)

    def _lend_lock(self) -> None:
        """Lets the samplers hold the storage's lock where they change their trees on their own (annealing)."""
        for sampler in self._with_learners(self._sampler):
            if isinstance(sampler, GenerationalPrioritizedSampler):
                sampler.lock = self._storage.lock

    def _make_parts(self) -> None:
        """Makes and checks the parts before TorchRL ties them together, so that a refusal leaves nothing attached."""
        storage: Any = self._maybe_make_storage(self._init_storage, compilable=self._init_compilable)
        sampler: Any = self._maybe_make_sampler(self._init_sampler)
        writer = self._make_writer()
        self._check_parts(storage, sampler, writer)
        self._init_storage, self._init_sampler, self._wanted_writer = storage, sampler, writer

    def _maybe_make_storage(self, storage: Any, compilable: bool | None) -> Storage:
        if storage is None:
            return GenerationalLazyTensorStorage(1_000, compilable=bool(compilable))
        made: Storage = super()._maybe_make_storage(storage, compilable=compilable)
        return made

    def _make_writer(self) -> Writer:
        if self._wanted_writer is None:
            return self._default_writer(compilable=bool(self._init_compilable))
        made: Writer = super()._maybe_make_writer(self._wanted_writer)
        return made

    def _maybe_make_writer(self, writer: Any) -> Writer:
        """The writer wanted here, whichever default the class behind passes on."""
        made: Writer = self._wanted_writer
        return made

    def _check_parts(self, storage: Any, sampler: Any, writer: Any) -> None:
        """Refuses parts that cannot keep the promise, before anything is changed."""
        user = type(self).__name__
        generations_on(storage, user=user)
        complete: bool = isinstance(storage, SupportsGenerations)
        if not complete:
            raise TypeError(
                f"{type(storage).__name__} says that it supports generations but lacks a part of SupportsGenerations: "
                "it needs slot_generations, generations and lock. See the documentation of that protocol."
            )
        plain = isinstance(writer, RoundRobinWriter) and not isinstance(writer, GenerationalWriterMixin)
        if plain or not getattr(writer, "tracks_generations", False):
            raise TypeError(
                f"{user} needs a writer that tracks generations, got {type(writer).__name__}. Use "
                "GenerationalRoundRobinWriter, GenerationalTensorDictRoundRobinWriter or "
                "GenerationalTensorDictMaxValueWriter."
            )
        if self.shared or storage.lock.is_shared:
            check_sharable(self, storage, sampler, writer)
        for candidate in self._with_learners(sampler):
            if isinstance(candidate, GenerationalPrioritizedSampler):
                candidate.fit(storage)
            if isinstance(candidate, PrioritizedSampler):
                check_capacity(candidate, storage)

    def _check_rounding(self, inner: Sequence[int]) -> None:
        """Refuses a first write that would round the capacity up to whole rows beyond a sampler that cannot grow."""
        storage = self._storage
        if storage.ndim == 1 or getattr(storage, "initialized", True):
            return
        row = math.prod(inner)
        cells = -(-storage.max_size // row) * row
        for sampler in self._with_learners(self._sampler):
            grows = isinstance(sampler, GenerationalPrioritizedSampler)
            if isinstance(sampler, PrioritizedSampler) and not grows and cells > sampler._max_capacity:
                raise ValueError(
                    f"Rows of {row} cells round the storage's capacity of {storage.max_size} up to {cells}, and "
                    f"{type(sampler).__name__} has max_capacity={sampler._max_capacity} and does not grow. Use "
                    f"GenerationalPrioritizedSampler, or a capacity that is a multiple of {row}."
                )

    # ---------------------------------------------------------------- exchange of parts

    def set_storage(self, storage: Any, collate_fn: Any = None) -> Storage:
        """Replaces the storage and returns the previous one. Every handle of either is stale, prefetched batches too.

        All samplers of this buffer start again: the records of the new storage get the default priority. So does the
        writer: it goes on behind the last of those records.

        A storage that other buffers write to keeps their lock, which this buffer joins: no other thread may be inside
        this buffer then. Any other storage takes over the lock that this buffer has.

        Raises:
            TypeError: if it cannot carry generations.
            ValueError: if it is larger than the sampler.
            OverflowError: if one of the two storages has been restored too often.
            RuntimeError: if processes share this buffer.
        """
        self._ready()
        self._refuse_write()
        self._refuse_exchange("set_storage")
        with self._futures_lock:
            drop_prefetched(self)
            with self._exclusive():
                self._check_parts(storage, self._sampler, self._writer)
                previous: Any = self._storage
                storage.slot_generations.check_later(previous.slot_generations.incarnation)
                if not storage._attached_entities:
                    storage.lock = previous.lock  # threads that wait for it now find the new storage behind it
                with storage.lock:
                    try:
                        super().set_storage(storage, collate_fn)
                        run_through(lambda: self._begin_with(storage, previous))
                    except BaseException:
                        if self._storage is storage and self not in storage._attached_entities:
                            self._storage = previous
                        raise
        replaced: Storage = previous
        return replaced

    def _begin_with(self, storage: Any, previous: Any) -> None:
        """Starts all parts again on a storage that has taken the place of another. Locks held."""
        storage.attach(self)  # first: from here on there is no way back
        # a handle of the previous storage must not name a record of this one
        reached = int(storage._len_along_dim0 or 0)
        storage.slot_generations.replaced(reached, after=previous.slot_generations.incarnation)
        if storage is not previous and self in previous._attached_entities:
            previous._attached_entities.remove(self)
        self._writer.register_storage(storage)
        self._place_cursor(self._writer, reached)
        self._follower = None
        self._settle_again()
        self._on_records_replaced()
        self._lend_lock()
        if not getattr(self, "_sync", True):
            self._keep_log(known=True)

    def set_writer(self, writer: Writer) -> Writer:
        """Replaces the writer and returns the previous one.

        A writer that has not written yet goes on where the previous one was.

        Raises:
            TypeError: if it does not track generations.
            RuntimeError: if processes share this buffer.
        """
        self._ready()
        self._refuse_write()
        self._refuse_exchange("set_writer")
        with self._exclusive():
            self._check_parts(self._storage, self._sampler, writer)
            previous: Any = self.writer
            try:
                super().set_writer(writer)
                if writer is not previous:
                    fresh = getattr(writer, "_write_count", None) == 0
                    self._place_cursor(writer, getattr(previous if fresh else writer, "_cursor", 0))
            except BaseException:
                self._writer = previous
                raise
        replaced: Writer = previous
        return replaced

    def _place_cursor(self, writer: Any, row: int) -> None:
        """Sets the cursor of a writer to ``row``, or where it leaves no slot before it without a record. Lock held."""
        if hasattr(writer, "_cursor"):
            reached, rows = int(self._storage._len_along_dim0 or 0), self._storage.slot_generations.num_rows
            writer._cursor = min(row, reached) % max(rows, 1)

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replaces the sampler and returns the previous one.

        Records that the new one has no priority for get its default priority.

        Raises:
            ValueError: if it has priorities and is smaller than the storage.
            RuntimeError: in another process than the one that made a shared buffer, or where processes share it and
                one sampler draws by priority and the other does not.
        """
        self._ready()
        self._refuse_write()
        with self._exclusive():
            self._refuse_elsewhere()
            if keeps_priorities(sampler) != keeps_priorities(self._sampler):
                self._refuse_exchange("set_sampler")  # workers leave first priorities only where they are wanted
            self._check_parts(self._storage, sampler, self._writer)
            previous, consumed = self._sampler, self._consume_after_n_samples
            self._catch_up()
            try:
                super().set_sampler(sampler)
                self._settle_again()
                self._lend_lock()
                self._give_priorities(sampler)
                self._follow(known=True)
                if self._follower is not None:
                    self._follower.has_seen_all(self._storage)
            except BaseException:
                self._sampler, self._consume_after_n_samples = previous, consumed
                raise
        exchanged: Sampler = previous
        return exchanged

    def _on_records_replaced(self) -> None:
        """Starts samplers and writer again for records that are new to this buffer. O(capacity). Lock held."""
        for sampler in self._with_learners(self._sampler):
            if sampler is not None:
                sampler._empty()
                self._give_priorities(sampler)
        if self._follower is not None:
            self._follower.has_seen_all(self._storage)
        self._place_cursor(self._writer, getattr(self._writer, "_cursor", 0))

    def _give_priorities(self, sampler: Any) -> None:
        """Gives the default priority to all records that a new sampler has none for. O(capacity). Lock held."""
        if isinstance(sampler, GenerationalPrioritizedSampler):
            sampler.fit(self._storage)
        count = len(self._storage) if getattr(self._storage, "initialized", True) else 0
        if isinstance(sampler, PrioritizedSampler) and count:
            cells = torch.arange(count, device=sampler.device)
            if self._storage.slot_generations.interrupted:  # slots whose last write did not end hold no record
                whole = self._storage.generations.reshape(-1)[:count] >= NEVER_WRITTEN
                cells = cells[whole.to(cells.device)]
            missing = cells[read_leaves(sampler._sum_tree, cells) == 0]
            if missing.numel():
                sampler.mark_update(missing)
