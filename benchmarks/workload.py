"""The workload of the benchmarks: locomotion-sized transitions, as a tensordict and as plain arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

ALPHA, BETA, BATCH = 0.7, 0.5, 256
FILL_BATCH = 10_000
SEED = 0
HANDLES = 64  # batches of random slots that updates go through again and again


@dataclass(frozen=True)
class Rates:
    """Rows per second, and the share of the rows to update whose record was gone."""

    written: float
    samples: float
    updates: float
    stale: float | None


def transitions(count: int) -> TensorDict:
    """Observation 17, action 6, next observation 17, reward and done."""
    return TensorDict(
        {
            "observation": torch.rand(count, 17),
            "action": torch.rand(count, 6),
            "next": {
                "observation": torch.rand(count, 17),
                "reward": torch.rand(count, 1),
                "done": torch.zeros(count, 1, dtype=torch.bool),
            },
        },
        [count],
    )


def arrays(count: int) -> dict[str, np.ndarray]:
    """The fields of `transitions` for a buffer without nesting."""
    flat = transitions(count).flatten_keys("_")
    return {key: entry.numpy() for key, entry in flat.items()}


def fill_sizes(capacity: int, chunk: int = FILL_BATCH) -> Iterator[int]:
    """Sizes of the batches that fill a ring."""
    return (min(chunk, capacity - start) for start in range(0, capacity, chunk))


def random_slots(capacity: int, batch: int) -> list[torch.Tensor]:
    """What updates are aimed at."""
    return [torch.randint(capacity, (batch,)) for _ in range(HANDLES)]
