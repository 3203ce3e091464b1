"""Prioritized replay for TorchRL that never updates the priority of the wrong record."""

from torchrl_generational.buffers.convert import convert
from torchrl_generational.buffers.mixin import GenerationalReplayBufferMixin
from torchrl_generational.buffers.ready_made import (
    GenerationalPrioritizedReplayBuffer,
    GenerationalReplayBuffer,
    GenerationalTensorDictPrioritizedReplayBuffer,
    GenerationalTensorDictReplayBuffer,
)
from torchrl_generational.buffers.tensordict_mixin import GenerationalTensorDictReplayBufferMixin
from torchrl_generational.concurrency.storage_lock import StorageLock
from torchrl_generational.ensembles.ensemble import GenerationalReplayBufferEnsemble
from torchrl_generational.generations.protocols import SupportsGenerations, TracksGenerations
from torchrl_generational.generations.slot_generations import SlotGenerations
from torchrl_generational.generations.update_result import UpdateResult
from torchrl_generational.samplers.prioritized import GenerationalPrioritizedSampler
from torchrl_generational.samplers.prioritized_slices import GenerationalPrioritizedSliceSampler
from torchrl_generational.storages.max_value_writer import GenerationalTensorDictMaxValueWriter
from torchrl_generational.storages.round_robin_writers import (
    GenerationalRoundRobinWriter,
    GenerationalTensorDictRoundRobinWriter,
)
from torchrl_generational.storages.tensor_storages import (
    GenerationalLazyMemmapStorage,
    GenerationalLazyTensorStorage,
    GenerationalTensorStorage,
)

__version__ = "0.1.0"

__all__ = [
    "GenerationalLazyMemmapStorage",
    "GenerationalLazyTensorStorage",
    "GenerationalPrioritizedReplayBuffer",
    "GenerationalPrioritizedSampler",
    "GenerationalPrioritizedSliceSampler",
    "GenerationalReplayBuffer",
    "GenerationalReplayBufferEnsemble",
    "GenerationalReplayBufferMixin",
    "GenerationalRoundRobinWriter",
    "GenerationalTensorDictMaxValueWriter",
    "GenerationalTensorDictPrioritizedReplayBuffer",
    "GenerationalTensorDictReplayBuffer",
    "GenerationalTensorDictReplayBufferMixin",
    "GenerationalTensorDictRoundRobinWriter",
    "GenerationalTensorStorage",
    "SlotGenerations",
    "StorageLock",
    "SupportsGenerations",
    "TracksGenerations",
    "UpdateResult",
    "convert",
]
