"""Every operation of a training loop, ours and stock interleaved: `python -m pytest benchmarks`.

Each round times `REPEAT` calls of stock and then `REPEAT` of ours; the ratio is the median over rounds of theirs to
each other, so that a noisy neighbour disturbs both alike.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from workload import Pair

CAPACITIES = [100_000, 1_000_000]
REPEAT, ROUNDS = 20, 30
OPERATIONS = [
    "sample",
    "extend(256)",
    "add",
    "update_priority",
    "update_priority_if_present",
    "update_tensordict_priority_if_present",
]


@pytest.fixture(scope="module", params=CAPACITIES, ids=lambda capacity: f"{capacity:.0e}")
def pair(request: pytest.FixtureRequest) -> Pair:
    torch.manual_seed(0)
    return Pair.full(request.param)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation(operation: str, pair: Pair, benchmark: Any, ratios: list[tuple[str, float, float, float]]) -> None:
    ours, stock = pair.operations()[operation]
    times: dict[str, list[float]] = {"ours": [], "stock": []}

    def timed(name: str, call: Any) -> None:
        start = time.perf_counter()
        for _ in range(REPEAT):
            call()
        times[name].append((time.perf_counter() - start) / REPEAT * 1e6)

    benchmark.pedantic(lambda: timed("ours", ours), setup=lambda: timed("stock", stock), rounds=ROUNDS, warmup_rounds=3)
    ratio = statistics.median(a / b for a, b in zip(times["ours"], times["stock"], strict=True))
    medians = [statistics.median(times[name]) for name in ("ours", "stock")]
    benchmark.extra_info.update(ours_us=medians[0], stock_us=medians[1], ratio=ratio)
    ratios.append((f"{operation} at {pair.ours.storage.max_size:.0e}", *medians, ratio))


def test_memory_per_slot(pair: Pair) -> None:
    """The stamps cost 8 bytes per slot of the storage over stock, and nothing else there does."""

    def held(storage: Any) -> int:
        tensors = list(storage._storage.values(True, True))
        tensors += [storage.slot_generations.values] if hasattr(storage, "slot_generations") else []
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    slots = pair.ours.storage.max_size
    assert (held(pair.ours.storage) - held(pair.stock.storage)) / slots == pytest.approx(8.0, abs=1e-3)


@pytest.mark.parametrize("capacity", [2**20, 2**20 + 1])
def test_memory_of_a_sampler_per_slot(capacity: int) -> None:
    """Float64 sums cost 8 bytes per leaf over stock, and the trees have a power of two of leaves."""
    grown = [int(subprocess.check_output([sys.executable, "-c", GROWTH, name, str(capacity)])) for name in SAMPLERS]
    more = (grown[1] - grown[0]) / capacity
    print(f"sampler of {capacity} slots: {more:.1f} bytes per slot over stock")
    assert 0 < more < 20


SAMPLERS = ["torchrl.data.PrioritizedSampler", "torchrl_generational.GenerationalPrioritizedSampler"]
#: Prints by how many bytes the memory of a new process grows with a full sampler.
GROWTH = """
import importlib, pathlib, resource, sys, torch
module, _, name = sys.argv[1].rpartition(".")
make, capacity = getattr(importlib.import_module(module), name), int(sys.argv[2])
pages = lambda: int(pathlib.Path("/proc/self/statm").read_text().split()[1])
cells, priority = torch.arange(capacity), torch.rand(capacity)
make(1024, 0.7, 0.5).update_priority(cells[:1024], priority[:1024])
before = pages()
sampler = make(capacity, 0.7, 0.5)
for start in range(0, capacity, 1024):
    sampler.update_priority(cells[start : start + 1024], priority[start : start + 1024])
print((pages() - before) * resource.getpagesize())
"""
