"""Every operation of a training loop, ours and stock interleaved: `python -m pytest benchmarks`.

Each round times `REPEAT` calls of stock and then `REPEAT` of ours; the ratio is the median over rounds of theirs to
each other, so that a noisy neighbour disturbs both alike.
"""

from __future__ import annotations

import statistics
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
    """The stamps cost 8 bytes per slot over stock, and nothing else does."""

    def held(storage: Any) -> int:
        tensors = list(storage._storage.values(True, True))
        tensors += [storage.slot_generations.values] if hasattr(storage, "slot_generations") else []
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    slots = pair.ours.storage.max_size
    assert (held(pair.ours.storage) - held(pair.stock.storage)) / slots == 8.0
