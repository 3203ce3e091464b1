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
_CTRL_C = int(signal.SIGINT)
_OTHERS = tuple(int(getattr(signal, name)) for name in ("SIGALRM", "SIGTERM") if hasattr(signal, name))


class Handler:
    """A handler that does what was last put into it, without a frame of its own in the traceback of that.

    Somebody may find it inside a section and put it back later: it knows in whose place it is, for good.

    Attributes:
        number: of the signal.
        otherwise: what it does outside of sections, as the handler in whose place it is.
        before: the one that was put in place before it, in the same section.
    """

    __slots__ = ("__call__", "before", "number", "otherwise")

    def __init__(self, number: int, otherwise: Callable[[int, Any], Any], before: Handler | None) -> None:
        self.number, self.otherwise, self.before = number, otherwise, before
        self.__call__ = otherwise


_usual = Handler(_CTRL_C, default_int_handler, None)


class Deferral:
    """Whether the main thread is inside sections, and the handlers to call when it has left the last one.

    Everything here belongs to the main thread, which alone may begin and end sections. Every line counts: each
    section of the main thread pays for it.

    Attributes:
        depth: how many sections the main thread is in.
        thread: the main thread.
    """

    __slots__ = ("_last", "_noted", "_noting", "depth", "thread")

    def __init__(self) -> None:
        self.thread = threading.main_thread().ident
        self.depth = 0
        self._last: Handler | None = None  # the one put in place last
        self._noted: list[int] = []  # signals that came meanwhile
        self._noting = self._note

    def begin(self) -> None:
        """A section of the main thread begins: signals are deferred until it has ended."""
        if not self.depth:
            if _get_handler(_CTRL_C) is default_int_handler:
                self._last = _usual
                _usual.__call__ = self._noting
                _set_handler(_CTRL_C, _usual)
            else:
                self._exchange(_CTRL_C)
            for number in _OTHERS:
                if _get_handler(number):  # not the system's own
                    self._exchange(number)
        self.depth += 1

    def _exchange(self, number: int) -> None:
        handler = _get_handler(number)
        if callable(handler):
            if type(handler) is Handler:  # left by an exception, or put back by somebody
                handler = handler.otherwise
            self._last = ours = Handler(number, handler, self._last)
            ours.__call__ = self._noting
            _set_handler(number, ours)

    def back_to(self, depth: int) -> None:
        """As :meth:`end`, of all sections but the outermost ``depth``. Other threads find nothing to do."""
        if _get_ident() == self.thread:
            self.depth = depth + 1
            self.end()

    def end(self) -> None:
        """A section of the main thread has ended and holds nothing any more.

        Raises what the handler raises for a signal that came, if it was the outermost.
        """
        if self.depth > 1:
            self.depth -= 1
            return
        self.depth = 0
        noted: list[Handler] | None = None
        try:
            while (ours := self._last) is not None:
                replaced = _set_handler(ours.number, ours.otherwise)
                if replaced is not ours:  # somebody's, from inside the section
                    _set_handler(ours.number, replaced)
                ours.__call__ = ours.otherwise
                self._last = ours.before
                if self._noted and ours.number in self._noted:
                    self._noted.remove(ours.number)
                    noted = [*(noted or ()), ours]
        finally:  # those that are back may raise before all are
            if self._last is not None:
                self.end()
            if noted:
                _call(noted)

    def __enter__(self) -> None:
        before = self.depth
        try:
            if _get_ident() == self.thread:
                self.begin()
        except BaseException:
            self.back_to(before)
            raise

    def __exit__(self, *exc: object) -> None:
        self.back_to(self.depth - 1)

    def check(self) -> None:
        """Raises what the handlers raise, if signals came: for a section that is still waited for."""
        if self._noted and _get_ident() == self.thread:
            noted = [ours for ours in self._in_place() if ours.number in self._noted]
            self._noted.clear()
            _call(noted)

    def waiting(self, waits: bool) -> None:
        """Lets signals through while the main thread waits for what a section needs, in a call that they end."""
        if self.depth and _get_ident() == self.thread:
            for ours in self._in_place():
                ours.__call__ = ours.otherwise if waits else self._noting
            if waits:
                self.check()

    def _in_place(self) -> Iterator[Handler]:
        ours = self._last
        while ours is not None:
            yield ours
            ours = ours.before

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
        self.thread = _get_ident()
        self._noted.clear()
        self.depth = 0
        self.end()


def _call(noted: list[Handler]) -> None:
    """Calls the handlers of signals that came, of which each may raise."""
    ours = noted.pop()
    try:
        ours.otherwise(ours.number, sys._getframe())
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
