"""Samplers: TorchRL's, handing out the generation of every record they draw and guarding what enters their trees."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import PrioritizedSampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_generational.concurrency.deferred_signals import run_through
from torchrl_generational.concurrency.write_access import refuse_write
from torchrl_generational.generations.indexing import as_int64, bounds_of, cells_of, rows_of
from torchrl_generational.generations.protocols import generations_on
from torchrl_generational.generations.slot_generations import GENERATION_KEY
from torchrl_generational.priorities.proportional_draw import draw
from torchrl_generational.priorities.segment_trees import (
    double_sums,
    on_cpu,
    read_leaves,
    tree_dtype,
    write_leaves,
)
from torchrl_generational.priorities.tree_state import TreeState
from torchrl_generational.priorities.tree_updates import (
    checked_array,
    checked_priority,
    largest_but,
    retransform,
    store_arrays,
    store_default,
    store_priorities,
)
from torchrl_generational.tensors.arrays import index_array
from torchrl_generational.tensors.compilation import runs_in_compiled_code, untraced

__all__ = [
    "GenerationalPrioritizedSampler",
    "as_exponent",
    "check_capacity",
    "store_checked",
    "stores_arrays",
]


_CPU = torch.device("cpu")


def check_capacity(sampler: PrioritizedSampler, storage: Any) -> None:
    """Refuses a sampler whose trees are smaller than the storage: TorchRL's trees do not check bounds.

    Raises:
        ValueError: naming both sizes.
    """
    cells = _num_cells(storage)
    if cells > sampler._max_capacity:
        raise ValueError(
            f"{type(sampler).__name__} has max_capacity={sampler._max_capacity} but the storage holds "
            f"{cells} records: priorities would be written outside the tree. Give the sampler the "
            "storage's max_size."
        )


def _num_cells(storage: Any) -> int:
    generations = getattr(storage, "generations", None)
    return int(storage.max_size if generations is None else generations.numel())


def as_exponent(name: str, value: Any) -> float:
    """``value`` as Python's float, finite and >= 0; schedulers and configurations bring NumPy scalars and tensors."""
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} must be greater or equal to 0 and finite, got {name}={number}.")
    return number


def store_checked(sampler: PrioritizedSampler, cells: torch.Tensor, priority: torch.Tensor) -> None:
    """Writes checked priorities to checked cells, by the sampler's own path if it has one. Lock held."""
    store = partial(store_priorities, sampler) if _stores_plainly(sampler) else sampler.update_priority
    store(cells.to(sampler.device), priority.to(sampler.device))


def stores_arrays(sampler: Any) -> bool:
    """Whether ``store_arrays`` does all that a sampler's ``update_priority`` does."""
    return isinstance(sampler, PrioritizedSampler) and _stores_plainly(sampler) and on_cpu(sampler)


def _stores_plainly(sampler: Any) -> bool:
    own = type(sampler).update_priority
    return own is GenerationalPrioritizedSampler.update_priority or own is PrioritizedSampler.update_priority


class GenerationalPrioritizedSampler(PrioritizedSampler):
    r"""A prioritized sampler whose samples carry the generation of every record.

    Takes the arguments of :class:`~torchrl.data.replay_buffers.samplers.PrioritizedSampler`, in their order, and
    draws with the same probabilities: :math:`P(i) = (p_i + \epsilon)^\alpha / \sum_j (p_j + \epsilon)^\alpha`, with
    importance weights :math:`(P(i) / \min_j P(j))^{-\beta}` (Schaul et al., "Prioritized experience replay", 2016,
    section 3.3 and 3.4).

    What differs: ``sample`` adds ``index_generation`` to its info, so that a stock buffer hands it out too;
    priorities of any real dtype are accepted and cast to the tree's; NaN, infinite and negative priorities, and
    indices outside the tree, are refused before anything changes; where one call names a slot twice, the running
    maximum sees the value that was stored. Sums and draws are float64 whatever ``dtype``, so that each of millions of
    slots is drawn as often as it should; a priority of zero (``eps=0``) is never drawn and left out of the minimum.

    New records are born at the largest priority stored since the sampler was emptied; with
    ``max_priority_within_buffer`` at the largest positive one among the records that stay, which costs O(capacity)
    whenever the record that holds it is updated or overwritten. Either way at 1 where there is none.

    In a stock buffer with a sample unit, ``index_generation`` is that of the anchors, repeated like the rest of the
    info; the buffers of this package look it up for the expanded records.

    Thread safety: none of its own; a buffer calls it under the storage's lock.

    Example:
        >>> from torchrl_generational import GenerationalLazyTensorStorage, GenerationalReplayBuffer
        >>> rb = GenerationalReplayBuffer(
        ...     storage=GenerationalLazyTensorStorage(8),
        ...     sampler=GenerationalPrioritizedSampler(8, alpha=0.7, beta=0.5),
        ...     batch_size=4,
        ... )
        >>> index = rb.extend(torch.arange(8))
        >>> data, info = rb.sample(return_info=True)
        >>> info["index_generation"]
        tensor([0, 0, 0, 0])
    """

    #: The lock of the storage that a buffer uses this sampler on; set by the buffer.
    lock: Any = contextlib.nullcontext()

    # TorchRL's; guarded by lock
    _max_capacity: int
    _alpha: float
    _beta: float
    _max_priority: tuple[Any, Any]

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        alpha, beta, eps = as_exponent("alpha", alpha), as_exponent("beta", beta), as_exponent("eps", eps)
        super().__init__(max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, device)

    def _init(self) -> None:
        super()._init()
        double_sums(self)

    @classmethod
    def like(cls, sampler: PrioritizedSampler) -> GenerationalPrioritizedSampler:
        """A sampler of this class with the configuration of ``sampler`` and no priorities. O(capacity)."""
        return cls(
            sampler._max_capacity,
            sampler._alpha,
            sampler._beta,
            sampler._eps,
            sampler.dtype,
            sampler.reduction,
            sampler._max_priority_within_buffer,
            sampler._device,
        )

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draws ``batch_size`` records in proportion to their priority. O(batch log capacity).

        Returns:
            The index (int64 ``[batch_size]``, or a tuple of coordinates for a storage of several dimensions) and an
            info dict with ``priority_weight`` (``[batch_size]``) and ``index_generation`` (int64 ``[batch_size]``).

        Raises:
            TypeError: if the storage cannot carry generations.
            RuntimeError: if the storage is empty.
            ValueError: if it holds more records than the trees.
        """
        if runs_in_compiled_code():
            drawn: tuple[Any, dict[str, Any]] = untraced(self.sample, storage, batch_size)
            return drawn
        generations = generations_on(storage, user=type(self).__name__)
        self.fit(storage)
        num_cells = len(storage)
        if num_cells > self._max_capacity:
            check_capacity(self, storage)
        self._follow_device(storage)
        if not on_cpu(self):
            index, info = super().sample(storage, batch_size)
        else:
            if not num_cells:
                raise RuntimeError("Cannot sample from an empty storage.")
            index, weight = draw(self, num_cells, batch_size)
            info = {"priority_weight": weight}
            if storage.ndim > 1:
                index = torch.unravel_index(index, storage.shape)
        info[GENERATION_KEY] = generations.lookup(rows_of(index))
        return index, info

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Writes priorities by raw index, whatever record is there now. O(rows log capacity).

        Prefer :meth:`~torchrl_generational.GenerationalReplayBufferMixin.update_priority_if_present`, which knows
        whether the record is still the one that was sampled.

        Args:
            index: flat cells, ``[...]``; or coordinates ``[..., ndim]`` of ``storage``. -1 marks a row to ignore, as
                TorchRL's max-value writer does.
            priority: a number, or as many real numbers as rows.
            storage: needed for coordinates.

        Raises:
            IndexError: if an index lies outside the tree, or outside the written part of ``storage``.
            TypeError: if the index does not hold integers or the priority no real numbers.
            ValueError: if a priority is NaN, infinite, negative or too large, or there is not one per row.
        """
        if runs_in_compiled_code():
            untraced(self.update_priority, index, priority, storage=storage)
            return
        self._follow_device(storage)
        if storage is None or storage.ndim == 1:
            limit = self._max_capacity if storage is None else min(len(storage), self._max_capacity)
            array = index_array(index, limit) if on_cpu(self) else None
            checked = None if array is None else checked_array(self, priority)
            if array is not None and checked is not None and array.ndim == 1 and checked[0].shape == array.shape:
                store_arrays(self, array, *checked)
                return
        if storage is not None and storage.ndim > 1:
            self.fit(storage)
        cells, ignored = self._cells(index, storage)
        values = checked_priority(self, priority)
        if values.numel() == 1:
            values = values.reshape(())
        elif values.numel() != cells.numel():
            raise ValueError(
                f"priority should be a number or an iterable of the same length as index. Got priority of shape "
                f"{tuple(values.shape)} for {cells.numel()} indices."
            )
        else:
            values = values.reshape(-1)
        if ignored:
            real = cells >= 0
            cells = cells[real]
            values = values[real] if values.ndim else values
        store_priorities(self, cells, values)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Gives the records at ``index`` the default priority, leaving out slots that ``storage`` has not reached."""
        if runs_in_compiled_code():
            untraced(self.mark_update, index, storage=storage)
            return
        if storage is not None and self._takes_defaults(storage):
            limit = len(storage)
            if type(index) is int and 0 <= index < limit:
                store_default(self, index)
                return
            array = index_array(index, limit)
            if array is not None and array.ndim == 1:
                store_default(self, array)
                return
        cells = as_int64("index", index, self.device)
        if storage is not None and cells.ndim <= 1:
            cells = cells.reshape(-1)
            if bounds_of(cells)[1] >= len(storage):
                cells = cells[cells < len(storage)]
        where = self._max_priority[1]
        if self._max_priority_within_buffer and self._alpha != 0 and where is not None:
            flat, _ = self._cells(cells, storage)
            if bool((flat == where).any()):  # the record with the largest priority is gone
                self._max_priority = largest_but(self, flat[flat >= 0])
        self.update_priority(cells, self.default_priority, storage=storage)

    def _follow_device(self, storage: Storage | None) -> None:
        """Moves the trees, before they hold anything, to the accelerator that the storage is on."""
        if self._device is not None or getattr(storage, "device", None) != _CPU:  # asking further is slow
            self._maybe_init_from_storage(storage)

    def _takes_defaults(self, storage: Storage) -> bool:
        """Whether marking slots of ``storage`` takes no more than writing the running maximum to them."""
        return (
            storage.ndim == 1
            and on_cpu(self)
            and self._max_priority[0] is not None
            and not self._max_priority_within_buffer
            and type(self).update_priority is GenerationalPrioritizedSampler.update_priority
            and type(self).default_priority is PrioritizedSampler.default_priority
            and len(storage) <= self._max_capacity
        )

    def _maybe_erase_max_priority(self, index: Any) -> None:
        """Nothing left to do: :meth:`mark_update` looked for the next largest. TorchRL starts again at 1."""

    def _recompute_max_priority_from_tree(self) -> None:
        if self._alpha != 0:
            self._max_priority = largest_but(self)

    def _cells(self, index: Any, storage: Storage | None) -> tuple[torch.Tensor, bool]:
        """``index`` as flat cells ``[M]``, -1 where the row is to be ignored, and whether there are such rows."""
        cells = as_int64("index", index, self.device)
        limit, place = self._max_capacity, "the tree's capacity"
        if cells.ndim > 1:
            if storage is None:
                raise RuntimeError(
                    "storage should be provided to Sampler.update_priority when the storage has more than one "
                    "dimension."
                )
            ndim = storage.ndim
            if cells.shape[-1] != ndim:
                raise ValueError(
                    f"index of shape {tuple(cells.shape)} does not hold coordinates of a storage with {ndim} "
                    f"dimension(s): its last dimension should be {ndim}."
                )
            space = tuple(storage.shape)
            ignored = (cells < 0).any(-1)
            beyond = (cells >= torch.tensor(space, device=cells.device)).any(-1) & ~ignored
            if beyond.any():
                raise IndexError(f"index {cells[beyond][0].tolist()} lies outside the storage's written part {space}.")
            cells = torch.where(ignored, -1, cells_of(cells, space))
        elif storage is not None and len(storage) < limit:
            limit, place = len(storage), "the number of records in the storage"
        cells = cells.reshape(-1)
        low, high = bounds_of(cells)
        if low < -1 or high >= limit:
            wrong = low if low < -1 else high
            raise IndexError(
                f"index {wrong} is outside [0, {limit}), {place}. Nothing was updated. Pass the index of a sample."
            )
        return cells, low < 0

    @property
    def alpha(self) -> float:
        """The priority exponent. Setting it rewrites all leaves, under the lock of the storage. O(capacity)."""
        alpha: float = self._alpha
        return alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        value = as_exponent("alpha", value)
        refuse_write(self.lock)
        with self.lock:
            if value != self._alpha:
                retransform(self, self._alpha, value)

    @property
    def beta(self) -> float:
        """The exponent of the importance weights. Setting it holds the lock of the storage. O(1)."""
        beta: float = self._beta
        return beta

    @beta.setter
    def beta(self, value: float) -> None:
        value = as_exponent("beta", value)
        refuse_write(self.lock)
        with self.lock:
            self._beta = value

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state["lock"] = contextlib.nullcontext()  # a buffer puts its own here
        return state

    def state_dict(self) -> dict[str, Any]:
        """Priorities and exponents, as tensors and numbers only: ``torch.load(..., weights_only=True)`` reads them."""
        return TreeState.of(self).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over :meth:`state_dict`, or the state of a TorchRL sampler.

        Raises:
            ValueError: if it does not fit; nothing has changed then.
        """
        refuse_write(self.lock)
        run_through(self._ready_state(TreeState.from_state_dict(state_dict)))

    def dumps(self, path: str | Path) -> None:
        """Saves priorities and exponents in TorchRL's layout. O(capacity), without a loop over slots."""
        TreeState.of(self).dumps(Path(path))

    def loads(self, path: str | Path) -> None:
        """Takes over what :meth:`dumps`, or a TorchRL sampler, saved.

        Raises:
            ValueError: if it does not fit; nothing has changed then.
        """
        refuse_write(self.lock)
        run_through(self._ready_state(TreeState.from_path(Path(path))))

    def _ready_state(self, state: TreeState) -> Callable[[], None]:
        state.check(self)
        return state.ready(self)

    def fit(self, storage: Storage) -> None:
        """Makes room where a storage of several dimensions rounded its capacity up to whole rows.

        O(capacity), once; O(1) ever after.
        """
        if storage.ndim == 1:
            return
        excess = _num_cells(storage) - self._max_capacity
        if excess <= 0 or not storage.shape:
            return
        if excess >= torch.Size(storage.shape[1:]).numel():
            return  # more than rounding accounts for: the sampler was made for another size
        self.grow(excess)

    def grow(self, excess: int) -> None:
        """Makes room for ``excess`` more cells. O(capacity)."""
        cells = torch.arange(self._max_capacity, device=self.device)
        leaves = read_leaves(self._sum_tree, cells).to(tree_dtype(self))
        maximum, capacity = self.__dict__["_max_priority"], len(cells) + excess

        def enlarge() -> None:
            self._max_capacity = capacity
            self._init()
            write_leaves(self, cells, leaves)
            self._max_priority = maximum

        run_through(enlarge)
