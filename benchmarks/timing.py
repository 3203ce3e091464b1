"""Times calls in turn, beside idle or busy cores."""

from __future__ import annotations

import contextlib
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.contenders import Call
from benchmarks.machine import Others

IDLE, BUSY = "idle", "busy"
WARMUP = 3
SETTLE_S = 0.02  # for spinning processes to start or stop: they look at their orders several times in that
LEAST_ROUNDS = 3
REST_S = 0.5  # in which the threads that torch keeps waiting go to sleep

#: Reads one-letter orders: 1 spins, 0 pauses; ends with its standard input, so with whoever holds the other end.
SPIN = """
import os, select
spinning = False
while True:
    if select.select([0], [], [], 0 if spinning else None)[0]:
        order = os.read(0, 1)
        if not order:
            break
        spinning = order == b"1"
    for _ in range(20_000 if spinning else 0):
        pass
"""


@dataclass(frozen=True)
class Effort:
    """How often each call is made."""

    rounds: int
    repeat: int
    limit_s: float  # after which no further round begins

    def at_most(self, rounds: int, repeat: int) -> Effort:
        """For operations that take long."""
        return Effort(min(self.rounds, rounds), min(self.repeat, repeat), self.limit_s)


class Spinners:
    """Processes that keep cores busy; paused until asked, and ended with the block."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.others = Others()
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Spinners:
        try:
            for _ in range(self.count):
                command = [sys.executable, "-S", "-E", "-c", SPIN]
                # A session of its own: Ctrl-C reaches this process alone, which ends them.
                self.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends all of them, whatever they are at."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Spinning within the block if the phase is busy; if it is idle, looks whether the machine is."""
        if phase == IDLE:
            with self.others:
                yield
            return
        self.order(b"1")
        try:
            yield
        finally:
            self.order(b"0")

    def alone(self, call: Call, calls: int) -> dict[str, list[float]]:
        """Phase -> microseconds of each call, with nothing in between and no threads of others left spinning."""
        times = {}
        for phase in self.phases:
            time.sleep(REST_S)
            timed(call, WARMUP)
            with self.during(phase):
                times[phase] = timed(call, calls)
        return times

    def order(self, letter: bytes) -> None:
        """Tells all of them, and waits until they do it."""
        for process in self.processes:
            if process.stdin is None or process.poll() is not None:
                raise RuntimeError(f"a spinning process ended with exit code {process.returncode}")
            process.stdin.write(letter)
            process.stdin.flush()
        time.sleep(SETTLE_S)

    @property
    def phases(self) -> tuple[str, ...]:
        """Idle, and busy if there are any."""
        return (IDLE, BUSY) if self.count else (IDLE,)


@dataclass(frozen=True)
class Figures:
    """Of one contender: median and 90th percentile of all calls; the ratio is a median over rounds of their means'."""

    median_us: float
    p90_us: float
    ratio: float | None
    rounds: int
    calls: int


Rounds = list[list[float]]  # microseconds of each call, by round


def interleave(calls: Mapping[str, Call], effort: Effort, spinners: Spinners) -> dict[str, dict[str, Rounds]]:
    """Phase -> contender -> rounds. In each round all contenders take turns, starting with another one each time."""
    times: dict[str, dict[str, Rounds]] = {phase: {name: [] for name in calls} for phase in spinners.phases}
    names = list(calls)
    for call in calls.values():
        for _ in range(min(WARMUP, effort.repeat)):
            call()
    gc.collect()
    gc.freeze()  # what lives through the benchmark is not gone through again while someone is timed
    start = time.monotonic()
    try:
        for number in range(effort.rounds):
            if number >= LEAST_ROUNDS and time.monotonic() - start > effort.limit_s:
                break
            shift = number % len(names)
            for phase in spinners.phases:
                with spinners.during(phase):
                    for name in names[shift:] + names[:shift]:
                        times[phase][name].append(timed(calls[name], effort.repeat))
    finally:
        gc.unfreeze()
    return times


def timed(call: Call, repeat: int) -> list[float]:
    """Microseconds of each call."""
    clock, times = time.perf_counter_ns, []
    for _ in range(repeat):
        start = clock()
        call()
        times.append((clock() - start) / 1e3)
    return times


def figures(rounds: Mapping[str, Rounds], base: str) -> dict[str, Figures]:
    """What is reported of every contender, with ratios to `base`."""
    means = {name: [statistics.fmean(calls) for calls in own] for name, own in rounds.items()}
    found = {}
    for name, own in rounds.items():
        every = np.concatenate(own)
        ratio = median_ratio(means[name], means[base]) if base in means else None
        median, p90 = np.percentile(every, [50, 90])
        found[name] = Figures(float(median), float(p90), ratio, len(own), len(every))
    return found


def median_ratio(own: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds, each of which a noisy neighbour disturbs alike for both."""
    return statistics.median(a / b for a, b in zip(own, base, strict=True))
