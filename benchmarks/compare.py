"""Every operation of a training loop, ours beside stock TorchRL and other libraries: `python -m benchmarks.compare`.

All contenders are full rings of the same transitions, in one process, and take turns: a round makes `--repeat` calls of
each, and every round starts with another one. `--scaling` and `--memory` print their own tables instead.
"""

from __future__ import annotations

import os

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")

import argparse
import datetime
import gc
import json
import math
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch

from benchmarks import slices
from benchmarks.contenders import CHECKPOINTS, OPERATIONS, TORCHRL, Call, Contender, Ours, StockOff
from benchmarks.machine import machine, versions
from benchmarks.memory import measure_memory, memory_table
from benchmarks.peers import PEERS, Peer
from benchmarks.scaling import Scaling
from benchmarks.timing import BUSY, IDLE, Effort, Spinners, figures, interleave
from benchmarks.workload import BATCH, SEED

CAPACITIES, QUICK_CAPACITIES = [100_000, 1_000_000], [10_000]
SCALING, QUICK_SCALING = [10_000, 100_000, 1_000_000, 10_000_000], [1_000, 10_000]
MEMORY, QUICK_MEMORY = 1_000_000, 100_000
LEAST_CAPACITY = 1_000
CHECKPOINT_CAPACITY = 1_000_000  # from which checkpoints are timed without being asked for
CHECKPOINT_BYTES = 250  # per slot: more than one takes
SLOW_CHECKPOINTS, SLOW_SLICES = (5, 1), (5, 2)  # at most so many rounds and calls


class Comparison:
    """The rows of the table of operations, and what has to be said below it."""

    def __init__(self, effort: Effort, spinners: Spinners, *, with_peers: bool) -> None:
        self.effort, self.spinners = effort, spinners
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.kinds: list[type[Contender]] = [*TORCHRL]
        for kind in PEERS if with_peers else ():
            if (reason := kind.missing()) is None:
                self.kinds.append(kind)
            else:
                self.notes.append(f"skipped: {kind.name} ({reason})")

    def at(self, capacity: int, checkpoints: bool) -> None:
        """Measures every operation at one capacity."""
        rings: dict[str, Contender] = {}
        for kind in self.kinds:
            progress(f"filling {kind.name}, {capacity:,} slots")
            try:
                rings[kind.name] = kind(capacity)
            except Exception as error:
                if not issubclass(kind, Peer):
                    raise
                self.notes.append(f"skipped: {kind.name} at {capacity:,} ({type(error).__name__}: {error})")
        for operation in OPERATIONS:
            self.measure(operation, capacity, rings, methodcaller("prepare", operation))
        self.alone(capacity, rings)
        if checkpoints:
            self.checkpoints(capacity, rings)

    def checkpoints(self, capacity: int, rings: Mapping[str, Contender]) -> None:
        """Measures them in memory where it can be had, so that the CPU is timed and not the disk."""
        place = checkpoint_place(capacity * CHECKPOINT_BYTES * len(rings))
        with tempfile.TemporaryDirectory(prefix="benchmarks-compare-", dir=place) as directory:
            for operation in CHECKPOINTS:
                self.measure(operation, capacity, rings, methodcaller(operation, Path(directory)), SLOW_CHECKPOINTS)
        where = "in memory" if place == Path("/dev/shm") else "on disk: the disk is timed as well"
        self.note(
            f"checkpoints: in {place} ({where}), up to {SLOW_CHECKPOINTS[0]} rounds of {SLOW_CHECKPOINTS[1]} call"
        )

    def slices(self, capacity: int) -> None:
        """Measures prioritized slice sampling."""
        kinds = list(slices.SLICED)
        if (reason := slices.missing()) is not None:
            kinds.remove(slices.SlicedOurs)
            self.note(f"skipped: {slices.OPERATION} of ours ({reason})")
        rings: dict[str, Contender] = {}
        for kind in kinds:
            progress(f"filling {kind.name} for slices, {capacity:,} slots")
            rings[kind.name] = kind(capacity)
        self.measure(slices.OPERATION, capacity, rings, methodcaller("sample", BATCH), SLOW_SLICES)
        self.note(
            f"{slices.OPERATION}: slices of episodes of {slices.EPISODE} steps, found by their done flags, "
            f"up to {SLOW_SLICES[0]} rounds of {SLOW_SLICES[1]} calls"
        )

    def measure(
        self,
        operation: str,
        capacity: int,
        rings: Mapping[str, Contender],
        prepare: Callable[[Contender], Call | None],
        at_most: tuple[int, int] | None = None,
    ) -> None:
        """Adds the rows of one operation, in every phase."""
        progress(f"{operation}, {capacity:,} slots")
        calls = {
            name: call for name, ring in rings.items() if (call := self.tried(operation, ring, prepare)) is not None
        }
        effort = self.effort if at_most is None else self.effort.at_most(*at_most)
        for phase, rounds in interleave(calls, effort, self.spinners).items():
            for name, own in figures(rounds, StockOff.name).items():
                key = {"operation": operation, "capacity": capacity, "phase": phase, "contender": name}
                self.rows.append(key | asdict(own))
                if own.rounds < effort.rounds and name == StockOff.name:
                    self.note(f"{operation} at {capacity:,}: {own.rounds} rounds only, after {effort.limit_s:g} s")

    def tried(self, operation: str, ring: Contender, prepare: Callable[[Contender], Call | None]) -> Call | None:
        """The call, made once: a peer that cannot do what it says is left out of this operation alone."""
        try:
            call = prepare(ring)
            if call is not None:
                call()
        except Exception as error:
            if not isinstance(ring, Peer):
                raise
            self.note(f"skipped: {operation} of {ring.name} ({type(error).__name__}: {error})")
            return None
        return call

    def note(self, text: str) -> None:
        """Says something once."""
        if text not in self.notes:
            self.notes.append(text)

    def table(self) -> str:
        """Operations, their capacities, and what each contender takes."""
        names = [kind.name for kind in self.kinds]
        by_line: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
        for row in self.rows:
            by_line.setdefault((row["operation"], row["capacity"], row["phase"]), {})[row["contender"]] = row
        operations = list(dict.fromkeys(operation for operation, _, _ in by_line))
        head = f"{'':37}{'slots':>11}" + f"{'':>6}" * (len(self.spinners.phases) - 1)
        lines = [head + "".join(f"{name:>26}" for name in names)]
        lines.append(" " * len(head) + f"{'median':>10}{'p90':>10}{'ratio':>6}" * len(names))
        for operation, capacity, phase in sorted(by_line, key=lambda line: (operations.index(line[0]), line[1])):
            found = by_line[operation, capacity, phase]
            label = f"{operation:37}{capacity:11,}" + (f"{phase:>6}" if self.spinners.count else "")
            lines.append(label + "".join(cell(found.get(name)) for name in names))
        return "\n".join(lines)

    def alone(self, capacity: int, rings: Mapping[str, Contender]) -> None:
        """Samples of ours and of stock beside busy cores, each on its own: stock's threads outlive its calls."""
        calls = 20 * self.effort.repeat
        for name in (Ours.name, StockOff.name) if self.spinners.count else ():
            progress(f"sample of {name} alone, {capacity:,} slots")
            times = self.spinners.alone(rings[name].sample(BATCH), calls)
            for phase, found in times.items():
                own = {"median_us": statistics.median(found), "p90_us": statistics.quantiles(found, n=10)[-1]}
                key = {"operation": "sample, alone", "capacity": capacity, "phase": phase, "contender": name}
                self.rows.append(key | own | {"ratio": None, "rounds": 1, "calls": calls})

    def tails(self) -> list[str]:
        """How much longer a sample takes beside busy cores, at the 90th percentile."""
        found = {
            (row["capacity"], row["contender"], row["phase"]): row
            for row in self.rows
            if row["operation"] == "sample, alone"
        }
        lines = []
        for capacity in dict.fromkeys(capacity for capacity, _, phase in found if phase == BUSY):
            shares = (
                (name, found[capacity, name, BUSY]["p90_us"] / found[capacity, name, IDLE]["median_us"])
                for name in (Ours.name, StockOff.name)
            )
            lines.append(
                f"sample at {capacity:,}, no other contender running, p90 busy / median idle: "
                + ", ".join(f"{name} {share:.2f}" for name, share in shares)
            )
        return lines


def cell(row: Mapping[str, Any] | None) -> str:
    """Three numbers, or dashes for an operation that is lacking."""
    if row is None:
        return f"{'-':>10}{'-':>10}{'-':>6}"
    median, p90 = (f"{us:,.0f}" if us >= 1000 else f"{us:.1f}" for us in (row["median_us"], row["p90_us"]))
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return f"{median:>10}{p90:>10}{ratio:>6}"


def checkpoint_place(needed: int) -> Path:
    """Where to write checkpoints: in memory if there is room."""
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > needed:
        return shared
    return Path(tempfile.gettempdir())


def progress(text: str) -> None:
    """What is being done, apart from the table."""
    print(f"... {text}", file=sys.stderr, flush=True)


def describe(effort: Effort, busy: int) -> dict[str, Any]:
    """What a report begins with, also for machines."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "batch": BATCH,
        "rounds": effort.rounds,
        "repeat": effort.repeat,
        "busy": busy,
    }


def heading(report: Mapping[str, Any]) -> str:
    """The same for people."""
    host = report["machine"]
    return "\n".join(
        [
            ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
            f"{host['cpu']}, {host['cores']} cores, {host['torch_threads']} torch threads, {host['os']}",
            f"batch {report['batch']}, {report['rounds']} rounds of {report['repeat']} calls"
            + (f", {report['busy']} spinning processes in the busy phase of each round" if report["busy"] else "")
            + f"; {report['date']}, load average {host['load']} at the start",
        ]
    )


def count(least: int) -> Callable[[str], int]:
    """A whole number for argparse, also as 1e6."""

    def read(text: str) -> int:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value != int(value) or value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(value)

    return read


def seconds(text: str) -> float:
    """A positive time for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads and checks the command line."""
    flag = argparse.BooleanOptionalAction
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capacities", type=count(LEAST_CAPACITY), nargs="+", metavar="SLOTS", help="1e5 1e6")
    parser.add_argument("--rounds", type=count(1), help="30; 3 if quick")
    parser.add_argument("--repeat", type=count(1), help="calls of each contender in a round: 20; 5 if quick")
    parser.add_argument("--limit", type=seconds, default=60.0, help="seconds after which a row gets no more rounds")
    parser.add_argument("--quick", action="store_true", help="a smoke run of a few seconds; its figures mean little")
    parser.add_argument("--peers", action=flag, default=True, help="other libraries that are installed")
    parser.add_argument("--slices", action=flag, default=True, help="slice sampling, at the largest capacity")
    parser.add_argument(
        "--checkpoints", action=flag, help="dumps and loads; by default from 1e6 slots on, and if quick"
    )
    parser.add_argument(
        "--busy", type=count(0), nargs="?", const=os.cpu_count(), default=0, metavar="PROCESSES",
        help="also times every round beside so many spinning processes, without a number one per core",
    )  # fmt: skip
    parser.add_argument("--scaling", action="store_true", help="cost by capacity (1e4 to 1e7) and batch, instead")
    parser.add_argument("--memory", action="store_true", help="bytes per slot (of 1e6), instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, machine-readable")
    args = parser.parse_args(argv)
    if args.busy and (args.scaling or args.memory):
        parser.error("--busy belongs to the table of operations, not to --scaling or --memory")
    if args.json is not None and (args.json.is_dir() or not args.json.resolve().parent.is_dir()):
        parser.error(f"--json: cannot write a file at {args.json}")
    if args.rounds is None:
        args.rounds = 3 if args.quick else 30
    if args.repeat is None:
        args.repeat = 5 if args.quick else 20
    return args


def compared(args: argparse.Namespace, effort: Effort) -> dict[str, Any]:
    """Measures and prints the table of operations."""
    capacities: Iterable[int] = args.capacities or (QUICK_CAPACITIES if args.quick else CAPACITIES)
    with Spinners(args.busy) as spinners:
        comparison = Comparison(effort, spinners, with_peers=args.peers)
        for capacity in sorted(set(capacities)):
            by_default = args.quick or capacity >= CHECKPOINT_CAPACITY
            comparison.at(capacity, by_default if args.checkpoints is None else args.checkpoints)
            gc.collect()  # before the next, larger rings are made
        if args.slices:
            comparison.slices(max(capacities))
    print(comparison.table())
    for line in comparison.tails():
        print(line)
    others = spinners.others.cores
    print(f"Other processes took {others:.2f} cores on average while contenders were timed idle.")
    print("Microseconds: median and p90 over all calls. Ratio to stock off: median over rounds of the ratio of means.")
    print("Stock is TorchRL with its tracking of generations off or on. Stock and peers update by raw index; only ours")
    print("is conditional. A dash: the contender has no such operation, or none that saves priorities as well.")
    for kind in comparison.kinds:
        if issubclass(kind, Peer):
            print(f"{kind.name}: {kind.note}")
    for note in comparison.notes:
        print(note)
    return {"rows": comparison.rows, "notes": comparison.notes, "cores_of_others": others}


def scaled(args: argparse.Namespace, effort: Effort) -> dict[str, Any]:
    """Measures and prints the table of capacities and batches."""
    capacities = args.capacities or (QUICK_SCALING if args.quick else SCALING)
    with Spinners(0) as spinners:
        scaling = Scaling(capacities, effort, spinners)
        for line in scaling.lines():
            print(line, flush=True)
    others = spinners.others.cores
    print(f"Other processes took {others:.2f} cores on average.")
    print("Median microseconds of a call, and nanoseconds of each of its rows; stock's updates are by raw index. The")
    print("records are full transitions at every capacity, with both rings of one, and those of the base, in memory.")
    return {"scaling": scaling.rows, "growth": scaling.growth, "cores_of_others": others}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for, prints it, and writes it down."""
    args = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and checkpoints are cleared away
    torch.manual_seed(SEED)
    effort = Effort(args.rounds, args.repeat, args.limit)
    report = describe(effort, args.busy)
    print(heading(report), end="\n\n", flush=True)
    try:
        if args.scaling:
            report |= scaled(args, effort)
        if args.memory:
            rows = measure_memory(max(args.capacities or [QUICK_MEMORY if args.quick else MEMORY]))
            print(memory_table(rows))
            report |= {"memory": rows}
        if not args.scaling and not args.memory:
            report |= compared(args, effort)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
