"""Threads that run one at a time, in an order that is chosen, and switch only at named points."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_generational.concurrency.storage_lock import StorageLock

__all__ = ["Sequencer", "SteppedLock", "StuckError"]

# How long a thread may run between two points. Only reached where it waits for a lock that is not a SteppedLock.
PATIENCE = 20.0


class StuckError(RuntimeError):
    """A thread did not come to its next point, or all of them wait for each other."""


class _Stopped(BaseException):
    """Unwinds the threads of a run that has ended early."""


class _Actor:
    def __init__(self, name: str, program: Callable[[], None]) -> None:
        self.name, self.program = name, program
        self.turn = threading.Semaphore(0)
        self.waits_for: SteppedLock | None = None
        self.done = False
        self.error: BaseException | None = None
        self.at = "the beginning"


class Sequencer:
    """Runs programs on threads of their own, of which only one runs at any time.

    A thread gives up its turn at :meth:`point`, before the outermost entry of a :class:`SteppedLock`, and at its end;
    ``choose`` says whose turn is next. Nothing else decides, so the same choices give the same run.

    Args:
        choose: given the names of the threads that can go on, and of the one that ran last (``None`` at first), returns
            the name of the next.
        between: called between two turns, on the thread of :meth:`run`.

    Example:
        >>> seen = []
        >>> sequencer = Sequencer(lambda names, last: names[-1])
        >>> def program(name):
        ...     seen.append(name + "1")
        ...     sequencer.point("the middle")
        ...     seen.append(name + "2")
        >>> sequencer.run({"a": lambda: program("a"), "b": lambda: program("b")})
        >>> seen
        ['b1', 'b2', 'a1', 'a2']
    """

    def __init__(
        self, choose: Callable[[list[str], str | None], str], between: Callable[[], None] = lambda: None
    ) -> None:
        self._choose, self._between = choose, between
        self._actors: dict[int, _Actor] = {}  # by thread
        self._back = threading.Semaphore(0)  # released by a thread that gives up its turn
        self._stopping = False
        self.locks: list[SteppedLock] = []

    def lock(self, *, quiet: bool = False) -> SteppedLock:
        """A lock that this sequencer knows. A quiet one is no point unless somebody else holds it."""
        made = SteppedLock(self, quiet=quiet)
        self.locks.append(made)
        return made

    def point(self, name: str) -> None:
        """Gives up the turn of the calling thread; does nothing on a thread of somebody else."""
        actor = self._actors.get(threading.get_ident())
        if actor is None:
            return
        if self._stopping:
            raise _Stopped
        actor.at = name
        self._back.release()
        actor.turn.acquire()
        if self._stopping:
            raise _Stopped

    def run(self, programs: Mapping[str, Callable[[], None]]) -> None:
        """Runs the programs to their ends.

        Raises:
            StuckError: if no thread can go on, or one does not come back.
            BaseException: the first error of a program, or of ``between``.
        """
        actors = [_Actor(name, program) for name, program in programs.items()]
        threads = [threading.Thread(target=self._live, args=(actor,), daemon=True) for actor in actors]
        for thread, actor in zip(threads, actors, strict=True):
            thread.start()
            self._wait_for(actor)
        try:
            last: str | None = None
            while any(not actor.done for actor in actors):
                ready = {actor.name: actor for actor in actors if self._can_go_on(actor)}
                if not ready:
                    waiting = ", ".join(f"{actor.name} at {actor.at}" for actor in actors if not actor.done)
                    raise StuckError(f"every thread waits for another: {waiting}.")
                last = self._choose(list(ready), last)
                ready[last].turn.release()
                self._wait_for(ready[last])
                error = ready[last].error
                if error is not None:
                    raise error
                self._between()
        finally:
            self._stopping = True
            for actor in actors:
                actor.turn.release()
            for thread in threads:
                thread.join(PATIENCE)

    def _wait_for(self, actor: _Actor) -> None:
        if not self._back.acquire(timeout=PATIENCE):
            raise StuckError(
                f"{actor.name} did not come back from {actor.at}: it waits for a lock that the sequencer does not know."
            )

    def _can_go_on(self, actor: _Actor) -> bool:
        wanted = actor.waits_for
        return not actor.done and (wanted is None or wanted.owner is None)

    def _live(self, actor: _Actor) -> None:
        self._actors[threading.get_ident()] = actor
        try:
            self.point("the beginning")
            actor.program()
        except _Stopped:
            pass
        except BaseException as error:
            actor.error = error
        finally:
            actor.done = True
            self._actors.pop(threading.get_ident(), None)
            self._back.release()

    def wait(self, lock: SteppedLock) -> None:
        """Gives up turns until ``lock`` is free."""
        actor = self._actors.get(threading.get_ident())
        while lock.owner is not None:
            if actor is None:
                raise StuckError("a thread of somebody else wants a lock that one of the programs holds.")
            actor.waits_for = lock
            try:
                self.point("a lock that is held")
            finally:
                actor.waits_for = None


class SteppedLock(StorageLock):
    """A reentrant lock whose outermost entry is a point of a :class:`Sequencer`.

    Example:
        >>> sequencer = Sequencer(lambda names, last: names[0])
        >>> lock = sequencer.lock()
        >>> with lock, lock:  # on a thread of somebody else it is a plain lock
        ...     pass
    """

    __slots__ = ("_level", "_quiet", "_sequencer", "owner")

    def __init__(self, sequencer: Sequencer, *, quiet: bool = False) -> None:
        super().__init__()
        self._sequencer, self._quiet, self._level = sequencer, quiet, 0
        self.owner: int | None = None

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        """Gives up the turn, then waits until no other thread holds the lock."""
        me = threading.get_ident()
        if self.owner != me:
            if not self._quiet:
                self._sequencer.point("the entry of a section")
            self._sequencer.wait(self)
            self.owner = me
        self._level += 1
        return True

    def release(self, *exc: object) -> None:
        """Undoes one :meth:`acquire`. No point: what a thread does next that others can see has one before it."""
        self._level -= 1
        if self._level == 0:
            self.owner = None

    __enter__, __exit__ = acquire, release

    def __reduce__(self) -> Any:
        return StorageLock, ()  # a copy of what it guards has a lock of its own
