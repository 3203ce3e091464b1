"""Hydra configurations of every buffer, storage, sampler and writer here, beside TorchRL's own.

Importing this module registers them in the groups of TorchRL's configurations, which it imports; so import it before
Hydra composes, and name them in a ``defaults`` list::

    defaults:
      - replay_buffer: generational_tensordict
      - storage@replay_buffer.storage: generational_lazy_tensor
      - sampler@replay_buffer.sampler: generational_prioritized

==================  =====================================================================================
group               names
==================  =====================================================================================
``replay_buffer``   ``generational_base``, ``generational_tensordict``, ``generational_prioritized``,
                    ``generational_tensordict_prioritized``, ``generational_ensemble``
``storage``         ``generational_tensor``, ``generational_lazy_tensor``, ``generational_lazy_memmap``
``sampler``         ``generational_prioritized``, ``generational_prioritized_slice``
``writer``          ``generational_round_robin``, ``generational_tensordict_round_robin``,
                    ``generational_tensordict_max_value``
==================  =====================================================================================

Fields and defaults are the arguments of the classes; what has none is mandatory (``???``). What YAML has no notation
for: a ``dtype`` is a name (``float64``), a nested key a list (``[next, truncated]``), a list of them a list of lists or
names (``[[next, done], [next, truncated]]``). The members of an ensemble are a list, ``rbs``. ``service_backend: ray``
makes a buffer in a Ray actor, whose parts need ``_partial_: true``. Needs the extra ``hydra``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

try:
    from hydra.core.config_store import ConfigStore
    from omegaconf import MISSING
except ImportError as error:
    raise ImportError(
        "torchrl_generational.configs needs Hydra. Install it with pip install 'torchrl-generational[hydra]', or "
        "hydra-core."
    ) from error

from torchrl.trainers.algorithms.configs.data import (
    LazyMemmapStorageConfig,
    LazyTensorStorageConfig,
    PrioritizedSamplerConfig,
    ReplayBufferBaseConfig,
    ReplayBufferConfig,
    RoundRobinWriterConfig,
    SamplerConfig,
    TensorDictMaxValueWriterConfig,
    TensorDictReplayBufferConfig,
    TensorDictRoundRobinWriterConfig,
    TensorStorageConfig,
)

from torchrl_generational.buffers.ready_made import GenerationalPrioritizedReplayBuffer
from torchrl_generational.ensembles.ensemble import GenerationalReplayBufferEnsemble
from torchrl_generational.samplers.prioritized import GenerationalPrioritizedSampler
from torchrl_generational.samplers.prioritized_slices import GenerationalPrioritizedSliceSampler
from torchrl_generational.storages.max_value_writer import GenerationalTensorDictMaxValueWriter

__all__ = [
    "GenerationalLazyMemmapStorageConfig",
    "GenerationalLazyTensorStorageConfig",
    "GenerationalPrioritizedReplayBufferConfig",
    "GenerationalPrioritizedSamplerConfig",
    "GenerationalPrioritizedSliceSamplerConfig",
    "GenerationalReplayBufferConfig",
    "GenerationalReplayBufferEnsembleConfig",
    "GenerationalRoundRobinWriterConfig",
    "GenerationalTensorDictMaxValueWriterConfig",
    "GenerationalTensorDictPrioritizedReplayBufferConfig",
    "GenerationalTensorDictReplayBufferConfig",
    "GenerationalTensorDictRoundRobinWriterConfig",
    "GenerationalTensorStorageConfig",
    "register_configs",
]

_HERE = "torchrl_generational"


# ---------------------------------------------------------------- storages


@dataclass
class GenerationalTensorStorageConfig(TensorStorageConfig):  # type: ignore[misc]  # TorchRL is untyped
    """Configuration of :class:`~torchrl_generational.GenerationalTensorStorage`."""

    _target_: str = f"{_HERE}.GenerationalTensorStorage"
    storage: Any = MISSING
    device: Any = "cpu"
    ndim: int = 1


@dataclass
class GenerationalLazyTensorStorageConfig(LazyTensorStorageConfig):  # type: ignore[misc]
    """Configuration of :class:`~torchrl_generational.GenerationalLazyTensorStorage`."""

    _target_: str = f"{_HERE}.GenerationalLazyTensorStorage"
    max_size: int = MISSING


@dataclass
class GenerationalLazyMemmapStorageConfig(LazyMemmapStorageConfig):  # type: ignore[misc]
    """Configuration of :class:`~torchrl_generational.GenerationalLazyMemmapStorage`."""

    _target_: str = f"{_HERE}.GenerationalLazyMemmapStorage"
    max_size: int = MISSING


# ---------------------------------------------------------------- samplers


@dataclass
class GenerationalPrioritizedSamplerConfig(PrioritizedSamplerConfig):  # type: ignore[misc]
    """Configuration of :class:`~torchrl_generational.GenerationalPrioritizedSampler`."""

    _target_: str = f"{_HERE}.configs._prioritized_sampler"
    max_capacity: int = MISSING
    alpha: float = MISSING
    beta: float = MISSING
    eps: float = 1e-8
    dtype: str = "float32"
    reduction: str = "max"
    max_priority_within_buffer: bool = False
    device: Any = None


# Not TorchRL's PrioritizedSliceSamplerConfig, which has a field that its sampler does not take.
@dataclass
class GenerationalPrioritizedSliceSamplerConfig(SamplerConfig):  # type: ignore[misc]
    """Configuration of :class:`~torchrl_generational.GenerationalPrioritizedSliceSampler`."""

    _target_: str = f"{_HERE}.configs._prioritized_slice_sampler"
    max_capacity: int = MISSING
    alpha: float = MISSING
    beta: float = MISSING
    eps: float = 1e-8
    dtype: str = "float32"
    reduction: str = "max"
    num_slices: int | None = None
    slice_len: int | None = None
    end_key: Any = None
    end_keys: Any = None
    traj_key: Any = None
    ends: Any = None
    trajectories: Any = None
    cache_values: bool = False
    truncated_key: Any = ("next", "truncated")
    init_key: Any = "is_init"
    strict_length: bool = True
    compile: Any = False
    span: Any = False
    max_priority_within_buffer: bool = False


# ---------------------------------------------------------------- writers


@dataclass
class GenerationalRoundRobinWriterConfig(RoundRobinWriterConfig):  # type: ignore[misc]
    """Configuration of :class:`~torchrl_generational.GenerationalRoundRobinWriter`."""

    _target_: str = f"{_HERE}.GenerationalRoundRobinWriter"
    track_generations: bool = True


@dataclass
class GenerationalTensorDictRoundRobinWriterConfig(TensorDictRoundRobinWriterConfig):  # type: ignore[misc]
    """Configuration of :class:`~torchrl_generational.GenerationalTensorDictRoundRobinWriter`."""

    _target_: str = f"{_HERE}.GenerationalTensorDictRoundRobinWriter"
    track_generations: bool = True


@dataclass
class GenerationalTensorDictMaxValueWriterConfig(TensorDictMaxValueWriterConfig):  # type: ignore[misc]
    """Configuration of :class:`~torchrl_generational.GenerationalTensorDictMaxValueWriter`."""

    _target_: str = f"{_HERE}.configs._max_value_writer"
    track_generations: bool = True
    compilable: bool = False


# ---------------------------------------------------------------- buffers


@dataclass
class GenerationalReplayBufferConfig(ReplayBufferConfig):  # type: ignore[misc]
    """Configuration of :class:`~torchrl_generational.GenerationalReplayBuffer`."""

    _target_: str = f"{_HERE}.GenerationalReplayBuffer"


@dataclass
class GenerationalTensorDictReplayBufferConfig(TensorDictReplayBufferConfig):  # type: ignore[misc]
    """Configuration of :class:`~torchrl_generational.GenerationalTensorDictReplayBuffer`."""

    _target_: str = f"{_HERE}.GenerationalTensorDictReplayBuffer"
    conditional_updates: bool | None = None


@dataclass
class _PrioritizedConfig(ReplayBufferBaseConfig):  # type: ignore[misc]
    """What the two prioritized buffers have in common. TorchRL has no configuration of its own for them."""

    alpha: float = MISSING
    beta: float = MISSING
    eps: float = 1e-8
    storage: Any = None
    sample_unit: Any = None
    sampler_device: Any = None
    sync: bool = True
    writer: Any = None
    collate_fn: Any = None
    pin_memory: bool = False
    prefetch: int | None = None
    transform: Any = None
    batch_size: int | None = None
    dim_extend: int | None = None
    service_backend: str = "direct"
    service_backend_options: dict[str, Any] = field(default_factory=dict)
    transport: str = "auto"
    transport_options: dict[str, Any] | None = None


@dataclass
class GenerationalPrioritizedReplayBufferConfig(_PrioritizedConfig):
    """Configuration of :class:`~torchrl_generational.GenerationalPrioritizedReplayBuffer`."""

    _target_: str = f"{_HERE}.configs._prioritized_replay_buffer"
    dtype: str = "float32"
    sampler: Any = None
    delayed_init: bool = False


@dataclass
class GenerationalTensorDictPrioritizedReplayBufferConfig(_PrioritizedConfig):
    """Configuration of :class:`~torchrl_generational.GenerationalTensorDictPrioritizedReplayBuffer`."""

    _target_: str = f"{_HERE}.GenerationalTensorDictPrioritizedReplayBuffer"
    priority_key: str = "td_error"
    reduction: str = "max"
    generator: Any = None
    shared: bool = False
    compilable: bool = False
    conditional_updates: bool | None = None


@dataclass
class GenerationalReplayBufferEnsembleConfig(ReplayBufferBaseConfig):  # type: ignore[misc]
    """Configuration of :class:`~torchrl_generational.GenerationalReplayBufferEnsemble`, of which TorchRL has none."""

    _target_: str = f"{_HERE}.configs._ensemble"
    rbs: list[Any] = MISSING
    transform: Any = None
    batch_size: int | None = None
    collate_fn: Any = None
    collate_fns: list[Any] | None = None
    p: Any = None
    sample_from_all: bool = False
    num_buffer_sampled: int | None = None
    routing_key: Any = None
    routing_dim: int | None = None
    generator: Any = None
    pin_memory: bool = False
    prefetch: int | None = None


# ---------------------------------------------------------------- from YAML to arguments


def _prioritized_sampler(**config: Any) -> GenerationalPrioritizedSampler:
    return GenerationalPrioritizedSampler(**_arguments(config))


def _prioritized_slice_sampler(**config: Any) -> GenerationalPrioritizedSliceSampler:
    return GenerationalPrioritizedSliceSampler(**_arguments(config))


def _max_value_writer(**config: Any) -> GenerationalTensorDictMaxValueWriter:
    return GenerationalTensorDictMaxValueWriter(**_arguments(config))


def _prioritized_replay_buffer(**config: Any) -> GenerationalPrioritizedReplayBuffer:
    return GenerationalPrioritizedReplayBuffer(**_arguments(config))


def _ensemble(rbs: list[Any], p: Any, **config: Any) -> GenerationalReplayBufferEnsemble:
    weights = list(p) if isinstance(p, Sequence) and not isinstance(p, str) else p
    return GenerationalReplayBufferEnsemble(*rbs, p=weights, **_arguments(config))


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """A dtype for its name, and tuples for lists: tensordict reads nothing else as a nested key."""
    arguments = dict(config)
    name = arguments.get("dtype")
    if isinstance(name, str):
        dtype = getattr(torch, name.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype should be the name of one of torch's, such as float32 or float64, got {name!r}.")
        arguments["dtype"] = dtype
    for name in ("end_key", "traj_key", "truncated_key", "init_key", "rank_key", "routing_key", "span"):
        if name in arguments:
            arguments[name] = _as_tuple(arguments[name])
    if arguments.get("end_keys") is not None:
        arguments["end_keys"] = tuple(_as_tuple(key) for key in arguments["end_keys"])
    return arguments


def _as_tuple(value: Any) -> Any:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return tuple(value)


# ---------------------------------------------------------------- registration

_NAMES: dict[str, dict[str, type[Any]]] = {
    "replay_buffer": {
        "generational_base": GenerationalReplayBufferConfig,
        "generational_ensemble": GenerationalReplayBufferEnsembleConfig,
        "generational_prioritized": GenerationalPrioritizedReplayBufferConfig,
        "generational_tensordict": GenerationalTensorDictReplayBufferConfig,
        "generational_tensordict_prioritized": GenerationalTensorDictPrioritizedReplayBufferConfig,
    },
    "sampler": {
        "generational_prioritized": GenerationalPrioritizedSamplerConfig,
        "generational_prioritized_slice": GenerationalPrioritizedSliceSamplerConfig,
    },
    "storage": {
        "generational_lazy_memmap": GenerationalLazyMemmapStorageConfig,
        "generational_lazy_tensor": GenerationalLazyTensorStorageConfig,
        "generational_tensor": GenerationalTensorStorageConfig,
    },
    "writer": {
        "generational_round_robin": GenerationalRoundRobinWriterConfig,
        "generational_tensordict_max_value": GenerationalTensorDictMaxValueWriterConfig,
        "generational_tensordict_round_robin": GenerationalTensorDictRoundRobinWriterConfig,
    },
}


def register_configs() -> None:
    """Registers all configurations with Hydra's store. Importing this module has done it; idempotent.

    Call it after something has emptied the store, as tests do.

    Example:
        >>> from hydra.core.config_store import ConfigStore
        >>> register_configs()
        >>> "generational_tensordict.yaml" in ConfigStore.instance().list("replay_buffer")
        True
    """
    store = ConfigStore.instance()
    for group, names in _NAMES.items():
        for name, node in names.items():
            store.store(group=group, name=name, node=node, provider=_HERE)


register_configs()
