"""Child processes for tests: started, listened to, killed, and never left behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support import TIMEOUT

_pipe: int | None = None  # of a child to its parent


def child_says(line: str) -> None:
    """In a child: tells the parent, who waits for it."""
    assert _pipe is not None
    os.write(_pipe, line.encode() + b"\n")


class Child:
    """A forked process."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid, self._pipe, self._heard = pid, pipe, b""
        self._status: int | None = None  # guarded by _waiting: the system tells it once
        self._waiting = threading.Lock()

    def wait_for(self, line: str) -> None:
        """Returns when the child has said ``line``."""
        end = time.monotonic() + TIMEOUT
        while line.encode() + b"\n" not in self._heard:
            ready, _, _ = select.select([self._pipe], [], [], max(end - time.monotonic(), 0))
            heard = os.read(self._pipe, 4096) if ready else b""
            assert heard, f"the child did not say {line!r} but {self._heard!r}"
            self._heard += heard

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        self.exit_code()

    def exit_code(self) -> int:
        """Waits for the end; negative for a signal."""
        end = time.monotonic() + TIMEOUT
        with self._waiting:
            while self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._status = os.waitstatus_to_exitcode(status)
                else:
                    assert time.monotonic() < end, "the child hangs"
                    time.sleep(0.001)
        return self._status


@contextlib.contextmanager
def forked(work: Callable[[], Any]) -> Iterator[Child]:
    """Runs ``work`` in a forked child, which ends with it: with 0, or with 70 and a traceback if it raises."""
    global _pipe
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _pipe = writing
            torch.set_num_threads(1)  # the parent's team of threads is not there
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(70)
        os._exit(0)
    os.close(writing)
    child = Child(pid, reading)
    try:
        yield child
    finally:
        if child._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            child.exit_code()
        os.close(reading)
