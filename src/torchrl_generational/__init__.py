"""Prioritized replay for TorchRL that never updates the priority of the wrong record."""

from torchrl_generational.buffers import (
    GenerationalPrioritizedReplayBuffer,
    GenerationalReplayBuffer,
    GenerationalTensorDictPrioritizedReplayBuffer,
    GenerationalTensorDictReplayBuffer,
)
from torchrl_generational.conversion import convert
from torchrl_generational.ensembles import GenerationalReplayBufferEnsemble
from torchrl_generational.generations import SlotGenerations
from torchrl_generational.locks import StorageLock
from torchrl_generational.max_value import GenerationalTensorDictMaxValueWriter
from torchrl_generational.mixin import GenerationalReplayBufferMixin
from torchrl_generational.protocols import SupportsGenerations, TracksGenerations
from torchrl_generational.result import UpdateResult
from torchrl_generational.samplers import GenerationalPrioritizedSampler
from torchrl_generational.slices import GenerationalPrioritizedSliceSampler
from torchrl_generational.storages import (
    GenerationalLazyMemmapStorage,
    GenerationalLazyTensorStorage,
    GenerationalTensorStorage,
)
from torchrl_generational.tensordict_mixin import GenerationalTensorDictReplayBufferMixin
from torchrl_generational.writers import GenerationalRoundRobinWriter, GenerationalTensorDictRoundRobinWriter

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
