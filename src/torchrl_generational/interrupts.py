"""Ctrl-C waits for the end of a section: whoever interrupts a notebook cell goes on with the buffer afterwards.

Python calls the handlers of signals in the main thread between any two instructions, also between taking a lock and
entering the block that gives it back; and some of them raise. So while the main thread is inside a section, another
handler notes the signal, and the one of before is back and called when the section ends. Whoever *waits* for a section
can be interrupted as ever.

Only in the main thread, only the signals that are used to end what a program is at, and only where their handler is one
of Python's.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from signal import default_int_handler
from typing import Any

__all__ = ["deferral", "run_through"]

# The functions behind those of the module signal, which take longer than many a section.
_signal: Any = importlib.import_module("_signal")
_get_handler, _set_handler = _signal.getsignal, _signal.signal

_get_ident = threading.get_ident
# Of Ctrl-C, of a limit of time, of a scheduler; Windows has no alarms.
_NUMBERS = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGALRM", "SIGTERM") if hasattr(signal, name))


class Handler:
    """A handler that does what was last put into it, without a frame of its own in the traceback of that.

    Somebody may find it inside a section and put it back later: it knows in whose place it is, for good.

    Attributes:
        otherwise: what it does outside of sections, as the handler in whose place it is.
    """

    __slots__ = ("__call__", "otherwise")

    def __init__(self, otherwise: Callable[[int, Any], Any]) -> None:
        self.otherwise = self.__call__ = otherwise


_of_python = Handler(default_int_handler)


class Deferral:
    """Whether the main thread is inside sections, and the handlers to call when it has left the last one.

    Everything here belongs to the main thread; other threads find nothing to do.

    Attributes:
        depth: how many sections the main thread is in.
    """

    __slots__ = ("_exchanged", "_main", "_noted", "depth")

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self.depth = 0
        self._exchanged: list[tuple[int, Handler]] = []  # signals, and what is in the place of their handlers
        self._noted: list[int] = []  # signals that came meanwhile

    def begin(self) -> bool:
        """A section begins. Returns whether signals are deferred, which they are in the main thread only."""
        if _get_ident() != self._main:
            return False
        if not self.depth:
            for number in _NUMBERS:
                handler = _get_handler(number)
                if callable(handler):
                    self._exchange(number, _of_python if handler is default_int_handler else handler)
        self.depth += 1
        return True

    def _exchange(self, number: int, handler: Any) -> None:
        # one of ours that is there was left by an exception, or put back by somebody
        ours = handler if type(handler) is Handler else Handler(handler)
        self._exchanged.append((number, ours))
        ours.__call__ = self._note
        _set_handler(number, ours)

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
        noted: list[tuple[int, Handler]] = []
        try:
            while self._exchanged:
                number, ours = self._exchanged[-1]
                replaced = _set_handler(number, ours.otherwise)
                if replaced is not ours:  # somebody's, from inside the section
                    _set_handler(number, replaced)
                ours.__call__ = ours.otherwise
                self._exchanged.pop()
                if number in self._noted:
                    self._noted.remove(number)
                    noted.append((number, ours))
        finally:  # those that are back may raise before all are
            if self._exchanged:
                self._end_last()
            if noted:
                _call(noted)

    def __enter__(self) -> None:
        before = self.depth
        try:
            self.begin()
        except BaseException:
            self.back_to(before)
            raise

    def __exit__(self, *exc: object) -> None:
        self.end()

    def check(self) -> None:
        """Raises what the handlers raise, if signals came: for a section that is still waited for."""
        if self._noted and _get_ident() == self._main:
            noted = [(number, ours) for number, ours in self._exchanged if number in self._noted]
            self._noted.clear()
            _call(noted)

    def waiting(self, waits: bool) -> None:
        """Lets signals through while the main thread waits for what a section needs, in a call that they end."""
        if self.depth and _get_ident() == self._main:
            for _, ours in self._exchanged:
                ours.__call__ = ours.otherwise if waits else self._note
            if waits:
                self.check()

    def _note(self, number: int, frame: Any) -> None:
        """A signal came inside a section."""
        if number not in self._noted:
            self._noted.append(number)

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
        self._noted.clear()
        self._end_last()


def _call(noted: list[tuple[int, Handler]]) -> None:
    """Calls the handlers of signals that came, of which each may raise."""
    number, ours = noted.pop()
    try:
        ours.otherwise(number, sys._getframe())
    finally:
        if noted:
            _call(noted)


#: Entered, it is a section that holds nothing yet.
deferral = Deferral()


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
