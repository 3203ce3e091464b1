"""Who may write: the process that made a storage, and those that share it for as long as that one lives."""

from __future__ import annotations

import errno
import os
from typing import Any

from torchrl_generational.concurrency.process_lock import KernelLock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Maker", "refuse_left_behind", "refuse_sent", "refuse_write"]


class Maker:
    """The process that made a storage, as the others know it: whether it lives, by a lock that the kernel keeps.

    A process holds the lock of its own from the first storage that it shares until it ends, however it ends. One system
    call where it lives, two where it does not.

    Example:
        >>> Maker.this_process().is_gone()
        False
    """

    __slots__ = ("_alive", "pid")

    _own: Maker | None = None

    def __init__(self, pid: int, alive: Any) -> None:
        self.pid, self._alive = pid, alive

    @classmethod
    def this_process(cls) -> Maker:
        """The one of this process."""
        own = Maker._own
        if own is None or own.pid != os.getpid():
            alive = None if fcntl is None else KernelLock()
            if alive is not None:
                alive._take()  # and never given back
            own = Maker._own = cls(os.getpid(), alive)
        return own

    def is_gone(self) -> bool:
        """Whether that process has ended. Never known without ``fcntl``."""
        if self._alive is None or self.pid == os.getpid():
            return False
        try:
            fcntl.lockf(self._alive._file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may be asking too
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False
        fcntl.lockf(self._alive._file, fcntl.LOCK_UN)
        return True

    def __getstate__(self) -> tuple[int, Any]:
        return self.pid, self._alive

    def __setstate__(self, state: tuple[int, Any]) -> None:
        self.pid, self._alive = state


def refuse_write(lock: Any) -> None:
    """Refuses, before anything changes, what would change records or priorities behind ``lock`` where it must not.

    A process that was forked without sharing has memory of its own, but the files of the process that made the
    buffer; it would write over records whose generations it cannot reach. One that shares the buffer with a process
    that has ended would write for nobody.
    """
    if getattr(lock, "elsewhere", False):
        refuse_left_behind(lock)
        if lock.maker is not None and lock.maker.is_gone():
            raise RuntimeError(
                f"The process that made this buffer, {lock.maker.pid}, has ended, and this is one that it shared the "
                "buffer with: nobody would learn from what is written here. Nothing was changed. End this process, and "
                "start it again from the next one that makes a buffer."
            )


def refuse_left_behind(lock: Any) -> None:
    """Refuses what a process must not change that was forked without sharing; see :func:`refuse_write`."""
    if getattr(lock, "elsewhere", False) and not lock.is_shared:
        raise RuntimeError(
            f"This process ({os.getpid()}) was forked from the one that made the buffer, and does not share it: what "
            "is changed here would not reach the other, or would change its records without their generations. "
            "Nothing was changed. Call share() before the fork (or pass shared=True); or give this process a buffer of "
            "its own, copy.deepcopy(buffer). Reading goes on to work here."
        )


def refuse_sent(sender: int) -> Any:
    """Stands for the lock of a shared buffer that came through a queue or a pipe, and refuses to be unpickled.

    It would be a copy, whose writes are lost to the original; and refusing to pickle it would leave whoever waits at a
    queue waiting, since that pickles in a thread of its own.
    """
    raise RuntimeError(
        f"A buffer that processes share, of process {sender}, came through a queue or a pipe, which carry copies: what "
        "is written to one is lost to the other. Pass the buffer to processes when they are started, "
        "Process(args=(buffer,)). To send a copy, send buffer.state_dict(), or pickle.dumps(buffer)."
    )
