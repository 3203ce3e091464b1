"""The workload of the benchmarks: a full ring of locomotion-sized transitions, ours beside stock TorchRL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer, TensorDictRoundRobinWriter

from torchrl_generational import (
    GenerationalLazyTensorStorage,
    GenerationalPrioritizedSampler,
    GenerationalTensorDictReplayBuffer,
)

ALPHA, BETA, BATCH = 0.7, 0.5, 256


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


@dataclass
class Pair:
    """The two buffers of one capacity, both full, and the operations to time on them."""

    ours: GenerationalTensorDictReplayBuffer
    stock: TensorDictReplayBuffer

    @classmethod
    def full(cls, capacity: int) -> Pair:
        """Both buffers, filled with the same transitions and priorities."""
        ours = GenerationalTensorDictReplayBuffer(
            storage=GenerationalLazyTensorStorage(capacity),
            sampler=GenerationalPrioritizedSampler(capacity, ALPHA, BETA),
            batch_size=BATCH,
        )
        stock = TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity),
            sampler=PrioritizedSampler(capacity, ALPHA, BETA),
            writer=TensorDictRoundRobinWriter(),
            batch_size=BATCH,
        )
        for start in range(0, capacity, 10_000):
            data = transitions(min(10_000, capacity - start))
            for rb in (ours, stock):
                rb.extend(data)
        priority = torch.rand(capacity)
        for rb in (ours, stock):
            rb.update_priority(torch.arange(capacity), priority)
        return cls(ours, stock)

    def operations(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """Name -> (ours, stock), on random handles."""
        ours, stock = self.ours, self.stock
        capacity = ours.storage.max_size
        handles = [torch.randint(capacity, (BATCH,)) for _ in range(64)]
        priority = torch.rand(BATCH)
        batch, single = transitions(BATCH), transitions(1)[0]
        turn = iter(range(10**9))

        def handle() -> torch.Tensor:
            return handles[next(turn) % len(handles)]

        generations = [ours.storage.generations[index] for index in handles]  # nothing is written while it is timed

        def conditional() -> object:
            position = next(turn) % len(handles)
            return ours.update_priority_if_present(
                index=handles[position], generation=generations[position], priority=priority
            )

        sampled = ours.sample()
        sampled["td_error"] = priority

        return {
            "sample": (ours.sample, stock.sample),
            "extend(256)": (lambda: ours.extend(batch), lambda: stock.extend(batch)),
            "add": (lambda: ours.add(single), lambda: stock.add(single)),
            "update_priority": (
                lambda: ours.update_priority(handle(), priority),
                lambda: stock.update_priority(handle(), priority),
            ),
            "update_priority_if_present": (conditional, lambda: stock.update_priority(handle(), priority)),
            "update_tensordict_priority_if_present": (
                lambda: ours.update_tensordict_priority_if_present(sampled),
                lambda: stock.update_tensordict_priority(sampled),
            ),
        }
