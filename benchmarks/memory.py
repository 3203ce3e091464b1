"""Resident memory of full rings and samplers, each in a new process: `python -m benchmarks.memory NAME CAPACITY`."""

from __future__ import annotations

import os

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torchrl.data import PrioritizedSampler

from benchmarks.contenders import TORCHRL, StockOff, TorchRLContender
from benchmarks.workload import ALPHA, BETA, fill_sizes, transitions
from torchrl_generational import GenerationalPrioritizedSampler

CHUNK, SMALL = 1024, 4096
OURS_SAMPLER, STOCK_SAMPLER = "sampler of ours", "sampler of stock"


def full_buffer(kind: type[TorchRLContender]) -> Callable[[int], Any]:
    """Fills in small chunks, so that what is measured is the ring and not what it was filled from."""

    class InSmallChunks(kind):  # type: ignore[misc, valid-type]
        def fill(self) -> None:
            records = transitions(CHUNK)
            for size in fill_sizes(self.capacity, CHUNK):
                self.rb.extend(records[:size])
            update_all(self.rb, self.capacity)

    return InSmallChunks


def full_sampler(kind: Callable[..., Any]) -> Callable[[int], Any]:
    """A sampler alone, with a priority in every leaf."""

    def make(capacity: int) -> Any:
        sampler = kind(capacity, ALPHA, BETA)
        update_all(sampler, capacity)
        return sampler

    return make


def update_all(owner: Any, capacity: int) -> None:
    """Sets all priorities."""
    for index in torch.split(torch.arange(capacity), CHUNK):
        owner.update_priority(index, torch.rand(len(index)))


KINDS: dict[str, Callable[[int], Any]] = {
    **{kind.name: full_buffer(kind) for kind in TORCHRL},
    OURS_SAMPLER: full_sampler(GenerationalPrioritizedSampler),
    STOCK_SAMPLER: full_sampler(PrioritizedSampler),
}


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth(name: str, capacity: int) -> int:
    """By how many bytes this process grows with one full ring; a small one has loaded what is needed once."""
    small = KINDS[name](SMALL)
    before = resident_bytes()
    full = KINDS[name](capacity)
    grown = resident_bytes() - before
    del small, full
    return grown


def grown_bytes(name: str, capacity: int) -> int:
    """`growth` in a new process."""
    command = [sys.executable, "-m", "benchmarks.memory", name, str(capacity)]
    return int(subprocess.check_output(command, cwd=Path(__file__).parents[1]))


def measure_memory(capacity: int) -> list[dict[str, Any]]:
    """Rows of `--memory`."""
    grown = {kind.name: grown_bytes(kind.name, capacity) for kind in TORCHRL}
    base = grown[StockOff.name]
    return [
        {
            "contender": name,
            "capacity": capacity,
            "bytes_per_slot": own / capacity,
            "bytes_per_slot_over_stock_off": (own - base) / capacity,
        }
        for name, own in grown.items()
    ]


def memory_table(rows: list[dict[str, Any]]) -> str:
    """As printed."""
    lines = [f"{'resident memory of a full ring':32}{'slots':>12}{'bytes/slot':>12}{'over stock off':>16}"]
    for row in rows:
        lines.append(
            f"{row['contender']:32}{row['capacity']:12,}{row['bytes_per_slot']:12.1f}"
            f"{row['bytes_per_slot_over_stock_off']:16.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(growth(sys.argv[1], int(sys.argv[2])))
