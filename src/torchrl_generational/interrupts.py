"""Ctrl-C waits for the end of a section: whoever interrupts a notebook cell goes on with the buffer afterwards.

Python raises ``KeyboardInterrupt`` in the main thread between any two instructions, also between taking a lock and
entering the block that gives it back. So while the main thread is inside a section, the handler notes the signal, and
what it does at other times is done when the section ends. Whoever *waits* for a section can be interrupted as ever.

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
from signal import SIGINT, default_int_handler
from typing import Any

__all__ = ["deferral", "run_through"]

# The functions behind those of the module signal, which take longer than many a section.
_signal: Any = importlib.import_module("_signal")
_get_handler, _set_handler = _signal.getsignal, _signal.signal

_get_ident = threading.get_ident
_NUMBER = int(SIGINT)


class Handler:
    """A handler that does what was last put into it, without a frame of its own in the traceback of that.

    Attributes:
        otherwise: what it does outside of sections, as the handler in whose place it is.
    """

    __slots__ = ("__call__", "otherwise")

    def __init__(self, otherwise: Callable[[int, Any], Any]) -> None:
        self.otherwise = self.__call__ = otherwise


# To change the handler of the process takes a system call, and to do so twice takes longer than many a section. So this
# one stays where it has come into the place of Python's. Others stand in for somebody's handler, for one section.
_resident = Handler(default_int_handler)


class Deferral:
    """Whether the main thread is inside sections, and what to do about a signal when it has left the last one.

    Everything here belongs to the main thread; other threads find nothing to do.

    Attributes:
        depth: how many sections the main thread is in.
    """

    __slots__ = ("_handler", "_main", "_pending", "_stand_in", "depth")

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self.depth = 0
        self._pending = False  # whether a signal came meanwhile
        self._handler = self._stand_in = _resident  # the one in use, and the last that stood in for somebody's

    def begin(self) -> bool:
        """A section begins. Returns whether signals are deferred, which they are in the main thread only."""
        if _get_ident() != self._main:
            return False
        if not self.depth:
            handler = _get_handler(_NUMBER)
            self._pending = False
            if handler is _resident:
                self._handler = handler
                handler.__call__ = self._note
            elif callable(handler):
                self._put_in_place_of(handler)
        self.depth += 1
        return True

    def _put_in_place_of(self, handler: Any) -> None:
        # One of ours has stayed here if an exception kept it from being exchanged, or if somebody found it in a section
        # and put it back later. It knows whose place it is in.
        if type(handler) is Handler:
            ours = handler
        elif handler is default_int_handler:
            ours = _resident
        else:
            ours = self._stand_in if self._stand_in.otherwise is handler else Handler(handler)
            self._stand_in = ours
        self._handler = ours
        ours.__call__ = self._note
        _set_handler(_NUMBER, ours)

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
        ours = self._handler
        if ours is not _resident:
            self._put_back(ours)
        ours.__call__ = ours.otherwise
        if self._pending:
            self._pending = False
            ours.otherwise(_NUMBER, sys._getframe())

    def _put_back(self, ours: Handler) -> None:
        replaced = _set_handler(_NUMBER, ours.otherwise)
        if replaced is not ours:  # somebody's, from inside the section
            _set_handler(_NUMBER, replaced)
        self._handler = _resident

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
        """Raises what the handler raises, if a signal came: for a section that is still waited for."""
        if self._pending and _get_ident() == self._main:
            self._pending = False
            self._handler.otherwise(_NUMBER, sys._getframe())

    def waiting(self, waits: bool) -> None:
        """Lets signals through while the main thread waits for what a section needs, in a call that they end."""
        if self.depth and _get_ident() == self._main:
            self._handler.__call__ = self._handler.otherwise if waits else self._note
            if waits:
                self.check()

    def _note(self, number: int, frame: Any) -> None:
        """A signal came inside a section, or in the last step out of it."""
        if self.depth or self._handler is not _resident:
            self._pending = True
        else:
            default_int_handler(number, frame)

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
        self._pending = False
        self._end_last()


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
