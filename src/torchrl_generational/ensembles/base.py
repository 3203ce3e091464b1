"""What every part of an ensemble asks of it: its members, its readiness, and the locks of all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from torchrl.data.replay_buffers import ReplayBufferEnsemble

from torchrl_generational.buffers.work_in_flight import drop_failed_batches, renew_after_fork
from torchrl_generational.concurrency.deferred_signals import deferral
from torchrl_generational.concurrency.storage_lock import Interruptible
from torchrl_generational.tensors.default_devices import has_default_device, without_default_device

__all__ = ["EnsembleBase"]

# A plain class in front of an ensemble, because TorchRL's buffers have a metaclass of their own.
if TYPE_CHECKING:
    _Ensemble = ReplayBufferEnsemble
else:
    _Ensemble = object


class EnsembleBase(_Ensemble):
    """The ground that the parts of :class:`GenerationalReplayBufferEnsemble` stand on."""

    # TorchRL's
    _rbs: tuple[Any, ...]
    _collate_fns: Any
    _storage: Any
    _sampler: Any
    _writer: Any
    _collated_by_members: bool  # and not by functions given for them
    _made = False  # set once all parts are in place
    _given: Any = None  # the three ensembles of parts that it is being made of

    def _ready(self) -> None:
        """Initialises an ensemble with ``delayed_init``."""
        if not self._made:
            with self._replay_lock:
                if not self.initialized:
                    self._init()
                self._adopt()
                self._made = True
        # what members exchanged in the meantime
        if self._rng is not None:
            for rb in self._rbs:
                if rb.sampler._rng is not self._rng:
                    rb.sampler._rng = self._rng
        if self._collated_by_members:
            self._collate_fns = [rb._collate_fn for rb in self._rbs]
        self._storage._storages = tuple(rb.storage for rb in self._rbs)
        self._sampler._samplers = tuple(rb.sampler for rb in self._rbs)
        self._writer._writers = tuple(rb.writer for rb in self._rbs)

    def _adopt(self) -> None:
        """Works with the very ensembles of parts that it was made of, which the caller may go on to hold."""
        if self._given is not None:
            (self._storage, self._sampler, self._writer), self._given = self._given, None

    # ---------------------------------------------------------------- locks

    def _locked(self) -> Any:
        """The locks of all members' storages, in an order that is the same for every ensemble in every process."""
        return without_default_device(_Sections(self)) if has_default_device() else _Sections(self)

    @contextlib.contextmanager
    def _still(
        self, *, errors: bool = True, directory: contextlib.AbstractContextManager[Any] | None = None
    ) -> Iterator[Any]:
        """No work in flight, here and in the members, and all their locks.

        Args:
            errors: whether those of updates submitted here are raised.
            directory: what to enter before the storages' locks; what it gives is handed on.
        """
        self._ready()
        with deferral, contextlib.ExitStack() as held:
            for buffer in (self, *sorted(self._rbs, key=id)):
                held.enter_context(Interruptible(buffer._futures_lock))
                with deferral.let_through():
                    if buffer is self and errors:
                        self._synchronize_futures_locked()  # needs the storages' locks
                        continue
                    # whoever submitted to a member gets its errors there
                    wait((*buffer._prefetch_queue, *buffer._pending_update_futures))
                    drop_failed_batches(buffer)
            found = None if directory is None else held.enter_context(directory)
            held.enter_context(self._locked())
            yield found

    _renew_locks = renew_after_fork

    def _refuse_write(self) -> None:
        """Refuses a process that must not write to one of the members, before another one changes."""
        for rb in self._rbs:
            rb._refuse_write()


class _Sections:
    """The locks of an ensemble and of all its members, taken in the order of the latter."""

    __slots__ = ("ensemble", "entered")

    def __init__(self, ensemble: EnsembleBase) -> None:
        self.ensemble = ensemble
        self.entered: list[Any] = []

    def __enter__(self) -> None:
        before = deferral.depth
        try:
            deferral.__enter__()
            members = sorted(self.ensemble._rbs, key=lambda rb: rb._replay_lock.order)
            for part in (Interruptible(self.ensemble._replay_lock), *(rb._exclusive() for rb in members)):
                self.entered.append(part)
                part.__enter__()
        except BaseException:
            self._leave(None, None, None)
            deferral.back_to(before)
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            self._leave(*exc)
        finally:
            deferral.__exit__()

    def _leave(self, *exc: object) -> None:
        while self.entered:
            self.entered.pop().__exit__(*exc)
