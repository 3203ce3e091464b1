"""One user of a checkpoint directory at a time, whichever thread, buffer or process it is."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

from torchrl_generational.concurrency.deferred_signals import deferral

try:
    import fcntl
except ImportError:  # Windows: there directories are not locked
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK", "directory_locked"]

LOCK = "generational.lock"

#: What systems say where files, or this file system, cannot be locked.
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EBADF, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextlib.contextmanager
def directory_locked(path: Path, *, create: bool) -> Iterator[bool]:
    """Waits until no other thread or process uses ``path``, and has it to itself.

    By ``flock`` on a file in the directory, which stays there. The kernel frees it when its holder dies, and it
    excludes the threads of one process as well. Order: futures locks, then this one, then the locks of storages.

    Args:
        path: the directory.
        create: whether to make the file where it is missing; the directory must exist then.

    Yields:
        Whether it is locked. It is not where that cannot be done: in a directory that has no such file and cannot be
        written to (or ``create`` is false), on file systems without locks, and on Windows.

    Raises:
        RuntimeError: if this thread has it already (a signal handler that saves while the thread is saving).
        ValueError: if something else has the name of the file.
    """
    held = _Held()
    try:
        yield held.take(path, create=create)
    finally:
        try:
            held.release()
        finally:  # once more, if an interrupt came in between
            held.release()


class _Held:
    """A file descriptor that is locked. Closing it, or the death of the process, frees the lock."""

    __slots__ = ("__weakref__", "_file", "_key")

    def __init__(self) -> None:
        self._file: int | None = None
        self._key: tuple[int, int, int] | None = None  # thread, device, inode

    def take(self, path: Path, *, create: bool) -> bool:
        if fcntl is None:
            return False
        while True:
            self._file = file = _open(path / LOCK, create=create)
            if file is None:
                return False
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                self.release()
                raise ValueError(_NOT_A_LOCK.format(path=path))
            key = (threading.get_ident(), found.st_dev, found.st_ino)
            if key in {other._key for other in _all()}:
                self.release()
                raise RuntimeError(
                    f"This thread is saving to or loading from {path} already, and would wait for itself. Save from a "
                    "signal handler only by setting a flag that the training loop reads."
                )
            _held[id(self)] = ref(self)
            try:
                with deferral.let_through():  # an ensemble waits for it in a section
                    fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                self.release()
                if error.errno in _UNSUPPORTED:
                    return False
                raise
            if _is_still(path / LOCK, found):
                self._key = key
                return True
            self.release()  # somebody removed the directory in the meantime, and made another

    def release(self) -> None:
        # Unlocked before it is closed, and marked as closed last: whatever interrupts this, it can be called again.
        _held.pop(id(self), None)
        self._key = None
        if self._file is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # also for a child that was forked with the descriptor
            file, self._file = self._file, None
            os.close(file)

    def forget(self) -> None:
        """In a forked child, which must not hold what is its parent's: closes without unlocking."""
        self._key = None
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


_held: dict[int, ref[_Held]] = {}  # of all threads; weak, so that one that nobody can release any more is freed


def _all() -> list[_Held]:
    return [held for held in (entry() for entry in tuple(_held.values())) if held is not None]


_NOT_A_LOCK = (
    "{path}/" + LOCK + " is not the file that checkpoints are locked by. Nothing was changed. Remove it, or use "
    "another directory."
)


def _open(file: Path, *, create: bool) -> int | None:
    """A descriptor of the file; ``None`` where there is none and none can be made."""
    # without waiting, should it be a pipe; and never through a link, which could make a file anywhere
    flags: Any = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK
    for mode in (os.O_RDWR | (os.O_CREAT if create else 0), os.O_RDONLY):
        try:
            return os.open(file, flags | mode, 0o666)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            raise ValueError(_NOT_A_LOCK.format(path=file.parent)) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise ValueError(_NOT_A_LOCK.format(path=file.parent)) from None
            if error.errno not in _NOT_WRITABLE:
                raise
    return None


def _is_still(file: Path, found: os.stat_result) -> bool:
    try:
        now = os.stat(file, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (found.st_dev, found.st_ino)


def _after_fork() -> None:
    for held in _all():
        held.forget()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
