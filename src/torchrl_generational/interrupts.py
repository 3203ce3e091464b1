"""Ctrl-C waits for the end of a section: whoever interrupts a notebook cell goes on with the buffer afterwards.

Python raises ``KeyboardInterrupt`` in the main thread between any two instructions, also between taking a lock and
entering the block that gives it back. So while the main thread is inside a section, another handler notes the signal,
and the one of before is called when the section ends. Whoever *waits* for a section can be interrupted as ever.

Only SIGINT, only in the main thread, and only where its handler is one of Python's. Handlers of other signals that
raise are met by what every section does about exceptions.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from signal import SIGINT
from typing import Any

__all__ = ["deferral", "run_through"]

# The functions behind those of the module signal, which take longer than many a section.
_signal: Any = importlib.import_module("_signal")
_get_handler, _set_handler = _signal.getsignal, _signal.signal

_get_ident = threading.get_ident
_NUMBER = int(SIGINT)


class Deferral:
    """Whether the main thread is inside sections, and the handler to call when it has left the last one.

    Everything here belongs to the main thread; other threads find nothing to do.

    Attributes:
        depth: how many sections the main thread is in.
    """

    __slots__ = ("_main", "_pending", "_previous", "_waiting", "depth")

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self.depth = 0
        self._pending = False  # whether a signal came meanwhile
        self._waiting = False  # whether this section is not entered yet, so that signals go through
        self._previous: Callable[[int, Any], Any] | None = None

    def begin(self) -> bool:
        """A section begins. Returns whether signals are deferred, which they are in the main thread only."""
        if _get_ident() != self._main:
            return False
        if not self.depth:
            handler = _get_handler(_NUMBER)
            if handler is not _hold and callable(handler):
                self._pending = False
                self._previous = handler
                _set_handler(_NUMBER, _hold)
        self.depth += 1
        return True

    def end(self) -> None:
        """A section has ended and holds nothing any more. Raises what the handler raises for a signal that came."""
        if _get_ident() == self._main:
            if self.depth > 1:
                self.depth -= 1
            else:
                self._end_last()

    def back_to(self, depth: int) -> None:
        """As :meth:`end`, of all sections but the outermost ``depth``."""
        if _get_ident() == self._main:
            if depth > 0:
                self.depth = depth
            else:
                self._end_last()

    def _end_last(self) -> None:
        self.depth = 0
        previous, self._previous = self._previous, None  # from here on receive() takes note
        if previous is None:
            return
        replaced = _set_handler(_NUMBER, previous)
        if replaced is not _hold:  # somebody's, from inside the section
            _set_handler(_NUMBER, replaced)
        if self._pending:
            self._pending = False
            previous(_NUMBER, sys._getframe())

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *exc: object) -> None:
        self.end()

    def check(self) -> None:
        """Raises what the handler raises, if a signal came: for a section that is still waited for."""
        if self._pending and self._previous is not None and _get_ident() == self._main:
            self._pending = False
            self._previous(_NUMBER, sys._getframe())

    def waiting(self, waits: bool) -> None:
        """Lets signals through while the main thread waits for what a section needs, in a call that they end."""
        if _get_ident() == self._main:
            self._waiting = waits
            if waits:
                self.check()

    def receive(self, number: int, frame: Any) -> None:
        """A signal came: between the first and the last step of a section, or just before or after."""
        previous = self._previous
        if previous is None or (self.depth and not self._waiting):
            self._pending = True
        else:
            previous(number, frame)

    @contextlib.contextmanager
    def let_through(self) -> Iterator[None]:
        """See :meth:`waiting`."""
        try:
            self.waiting(True)
            yield
        finally:
            self.waiting(False)

    def renew(self) -> None:
        """In a forked child: the thread that forked is the main thread, and inside no section that it could leave."""
        self._main = _get_ident()
        self.depth, self._pending, self._waiting = 0, False, False
        if self._previous is not None:
            previous, self._previous = self._previous, None
            if _get_handler(_NUMBER) is _hold:
                _set_handler(_NUMBER, previous)


#: Entered, it is a section that holds nothing yet.
deferral = Deferral()


def _hold(number: int, frame: Any) -> None:
    deferral.receive(number, frame)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=deferral.renew)


def run_through(steps: Callable[[], Any]) -> None:
    """Takes steps of which none may be left out: whatever is raised among them, all of them have been taken then.

    Args:
        steps: takes them, and may be called again wherever it was left. It has made and checked before whatever can
            fail for good.
    """
    try:
        steps()
    except BaseException:
        steps()
        raise
