"""One live storage per folder of memory-mapped records: a kernel lock in it, for as long as anybody may write there."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import time
import warnings
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["IN_USE", "FolderLock", "refuse_used_folder"]

#: The file in the folder that is locked. It says who made the storage, and stays when that has ended.
IN_USE = ".generational-in-use"

_PATIENCE = 0.2  # seconds: somebody who only asks holds the lock for less
_BUSY = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """The right to write to the files of a folder, held by a storage and by the processes that it is shared with.

    ``flock``, which belongs to the open file and not to a process: forked children inherit it, processes being started
    are passed the file, and the kernel gives it back when the last of them has ended or let go of it. Where the file
    system has no locks, a warning says so and nothing is held.

    Args:
        folder: the folder; made if it is not there.

    Raises:
        RuntimeError: if another storage, of this process or another, has it.
    """

    def __init__(self, folder: str | Path) -> None:
        self._files: list[int] = []  # the file that is locked, then others of it for processes being started
        self._passed = 0  # how many of the latter the process being started has, less one
        self._starting: Any = None  # that process
        weakref.finalize(self, _close, self._files)
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / IN_USE
        end: float | None = None
        while fcntl is not None and not self._files:
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                self._files.append(file)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(file, path):  # and not one that a storage has removed with its folder meanwhile
                    os.truncate(file, 0)
                    os.pwrite(file, str(os.getpid()).encode(), 0)
                    return
                self.close()
            except OSError as error:
                if error.errno not in _BUSY:
                    self.close()
                    warnings.warn(
                        f"The folder {folder} cannot be locked ({error}): a second storage on its files would not be "
                        "noticed, and would write over the records of the first.",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                    return
                self.close()
                if end is None:
                    gc.collect()  # a buffer and its storage refer to each other: one that was dropped may still be here
                    end = time.monotonic() + _PATIENCE
                elif time.monotonic() > end:
                    raise _refusal(folder) from None
                else:
                    time.sleep(_PATIENCE / 20)

    def close(self) -> None:
        """Lets go of the folder in this process. Idempotent."""
        _close(self._files)

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            raise RuntimeError("A FolderLock can only be passed to a process that is being started.")
        return _rebuild, tuple(map(DupFd, self._another_descriptor(get_spawning_popen())))

    def _another_descriptor(self, starting: Any) -> list[int]:
        """A descriptor that has not been passed to the process being started yet: none can be passed twice.

        They stay open as long as the lock, since nobody tells when that process has them, and are passed again.
        """
        if not self._files:
            return []
        last = self._starting() if self._starting is not None else None
        self._passed = self._passed + 1 if last is starting else 1
        self._starting = weakref.ref(starting)
        if self._passed == len(self._files):
            self._files.append(os.dup(self._files[0]))
        return [self._files[self._passed]]


def refuse_used_folder(folder: str | Path) -> None:
    """Refuses a folder that a storage has, of this process or another. Changes nothing; O(1).

    Raises:
        RuntimeError: naming the processes.
    """
    if _is_used(folder):
        gc.collect()  # as above
        if _is_used(folder):
            raise _refusal(folder)


def _is_used(folder: str | Path) -> bool:
    try:
        file = os.open(Path(folder) / IN_USE, os.O_RDONLY)
    except OSError:
        return False
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _BUSY
    finally:
        os.close(file)
    return False


def _refusal(folder: str | Path) -> RuntimeError:
    path = Path(folder) / IN_USE
    try:
        maker = path.read_text() or "unknown"
    except OSError:
        maker = "unknown"
    living = _holders(path)
    who = f"process {maker} made a storage there"
    if maker == str(os.getpid()):
        who = "a storage of this process lies there"
    elif living and maker not in living:
        who += f", which has ended, but {', '.join(living)} that it started to write to it have not"
    return RuntimeError(
        f"The folder {Path(folder)} is in use: {who}. Another storage on the same files would write over the same "
        "records, with generations of its own. Nothing was changed. End those processes (or drop that storage), or use "
        "another scratch_dir."
    )


def _holders(path: Path) -> list[str]:
    """The processes that have a file open, as far as this platform tells."""
    found = []
    with contextlib.suppress(OSError):
        wanted = os.stat(path)
        for process in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                for file in os.listdir(f"/proc/{process}/fd") if process.isdigit() else ():
                    with contextlib.suppress(OSError):
                        if os.path.samestat(os.stat(f"/proc/{process}/fd/{file}"), wanted):
                            found.append(process)
                            break
    return found


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def _rebuild(*passed: Any) -> FolderLock:
    lock = FolderLock.__new__(FolderLock)
    lock._files, lock._passed, lock._starting = [file.detach() for file in passed], 0, None
    weakref.finalize(lock, _close, lock._files)
    return lock
