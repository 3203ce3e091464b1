"""The prioritized slice sampler: TorchRL's, drawing without a look at the whole storage and without touching leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torchrl._utils import _replace_last
from torchrl.data.replay_buffers.samplers import PrioritizedSliceSampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_generational.generations.protocols import generations_on
from torchrl_generational.generations.slot_generations import GENERATION_KEY, SlotGenerations
from torchrl_generational.priorities.proportional_draw import weights
from torchrl_generational.samplers.prioritized import GenerationalPrioritizedSampler, as_exponent, check_capacity
from torchrl_generational.samplers.slice_starts import Slices, StartRule, draw_slices, valid_starts
from torchrl_generational.samplers.trajectory_ends import TrajectoryEnds, entry_of, records_of, values_at

__all__ = ["GenerationalPrioritizedSliceSampler"]

_STATIC = "static-stop-and-length"  # where TorchRL keeps the boundaries that were handed in
# How TorchRL remembers where it reads boundaries, which is not what it was constructed with.
_RESOLVED = ("_fetch_traj", "_traj_key_auto", "traj_key", "end_key", "end_keys", "__used_traj_key", "__used_end_key")


class GenerationalPrioritizedSliceSampler(GenerationalPrioritizedSampler, PrioritizedSliceSampler):
    r"""A prioritized sampler of slices of trajectories whose samples carry the generation of every record.

    Takes the arguments of :class:`~torchrl.data.replay_buffers.samplers.PrioritizedSliceSampler`, in their order, and
    draws the same slices: a slice starts at record :math:`i` with probability :math:`p_i^\alpha / \sum_j p_j^\alpha`
    over the records that one can start at, and has the importance weight of its start on every step (Schaul et al.,
    "Prioritized experience replay", 2016, section 3.3 and 3.4). What differs from a
    :class:`GenerationalPrioritizedSampler` are the samples; priorities, checkpoints and errors are the same.

    What differs from TorchRL's: candidates are drawn by priority and those too close to the end of their trajectory
    rejected, instead of searching all records and setting leaves to zero for the time of a draw. So a sample costs no
    more for a larger storage, nothing is cached that writes could outdate, and a draw that raises leaves the priorities
    as they are. A slice never crosses the end of a trajectory or the newest record, also where the ring has wrapped and
    where the storage has several dimensions; ``slice_len=1`` draws single records; the first step of every slice is
    marked under ``init_key``, where records have that entry; records whose last write did not end are in no slice.

    The arguments in short (see TorchRL's class): ``num_slices`` or ``slice_len``; where trajectories end, by
    ``traj_key``, ``end_key`` or ``end_keys``, else found as TorchRL does, or as ``ends`` or ``trajectories`` with
    ``cache_values=True`` for records that are never written over; ``strict_length=False`` draws trajectories shorter
    than a slice from their first step; ``span=(0, k)`` lets a slice lack up to ``k`` steps at the end of a trajectory,
    ``(0, True)`` all but two. Without ``ends`` or ``trajectories``, ``cache_values`` changes nothing, and so does
    ``compile``: there is nothing slow to keep or compile. The trees live on the CPU, wherever the records are.

    Thread safety: none of its own; a buffer calls it under the storage's lock.

    Raises:
        TypeError: if not exactly one of ``num_slices`` and ``slice_len`` is given.
        ValueError: if one of the numbers makes no sense.

    Warns:
        UserWarning: if ``span`` asks for slices that lack steps on the left, which it does not do, as TorchRL's.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_generational import GenerationalLazyTensorStorage, GenerationalTensorDictReplayBuffer
        >>> rb = GenerationalTensorDictReplayBuffer(
        ...     storage=GenerationalLazyTensorStorage(8),
        ...     sampler=GenerationalPrioritizedSliceSampler(8, alpha=0.7, beta=0.5, slice_len=3),
        ...     batch_size=6,
        ... )
        >>> index = rb.extend(TensorDict({"episode": torch.arange(8) // 4, "step": torch.arange(8) % 4}, [8]))
        >>> rb.update_priority(torch.arange(8), torch.tensor([0.0, 0, 9, 9, 0, 1, 9, 9]))
        >>> sample = rb.sample()  # 9 stands where no slice of 3 steps can start
        >>> sample["episode"].tolist(), sample["step"].tolist()
        ([1, 1, 1, 1, 1, 1], [1, 2, 3, 1, 2, 3])
        >>> sample["td_error"] = torch.rand(6)
        >>> rb.update_tensordict_priority_if_present(sample).num_updated
        6
    """

    _static_ends: torch.Tensor | None = None  # bool [rows, *inner]; guarded by lock
    _was_static = False

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        compile: bool | dict[str, Any] = False,
        span: bool | int | tuple[bool | int, bool | int] = False,
        max_priority_within_buffer: bool = False,
    ) -> None:
        for name, number in (("num_slices", num_slices), ("slice_len", slice_len)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}.")
        PrioritizedSliceSampler.__init__(
            self,
            max_capacity,
            as_exponent("alpha", alpha),
            as_exponent("beta", beta),
            as_exponent("eps", eps),
            dtype,
            reduction,
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=cache_values,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            span=span,
            max_priority_within_buffer=max_priority_within_buffer,
        )
        self.compile = bool(compile)
        self._device = torch.device("cpu")  # whatever the storage's: TorchRL's slice sampler has no other
        if _STATIC in self._cache:
            self._static_ends, self._was_static = _ends_of(*self._cache[_STATIC]), True
        if slice_len is not None:
            self._min_steps_left(slice_len)

    @classmethod
    def like(cls, sampler: Any) -> GenerationalPrioritizedSliceSampler:
        """A sampler of this class with the configuration of ``sampler`` and no priorities. O(capacity).

        Raises:
            TypeError: if ``sampler`` does not draw slices.
        """
        if not isinstance(sampler, PrioritizedSliceSampler):
            raise TypeError(
                f"{cls.__name__}.like needs a PrioritizedSliceSampler, which says how long slices are, got "
                f"{type(sampler).__name__}."
            )
        static = sampler._cache.get(_STATIC)
        ends = getattr(sampler, "_static_ends", None) if static is None else _ends_of(*static)
        made = cls(
            sampler._max_capacity,
            sampler._alpha,
            sampler._beta,
            sampler._eps,
            sampler.dtype,
            sampler.reduction,
            num_slices=sampler.num_slices,
            slice_len=sampler.slice_len,
            ends=ends,
            cache_values=sampler.cache_values,
            truncated_key=sampler.truncated_key,
            init_key=sampler.init_key,
            strict_length=sampler.strict_length,
            compile=sampler.compile,
            span=sampler.span,
            max_priority_within_buffer=sampler._max_priority_within_buffer,
        )
        made.__dict__.update({name: value for name, value in vars(sampler).items() if name in _RESOLVED})
        return made

    def __repr__(self) -> str:
        names = ("num_slices", "slice_len", "end_key", "end_keys", "traj_key", "truncated_key", "strict_length", "span")
        shown = {name: getattr(self, name) for name in names}
        shown |= {"alpha": self._alpha, "beta": self._beta, "eps": self._eps}
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"

    def sample(self, storage: Storage, batch_size: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """Draws slices of ``batch_size`` steps in all, or fewer where short ones are allowed.

        Complexity: O(batch log capacity) where trajectories are longer than slices; O(capacity) where hardly a record
        can be started at.

        Returns:
            The index, a tuple with one int64 tensor ``[B]`` for each dimension of the storage, slice after slice; and
            an info dict with ``index_generation`` (int64 ``[B]``), ``priority_weight`` (``[B]``, that of the start of
            the slice) and, unless ``truncated_key`` is ``None``, the ends of slices and trajectories under it and its
            siblings ``done`` and ``terminated`` (bool ``[B, 1]``).

        Raises:
            TypeError: if the storage cannot carry generations.
            RuntimeError: if the storage is empty, no slice can be drawn from it, or ``batch_size`` cannot be divided
                into slices; or if the records do not say where trajectories end.
            ValueError: if it holds more records than the trees, or ``span`` is not shorter than a slice.
        """
        generations = generations_on(storage, user=type(self).__name__)
        self.fit(storage)
        num_cells = len(storage)
        if num_cells > self._max_capacity:
            check_capacity(self, storage)
        if not num_cells:
            raise RuntimeError("Cannot sample from an empty storage.")
        count, rule = self._rule(storage, generations, batch_size)
        slices = draw_slices(self, num_cells, count, rule)
        index = _index_of(slices, rule.ends)
        info: dict[str, Any] = {"priority_weight": self._weights(num_cells, slices)}
        records = records_of(storage)
        last = np.cumsum(slices.lengths) - 1
        if self.truncated_key is not None:
            info.update(self._marks(records, index, last))
        if self.init_key is not None:
            first = values_at(records, self.init_key, index)
            if first is not None:
                first[torch.from_numpy(last + 1 - slices.lengths)] = True
                info[self.init_key] = first
        info[GENERATION_KEY] = generations.lookup(index[0])
        return index, info

    def _sampleable_count(self, storage: Storage, batch_size: int) -> int:
        """How many records a slice can start at now. O(capacity)."""
        if not len(storage):
            return 0
        generations = generations_on(storage, user=type(self).__name__)
        self.fit(storage)
        self._adjusted_batch_size(batch_size)  # what cannot be divided is refused, as in TorchRL
        try:
            _, rule = self._rule(storage, generations, batch_size)
        except RuntimeError:
            return 0
        return int(np.count_nonzero(valid_starts(self, len(storage), rule)[0]))

    def _rule(self, storage: Storage, generations: SlotGenerations, batch_size: int) -> tuple[int, StartRule]:
        """How many slices make a batch, and where they can start."""
        steps, count = self._adjusted_batch_size(batch_size)
        if not steps or not count:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        min_steps = self._min_steps_left(steps)
        return count, StartRule(self._ends(storage), generations, steps, min_steps, heads=not self.strict_length)

    def _min_steps_left(self, steps: int) -> int:
        """How many steps must be left in a trajectory for a slice of ``steps`` to start there."""
        lacking = self.span[1]
        if isinstance(lacking, bool):
            # TorchRL leaves out the last step of each trajectory then
            return min(2, steps) if lacking else steps
        if not 0 <= lacking < steps:
            raise ValueError(
                f"span on the right must be at least 0 and shorter than a slice, got {lacking} for slices of {steps} "
                "steps: at least one of them has to be drawn."
            )
        return steps - int(lacking)

    def _ends(self, storage: Any) -> TrajectoryEnds:
        """Where trajectories end, by what TorchRL's slice samplers go by."""
        if self._was_static:
            return self._given_ends(storage)
        records = records_of(storage)
        if self._traj_key_auto:
            self._resolve_traj_key(storage)
        ids = {} if not self._fetch_traj else self._found(records, self._used_traj_key)
        ends = {} if ids else self._found(records, *(self.end_keys or (self.end_key,)))
        if not ids and not ends and self.end_keys and self.traj_key is None:
            self._resolve_traj_key(storage)  # as TorchRL, which gives up where a single end_key is missing
            ids = self._found(records, self._used_traj_key)
        if not ids and not ends:
            raise RuntimeError(
                f"{type(self).__name__} finds neither trajectories ({self.traj_key!r}) nor their ends "
                f"({self.end_keys or self.end_key!r}) among the records. Pass the traj_key or end_key that they have."
            )
        if self.cache_values:
            self._cache["keys"] = tuple(ids or ends)
        return TrajectoryEnds(storage, ids or ends, ids=bool(ids))

    def _found(self, records: Any, *keys: Any) -> dict[Any, torch.Tensor]:
        found = {key: entry_of(records, key) for key in keys if key is not None}
        return {key: entry for key, entry in found.items() if entry is not None}

    def _given_ends(self, storage: Any) -> TrajectoryEnds:
        if self._static_ends is None:
            raise RuntimeError(
                "The ends or trajectories that this sampler was made with describe records that have been written over "
                "since. Make it after the storage is filled (set_sampler), or pass end_key or traj_key instead."
            )
        if len(self._static_ends) != storage.shape[0]:
            raise RuntimeError(
                f"The ends or trajectories that this sampler was made with describe {len(self._static_ends)} records "
                f"and the storage holds {storage.shape[0]}. Pass one value per record."
            )
        return TrajectoryEnds(storage, {"ends": self._static_ends}, static=True)

    def _weights(self, num_cells: int, slices: Slices) -> torch.Tensor:
        """The importance weight of every slice's start, on each of its steps."""
        weight = weights(self, num_cells, self._sum_tree[slices.cells])
        return torch.from_numpy(np.repeat(weight.numpy(), slices.lengths))

    def _marks(self, records: Any, index: tuple[torch.Tensor, ...], last: Any) -> dict[Any, torch.Tensor]:
        """Where slices and trajectories end, under the keys that value estimators look for."""
        truncated = torch.zeros(len(index[0]), 1, dtype=torch.bool, device="cpu")
        truncated.numpy()[last] = True
        done_key, terminated_key = (_replace_last(self.truncated_key, name) for name in ("done", "terminated"))
        done, terminated = (values_at(records, key, index) for key in (done_key, terminated_key))
        return {
            self.truncated_key: truncated,
            done_key: truncated.clone() if done is None else done | truncated.reshape(-1, *(1,) * (done.ndim - 1)),
            terminated_key: torch.zeros_like(truncated) if terminated is None else terminated,
        }

    def add(self, index: Any) -> None:
        """A record was written: boundaries that were handed in no longer describe the records. O(1)."""
        self._cache.clear()
        self._static_ends = None

    def extend(self, index: Any) -> None:
        """Records were written; as :meth:`add`."""
        self.add(index)

    def _empty(self) -> None:
        self._cache.clear()
        self._init()


def _ends_of(start: torch.Tensor, stop: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Boundaries as TorchRL keeps them, as one flag per record ``[rows, *inner]``."""
    inner = [int(coordinate.max()) + 1 for coordinate in stop[:, 1:].unbind(1)]
    rows = int(lengths.sum()) // torch.Size(inner).numel()
    ends = torch.zeros(rows, *inner, dtype=torch.bool, device="cpu")
    ends[tuple(stop.cpu().unbind(1))] = True
    return ends


def _index_of(slices: Slices, ends: TrajectoryEnds) -> tuple[torch.Tensor, ...]:
    """The coordinates of all steps of all slices, one after the other."""
    lengths = slices.lengths
    first = np.cumsum(lengths) - lengths
    rows, lanes = np.divmod(slices.cells, ends.lanes) if ends.lanes > 1 else (slices.cells, np.zeros_like(lengths))
    steps = (np.repeat(rows - first, lengths) + np.arange(lengths.sum())) % ends.rows
    inner = np.unravel_index(lanes, ends.inner) if ends.inner else ()
    return tuple(torch.from_numpy(part) for part in (steps, *(np.repeat(part, lengths) for part in inner)))
