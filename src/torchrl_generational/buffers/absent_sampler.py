"""The sampler of a buffer in processes other than the one that keeps the priorities."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, Sampler

from torchrl_generational.priorities.segment_trees import tree_dtype

__all__ = ["ELSEWHERE", "AbsentSampler", "keeps_priorities"]


class AbsentSampler(Sampler):
    """Stands in a process that was started for the prioritized sampler of the process that made the buffer.

    It knows what a priority may be, and has none.
    """

    def __init__(self, sampler: Any) -> None:
        self._alpha, self._eps = float(sampler._alpha), float(sampler._eps)
        self._max_capacity: int = sampler._max_capacity
        self.dtype = tree_dtype(sampler)
        self.reduction: str = sampler.reduction
        self.device = torch.device("cpu")

    def _empty(self) -> None:
        """Nothing: the learner notices."""

    def _refuse(self, *args: Any) -> Any:
        raise RuntimeError(ELSEWHERE)

    sample = state_dict = load_state_dict = dumps = loads = _refuse


ELSEWHERE = (
    "The priorities of a buffer that processes share are kept by the process that made it, and this is another one. "
    "Sample, update and save there, and let this one write (extend, add, empty, len, write_count)."
)


def keeps_priorities(sampler: Any) -> bool:
    """Whether a sampler draws by priority, here or in the process that made it."""
    return isinstance(sampler, PrioritizedSampler | AbsentSampler)
