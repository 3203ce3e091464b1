"""A buffer in a Ray actor between clients: `python benchmarks/ray_throughput.py --writers 1`. Needs the extra `ray`.

Every contender is a full ring of the transitions of `workload` in an actor. Writers, actors too, put batches into it
without pause while the learner, in this process, samples and updates priorities. The contenders take turns: a round
runs each of them for `--seconds`. Rates are medians over rounds, and so are the ratios to TorchRL, each taken within
one round.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if not __package__:  # run as a script: the package it is part of lies one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import ray
import torch
from torchrl.data import LazyTensorStorage, RayReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler

from benchmarks.machine import cpu, versions
from benchmarks.workload import ALPHA, BETA, Rates, fill_sizes, transitions
from torchrl_generational import (
    GenerationalLazyTensorStorage,
    GenerationalPrioritizedSampler,
    GenerationalTensorDictReplayBuffer,
)
from torchrl_generational.ray import GenerationalRayReplayBuffer

BATCHES = 16  # that a writer, and the learner, goes through again and again
COLUMNS = ("written", "samples", "updates")
OURS, TORCHRL = "ours, conditional", "TorchRL, raw"


def make(name: str, capacity: int, batch: int) -> Any:
    """A full ring in an actor of its own."""
    ours = name == OURS
    cls = GenerationalRayReplayBuffer if ours else RayReplayBuffer
    rb = cls(
        replay_buffer_cls=GenerationalTensorDictReplayBuffer if ours else TensorDictReplayBuffer,
        storage=partial(GenerationalLazyTensorStorage if ours else LazyTensorStorage, capacity),
        sampler=partial(GenerationalPrioritizedSampler if ours else PrioritizedSampler, capacity, ALPHA, BETA),
        priority_key="td_error",
        batch_size=batch,
        remote_config={"num_cpus": 0},
    )
    for size in fill_sizes(capacity):
        rb.extend(transitions(size).set("td_error", torch.rand(size)))
    return rb


@ray.remote(num_cpus=0, max_concurrency=2)  # `stop` comes in while `write` goes on
class Writer:
    """Writes batches with first priorities to the buffer of a client."""

    def __init__(self, batch: int) -> None:
        torch.set_num_threads(1)
        self.batches = [transitions(batch).set("td_error", torch.rand(batch)) for _ in range(BATCHES)]
        self.stopped = False

    def ready(self) -> None:
        """Answers when the batches are made."""
        self.stopped = False

    def stop(self) -> None:
        """Has `write` end."""
        self.stopped = True

    def write(self, client: Any) -> float:
        """Writes until stopped; returns rows per second."""
        start = time.perf_counter()
        for number in count():
            if self.stopped:
                break
            client.extend(self.batches[number % BATCHES])
        return number * self.batches[0].shape[0] / (time.perf_counter() - start)


def measure(name: str, rb: Any, writers: Sequence[Any], batch: int, seconds: float) -> Rates:
    """One contender for one round."""
    client, td_errors = rb.client(), [torch.rand(batch) for _ in range(BATCHES)]
    update = client.update_tensordict_priority_if_present if name == OURS else client.update_tensordict_priority
    results = []
    ray.get([writer.ready.remote() for writer in writers])
    written = [writer.write.remote(client) for writer in writers]
    try:
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            sample = client.sample()
            sample["td_error"] = td_errors[len(results) % BATCHES]
            results.append(update(sample))
    finally:
        ray.get([writer.stop.remote() for writer in writers])
    rows = len(results) * batch
    updated = sum(result.num_updated for result in results) if name == OURS else rows
    stale = (rows - updated) / rows if name == OURS else None
    return Rates(sum(ray.get(written)), rows / elapsed, updated / elapsed, stale)


def figures(rounds: Sequence[Rates], torchrl: Sequence[Rates]) -> str:
    """Medians over rounds and ratios to TorchRL, as a line of the table has them."""
    cells = ""
    for column in COLUMNS:
        own = [getattr(rates, column) for rates in rounds]
        pairs = [(mine, getattr(its, column)) for mine, its in zip(own, torchrl, strict=True)]
        ratios = [mine / its for mine, its in pairs if its]
        cells += f"{statistics.median(own):12,.0f}" + (f"{statistics.median(ratios):8.2f}" if ratios else f"{'-':>8}")
    stales = [rates.stale for rates in rounds if rates.stale is not None]
    return cells + (f"{statistics.median(stales):9.3%}" if stales else f"{'-':>9}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="that each contender runs in a round")
    parser.add_argument("--writers", type=int, default=1, help="number of writing actors")
    parser.add_argument("--capacity", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=256, help="rows written, sampled and updated at a time")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Runs the contenders in turn and prints the table."""
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    results: dict[str, list[Rates]] = {OURS: [], TORCHRL: []}
    try:
        buffers = {name: make(name, args.capacity, args.batch) for name in results}
        writers = [Writer.remote(args.batch) for _ in range(args.writers)]
        for number in range(args.rounds + 1):
            for name in sorted(results, reverse=bool(number % 2)):  # whoever begins is not always the same
                rates = measure(name, buffers[name], writers, args.batch, args.seconds if number else 1.0)
                if number:  # the first round warms up
                    results[name].append(rates)
    finally:
        ray.shutdown()

    columns = "".join(f"{column + '/s':>12}{'ratio':>8}" for column in COLUMNS)
    print(f"{'contender':18}{columns}{'stale':>9}")
    for name, rounds in results.items():
        print(f"{name:18}{figures(rounds, results[TORCHRL])}")
    print("Rows per second and ratios to TorchRL. Updates count what was applied; TorchRL's, what it was given.")
    found = versions(("torch", "tensordict", "torchrl", "ray", "torchrl-generational"))
    print(", ".join(f"{name} {version}" for name, version in found.items()))
    print(
        f"capacity {args.capacity}, batch {args.batch}, {args.writers} writers, {args.rounds} x {args.seconds:g} s, "
        f"{os.cpu_count()} cores of {cpu()}"
    )


if __name__ == "__main__":
    main()
