"""A buffer that processes share: one of them learns, the others write."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

import torch
from torchrl.data.replay_buffers import ReplayBuffer
from torchrl.data.replay_buffers.samplers import ConsumingSampler, PrioritizedSampler, Sampler
from torchrl.data.replay_buffers.writers import RoundRobinWriter

from torchrl_generational.buffers.copies import copied, frozen, still, take_moment
from torchrl_generational.buffers.deferred_priorities import Follower
from torchrl_generational.concurrency.process_lock import renew_in_forked_children
from torchrl_generational.concurrency.write_access import refuse_left_behind, refuse_write
from torchrl_generational.priorities.segment_trees import tree_dtype
from torchrl_generational.storages.moments import check_moment
from torchrl_generational.storages.shared_storage import SharableStorage

__all__ = ["AbsentSampler", "SharedByProcesses", "keeps_priorities", "renew_after_fork"]

# A plain class in front of a buffer, because TorchRL's buffers have a metaclass of their own.
_Buffer: Any = ReplayBuffer if TYPE_CHECKING else object


class AbsentSampler(Sampler):  # type: ignore[misc]  # TorchRL is untyped
    """Stands in a process that was started for the prioritized sampler of the process that made the buffer.

    It knows what a priority may be, and has none.
    """

    def __init__(self, sampler: Any) -> None:
        self._alpha, self._eps = float(sampler._alpha), float(sampler._eps)
        self._max_capacity: int = sampler._max_capacity
        self.dtype = tree_dtype(sampler)
        self.reduction: str = sampler.reduction
        self.device = torch.device("cpu")

    def _empty(self) -> None:
        """Nothing: the learner notices."""

    def _refuse(self, *args: Any) -> Any:
        raise RuntimeError(_ELSEWHERE)

    sample = state_dict = load_state_dict = dumps = loads = _refuse


_ELSEWHERE = (
    "The priorities of a buffer that processes share are kept by the process that made it, and this is another one. "
    "Sample, update and save there, and let this one write (extend, add, empty, len, write_count)."
)


def keeps_priorities(sampler: Any) -> bool:
    """Whether a sampler draws by priority, here or in the process that made it."""
    return isinstance(sampler, PrioritizedSampler | AbsentSampler)


class SharedByProcesses(_Buffer):  # type: ignore[misc]  # TorchRL is untyped
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
                    buffer._check_sharable(self._storage, buffer._sampler, buffer._writer)
        try:
            super().share(shared)
            if shared and made:
                self._share_storage()
        except BaseException:
            self.shared = before
            raise
        finally:
            self._write_lock = contextlib.nullcontext()  # the storage's lock is for processes too
        return self

    def _share_storage(self) -> None:
        self._storage.share()
        with self._storage.lock:
            self._keep_log(known=True)

    def _check_sharable(self, storage: Any, sampler: Any, writer: Any) -> None:
        """Refuses parts that processes cannot share, before anything is changed."""
        user = type(self).__name__
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
        if isinstance(sampler, ConsumingSampler) or getattr(self, "_init_consume_after_n_samples", None) is not None:
            raise ValueError(
                f"{user} cannot share a buffer that consumes records: each process would count on its own."
            )
        if storage.ndim > 1 and any(map(keeps_priorities, self._with_learners(sampler))):
            raise ValueError(
                f"{user} shares priorities only with storages of one dimension, got ndim={storage.ndim}. Write "
                "flattened batches (reshape(-1)) to one of ndim=1."
            )

    # ---------------------------------------------------------------- who may write

    def _refuse_write(self) -> None:
        """Refuses a process that must not write, before anything changes: every method that changes something."""
        lock = getattr(self.__dict__.get("_storage"), "lock", None)  # none with delayed_init
        if lock is not None and lock.elsewhere:
            refuse_write(lock)

    def _init(self) -> None:
        if not self._initialized and not self.shared:
            self._owner = os.getpid()  # the parts are made here
        super()._init()

    # TorchRL's, which change fields in place.

    def set_at_(self, key: Any, value: Any, index: Any) -> Any:
        """Sets a field of the records at ``index``; see TorchRL's."""
        self._ready()
        self._refuse_write()
        return super().set_at_(key, value, index)

    def set_(self, key: Any, value: Any) -> Any:
        """Sets a field of all records; see TorchRL's."""
        self._ready()
        self._refuse_write()
        return super().set_(key, value)

    def update_(self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None) -> Any:
        """Sets fields of all records; see TorchRL's."""
        self._ready()
        self._refuse_write()
        return super().update_(input_dict_or_td, clone, keys_to_update=keys_to_update)

    def submit_update_if_present(self, **kwargs: Any) -> Any:
        """:meth:`update_if_present` on a background thread; see TorchRL's."""
        self._ready()
        self._refuse_write()
        return super().submit_update_if_present(**kwargs)

    # ---------------------------------------------------------------- the learner

    @property
    def _follows(self) -> bool:
        """Whether priorities of new records are given when the learner catches up, not when they are written."""
        return self._storage.slot_generations.log is not None and keeps_priorities(self._learners_sampler())

    def _learners_sampler(self) -> Any:
        """The sampler that draws; TorchRL keeps it apart from the writers' with ``sync=False``."""
        return self._sampler if getattr(self, "_sync", True) else self.__dict__.get("_prioritized_sampler")

    def _keep_log(self, *, known: bool) -> None:
        """Has changes of the storage noted; other buffers on it then follow the log too. Lock held."""
        storage = self._storage
        storage.slot_generations.keep_log()
        for buffer in (*storage._attached_entities, self):
            if isinstance(buffer, SharedByProcesses) and "_sampler" in vars(buffer):
                buffer._follow(known=known or buffer is not self)

    def _follow(self, *, known: bool) -> None:
        """Follows the log from now on; ``known`` says whether the sampler has priorities of all records. Lock held."""
        if self._follower is None and self._follows:
            self._follower = Follower(self._storage, known=known)

    def _catch_up(self) -> None:
        """Gives records that were written since their first priority, where a learner follows. Lock held."""
        if not self._follows:
            return
        self._follow(known=False)
        assert self._follower is not None
        self._follower.catch_up(self._learners_sampler(), self._storage)

    def _catch_up_here(self) -> None:
        """Catches up before the priorities are saved, or refuses that where they are not. Lock held."""
        self._refuse_elsewhere()
        self._catch_up()

    def _catch_up_prioritized_sampler(self) -> None:
        """TorchRL's, which goes by the count of records written and assumes that they are next to each other."""
        with self._storage.lock:
            self._catch_up()
            self._prioritized_sampler_write_count = self.write_count

    def _refuse_elsewhere(self) -> None:
        """Refuses what only the process that keeps the priorities can do."""
        if self._is_elsewhere and any(map(keeps_priorities, self._with_learners(self._sampler))):
            raise RuntimeError(_ELSEWHERE)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether this is another process than the one that made a shared buffer."""
        return self._owner != os.getpid() and self._storage.lock.is_shared

    def _refuse_restore(self) -> None:
        """Refuses to replace records and stamps under the process that keeps the priorities."""
        if self._is_elsewhere:
            raise RuntimeError(
                "A buffer that processes share is restored by the process that made it, and this is another one. Load "
                "the checkpoint there."
            )

    def _refuse_exchange(self, method: str) -> None:
        if self.shared:
            raise RuntimeError(
                f"{type(self).__name__}.{method} does not reach the processes that share this buffer: they would go on "
                "with what it had. Call share(False) first, and share() again before starting them."
            )

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
                    state: dict[str, Any] = super().__getstate__()
                    state["_owner"] = None
                    frozen(self, state)
            return state
        state = super().__getstate__()
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


def renew_after_fork(buffer: Any) -> None:
    """Gives a buffer in a forked child locks and executors of its own: the threads of the parent's do not exist.

    What those had drawn ahead, and updates that they had not made, are the parent's.
    """
    buffer._futures_lock = threading.RLock()
    buffer._replay_lock = threading.RLock()
    buffer._prefetch_queue = deque()
    buffer._pending_update_futures = deque()
    buffer._sample_dependency = buffer._update_executor = buffer._iterator = None
    if getattr(buffer, "_prefetch_executor", None) is not None:  # None where it was shut down
        buffer._prefetch_executor = ThreadPoolExecutor(max_workers=buffer._prefetch_cap)
