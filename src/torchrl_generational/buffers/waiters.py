"""Waking whoever waits for records: for TorchRL after 0.14, where ``sample(wait=True)`` waits on a condition.

There a waiter holds the condition while it takes the lock of the storage, and a shared buffer has a condition between
processes. So nobody who may be inside a section waits for the condition, and nobody waits on it for long: what the
writers of other processes, of other buffers on the storage, or of an ensemble's members do is seen without them. A
process that is killed leaves nothing taken.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import torch
from torchrl.data.replay_buffers import ReplayBuffer

from torchrl_generational.tensors.compilation import is_traced

__all__ = ["Readiness", "WakesWaiters"]

_PATIENCE = 0.02  # seconds until a waiter looks by itself
if TYPE_CHECKING:  # in front of a buffer or an ensemble
    _Buffer = ReplayBuffer
else:
    _Buffer = object
_CAN_WAIT = hasattr(ReplayBuffer, "wait_until_sampleable")


class Readiness(threading.Condition):
    """A condition on which nobody waits for long.

    Attributes:
        inside: how many threads have entered it, those included that wait; guarded by the condition.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0

    def __enter__(self) -> bool:
        entered = super().__enter__()
        self.inside += 1
        return entered

    def __exit__(self, *exc: Any) -> None:
        self.inside -= 1
        super().__exit__(*exc)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits to be notified, and a while at most. Returns whether somebody did."""
        return super().wait(_PATIENCE if timeout is None else min(timeout, _PATIENCE))

    def wake(self) -> None:
        """Notifies whoever waits, unless somebody is just looking: who holds the condition does."""
        if self.inside and self.acquire(blocking=False):
            try:
                self.notify_all()
            finally:
                self.release()

    def __reduce__(self) -> Any:
        return Readiness, ()


class WakesWaiters(_Buffer):
    """What a buffer does about those that wait for its records. In TorchRL 0.14 nobody does."""

    @property
    def _readiness_condition(self) -> Any:
        condition = self.__dict__.get("_readiness_condition")
        if type(condition) is not Readiness:  # a copy, in whose state TorchRL has put one of its own
            condition = self.__dict__["_readiness_condition"] = Readiness()
        return condition

    @_readiness_condition.setter
    def _readiness_condition(self, condition: Any) -> None:
        self.__dict__.setdefault("_readiness_condition", Readiness())

    def _notify_replay_state_change(self) -> None:
        if _CAN_WAIT and not is_traced():
            self._readiness_condition.wake()

    def _count_sample(self, rows: int) -> None:
        """Counts a sample that does not go through TorchRL's ``sample``."""
        if _CAN_WAIT:
            self._increment_counter("_sample_call_count_value", 1)
            self._increment_counter("_sampled_item_count_value", rows)

    # The counters of samples, for which TorchRL takes the condition, or a lock that a killed process would keep. Those
    # that processes share are read and written without it, under the lock of the storage; others do not wait for that.

    @staticmethod
    def _counter_value(counter: Any) -> int:
        return int(counter.get_obj().value if hasattr(counter, "get_lock") else counter)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _increment_counter(self, name: str, increment: int) -> None:
        with self._replay_lock if hasattr(getattr(self, name), "get_lock") else _counting.lock:
            self._put_counter(name, self._counter_value(getattr(self, name)) + increment)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _set_counter(self, name: str, value: int) -> None:
        with self._replay_lock if hasattr(getattr(self, name), "get_lock") else _counting.lock:
            self._put_counter(name, value)

    def _put_counter(self, name: str, value: int) -> None:
        counter = getattr(self, name)
        if hasattr(counter, "get_lock"):
            counter.get_obj().value = value
        else:
            setattr(self, name, value)


class _Counting:
    """The lock of counters that no other process sees, held for no longer than it takes to add.

    Classes that go to another machine take this object with them, and get a lock of their own there.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """In a forked child: no thread holds it."""
        self.lock = threading.Lock()  # entered itself: no signal comes between taking it and the block

    def __reduce__(self) -> Any:
        return _Counting, ()


_counting = _Counting()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_counting.renew)
