"""The ready-made buffers: TorchRL's four, with the mixin in front.

Each takes the keyword arguments of its TorchRL parent and ``writer``; moving a training loop over is a change of
imports.
"""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data.replay_buffers import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, Sampler

from torchrl_generational.buffers.mixin import GenerationalReplayBufferMixin
from torchrl_generational.buffers.tensordict_mixin import GenerationalTensorDictReplayBufferMixin
from torchrl_generational.samplers.prioritized import GenerationalPrioritizedSampler

__all__ = [
    "GenerationalPrioritizedReplayBuffer",
    "GenerationalReplayBuffer",
    "GenerationalTensorDictPrioritizedReplayBuffer",
    "GenerationalTensorDictReplayBuffer",
]


class GenerationalReplayBuffer(GenerationalReplayBufferMixin, ReplayBuffer):
    """:class:`~torchrl.data.ReplayBuffer` whose samples carry generations in their info.

    Args:
        **kwargs: those of the TorchRL class. ``storage`` defaults to a :class:`GenerationalLazyTensorStorage` of 1000
            records, ``writer`` to a :class:`GenerationalRoundRobinWriter`.

    Raises:
        TypeError: if the storage or the writer cannot track generations.

    Example:
        >>> from torchrl_generational import GenerationalLazyTensorStorage, GenerationalPrioritizedSampler
        >>> rb = GenerationalReplayBuffer(
        ...     storage=GenerationalLazyTensorStorage(8),
        ...     sampler=GenerationalPrioritizedSampler(8, alpha=0.7, beta=0.5),
        ...     batch_size=4,
        ... )
        >>> index = rb.extend(torch.arange(8))
        >>> data, info = rb.sample(return_info=True)
        >>> rb.update_priority_if_present(
        ...     index=info["index"], generation=info["index_generation"], priority=1.0
        ... ).num_updated
        4
    """


class GenerationalTensorDictReplayBuffer(GenerationalTensorDictReplayBufferMixin, TensorDictReplayBuffer):
    """:class:`~torchrl.data.TensorDictReplayBuffer` whose samples carry generations.

    Args:
        **kwargs: those of the TorchRL class. ``storage`` defaults to a :class:`GenerationalLazyTensorStorage` of 1000
            records, ``writer`` to a :class:`GenerationalTensorDictRoundRobinWriter`.

    Raises:
        TypeError: if the storage or the writer cannot track generations.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_generational import GenerationalLazyTensorStorage
        >>> rb = GenerationalTensorDictReplayBuffer(storage=GenerationalLazyTensorStorage(8), batch_size=2)
        >>> index = rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
        >>> rb.sample()["index_generation"]
        tensor([0, 0])
    """


class GenerationalPrioritizedReplayBuffer(GenerationalReplayBufferMixin, PrioritizedReplayBuffer):
    """:class:`~torchrl.data.PrioritizedReplayBuffer` with conditional priority updates.

    Args:
        alpha: priority exponent.
        beta: importance-sampling exponent.
        eps: added to every priority.
        dtype: dtype of the priority trees.
        storage: a storage with generations; defaults to a :class:`GenerationalLazyTensorStorage` of 1000 records.
        sampler: defaults to a :class:`GenerationalPrioritizedSampler` of the storage's size.
        sampler_device: where the priority trees live; not together with ``sampler``.
        **kwargs: the others of the TorchRL class, and ``writer``.

    Raises:
        TypeError: if the storage or the writer cannot track generations.
        ValueError: if the sampler is smaller than the storage.

    Example:
        >>> from torchrl_generational import GenerationalLazyTensorStorage
        >>> rb = GenerationalPrioritizedReplayBuffer(
        ...     alpha=0.7, beta=0.5, storage=GenerationalLazyTensorStorage(8), batch_size=4
        ... )
        >>> index = rb.extend(torch.arange(8))
        >>> data, info = rb.sample(return_info=True)
        >>> index = rb.extend(torch.arange(8))  # the ring wraps before the learner is done
        >>> rb.update_priority_if_present(
        ...     index=info["index"], generation=info["index_generation"], priority=[3.0, 1.0, 2.0, 5.0]
        ... ).num_stale
        4
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        storage: Any = None,
        sampler: Sampler | None = None,
        sampler_device: Any = None,
        **kwargs: Any,
    ) -> None:
        storage = self._maybe_make_storage(storage, compilable=None)
        if sampler is None:
            sampler = GenerationalPrioritizedSampler(storage.max_size, alpha, beta, eps, dtype, device=sampler_device)
            sampler_device = None
        super().__init__(
            alpha=alpha,
            beta=beta,
            eps=eps,
            dtype=dtype,
            storage=storage,
            sampler=sampler,
            sampler_device=sampler_device,
            **kwargs,
        )


class GenerationalTensorDictPrioritizedReplayBuffer(
    GenerationalTensorDictReplayBufferMixin,
    TensorDictPrioritizedReplayBuffer,
):
    """:class:`~torchrl.data.TensorDictPrioritizedReplayBuffer` with conditional priority updates.

    Args:
        **kwargs: those of the TorchRL class (``alpha`` and ``beta`` are required), and ``writer``. ``storage``
            defaults to a :class:`GenerationalLazyTensorStorage` of 1000 records.

    Raises:
        TypeError: if the storage or the writer cannot track generations.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_generational import GenerationalLazyTensorStorage
        >>> rb = GenerationalTensorDictPrioritizedReplayBuffer(
        ...     alpha=0.7, beta=0.5, storage=GenerationalLazyTensorStorage(8), batch_size=4
        ... )
        >>> index = rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
        >>> sample = rb.sample()
        >>> sample["td_error"] = torch.rand(4)
        >>> rb.update_tensordict_priority_if_present(sample)
        UpdateResult(num_updated=4, num_stale=0, num_rejected=0, shape=(4,))
    """

    _prioritized_sampler: Any

    def _init(self) -> None:
        # TorchRL makes the sampler itself and takes none: what it made is still empty, so ours takes its place.
        made: Any = self._prioritized_sampler
        if type(made) is PrioritizedSampler:
            self._prioritized_sampler = GenerationalPrioritizedSampler.like(made)
        super()._init()

    def _maybe_make_sampler(self, sampler: Any) -> Sampler:
        if type(sampler) is PrioritizedSampler:
            sampler = GenerationalPrioritizedSampler.like(sampler)
        made: Sampler = super()._maybe_make_sampler(sampler)
        return made
