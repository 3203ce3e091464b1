"""How the cost of an operation grows with the ring and with the batch."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.contenders import Call, Ours, StockOff, TorchRLContender
from benchmarks.machine import available_bytes
from benchmarks.timing import IDLE, Effort, Spinners, figures, interleave
from benchmarks.workload import BATCH

CONDITIONAL = "update_priority_if_present"
OPERATIONS = ("sample", "extend", CONDITIONAL)
BATCHES = (32, 256, 1024, 4096)
KINDS: tuple[type[TorchRLContender], ...] = (Ours, StockOff)
BASE = 100_000  # slots of the ring that the largest is compared with at the end
BYTES_PER_SLOT = 300  # of either ring and its trees: more than they take

Rings = dict[str, TorchRLContender]


class Scaling:
    """Rows of one table. Both rings of a capacity are in memory at a time, and those of the base throughout."""

    def __init__(self, capacities: Sequence[int], effort: Effort, spinners: Spinners) -> None:
        self.capacities, self.effort, self.spinners = sorted(capacities), effort, spinners
        self.base = BASE if BASE in self.capacities else self.capacities[0]
        self.rows: list[dict[str, Any]] = []
        self.growth: dict[str, float] = {}

    def lines(self) -> Iterator[str]:
        """Measures everything, and gives each line as soon as it is known."""
        columns = "".join(f"{name + ' us':>14}{'ns/row':>9}" for name in (kind.name for kind in KINDS))
        yield f"{'operation':28}{'slots':>7}{'batch':>7}{columns}{'ratio':>8}"
        base: Rings | None = None
        for capacity in self.capacities:
            if (lacking := self.lacking(capacity)) is not None:
                yield f"skipped: {capacity:.0e} slots ({lacking})"
                continue
            rings = {kind.name: kind(capacity, batch_size=None) for kind in KINDS}
            for operation in OPERATIONS:
                for batch in BATCHES:
                    if batch <= capacity:
                        yield self.row(rings, operation, capacity, batch)
            if capacity == self.base:
                base = rings
            elif capacity == self.capacities[-1] and base is not None:
                yield self.last_line(rings, base, capacity)
            del rings
            gc.collect()  # before the next, larger ones are made

    def lacking(self, capacity: int) -> str | None:
        """What memory there is too little of, or `None`."""
        needed, available = capacity * BYTES_PER_SLOT * len(KINDS), available_bytes()
        if available is None or needed < available:
            return None
        return f"takes {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available"

    def row(self, rings: Rings, operation: str, capacity: int, batch: int) -> str:
        """One line."""
        calls = {name: prepared(ring, operation, batch) for name, ring in rings.items()}
        found = figures(interleave(calls, self.effort, self.spinners)[IDLE], StockOff.name)
        cells = ""
        for name, own in found.items():
            per_row = own.median_us * 1e3 / batch
            cells += f"{own.median_us:14,.1f}{per_row:9,.0f}"
            key = {"operation": operation, "capacity": capacity, "batch": batch, "contender": name}
            self.rows.append(key | asdict(own) | {"ns_per_row": per_row})
        return f"{operation:28}{capacity:7.0e}{batch:7}{cells}{found[Ours.name].ratio:8.2f}"

    def last_line(self, rings: Rings, base: Rings, capacity: int) -> str:
        """The largest rings and those of the base in turn, so that the same hour is the measure of both."""
        for name in rings:
            calls = {"largest": prepared(rings[name], CONDITIONAL), "base": prepared(base[name], CONDITIONAL)}
            found = figures(interleave(calls, self.effort, self.spinners)[IDLE], "base")
            self.growth[name] = found["largest"].ratio or 0.0
        grown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.growth.items())
        return f"{CONDITIONAL} at {capacity:.0e} over that at {self.base:.0e}, batch {BATCH}, interleaved: {grown}"


def prepared(ring: TorchRLContender, operation: str, batch: int = BATCH) -> Call:
    """The call of an operation, which all of TorchRL's kind have."""
    call: Call = getattr(ring, operation)(batch)
    return call
