"""Drawing where slices start: in proportion to priority, among the records that a slice can start at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchrl_generational.generations.slot_generations import SlotGenerations
from torchrl_generational.generations.write_protocol import NEVER_WRITTEN
from torchrl_generational.priorities.proportional_draw import draw
from torchrl_generational.samplers.trajectory_ends import TrajectoryEnds, steps_to_next

__all__ = ["Slices", "StartRule", "draw_slices", "valid_starts"]

_Array = np.ndarray[Any, Any]

_LARGEST_ROUND = 4096  # candidates
_LARGEST_WINDOWS = 2**18  # cells of all candidates of one round


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices that were drawn.

    Attributes:
        cells: int64 ``[S]``, the flat cells that they start at.
        lengths: int64 ``[S]``, how many steps they have.
    """

    cells: _Array
    lengths: _Array


@dataclass(frozen=True, slots=True)
class StartRule:
    """Which records a slice can start at.

    Attributes:
        ends: where trajectories end.
        generations: the stamps of the rows: no slice holds a record whose last write did not end.
        steps: the length of a slice that meets no end.
        min_steps: steps that must be left in the trajectory.
        heads: whether a slice can start at the first step of any trajectory, however short.
    """

    ends: TrajectoryEnds
    generations: SlotGenerations
    steps: int
    min_steps: int
    heads: bool

    def judge(self, cells: _Array) -> tuple[_Array, _Array]:
        """For cells ``[B]``: whether a slice can start there, and how many steps it would have. O(B steps)."""
        ends, steps = self.ends, self.steps
        rows, lanes = np.divmod(cells, ends.lanes) if ends.lanes > 1 else (cells, np.zeros_like(cells))
        left = ends.left(rows, lanes, steps)
        valid = left >= self.min_steps
        if self.heads:
            valid |= ends.begin(rows, lanes)
        if self.generations.interrupted:
            window = (rows[:, None] + np.arange(steps)) % ends.rows
            torn = self._torn(window.reshape(-1)).reshape(window.shape)
            valid &= ~(torn & (np.arange(steps) < left[:, None])).any(1)
        return valid, left

    def judge_all(self) -> tuple[_Array, _Array]:
        """The same for every cell, both ``[cells]``; the steps are those left in the trajectory. O(capacity)."""
        ends = self.ends.everywhere
        left = steps_to_next(ends)
        valid = left >= self.min_steps
        if self.heads:
            valid |= np.roll(ends, 1, 0)
        if self.generations.interrupted:
            torn = self._torn(np.arange(self.ends.rows))
            valid &= steps_to_next(torn[:, None]) > np.minimum(left, self.steps)
        return valid.reshape(-1), left.reshape(-1)

    def _torn(self, rows: _Array) -> _Array:
        return np.asarray(self.generations.lookup(torch.from_numpy(rows)).numpy() < NEVER_WRITTEN)


def draw_slices(sampler: Any, num_cells: int, count: int, rule: StartRule) -> Slices:
    """Draws ``count`` slices with replacement, each start in proportion to its leaf among the valid ones.

    Rejection sampling: starts are drawn from all records and the valid ones kept, in the order of the draws. So
    nothing but the neighbourhood of the candidates is read, and no leaf is changed. Where most candidates are rejected,
    the rest are drawn from the exact distribution, which takes one look at all records. Either way the draws are
    independent and equally distributed.

    Complexity: O(count (steps + log capacity) / share of the priorities that valid starts hold), and never more than
    a few times O(capacity).

    Args:
        sampler: a prioritized sampler on the CPU; the caller holds the storage's lock.
        num_cells: the storage's length.
        count: number of slices.
        rule: which starts are valid.

    Raises:
        RuntimeError: if no valid start has a positive leaf.
    """
    drawn: list[Slices] = []
    missing, tried, tries = count, 0, _tries(num_cells, rule.steps)
    wanted = count + max(count // 4, 8)  # more than enough where trajectories are much longer than slices
    largest = max(min(_LARGEST_ROUND, _LARGEST_WINDOWS // rule.steps), count)
    while missing and tried < tries:
        wanted = min(wanted, largest)
        cells = draw(sampler, num_cells, wanted)[0].numpy()
        valid, left = rule.judge(cells)
        kept = np.flatnonzero(valid)[:missing]
        drawn.append(Slices(cells[kept], left[kept]))
        missing -= len(kept)
        tried += wanted
        wanted *= 2
    if missing:
        drawn.append(_draw_exactly(sampler, num_cells, missing, rule))
    if len(drawn) == 1:
        return drawn[0]
    return Slices(np.concatenate([part.cells for part in drawn]), np.concatenate([part.lengths for part in drawn]))


def _tries(num_cells: int, steps: int) -> int:
    """How many candidates are drawn before that costs more than one look at all records."""
    return min(max(num_cells // (32 + steps), 512), 50_000)


def _draw_exactly(sampler: Any, num_cells: int, count: int, rule: StartRule) -> Slices:
    """:func:`draw_slices` by the cumulative sums of the valid leaves alone. O(capacity)."""
    leaves, left = valid_starts(sampler, num_cells, rule)
    sums = np.cumsum(leaves)
    if not sums[-1] > 0:
        raise RuntimeError(_refusal(num_cells, rule))
    uniform = torch.rand(count, dtype=torch.float64, generator=sampler._rng, device="cpu").numpy()
    cells = np.searchsorted(sums, (1.0 - uniform) * sums[-1])  # masses in (0, total]: none lands on a leaf of zero
    return Slices(cells, np.minimum(left[cells], rule.steps))


def valid_starts(sampler: Any, num_cells: int, rule: StartRule) -> tuple[_Array, _Array]:
    """For every cell: its leaf in float64, zero where no slice can start, and the steps left there. O(capacity)."""
    valid, left = rule.judge_all()
    leaves = np.atleast_1d(sampler._sum_tree[np.arange(num_cells)]).astype(np.float64, copy=False)
    return np.where(valid[:num_cells], leaves, 0.0), left


def _refusal(num_cells: int, rule: StartRule) -> str:
    valid, left = rule.judge_all()
    count, longest = int(valid.sum()), int(left.max())
    if count:
        return (
            f"Cannot sample slices: the priorities of all {count} records that one could start at are zero. Update one "
            "of them, or give the sampler eps > 0. If their last write did not end, write new ones over them."
        )
    if longest >= rule.min_steps:
        return (
            f"Cannot sample slices: every run of {rule.min_steps} steps among the {num_cells} records holds one whose "
            "last write did not end, because it failed or its process was killed. Write new records over them: the "
            "next writes of the ring do."
        )
    return (
        f"Cannot sample slices: the longest trajectory among the {num_cells} records has {longest} steps, and a "
        f"slice needs {rule.min_steps}. Write longer trajectories, ask for shorter slices (slice_len, or more "
        "num_slices), or pass strict_length=False, which draws short ones too."
    )
