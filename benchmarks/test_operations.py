"""Every operation of a training loop, ours and stock interleaved: `python -m pytest benchmarks`.

Each round times `REPEAT` calls of stock and then `REPEAT` of ours; the ratio is the median over rounds of theirs to
each other, so that a noisy neighbour disturbs both alike.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from benchmarks.contenders import OPERATIONS, Ours, StockOff, TorchRLContender
from benchmarks.memory import OURS_SAMPLER, STOCK_SAMPLER, grown_bytes
from benchmarks.timing import median_ratio, timed

CAPACITIES = [100_000, 1_000_000]
REPEAT, ROUNDS = 20, 30
Pair = tuple[TorchRLContender, TorchRLContender]


@pytest.fixture(scope="module", params=CAPACITIES, ids=lambda capacity: f"{capacity:.0e}")
def pair(request: pytest.FixtureRequest) -> Pair:
    return Ours(request.param), StockOff(request.param)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation(operation: str, pair: Pair, benchmark: Any, ratios: list[tuple[str, float, float, float]]) -> None:
    ours, stock = (contender.prepare(operation) for contender in pair)
    times: dict[str, list[float]] = {"ours": [], "stock": []}

    def turn(name: str, call: Any) -> None:
        times[name].append(statistics.fmean(timed(call, REPEAT)))

    benchmark.pedantic(lambda: turn("ours", ours), setup=lambda: turn("stock", stock), rounds=ROUNDS, warmup_rounds=3)
    ratio = median_ratio(times["ours"], times["stock"])
    medians = [statistics.median(times[name]) for name in ("ours", "stock")]
    benchmark.extra_info.update(ours_us=medians[0], stock_us=medians[1], ratio=ratio)
    ratios.append((f"{operation} at {pair[0].capacity:.0e}", *medians, ratio))


def test_memory_per_slot(pair: Pair) -> None:
    """The stamps cost 8 bytes per slot of the storage over stock, and nothing else there does."""

    def held(storage: Any) -> int:
        tensors = list(storage._storage.values(True, True))
        tensors += [storage.slot_generations.values] if hasattr(storage, "slot_generations") else []
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    ours, stock = pair
    assert (held(ours.rb.storage) - held(stock.rb.storage)) / ours.capacity == pytest.approx(8.0, abs=1e-3)


@pytest.mark.parametrize("capacity", [2**20, 2**20 + 1])
def test_memory_of_a_sampler_per_slot(capacity: int) -> None:
    """Float64 sums cost 8 bytes per leaf over stock, and the trees have a power of two of leaves."""
    more = (grown_bytes(OURS_SAMPLER, capacity) - grown_bytes(STOCK_SAMPLER, capacity)) / capacity
    print(f"sampler of {capacity} slots: {more:.1f} bytes per slot over stock")
    assert 0 < more < 20
