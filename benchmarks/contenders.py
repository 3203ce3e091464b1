"""Full rings to time: ours and stock TorchRL, with its tracking of generations off and on."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer, TensorDictRoundRobinWriter

from benchmarks.workload import ALPHA, BATCH, BETA, SEED, fill_sizes, random_slots, transitions
from torchrl_generational import (
    GenerationalLazyTensorStorage,
    GenerationalPrioritizedSampler,
    GenerationalTensorDictReplayBuffer,
)

Call = Callable[[], object]

#: Operation as printed -> method of `Contender` that prepares it.
OPERATIONS = {
    "sample": "sample",
    f"extend({BATCH})": "extend",
    "add": "add",
    "update_priority": "update_priority",
    "update_priority_if_present": "update_priority_if_present",
    "update_tensordict_priority_if_present": "update_tensordict_priority_if_present",
}
CHECKPOINTS = ("dumps", "loads")
CHUNK, LARGE_CHUNK = 100_000, 1_000_000  # rows written at a time, so that a ring of 1e7 is full within seconds


class Contender(ABC):
    """A full ring. Each method prepares one operation and returns the call to time, `None` where it is lacking.

    Preparing reads whatever the call needs (handles above all) just before the operation is timed, so that what other
    operations have written does not turn handles stale.
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, capacity: int) -> None:
        """Fills the ring with the same records and priorities as every other contender."""

    def prepare(self, operation: str, batch: int = BATCH) -> Call | None:
        """The call of an operation as `OPERATIONS` names it."""
        call: Call | None = getattr(self, OPERATIONS[operation])(batch)
        return call

    def sample(self, batch: int) -> Call | None:
        """A prioritized sample with importance weights."""
        return None

    def extend(self, batch: int) -> Call | None:
        """A batch of new records."""
        return None

    def add(self, batch: int) -> Call | None:
        """One new record."""
        return None

    def update_priority(self, batch: int) -> Call | None:
        """An update by raw index."""
        return None

    def update_priority_if_present(self, batch: int) -> Call | None:
        """A conditional update; by raw index where there is none."""
        return self.update_priority(batch)

    def update_tensordict_priority_if_present(self, batch: int) -> Call | None:
        """A conditional update from a sample with TD errors; a raw one where there is none."""
        return None

    def dumps(self, folder: Path) -> Call | None:
        """A checkpoint of records and priorities, at a place of its own in the folder."""
        return None

    def loads(self, folder: Path) -> Call | None:
        """Its restoring; `dumps` has written it."""
        return None


class TorchRLContender(Contender):
    """What ours and stock have in common."""

    rb: Any

    def __init__(self, capacity: int, batch_size: int | None = BATCH) -> None:
        torch.manual_seed(SEED)
        self.capacity, self.batch_size = capacity, batch_size
        self.rb = self.empty(capacity)
        self.fill()

    @abstractmethod
    def empty(self, capacity: int) -> Any:
        """An empty buffer."""

    @abstractmethod
    def sampler(self, capacity: int) -> Any:
        """Its sampler."""

    def records(self, count: int) -> TensorDict:
        """What it is filled with."""
        return transitions(count)

    def fill(self) -> None:
        """Writes one chunk again and again: making random records takes longer than writing them."""
        chunk = self.records(min(self.capacity, LARGE_CHUNK if self.capacity > LARGE_CHUNK else CHUNK))
        for size in fill_sizes(self.capacity, len(chunk)):
            self.rb.extend(chunk[:size])
        for index in torch.split(torch.arange(self.capacity), LARGE_CHUNK):
            self.rb.update_priority(index, torch.rand(len(index)))

    def sample(self, batch: int) -> Call:
        """`rb.sample`; TorchRL warns at every call of another batch size than the buffer's own, if that has one."""
        return self.rb.sample if batch == self.batch_size else lambda: self.rb.sample(batch)

    def extend(self, batch: int) -> Call:
        """`rb.extend`."""
        records = transitions(batch)
        return lambda: self.rb.extend(records)

    def add(self, batch: int) -> Call:
        """`rb.add`."""
        record = transitions(1)[0]
        return lambda: self.rb.add(record)

    def update_priority(self, batch: int) -> Call:
        """`rb.update_priority`."""
        slots, priority = itertools.cycle(random_slots(self.capacity, batch)), torch.rand(batch)
        return lambda: self.rb.update_priority(next(slots), priority)

    def sampled(self, batch: int) -> Any:
        """A sample with TD errors."""
        sample = self.rb.sample(batch)
        sample["td_error"] = torch.rand(batch)
        return sample

    def update_tensordict_priority_if_present(self, batch: int) -> Call:
        """`rb.update_tensordict_priority`."""
        sample = self.sampled(batch)
        return lambda: self.rb.update_tensordict_priority(sample)

    def dumps(self, folder: Path) -> Call:
        """`rb.dumps`, to the same place every time, as a job does that keeps its last checkpoint."""
        return lambda: self.rb.dumps(folder / self.name)

    def loads(self, folder: Path) -> Call:
        """`rb.loads` into the buffer that the checkpoint is from."""
        return lambda: self.rb.loads(folder / self.name)


class Ours(TorchRLContender):
    """Stamps are always on."""

    name = "ours"

    def empty(self, capacity: int) -> GenerationalTensorDictReplayBuffer:
        """An empty buffer."""
        return GenerationalTensorDictReplayBuffer(
            storage=GenerationalLazyTensorStorage(capacity),
            sampler=self.sampler(capacity),
            batch_size=self.batch_size,
        )

    def sampler(self, capacity: int) -> Any:
        """Its sampler."""
        return GenerationalPrioritizedSampler(capacity, ALPHA, BETA)

    def update_priority_if_present(self, batch: int) -> Call:
        """`rb.update_priority_if_present`; all handles are live."""
        slots, priority = random_slots(self.capacity, batch), torch.rand(batch)
        handles = itertools.cycle([(index, self.rb.storage.generations[index]) for index in slots])

        def call() -> object:
            index, generation = next(handles)
            return self.rb.update_priority_if_present(index=index, generation=generation, priority=priority)

        return call

    def update_tensordict_priority_if_present(self, batch: int) -> Call:
        """`rb.update_tensordict_priority_if_present`; all handles are live."""
        sample = self.sampled(batch)
        return lambda: self.rb.update_tensordict_priority_if_present(sample)


class StockOff(TorchRLContender):
    """Stock TorchRL as it comes: what all ratios are to."""

    name = "stock off"
    track_generations = False

    def empty(self, capacity: int) -> TensorDictReplayBuffer:
        """An empty buffer."""
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity),
            sampler=self.sampler(capacity),
            writer=TensorDictRoundRobinWriter(track_generations=self.track_generations),
            batch_size=self.batch_size,
        )

    def sampler(self, capacity: int) -> Any:
        """Its sampler."""
        return PrioritizedSampler(capacity, ALPHA, BETA)


class StockOn(StockOff):
    """Stock TorchRL with generations that its priority updates do not look at."""

    name = "stock on"
    track_generations = True


TORCHRL: tuple[type[TorchRLContender], ...] = (Ours, StockOff, StockOn)
