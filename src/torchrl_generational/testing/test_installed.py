"""The race suite on the installed classes: ``pytest --pyargs torchrl_generational.testing``."""

from __future__ import annotations

from typing import Any

from torchrl_generational.buffers.ready_made import (
    GenerationalTensorDictPrioritizedReplayBuffer,
    GenerationalTensorDictReplayBuffer,
)
from torchrl_generational.samplers.prioritized import GenerationalPrioritizedSampler
from torchrl_generational.storages.max_value_writer import GenerationalTensorDictMaxValueWriter
from torchrl_generational.storages.round_robin_writers import GenerationalRoundRobinWriter
from torchrl_generational.storages.tensor_storages import GenerationalLazyMemmapStorage
from torchrl_generational.testing.suite import RaceSuite


class TestPrioritizedBuffer(RaceSuite):
    """The prioritized tensordict buffer on a tensor storage."""


class TestMemmapStorage(RaceSuite):
    """The same on memory-mapped files."""

    preemptions = 1

    def storage(self, capacity: int) -> Any:
        """In a temporary folder."""
        return GenerationalLazyMemmapStorage(capacity)


class TestComposedBuffer(RaceSuite):
    """A plain tensordict buffer with a prioritized sampler and the plain writer."""

    preemptions = 1

    def buffer(self, storage: Any, capacity: int) -> Any:
        """Its parts one by one."""
        return GenerationalTensorDictReplayBuffer(
            storage=storage,
            sampler=GenerationalPrioritizedSampler(capacity, 1.0, 1.0, eps=0.0),
            writer=GenerationalRoundRobinWriter(),
            batch_size=4,
        )


class TestMaxValueWriter(RaceSuite):
    """The writer that keeps the best records; each one here is better than all before."""

    preemptions = 1

    def buffer(self, storage: Any, capacity: int) -> Any:
        """Ranked by the number of the record."""
        return GenerationalTensorDictPrioritizedReplayBuffer(
            alpha=1.0,
            beta=1.0,
            eps=0.0,
            storage=storage,
            batch_size=4,
            writer=GenerationalTensorDictMaxValueWriter(rank_key="rank"),
        )
