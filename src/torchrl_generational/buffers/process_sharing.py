"""A buffer that processes share: one of them learns, the others write."""

from __future__ import annotations

import contextlib
import os
import threading
from multiprocessing.context import get_spawning_popen
from typing import Any

from torchrl.data.replay_buffers.samplers import ConsumingSampler
from torchrl.data.replay_buffers.writers import RoundRobinWriter

from torchrl_generational.buffers.absent_sampler import AbsentSampler, keeps_priorities
from torchrl_generational.buffers.base import BufferBase, without_settled
from torchrl_generational.buffers.copies import copied, frozen, still, take_moment
from torchrl_generational.buffers.deferred_priorities import Follower
from torchrl_generational.buffers.work_in_flight import renew_after_fork
from torchrl_generational.concurrency.process_lock import renew_in_forked_children
from torchrl_generational.concurrency.write_access import refuse_left_behind
from torchrl_generational.storages.moments import check_moment
from torchrl_generational.storages.shared_storage import SharableStorage

__all__ = ["SharedByProcesses", "check_sharable", "share_storage"]


class SharedByProcesses(BufferBase):
    """What :class:`GenerationalReplayBufferMixin` does about other processes."""

    _owner: int  # the process that keeps the priorities
    _follower: Follower | None = None  # guarded by the storage's lock
    _write_lock: Any
    _passed_on: Any = None
    _moment: int | None = None  # of a copy: that of its storage
    _initializing: int | None

    @property
    def keeps_priorities(self) -> bool:
        """Whether the sampler draws by priority, here or in the process that made it."""
        self._ready()
        return keeps_priorities(self._learners_sampler())

    def __init__(self, **kwargs: Any) -> None:
        self._owner = os.getpid()
        super().__init__(**kwargs)
        renew_in_forked_children(self, "_renew_locks")
        if self.shared:
            self._ready()  # processes that initialised it on their own would not share it

    def share(self, shared: bool = True) -> Any:
        """Lets processes that are started afterwards write to this buffer. Returns the buffer.

        Spawned ones get it as an argument, forked ones inherit it. This process goes on to sample and update; where
        samples are drawn by priority, only this one does. See *Sharing between processes*.

        ``share(False)`` lets parts be exchanged again; processes that were started keep what they have.

        Raises:
            ValueError, TypeError: if a part cannot be shared.
            RuntimeError: if there is not enough shared memory, or this process was forked and does not share it.

            Whatever is raised, nothing is shared then.

        Warns:
            RuntimeWarning: on a platform where a killed process keeps its locks.
        """
        made = "_futures_lock" in vars(self)  # else called by TorchRL's constructor
        before = vars(self).get("shared", False)
        if shared:
            refuse_left_behind(self._replay_lock if made else None)
            if self._prefetch:
                raise ValueError(
                    "Cannot share prefetched replay buffers: what was drawn ahead would not know of later writes of "
                    "other processes. Pass prefetch=0 or shared=False."
                )
            if made:
                self._ready()
                for buffer in (self, *self._storage._attached_entities):
                    check_sharable(buffer, self._storage, buffer._sampler, buffer._writer)
        try:
            super().share(shared)
            if shared and made:
                share_storage(self)
        except BaseException:
            self.shared = before
            raise
        finally:
            self._write_lock = contextlib.nullcontext()  # the storage's lock is for processes too
        return self

    # ---------------------------------------------------------------- who may write

    def _init(self) -> None:
        if not self._initialized and not self.shared:
            self._owner = os.getpid()  # the parts are made here
        super()._init()

    # ---------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        spawning = get_spawning_popen() is not None
        if not spawning and self._initialized:
            self._refuse_elsewhere()
        if spawning and not (self._initialized and self._storage.slot_generations.is_shared):
            self.share()
        self._passed_on = None
        if not spawning:
            with self._futures_lock:
                self._synchronize_futures_locked()
                with self._exclusive():
                    state: dict[str, Any] = without_settled(super().__getstate__())
                    state["_owner"] = None
                    frozen(self, state)
            return state
        state = without_settled(super().__getstate__())
        state["_follower"] = None
        # What TorchRL makes for the copy lies in shared memory, which must be there until the process has started.
        self._passed_on = state["_rng"]
        for name in ("_sampler", "_prioritized_sampler"):
            sampler = self.__dict__.get(name)
            if keeps_priorities(sampler):
                state[name] = sampler if isinstance(sampler, AbsentSampler) else AbsentSampler(sampler)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._futures_lock:
            self._synchronize_futures_locked()
        with still([self]):
            return copied(self, memo)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["_owner"] is None:
            state["_owner"] = os.getpid()
        self._moment = take_moment(state)
        super().__setstate__(state)
        if "_mutation_revision_value" in vars(vars(self).get("_storage", self)):  # else it is not complete yet
            check_moment(self._storage, self._moment)
        renew_in_forked_children(self, "_renew_locks")

    def _renew_locks(self) -> None:
        """In a forked child: threads that are inside this buffer in the parent do not exist."""
        renew_after_fork(self)
        if self._initializing not in (None, threading.get_ident()):
            self._initializing, self._initialized = None, False


def share_storage(rb: BufferBase) -> None:
    """Shares the storage of a buffer, whose learner follows its writers from then on."""
    rb._storage.share()
    with rb._storage.lock:
        rb._keep_log(known=True)


def check_sharable(rb: Any, storage: Any, sampler: Any, writer: Any) -> None:
    """Refuses parts that processes cannot share, before anything is changed."""
    user = type(rb).__name__
    if not isinstance(storage, SharableStorage):
        raise TypeError(
            f"{user} cannot share a {type(storage).__name__} between processes. Use GenerationalLazyTensorStorage, "
            "GenerationalLazyMemmapStorage or GenerationalTensorStorage, or a subclass of one."
        )
    storage.check_sharable()
    if not getattr(writer, "sharable", isinstance(writer, RoundRobinWriter)):
        raise TypeError(
            f"{user} cannot share a {type(writer).__name__}, which keeps in one process what it needs to write. "
            "Use a round-robin writer, or let one process write what the others send it."
        )
    if getattr(writer, "_compilable", False):
        raise ValueError(f"{user} cannot share a writer with compilable=True, which counts in one process.")
    if isinstance(sampler, ConsumingSampler) or getattr(rb, "_init_consume_after_n_samples", None) is not None:
        raise ValueError(f"{user} cannot share a buffer that consumes records: each process would count on its own.")
    if storage.ndim > 1 and any(map(keeps_priorities, rb._with_learners(sampler))):
        raise ValueError(
            f"{user} shares priorities only with storages of one dimension, got ndim={storage.ndim}. Write "
            "flattened batches (reshape(-1)) to one of ndim=1."
        )
