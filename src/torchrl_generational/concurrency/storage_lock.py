"""The one lock of a storage: reentrant between threads and, once shared, exclusive between processes.

TorchRL guards a buffer with two locks, a replay lock (threads) and a write lock (processes, not reentrant), and
leaves some methods without either. Here both are one object that belongs to the *storage*, so that every buffer on
that storage, and every method however nested, excludes every other.
"""

from __future__ import annotations

import os
import secrets
import threading
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torchrl_generational.concurrency.deferred_signals import deferral
from torchrl_generational.concurrency.process_lock import make_process_lock, renew_in_forked_children
from torchrl_generational.concurrency.write_access import Maker, refuse_sent

__all__ = ["Interruptible", "StorageLock"]

_get_ident = threading.get_ident
_PATIENCE = 0.1  # seconds until a main thread that waits looks whether it was interrupted


class StorageLock:
    """A reentrant lock for threads that also excludes other processes after :meth:`share`.

    Order: the thread lock is taken first, then, on the outermost entry only, the process lock. Buffers take their
    futures lock before this one, never after. Whoever takes several takes them by :attr:`order`.

    A process that is killed while it holds the lock gives it back (on platforms with ``fcntl``; elsewhere
    :meth:`share` warns). In a forked child it is free, whatever the parent's threads held.

    Pickling for a process being started keeps the process lock, so parent and child exclude each other. Any other
    copy gets locks of its own.

    Thread and process safety: this is the primitive that gives it.

    Example:
        >>> lock = StorageLock()
        >>> with lock, lock:  # reentrant
        ...     pass
    """

    __slots__ = ("__weakref__", "_depth", "_held", "_owner", "_processes", "_threads", "elsewhere", "maker", "order")

    def __init__(self) -> None:
        self._processes: Any = None  # the process lock once shared; guarded by _threads
        self.order = secrets.randbits(63)  # the same in all processes that share the lock; constant
        #: Whether this is another process than the one that made the lock; see :func:`write_access.refuse_write`.
        self.elsewhere = False
        self.maker: Maker | None = None  # that process, once shared; constant from then on
        self.renew()
        renew_in_forked_children(self, "renew_elsewhere")

    def renew_elsewhere(self) -> None:
        """Makes the lock one of a child that was just forked."""
        self.elsewhere = True
        self.renew()

    def renew(self) -> None:
        """Makes the lock one that no thread of this process holds: for a forked child, which has one thread."""
        self._threads = threading.RLock()
        self._owner = 0  # the thread that holds it: only that one finds itself here; guarded by _threads
        self._depth = 0  # its entries; guarded by _threads
        self._held: Any = None  # the process lock taken at depth 1; guarded by _threads

    @property
    def is_shared(self) -> bool:
        """Whether processes are excluded too."""
        return self._processes is not None

    def share(self) -> None:
        """Makes the lock exclude other processes from the next outermost entry on. Idempotent.

        Warns:
            RuntimeWarning: on a platform where a killed process does not give the lock back.
        """
        with self._threads:
            if self._processes is None:
                processes = make_process_lock()
                self.maker = Maker.this_process()
                self._processes = processes

    def acquire(self) -> bool:
        """Blocks until this thread, and this process, hold the lock. Ctrl-C ends the wait, and waits for the release.

        Whatever is raised here leaves nothing taken. One line takes a lock and says so, so that an exception finds
        either both or none.
        """
        me = _get_ident()
        if self._owner == me:
            return self._acquire_again()
        before, taken, processes = deferral.depth, False, None
        try:
            if me == deferral.thread:
                deferral.begin()
                taken = self._threads.acquire(blocking=False)
            else:
                taken = self._threads.acquire()
            while not taken:
                deferral.check()
                taken = self._threads.acquire(timeout=_PATIENCE)
            if self._processes is not None:
                processes = self._processes.acquire()
                self._held = processes
            self._owner, self._depth = me, 1
            return self._depth > 0  # True, but no constant: Python would leave the try before it returns one
        except BaseException:
            if processes is not None:
                self._held = None
                processes.release()
            if taken:
                self._owner, self._depth = 0, 0
                self._threads.release()
            deferral.back_to(before)
            raise

    def _acquire_again(self) -> bool:
        level = self._depth
        try:
            self._depth = level + 1
            return self._depth > 1
        except BaseException:
            self._depth = level
            raise

    def release(self, *exc: object) -> None:
        """Undoes one :meth:`acquire` of this thread.

        Raises:
            RuntimeError: if this thread does not hold it, as in a child that was forked in the middle of a section.
        """
        me = _get_ident()
        if self._owner != me:
            raise RuntimeError("This thread does not hold the lock: a forked child holds nothing of its parent's.")
        if self._depth > 1:
            self._depth -= 1
            return
        held = self._held
        try:
            if held is not None:
                self._held = None
                held.release()
        finally:
            self._owner, self._depth = 0, 0
            self._threads.release()
            if me == deferral.thread:
                deferral.end()

    __enter__, __exit__ = acquire, release

    def __getstate__(self) -> dict[str, Any]:
        processes = self._processes
        if processes is not None and get_spawning_popen() is None:
            processes = True  # shared, but this copy needs a lock of its own
        if get_spawning_popen() is None:
            return {"processes": processes}
        return {"processes": processes, "order": self.order, "maker": self.maker}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        processes = state["processes"]
        self._processes = make_process_lock() if processes is True else processes
        if "order" in state:  # the lock itself, in a process being started
            self.order, self.maker = state["order"], state["maker"]
            self.elsewhere = self.maker is not None and self.maker.pid != os.getpid()
        elif processes is True:
            self.maker = Maker.this_process()


class Interruptible:
    """A lock of :mod:`threading` that is taken while Ctrl-C is deferred; Ctrl-C ends the wait for it all the same.

    Leaving one that was not entered does nothing.
    """

    __slots__ = ("_held", "_lock")

    def __init__(self, lock: Any) -> None:
        self._lock, self._held = lock, False

    def __enter__(self) -> None:
        while not self._held:
            deferral.check()
            self._held = self._lock.acquire(timeout=_PATIENCE)

    def __exit__(self, *exc: object) -> None:
        held, self._held = self._held, False
        if held:
            self._lock.release()


def _reduced(lock: StorageLock) -> Any:
    """What a queue or pipe between processes sends of a lock, and with it of a storage or buffer."""
    if lock.is_shared and get_spawning_popen() is None:
        return refuse_sent, (os.getpid(),)
    return lock.__reduce_ex__(2)


ForkingPickler.register(StorageLock, _reduced)
