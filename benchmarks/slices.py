"""Full rings of trajectories as contenders, for prioritized slice sampling."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import PrioritizedSliceSampler

import torchrl_generational
from benchmarks.contenders import Ours, StockOff, StockOn, TorchRLContender
from benchmarks.workload import ALPHA, BATCH, BETA, transitions

SLICES, EPISODE = 8, 1000
OPERATION = f"slices({SLICES} of {BATCH // SLICES})"
OUR_SAMPLER = "GenerationalPrioritizedSliceSampler"


class Sliced(TorchRLContender):
    """What the three have in common."""

    kind: Any = PrioritizedSliceSampler

    def records(self, count: int) -> TensorDict:
        """Episodes of `EPISODE` steps."""
        records = transitions(count)
        records["next", "done"][:] = (torch.arange(1, count + 1) % EPISODE == 0).unsqueeze(-1)
        return records

    def sampler(self, capacity: int) -> Any:
        """Slices that end with their episode."""
        return self.kind(capacity, ALPHA, BETA, num_slices=SLICES, end_key=("next", "done"))


class SlicedOurs(Sliced, Ours):
    """Ours; its sampler is looked up here, so that a version without one can be timed at everything else."""

    kind = getattr(torchrl_generational, OUR_SAMPLER, None)


class SlicedOff(Sliced, StockOff):
    """Stock."""


class SlicedOn(Sliced, StockOn):
    """Stock, with generations."""


SLICED: tuple[type[Sliced], ...] = (SlicedOurs, SlicedOff, SlicedOn)


def missing() -> str | None:
    """Why ours cannot take part, or `None` if it can."""
    return None if SlicedOurs.kind is not None else f"torchrl_generational has no {OUR_SAMPLER}"
