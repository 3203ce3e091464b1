"""All the orders in which a few threads can run, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from torchrl_generational.testing.sequencer import Sequencer

__all__ = ["RaceError", "Report", "Scene", "explore", "replay"]


class Scene(Protocol):
    """What is explored: built anew for every order."""

    def programs(self) -> Mapping[str, Callable[[], None]]:
        """Name of each thread -> what it does."""

    def check(self) -> None:
        """Raises AssertionError if something is wrong. Called between any two turns, and at the end."""


class RaceError(AssertionError):
    """A promise is broken in one order.

    Attributes:
        schedule: the order, as :func:`replay` takes it.
        problem: what is wrong.
    """

    def __init__(self, problem: str, schedule: str) -> None:
        super().__init__(f"{problem}\n  in this order (replay it with its schedule): {schedule!r}")
        self.problem, self.schedule = problem, schedule


@dataclass(frozen=True)
class Report:
    """What an exploration covered.

    Attributes:
        schedules: number of orders that were run.
        complete: whether these are all there are, within the bound on preemptions.
        longest: turns in the longest of them.
    """

    schedules: int
    complete: bool
    longest: int


def explore(build: Callable[[Sequencer], Scene], *, preemptions: int | None = 2, most: int = 20_000) -> Report:
    """Runs the threads of a scene in every order, depth first.

    Args:
        build: makes a fresh scene whose locks and points belong to the sequencer it is given.
        preemptions: how often a thread may be made to wait although it could go on; most faults need one or two
            (Musuvathi and Qadeer, "Iterative context bounding for systematic testing of multithreaded programs", 2007).
            ``None`` for all orders.
        most: gives up after so many orders.

    Returns:
        A :class:`Report`.

    Raises:
        RaceError: in the first order in which ``check`` or a program fails.

    Example:
        >>> class Counter:
        ...     def __init__(self, sequencer):
        ...         self.sequencer, self.value = sequencer, 0
        ...     def increment(self):
        ...         read = self.value
        ...         self.sequencer.point("between read and write")
        ...         self.value = read + 1
        ...     def programs(self):
        ...         return {"a": self.increment, "b": self.increment}
        ...     def check(self):
        ...         pass
        >>> explore(Counter, preemptions=None)
        Report(schedules=6, complete=True, longest=4)
    """
    path: list[tuple[list[str], int]] = []  # for every turn: the choices in the order they are tried, and the current
    schedules = longest = 0
    while True:
        taken = _run(build, path, preemptions)
        schedules += 1
        longest = max(longest, taken)
        while path and path[-1][1] + 1 == len(path[-1][0]):
            path.pop()
        if not path:
            return Report(schedules, True, longest)
        if schedules == most:
            return Report(schedules, False, longest)
        choices, current = path[-1]
        path[-1] = (choices, current + 1)


def replay(build: Callable[[Sequencer], Scene], schedule: str) -> None:
    """Runs a scene in the order of one schedule, such as ``"learner*3 writer*2 learner"``.

    Args:
        build: as for :func:`explore`.
        schedule: names of threads in the order of their turns. Where it ends, each thread runs as far as it can.

    Raises:
        RaceError: as the exploration that printed the schedule, or if the schedule does not fit.

    Example:
        >>> class Two:
        ...     def __init__(self, sequencer):
        ...         self.seen = []
        ...     def programs(self):
        ...         return {"a": lambda: self.seen.append("a"), "b": lambda: self.seen.append("b")}
        ...     def check(self):
        ...         assert self.seen != ["b", "a"], "b came first"
        >>> replay(Two, "a b")
        >>> try:
        ...     replay(Two, "b a")
        ... except RaceError as error:
        ...     print(error.problem)
        b came first
    """
    path: list[tuple[list[str], int]] = []
    for part in schedule.split():
        name, _, times = part.partition("*")
        path += [([name], 0)] * int(times or 1)
    _run(build, path, None)


def _run(build: Callable[[Sequencer], Scene], path: list[tuple[list[str], int]], preemptions: int | None) -> int:
    """One run: as ``path`` says as far as it goes, then without preemption; what could be chosen is added to it."""
    turns: list[str] = []
    spent = 0

    def choose(ready: list[str], last: str | None) -> str:
        nonlocal spent
        if len(turns) == len(path):
            stay = [last] if last in ready else []
            others = [name for name in ready if name != last]
            if stay and preemptions is not None and spent >= preemptions:
                others = []
            path.append(([*stay, *others], 0))
        choices, current = path[len(turns)]
        name = choices[current]
        if name not in ready:
            raise AssertionError(f"the schedule does not fit: {name} cannot go on at turn {len(turns)}, {ready} can.")
        spent += last in ready and name != last
        turns.append(name)
        return name

    scene: Any = None
    sequencer = Sequencer(choose, lambda: scene.check())
    scene = build(sequencer)
    try:
        sequencer.run(scene.programs())
        scene.check()
    except Exception as error:
        runs = ((name, len(list(group))) for name, group in groupby(turns))
        schedule = " ".join(name if count == 1 else f"{name}*{count}" for name, count in runs)
        problem = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise RaceError(problem, schedule) from error
    del path[len(turns) :]
    return len(turns)
