"""Writers in processes of their own beside a learner: `python benchmarks/processes.py --writers 1 2`.

Every contender is a full ring of the transitions of `workload`. Writers put batches into it without pause while the
learner, in this process, samples and updates priorities. A round runs each contender for `--seconds`; rates are medians
over rounds, and so are the ratios to TorchRL, each taken within one round.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")
if not __package__:  # run as a script: the package it is part of lies one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import contextlib
import importlib
import json
import multiprocessing
import signal
import statistics
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

from benchmarks.machine import NOT_INSTALLED, versions
from benchmarks.workload import ALPHA, BETA, Rates, arrays, fill_sizes, transitions
from torchrl_generational import GenerationalLazyTensorStorage, GenerationalTensorDictPrioritizedReplayBuffer

BATCHES = 16  # that a writer, and a learner, goes through again and again
START_S, STOP_S = 120, 10  # how long writers may take to get ready, and to stop
WAIT, GO, STOP = range(3)
COLUMNS = ("written", "samples", "updates")


@dataclass(frozen=True)
class Setup:
    """What all contenders of a run have in common."""

    capacity: int
    batch: int
    start_method: str


class Contender(ABC):
    """A buffer between one learner and several writers; sent to the writers' processes once it is full."""

    name: str
    package: str

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @abstractmethod
    def fill(self) -> None:
        """Fills the ring and makes it ready to be sent to the writers."""

    @abstractmethod
    def prepare_writes(self) -> None:
        """Makes the batches of a writer; called in its process."""

    @abstractmethod
    def write(self, batch_number: int) -> None:
        """Writes one batch; called in a writer's process."""

    @abstractmethod
    def learn(self) -> torch.Tensor | None:
        """Samples and updates one batch. Returns which rows were updated, `None` where the buffer does not say."""


class TensorDictContender(Contender):
    """What the contenders on TorchRL's interface have in common."""

    rb: Any

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.td_errors = [torch.rand(setup.batch) for _ in range(BATCHES)]
        self.turn = 0

    def records(self, size: int) -> TensorDict:
        """A batch to write."""
        return transitions(size)

    def fill(self) -> None:
        """Fills the ring."""
        for size in fill_sizes(self.setup.capacity):
            self.rb.extend(self.records(size))

    def prepare_writes(self) -> None:
        """Makes the batches of a writer."""
        self.batches = [self.records(self.setup.batch) for _ in range(BATCHES)]

    def write(self, batch_number: int) -> None:
        """Writes one batch."""
        self.rb.extend(self.batches[batch_number % BATCHES])

    def sampled(self) -> Any:
        """A sample with TD errors."""
        sample = self.rb.sample()
        sample["td_error"] = self.td_errors[self.turn % BATCHES]
        self.turn += 1
        return sample


class Ours(TensorDictContender):
    """Writers give first priorities, the learner updates conditionally."""

    name, package = "ours", "torchrl-generational"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.rb = GenerationalTensorDictPrioritizedReplayBuffer(
            alpha=ALPHA,
            beta=BETA,
            storage=GenerationalLazyTensorStorage(setup.capacity),
            batch_size=setup.batch,
            shared=True,
        )

    def records(self, size: int) -> TensorDict:
        """A batch with first priorities."""
        return super().records(size).set("td_error", torch.rand(size))

    def learn(self) -> torch.Tensor | None:
        """Updates what is still there."""
        mask: torch.Tensor = self.rb.update_tensordict_priority_if_present(self.sampled()).updated_mask
        return mask


class TorchRL(TensorDictContender):
    """TorchRL's way to share: priorities live in the learner alone, which catches up with the writers."""

    name, package = "TorchRL", "torchrl"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.rb = TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA,
            beta=BETA,
            storage=LazyTensorStorage(setup.capacity),
            batch_size=setup.batch,
            sync=False,
            shared=True,
        )

    def fill(self) -> None:
        """Fills the ring; the first sample gives all records their default priority."""
        super().fill()
        if self.setup.start_method == "fork":
            self.rb.storage._storage.share_memory_()  # spawned processes get it anyway
        self.rb.sample()
        self.rb.update_priority(torch.arange(self.setup.capacity), torch.rand(self.setup.capacity))

    def learn(self) -> torch.Tensor | None:
        """Updates by raw index."""
        self.rb.update_tensordict_priority(self.sampled())
        return None


class Cpprb(Contender):
    """cpprb's multi-process buffer; it leaves out rows written since the last sample and does not say how many."""

    name, package = "cpprb", "cpprb"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        cpprb: Any = importlib.import_module("cpprb")  # untyped, and optional
        fields = {key: {"shape": entry.shape[1:], "dtype": entry.dtype} for key, entry in arrays(1).items()}
        context = multiprocessing.get_context(setup.start_method)
        self.rb = cpprb.MPPrioritizedReplayBuffer(setup.capacity, fields, alpha=ALPHA, ctx=context)
        self.priorities = [np.random.rand(setup.batch).astype(np.float32) for _ in range(BATCHES)]
        self.turn = 0

    def fill(self) -> None:
        """Fills the ring."""
        for size in fill_sizes(self.setup.capacity):
            self.rb.add(**arrays(size), priorities=np.random.rand(size).astype(np.float32))

    def prepare_writes(self) -> None:
        """Makes the batches of a writer; priorities are those that the contender came with."""
        self.batches = [arrays(self.setup.batch) for _ in range(BATCHES)]

    def write(self, batch_number: int) -> None:
        """Writes one batch with its first priorities."""
        position = batch_number % BATCHES
        self.rb.add(**self.batches[position], priorities=self.priorities[position])

    def learn(self) -> torch.Tensor | None:
        """Updates by raw index."""
        sample = self.rb.sample(self.setup.batch, beta=BETA)
        self.rb.update_priorities(sample["indexes"], self.priorities[self.turn % BATCHES])
        self.turn += 1
        return None


CONTENDERS: list[type[Contender]] = [Ours, TorchRL, Cpprb]
PACKAGES = ("torch", "tensordict", *(kind.package for kind in CONTENDERS))


def write_until_stopped(contender: Contender, writer: int, counts: Any, flag: Any) -> None:
    """A writer's process: counts its batches in `counts[writer]`, which is 0 as soon as it is ready."""
    torch.set_num_threads(1)
    torch.manual_seed(writer)
    contender.prepare_writes()
    counts[writer] = 0
    while flag.value == WAIT:
        time.sleep(0.001)
    for number in count():
        if flag.value == STOP:
            return
        contender.write(number)
        counts[writer] = number + 1


class WriterError(RuntimeError):
    """A writer ended, or did not start or stop."""


@contextlib.contextmanager
def watched(processes: Sequence[BaseProcess], limit_s: float) -> Iterator[None]:
    """Raises in this process, also while it waits for a lock, when a writer has ended or time is up."""
    deadline = time.monotonic() + limit_s

    def look(*_: object) -> None:
        raise_for_ended(processes)
        if time.monotonic() > deadline:
            raise TimeoutError(f"neither done nor failed after {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def raise_for_ended(processes: Sequence[BaseProcess], *, expected: int | None = None) -> None:
    """Refuses exit codes other than `expected`, by default that of a process that runs."""
    for number, process in enumerate(processes):
        if process.exitcode != expected:
            raise WriterError(f"writer {number} ended with exit code {process.exitcode}")


def stop(processes: Sequence[BaseProcess]) -> list[int]:
    """Waits for the writers, ends those that do not stop, and returns their numbers."""
    deadline, stuck = time.monotonic() + STOP_S, []
    for number, process in enumerate(processes):
        if process.pid is None:  # never started
            continue
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            stuck.append(number)
            process.kill()
            process.join()
    return stuck


def measure(kind: type[Contender], setup: Setup, writers: int, seconds: float) -> Rates:
    """One contender for one round."""
    context: Any = multiprocessing.get_context(setup.start_method)
    contender = kind(setup)
    contender.fill()
    contender.learn()  # TorchRL's learner catches up with the fill here
    counts, flag = context.RawArray("q", [-1] * writers), context.RawValue("i", WAIT)
    processes = [
        context.Process(target=write_until_stopped, args=(contender, writer, counts, flag), daemon=True)
        for writer in range(writers)
    ]
    learned: list[torch.Tensor | None] = []
    try:
        for process in processes:
            process.start()
        with watched(processes, START_S + seconds):
            while min(counts) < 0:
                time.sleep(0.01)
            start = time.perf_counter()
            flag.value = GO
            while (elapsed := time.perf_counter() - start) < seconds:
                learned.append(contender.learn())
            written = sum(counts) * setup.batch
    finally:
        flag.value = STOP
        stuck = stop(processes)
    if stuck:
        raise WriterError(f"writers {stuck} did not stop within {STOP_S} s")
    raise_for_ended(processes, expected=0)
    samples = len(learned) * setup.batch
    masks = [mask for mask in learned if mask is not None]
    updated = int(torch.stack(masks).count_nonzero()) if masks else samples
    stale = (samples - updated) / samples if masks else None
    return Rates(written / elapsed, samples / elapsed, updated / elapsed, stale)


def figures(rounds: Sequence[Rates], torchrl: Sequence[Rates | None]) -> str:
    """Medians over rounds and ratios to TorchRL, as a line of the table has them."""
    cells = ""
    for column in COLUMNS:
        own = [getattr(rates, column) for rates in rounds]
        ratios = [mine / getattr(its, column) for mine, its in zip(own, torchrl, strict=True) if its is not None]
        cells += f"{statistics.median(own):12,.0f}" + (f"{statistics.median(ratios):8.2f}" if ratios else f"{'-':>8}")
    stales = [rates.stale for rates in rounds if rates.stale is not None]
    return cells + (f"{statistics.median(stales):9.3%}" if stales else f"{'-':>9}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="that each contender runs in a round")
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 2], help="numbers of writer processes")
    parser.add_argument("--capacity", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=256, help="rows written, sampled and updated at a time")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the rates of every round")
    parser.add_argument("--start-method", choices=["fork", "spawn"], default="spawn")
    return parser.parse_args()


def main() -> int:
    """Runs all contenders, prints the table, and returns 1 if one of them failed."""
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    setup, installed = Setup(args.capacity, args.batch, args.start_method), versions(PACKAGES)
    contenders = [kind for kind in CONTENDERS if installed[kind.package] != NOT_INSTALLED]
    failures: dict[tuple[str, int], str] = {}
    results: dict[tuple[str, int], list[Rates | None]] = {}
    for writers in args.writers:
        for _ in range(args.rounds):
            for kind in contenders:
                rates = None
                try:
                    rates = measure(kind, setup, writers, args.seconds)
                except Exception as error:
                    traceback.print_exc()
                    failures[kind.name, writers] = f"{type(error).__name__}: {error}"
                results.setdefault((kind.name, writers), []).append(rates)

    columns = "".join(f"{column + '/s':>12}{'ratio':>8}" for column in COLUMNS)
    print(f"{'writers':7}  {'contender':10}{columns}{'stale':>9}")
    for writers in args.writers:
        for kind in CONTENDERS:
            key = kind.name, writers
            if kind not in contenders:
                cells = "  not installed"
            elif key in failures:
                cells = f"  failed: {failures[key]}"
            else:
                cells = figures([rates for rates in results[key] if rates], results[TorchRL.name, writers])
            print(f"{writers:7}  {kind.name:10}{cells}")
    print("Rows per second and ratios to TorchRL. Updates count what was applied; cpprb's, what it was given.")
    print(", ".join(f"{name} {version}" for name, version in installed.items()))
    print(
        f"capacity {args.capacity}, batch {args.batch}, {args.rounds} x {args.seconds:g} s, {args.start_method}, "
        f"{os.cpu_count()} cores, 1 torch thread per process"
    )
    if args.json is not None:
        rows = [
            {"contender": name, "writers": writers, "rounds": [rates and asdict(rates) for rates in rounds]}
            | ({"failure": failures[name, writers]} if (name, writers) in failures else {})
            for (name, writers), rounds in results.items()
        ]
        report = {"setup": asdict(setup), "seconds": args.seconds, "cores": os.cpu_count(), "versions": installed}
        args.json.write_text(json.dumps(report | {"results": rows}, indent=2) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
