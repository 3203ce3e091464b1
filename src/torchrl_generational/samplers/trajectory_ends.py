"""Where the trajectories in a storage end: for a few cells at a time, or for all of them.

The only place that knows how TorchRL's storages tell their newest record and when their ring is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection

__all__ = ["TrajectoryEnds", "entry_of", "records_of", "steps_to_next", "values_at"]

_Array = np.ndarray[Any, Any]


def records_of(storage: Any) -> Any:
    """What an initialised storage holds, by name: a tensor collection or a mapping, perhaps longer than the storage.

    Raises:
        RuntimeError: if its records have no named entries.
    """
    held = getattr(storage, "_storage", None)
    if held is None:
        held = storage[:]
    if not (is_tensor_collection(held) or isinstance(held, Mapping)):
        raise RuntimeError(
            f"Slices need records with named entries, which tell where trajectories end, and this storage holds a "
            f"{type(held).__name__}. Store tensordicts."
        )
    return held


def entry_of(records: Any, key: Any) -> torch.Tensor | None:
    """The tensor under a key, nested or not; ``None`` if there is none."""
    if is_tensor_collection(records):
        records = records.get(key, None)
    else:
        for part in key if isinstance(key, tuple) else (key,):
            records = records.get(part) if isinstance(records, Mapping) else None
    return records if isinstance(records, torch.Tensor) else None


def values_at(records: Any, key: Any, index: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """One entry of the records at ``index``, coordinates ``[B]`` on the CPU; ``None`` if there is none."""
    entry = entry_of(records, key)
    if entry is None:
        return None
    if not entry.is_cpu:
        index = tuple(part.to(entry.device) for part in index)
    found: torch.Tensor = entry.index_select(0, index[0]) if len(index) == 1 else entry[index]
    return found if found.is_cpu else found.cpu()


class TrajectoryEnds:
    """The last steps of the trajectories that a storage holds now.

    A trajectory ends where its signal says so. Where the ring is not full, the newest row ends one in every lane;
    where it is full, the row written last does, and all others go on at row 0 after the last row. A full ring of which
    nobody knows where it was written last ends at its last row, in the lanes without any other end.

    Nothing is kept: whoever holds the storage's lock makes one, asks it, and drops it.

    Args:
        storage: an initialised storage that is not empty.
        signals: entries ``[rows, *inner]`` of the storage, with trailing dimensions of size 1 or without, that are
            true (not zero) at the last step of a trajectory; or, with ``ids``, one that differs between trajectories.
        ids: whether the signal numbers the trajectories.
        static: whether the signal was handed in, and says all that there is to say.

    Attributes:
        rows: rows along dim 0, as far as the storage is filled.
        inner: the shape of one row; ``()`` where the storage has one dimension.
        lanes: cells of one row, each with trajectories of its own.

    Raises:
        RuntimeError: if a signal does not have one value per record.
    """

    def __init__(self, storage: Any, signals: Mapping[Any, Any], *, ids: bool = False, static: bool = False) -> None:
        shape = tuple(storage.shape) if storage.ndim > 1 else (len(storage),)
        self.rows: int = shape[0]
        self.inner: tuple[int, ...] = shape[1:]
        self.lanes = torch.Size(self.inner).numel()
        self._ids = ids
        self._signals = [self._one_per_record(key, signal) for key, signal in signals.items()]
        newest: int | None = self.rows - 1
        if static:
            newest = None
        elif storage._is_full:
            newest = getattr(storage, "_last_cursor_index", None)
        self._newest = newest

    def _one_per_record(self, key: Any, signal: torch.Tensor) -> Any:
        """A signal ``[rows or more, *inner]``, as an array where it lies on the CPU. Never a copy."""
        ndim = 1 + len(self.inner)
        shape = tuple(signal.shape)
        rest = torch.Size(shape[ndim:]).numel()
        if len(shape) < ndim or shape[0] < self.rows or shape[1:ndim] != self.inner or rest != 1:
            raise RuntimeError(
                f"The end-of-trajectory signal {key!r} has shape {shape} where the storage holds records of shape "
                f"{(self.rows, *self.inner)}: it must have one value per record. Reduce it before writing, or pass "
                "another end_key or traj_key."
            )
        signal = signal.detach().reshape(shape[:ndim])
        return signal.numpy() if signal.is_cpu else signal

    def at(self, rows: _Array, lanes: _Array) -> _Array:
        """Whether a trajectory ends at cells, int64 ``rows`` and ``lanes`` that broadcast. O(cells)."""
        first, *others = self._signals
        own = self._read(first, rows, lanes)
        ends: _Array = own != (self._read(first, (rows + 1) % self.rows, lanes) if self._ids else 0)
        for signal in others:
            ends |= self._read(signal, rows, lanes) != 0
        if self._newest is not None:
            ends |= rows == self._newest
        else:
            last = (rows == self.rows - 1) & ~ends
            if last.any():  # rare, which is why it may cost O(capacity)
                ends |= last & self._endless[lanes]
        return ends

    def _read(self, signal: Any, rows: _Array, lanes: _Array) -> _Array:
        where = (rows, *np.unravel_index(lanes, self.inner)) if self.inner else (rows,)
        if isinstance(signal, np.ndarray):
            found: _Array = signal[where]
            return found
        on_device = tuple(torch.from_numpy(part).to(signal.device) for part in where)
        return np.asarray(signal[on_device].cpu().numpy())

    def left(self, rows: _Array, lanes: _Array, max_steps: int) -> _Array:
        """Steps from cells ``[B]`` to the end of their trajectory, both counted, ``max_steps`` at most."""
        if max_steps == 1:
            return np.ones(len(rows), np.int64)
        ends = self.at((rows[:, None] + np.arange(max_steps - 1)) % self.rows, lanes[:, None])
        return np.asarray(np.where(ends.any(1), ends.argmax(1) + 1, max_steps))

    def begin(self, rows: _Array, lanes: _Array) -> _Array:
        """Whether a trajectory begins at cells: the one before ends in front of them."""
        return self.at((rows - 1) % self.rows, lanes)

    @cached_property
    def everywhere(self) -> _Array:
        """:meth:`at` for all cells: bool ``[rows, lanes]``. O(capacity)."""
        ends = self._signalled.copy()
        if self._newest is not None:
            ends[self._newest] = True
        else:
            ends[-1] |= self._endless
        return ends

    @cached_property
    def _signalled(self) -> _Array:
        tables = [
            np.asarray(signal[: self.rows] if isinstance(signal, np.ndarray) else signal[: self.rows].cpu().numpy())
            for signal in self._signals
        ]
        tables = [table.reshape(self.rows, self.lanes) for table in tables]
        if self._ids:
            return np.asarray(tables[0] != np.roll(tables[0], -1, 0))
        return np.asarray(np.any([table != 0 for table in tables], 0))

    @cached_property
    def _endless(self) -> _Array:
        return np.asarray(~self._signalled.any(0))


def steps_to_next(marks: _Array) -> _Array:
    """From every row of a ring to the next mark in its lane, both counted: int64. O(rows lanes).

    Args:
        marks: bool ``[rows, lanes]``. Where a lane has none, the result is larger than the ring.
    """
    rows = len(marks)
    own = np.arange(rows)[:, None]
    place = np.where(marks, own, 3 * rows)
    ahead = np.minimum.accumulate(place[::-1], 0)[::-1]
    ahead = np.minimum(ahead, ahead[0] + rows)  # around the end of the ring
    return np.asarray(ahead - own + 1)
