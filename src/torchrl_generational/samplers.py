"""Samplers: TorchRL's, handing out the generation of every record they draw and guarding what enters their trees."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import PrioritizedSampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_generational.generations import GENERATION_KEY, generations_on
from torchrl_generational.indexing import as_int64, bounds_of, cells_of, keep_last, rows_of
from torchrl_generational.priorities import as_priority, largest_priority
from torchrl_generational.trees import TreeState, read_leaves, tree_dtype

__all__ = ["GenerationalPrioritizedSampler", "check_capacity", "store_priorities"]


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


def checked_priority(sampler: PrioritizedSampler, priority: Any, *, name: str = "priority") -> torch.Tensor:
    """``priority`` as values that ``sampler``'s trees can hold; see :func:`as_priority`."""
    dtype = tree_dtype(sampler)
    most = largest_priority(alpha=sampler._alpha, eps=sampler._eps, capacity=sampler._max_capacity, dtype=dtype)
    return as_priority(priority, dtype=dtype, device=sampler.device, most=most, name=name)


def store_priorities(sampler: PrioritizedSampler, cells: torch.Tensor, priority: torch.Tensor) -> None:
    """Writes checked priorities to checked cells. The caller holds the storage's lock.

    Where a cell stands more than once, the last row wins, and the running maximum sees only that one. Otherwise the
    sampler is left bit for bit as TorchRL's ``update_priority`` leaves it.

    Args:
        sampler: any prioritized sampler.
        cells: int64 ``[M]`` within the sampler's capacity.
        priority: 0-d or ``[M]``, of the tree's dtype, finite and >= 0.
    """
    if not cells.numel():
        return
    maximum, where = sampler._max_priority
    highest = priority.max() if priority.ndim else priority
    if maximum is None or bool(highest > maximum):
        # only a row that raises the maximum can raise it wrongly: look for repeated cells then
        keep = keep_last(cells) if priority.ndim else None
        if keep is not None:
            cells, priority = cells[keep], priority[keep]
        highest, row = priority.max(0)
        if maximum is None or bool(highest > maximum):
            maximum, where = sampler._max_priority = (highest, cells[row])
    if sampler.device.type != "cpu":
        PrioritizedSampler.update_priority(sampler, cells, priority)
        return
    # NumPy views take half the time of tensors here, but the trees read them as if they were contiguous.
    leaf = torch.pow(priority + sampler._eps, sampler._alpha).contiguous().numpy()
    index = cells.contiguous().numpy()
    sampler._sum_tree[index] = leaf if priority.ndim else float(leaf)
    sampler._min_tree[index] = leaf if priority.ndim else float(leaf)
    tracked = sampler._max_priority_within_buffer and sampler._alpha != 0 and where is not None
    if tracked and bool((cells == where).any()):
        highest, row = sampler._tree_argmax()  # of transformed values
        sampler._max_priority = ((highest ** (1.0 / sampler._alpha) - sampler._eps).clamp_min(0), row)


def has_own_update(sampler: PrioritizedSampler) -> bool:
    """Whether a sampler does something of its own with priorities, so that it must be asked."""
    plain = (PrioritizedSampler.update_priority, GenerationalPrioritizedSampler.update_priority)
    return type(sampler).update_priority not in plain


class GenerationalPrioritizedSampler(PrioritizedSampler):  # type: ignore[misc]  # TorchRL is untyped
    r"""A prioritized sampler whose samples carry the generation of every record.

    Takes the arguments of :class:`~torchrl.data.replay_buffers.samplers.PrioritizedSampler`, in their order, and
    draws with the same probabilities: :math:`P(i) = (p_i + \epsilon)^\alpha / \sum_j (p_j + \epsilon)^\alpha`, with
    importance weights :math:`(P(i) / \min_j P(j))^{-\beta}` (Schaul et al., "Prioritized experience replay", 2016,
    section 3.3 and 3.4).

    What differs: ``sample`` adds ``index_generation`` to its info, so that a stock buffer hands it out too;
    priorities of any real dtype are accepted and cast to the tree's; NaN, infinite and negative priorities, and
    indices outside the tree, are refused before anything changes; where one call names a slot twice, the running
    maximum sees the value that was stored.

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
        generations = generations_on(storage, user=type(self).__name__)
        self.fit(storage)
        if len(storage) > self._max_capacity:
            check_capacity(self, storage)
        if self._rng is not None and self.device.type == "cpu" and tree_dtype(self) == torch.float64:
            index, info = self._sample_double(storage, batch_size)
        else:
            index, info = super().sample(storage, batch_size)
        info[GENERATION_KEY] = generations.lookup(rows_of(index))
        return index, info

    def _sample_double(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """The draw from float64 trees with a generator, where TorchRL hands them a float32 mass and fails.

        Inverse-transform sampling: a mass uniform in ``[0, total)`` falls into the cell whose cumulative priority
        first exceeds it.
        """
        num_cells = len(storage)
        if not num_cells:
            raise RuntimeError("Cannot sample from an empty storage.")
        total, least = self._sum_tree.query(0, num_cells), self._min_tree.query(0, num_cells)
        if not (total > 0 and least > 0):
            raise RuntimeError(f"Cannot sample by priority: their sum is {total} and the smallest {least}.")
        mass = torch.rand(batch_size, generator=self._rng, dtype=torch.float64) * total
        cells = self._sum_tree.scan_lower_bound(mass).clamp_max_(num_cells - 1)
        weight = (self._sum_tree[cells] / least) ** -self._beta
        return torch.unravel_index(cells, storage.shape) if storage.ndim > 1 else cells, {"priority_weight": weight}

    @torch.no_grad()
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
        self._maybe_init_from_storage(storage)
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
        cells = as_int64("index", index, self.device)
        if storage is not None and cells.ndim <= 1:
            cells = cells.reshape(-1)
            if bounds_of(cells)[1] >= len(storage):
                cells = cells[cells < len(storage)]
        self.update_priority(cells, self.default_priority, storage=storage)

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
        with self.lock:
            PrioritizedSampler.alpha.fset(self, value)

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
        state = TreeState.from_state_dict(state_dict)
        state.check(self)
        state.restore(self)

    def dumps(self, path: str | Path) -> None:
        """Saves priorities and exponents in TorchRL's layout. O(capacity), without a loop over slots."""
        TreeState.of(self).dumps(Path(path))

    def loads(self, path: str | Path) -> None:
        """Takes over what :meth:`dumps`, or a TorchRL sampler, saved.

        Raises:
            ValueError: if it does not fit; nothing has changed then.
        """
        state = TreeState.from_path(Path(path))
        state.check(self)
        state.restore(self)

    def fit(self, storage: Storage) -> None:
        """Makes room where a storage of several dimensions rounded its capacity up to whole rows.

        O(capacity), once; O(1) ever after.
        """
        excess = _num_cells(storage) - self._max_capacity
        if excess <= 0 or storage.ndim == 1 or not storage.shape:
            return
        if excess >= torch.Size(storage.shape[1:]).numel():
            return  # more than rounding accounts for: the sampler was made for another size
        self.grow(excess)

    def grow(self, excess: int) -> None:
        """Makes room for ``excess`` more cells. O(capacity)."""
        cells = torch.arange(self._max_capacity, device=self.device)
        sums, minima = read_leaves(self._sum_tree, cells), read_leaves(self._min_tree, cells)
        maximum = self.__dict__["_max_priority"]
        self._max_capacity += excess
        self._init()
        self._sum_tree[cells], self._min_tree[cells] = sums, minima
        self._max_priority = maximum
