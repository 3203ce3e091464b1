"""What every part of a buffer asks of it: its section, its readiness, who may write, and who keeps the priorities."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from torchrl.data.replay_buffers import ReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler

from torchrl_generational.buffers.absent_sampler import ELSEWHERE, keeps_priorities
from torchrl_generational.buffers.deferred_priorities import Follower
from torchrl_generational.buffers.section import Section, lock_of
from torchrl_generational.concurrency.write_access import refuse_write
from torchrl_generational.generations.update_result import UpdateResult
from torchrl_generational.tensors.compilation import is_traced, runs_in_compiled_code
from torchrl_generational.tensors.default_devices import has_default_device, without_default_device

__all__ = ["BufferBase", "without_settled"]

# A plain class in front of a buffer, because TorchRL's buffers have a metaclass of their own.
if TYPE_CHECKING:
    _Buffer = ReplayBuffer
else:
    _Buffer = object


class BufferBase(_Buffer):
    """The ground that the parts of :class:`GenerationalReplayBufferMixin` stand on.

    Each of them knows this class and TorchRL's, and none of the others.
    """

    _initializing: int | None = None  # the thread that puts the parts in place; guarded by the buffer's own lock
    _owner: int  # the process that keeps the priorities
    _follower: Follower | None = None  # guarded by the storage's lock
    _moment: int | None = None  # of a copy: that of its storage

    # Totals of all conditional updates; tensors, so that CUDA is not synchronised. Guarded by the storage's lock.
    _conditional_rows: int = 0
    _conditional_updated: Any = 0
    _conditional_rejected: Any = 0

    #: Storage and sampler, and the dtype of the trees if updates of the two go through arrays; see prepared_arrays.
    _settled_for_arrays: Any = None
    _plain_records: Any = False  # those of which samples are gathered; guarded by the storage's lock

    # ---------------------------------------------------------------- locks

    # The lock belongs to the storage and covers processes too once shared: TorchRL's `with self._replay_lock,
    # self._write_lock` therefore takes it once, and so does every method that in TorchRL takes only the first.

    @property
    def _replay_lock(self) -> Any:
        return lock_of(self.__dict__)

    @_replay_lock.setter
    def _replay_lock(self, lock: Any) -> None:
        self.__dict__["_replay_lock"] = lock

    def _exclusive(self) -> Any:
        """Holds the storage's lock. Traced code cannot: its graph ends here, or with ``compilable`` holds nothing."""
        if is_traced() and self._storage._compilable:
            return contextlib.nullcontext()
        return without_default_device(Section(self)) if has_default_device() else Section(self)

    def _stays_out_of_graphs(self) -> bool:
        """Whether a method that ``torch.compile`` is about to trace has to be called :func:`untraced` instead."""
        return runs_in_compiled_code() and not getattr(self.__dict__.get("_storage"), "_compilable", False)

    # ---------------------------------------------------------------- readiness

    @property
    def initialized(self) -> bool:
        """Whether the parts are in place. False to other threads while one is putting them there."""
        by = self._initializing
        return self._initialized and (by is None or by == threading.get_ident())

    def _ready(self) -> None:
        """Initialises a buffer with ``delayed_init``."""
        if not self.initialized:
            self._init()

    def _settle_again(self) -> None:
        """A part was exchanged: what had been settled about the parts is settled anew when it is asked for."""
        without_settled(self.__dict__)

    # ---------------------------------------------------------------- who may write

    def _refuse_write(self) -> None:
        """Refuses a process that must not write, before anything changes: every method that changes something."""
        lock = getattr(self.__dict__.get("_storage"), "lock", None)  # none with delayed_init
        if lock is not None and lock.elsewhere:
            refuse_write(lock)

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
            if isinstance(buffer, BufferBase) and "_sampler" in vars(buffer):
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
            raise RuntimeError(ELSEWHERE)

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

    def _with_learners(self, sampler: Any) -> tuple[Any, Any]:
        """``sampler``, and the one that TorchRL keeps for the learner with ``sync=False`` (else ``None``)."""
        return sampler, self.__dict__.get("_prioritized_sampler")

    def _drawing_sampler(self) -> Any:
        """The sampler that batches are drawn with, in the process that keeps it."""
        self._refuse_elsewhere()
        return self._learners_sampler()

    # ---------------------------------------------------------------- conditional updates

    def _count(self, result: UpdateResult) -> None:
        mask = result.updated_mask
        self._conditional_rows += mask.numel()
        updated = int(np.count_nonzero(mask.numpy())) if mask.is_cpu else mask.count_nonzero()
        self._conditional_updated = self._conditional_updated + updated
        if result.rejected_mask is not None:
            self._conditional_rejected = self._conditional_rejected + result.rejected_mask.count_nonzero()

    def _written_storage(self, method: str) -> Any:
        storage = self.storage  # initialises a buffer with delayed_init
        if not getattr(storage, "initialized", True):
            with self._exclusive():  # takes over what another process wrote first
                pass
        if not getattr(storage, "initialized", True):
            raise RuntimeError(
                f"{type(self).__name__}.{method}: conditional updates require an initialized storage, and nothing has "
                "been written to this buffer yet. Call add() or extend() first."
            )
        return storage

    def _priority_sampler(self, method: str) -> PrioritizedSampler:
        """The sampler that owns the priorities."""
        sampler = self._drawing_sampler()
        if not isinstance(sampler, PrioritizedSampler):
            raise TypeError(
                f"{type(self).__name__}.{method} needs a sampler with priorities, got {type(sampler).__name__}. Build "
                "the buffer with sampler=GenerationalPrioritizedSampler(...), or use a prioritized buffer class."
            )
        return sampler


def without_settled(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a buffer without what is settled anew when it is asked for: that holds parts a second time."""
    for name in ("_settled_for_arrays", "_plain_records"):
        state.pop(name, None)
    return state
