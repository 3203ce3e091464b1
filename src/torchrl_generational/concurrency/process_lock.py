"""A lock between processes that the kernel takes back from a process that is killed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import struct
import sys
import tempfile
import threading
import time
import warnings
import weakref
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

from torchrl_generational.concurrency.deferred_signals import deferral

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["KernelLock", "SemaphoreLock", "make_process_lock", "renew_in_forked_children"]

_POLLING = 0.0003  # seconds for which a process asks again before it queues
_LONG = 30.0  # seconds after which whoever waits is told for whom
_PATIENCE = 0.1  # seconds until a thread that waits looks whether it was interrupted
_PAUSE = 0.0005  # seconds between two tries where the kernel refuses to queue

_let_others_run = getattr(os, "sched_yield", partial(time.sleep, 0))

#: What has to forget, in a forked child, the threads that hold it in the parent; and the name of the method for it.
_RENEWED: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def renew_in_forked_children(owner: Any, method: str) -> None:
    """Has ``owner.method()`` called in every forked child: threads that are inside ``owner`` do not exist there."""
    _RENEWED[owner] = method


def _in_forked_child() -> None:
    for owner, method in list(_RENEWED.items()):
        getattr(owner, method)()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)


class _ProcessLock:
    """Reentrant for threads, exclusive between processes by what ``_take`` and ``_give`` do."""

    def __init__(self) -> None:
        self.renew()
        renew_in_forked_children(self, "renew")

    def renew(self) -> None:
        """Makes the lock one that no thread of this process holds."""
        self._threads = threading.RLock()
        self._depth = 0  # entries of the owning thread; guarded by _threads

    def acquire(self) -> Any:
        """Blocks until this thread, and this process, hold the lock. Returns the lock."""
        taken, level = False, -1
        try:
            taken = self._threads.acquire(blocking=not deferral.depth)
            while not taken:
                deferral.check()
                taken = self._threads.acquire(timeout=_PATIENCE)
            level = self._depth
            if level == 0:
                self._take()
            self._depth = level + 1
            return self
        except BaseException:  # an interrupt must leave neither lock behind
            if level == 0:
                self._give()
            if level >= 0:
                self._depth = level
            if taken:
                self._threads.release()
            raise

    def release(self) -> None:
        """Undoes one :meth:`acquire` of this thread."""
        if not self._depth:
            raise RuntimeError("This process does not hold the lock: a forked child holds nothing of its parent's.")
        try:
            if self._depth == 1:
                self._give()
        finally:
            self._depth -= 1
            self._threads.release()

    def _take(self) -> None:
        raise NotImplementedError

    def _give(self) -> None:
        """Gives back what ``_take`` took, if it came that far."""
        raise NotImplementedError


class KernelLock(_ProcessLock):
    """A POSIX record lock (``fcntl.lockf``) on an anonymous file: it never outlives its process.

    The kernel gives such a lock to a *process*. So threads are excluded from each other by a lock of their own, and
    copies of this object in one process (a buffer that was unpickled twice) are one object. O(1): two system calls.

    Pickling for a process being started passes the file on; any other pickling is refused.

    Process safety: this is the primitive that gives it. A forked child does not hold what its parent holds.

    Example:
        >>> lock = KernelLock()
        >>> held = lock.acquire()
        >>> held.release()
    """

    def __init__(self, file: int | None = None) -> None:
        super().__init__()
        self._file = _anonymous_file() if file is None else file
        self._descriptors: list[int] = []  # others of the same file, for processes being started
        self._passed = 0  # how many of them the process being started has, less one
        self._starting: Any = None  # that process
        self.waiting_since: float | None = None  # when a thread of this process began to queue; read by the watch
        weakref.finalize(self, os.close, self._file)
        _LOCKS[_identity(self._file)] = self

    def _take(self) -> None:
        # Being woken takes as long as many a section, so a process polls for a while first.
        end = time.perf_counter() + _POLLING
        while time.perf_counter() < end:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                _let_others_run()
            else:
                return
        try:
            deferral.waiting(True)
            self.waiting_since = time.monotonic()
            _keep_watch()
            while not self._queue():
                time.sleep(_PAUSE)
        finally:
            self.waiting_since = None
            deferral.waiting(False)

    def _queue(self) -> bool:
        """Waits in the kernel's queue; returns whether it gave the lock."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
        except OSError as error:
            # The kernel thinks in processes: threads of two processes that wait for two locks look to it like two
            # processes that wait for each other.
            if error.errno != errno.EDEADLK:
                raise
            return False
        return True

    def _give(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)

    def holder(self) -> int | None:
        """The process that holds the lock, where the kernel says so: ``None`` if it is free, or held by this one."""
        if not sys.platform.startswith("linux"):
            return None  # other kernels order the fields in another way
        asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi", fcntl.fcntl(self._file, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else pid

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            raise RuntimeError("A KernelLock can only be passed to a process that is being started.")
        return _rebuild, (DupFd(self._another_descriptor(get_spawning_popen())),)

    def _another_descriptor(self, starting: Any) -> int:
        """A descriptor that has not been passed to the process being started yet: none can be passed twice.

        They stay open as long as the lock, since closing one would drop it, and are passed again to later processes.
        """
        last = self._starting() if self._starting is not None else None
        self._passed = self._passed + 1 if last is starting else 0
        self._starting = weakref.ref(starting)
        if self._passed == len(self._descriptors):
            self._descriptors.append(os.dup(self._file))
            weakref.finalize(self, os.close, self._descriptors[-1])
        return self._descriptors[self._passed]


#: The locks of this process by their file: closing any descriptor of a file drops the lock that the process has on it.
_LOCKS: weakref.WeakValueDictionary[tuple[int, int], KernelLock] = weakref.WeakValueDictionary()


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def _rebuild(passed: Any) -> KernelLock:
    file: int = passed.detach()
    known = _LOCKS.get(_identity(file))
    if known is None:
        return KernelLock(file)
    weakref.finalize(known, os.close, file)  # not now, when a thread may hold the lock
    return known


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("torchrl-generational-lock")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


#: The thread that looks whether this process waits for a lock suspiciously long. One of a parent is not a child's.
_watch: threading.Thread | None = None


def _keep_watch() -> None:
    """Has whoever waits for very long told for whom: a process that is stopped keeps its locks."""
    global _watch
    if _watch is None or not _watch.is_alive():
        _watch = threading.Thread(target=_look, name="torchrl-generational-watch", daemon=True)
        _watch.start()


def _look() -> None:
    told: dict[int, float] = {}
    while True:
        time.sleep(_LONG / 4)
        for lock in list(_LOCKS.values()):
            since = lock.waiting_since
            if since is not None and time.monotonic() - since > _LONG and told.get(id(lock)) != since:
                told[id(lock)] = since
                _tell(lock.holder())


def _tell(holder: int | None) -> None:
    who = "another process" if holder is None else f"process {holder}"
    warnings.warn(
        f"Waiting for {_LONG:.0f} s for the lock of a shared buffer, which {who} holds. If it is stopped (SIGSTOP, a "
        "debugger), it keeps the lock: let it go on, or kill it, which gives the lock back.",
        RuntimeWarning,
        stacklevel=2,
    )


class SemaphoreLock(_ProcessLock):
    """The same with a semaphore, for platforms without record locks: a killed holder blocks the others for good."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = False  # by this process; guarded by _threads
        self._semaphore = multiprocessing.Lock()

    def _take(self) -> None:
        self._taken = self._semaphore.acquire()

    def _give(self) -> None:
        if self._taken:
            self._taken = False
            self._semaphore.release()

    def __getstate__(self) -> dict[str, Any]:
        return {"_semaphore": self._semaphore}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self._taken = False
        self._semaphore = state["_semaphore"]


def make_process_lock() -> KernelLock | SemaphoreLock:
    """The best lock between processes that this platform has.

    Warns:
        RuntimeWarning: where its locks outlive a killed process.
    """
    if fcntl is not None:
        return KernelLock()
    warnings.warn(
        "This platform has no lock that is released when its process is killed (fcntl.lockf): a writer that is killed "
        "in the middle of a write blocks all other processes of this buffer for good. Stop writers by a flag instead.",
        RuntimeWarning,
        stacklevel=2,
    )
    return SemaphoreLock()
