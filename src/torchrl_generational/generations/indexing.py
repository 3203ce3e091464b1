"""The one normaliser of indices: whatever a caller or a sample calls an index -> rows, cells and a result shape.

Two numberings meet here. *Rows* run along dim 0 of the storage: a write replaces whole rows, so stamps belong to
them. *Cells* number the whole index space in C order: priorities belong to them. With ``ndim == 1`` they are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch.utils._pytree import tree_leaves

from torchrl_generational.tensors.default_devices import as_tensor

__all__ = [
    "Handles",
    "as_array",
    "as_generation",
    "as_int64",
    "as_rows",
    "bounds_of",
    "cells_in",
    "cells_of",
    "keep_last",
    "leading_shape",
    "normalise_handles",
    "rows_of",
    "rows_written",
]


@dataclass(frozen=True, slots=True)
class Handles:
    """A batch of ``(index, generation)`` pairs, flattened and within range.

    Attributes:
        rows: int64 ``[M]``, dim-0 rows.
        cells: int64 ``[M]``, flat cells.
        generation: int64 ``[M]``.
        shape: the shape that the caller's ``generation`` had, which results are given in.
    """

    rows: torch.Tensor
    cells: torch.Tensor
    generation: torch.Tensor
    shape: torch.Size


def as_array(name: str, value: Any, numbers: str) -> Any:
    """What came in the place of a tensor, as NumPy sees it; see :func:`as_int64`.

    Raises:
        TypeError: if it is ragged, or a tensordict: NumPy goes through one that holds objects without an end.
    """
    for kind in {type(part) for part in value} if isinstance(value, list | tuple) else {type(value)}:
        if is_tensor_collection(kind):
            raise TypeError(f"{name} must hold {numbers}, got a {kind.__name__}.")
    try:
        return np.asarray(value)
    except ValueError as err:
        raise TypeError(f"{name} must hold {numbers} of one shape, got {value!r}.") from err


def as_int64(name: str, value: Any, device: torch.device | None = None) -> torch.Tensor:
    """``value`` as an int64 tensor.

    Raises:
        TypeError: if it does not hold integers (bools and floats are not indices).
    """
    if type(value) is torch.Tensor and value.dtype is torch.int64 and device in (None, value.device):
        return value
    if not isinstance(value, torch.Tensor):
        array = as_array(name, value, "integers")
        if array.size == 0:
            array = array.astype(np.int64)
        if array.dtype.kind not in "iu":
            raise TypeError(_not_integers(name, f"{type(value).__name__} of {array.dtype}"))
        value = torch.from_numpy(array.astype(np.int64, copy=False))
    elif value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
        raise TypeError(_not_integers(name, f"a tensor of {value.dtype}"))
    result: torch.Tensor = value.detach()
    return result.to(device=device, dtype=torch.int64)


def _not_integers(name: str, came: str) -> str:
    return f"{name} must hold integers, got {came}. Pass it as the sample carries it, without casting."


def as_generation(value: Any, device: torch.device | None = None) -> torch.Tensor:
    """``value`` as int64 stamps.

    No other dtype is converted, unlike an index: a stamp is 64 bits of which each decides, and one that went through
    fewer may equal that of another record.

    Raises:
        TypeError: if it is of another dtype than int64. Python ints have none, and are taken.
    """
    if not isinstance(value, torch.Tensor):
        value = _stamps_from_outside(value)
    elif value.dtype != torch.int64:
        raise TypeError(_no_stamps(f"a tensor of {value.dtype}"))
    result: torch.Tensor = value
    return result if device in (None, value.device) else result.to(device)


def _stamps_from_outside(value: Any) -> torch.Tensor:
    array = as_array("generation", value, "integers")
    if not array.size and isinstance(value, list | tuple):
        array = array.astype(np.int64)
    if array.dtype.kind != "i" or array.dtype.itemsize != 8:
        raise TypeError(_no_stamps(f"{type(value).__name__} of {array.dtype}"))
    return torch.as_tensor(array.astype(np.int64, copy=False), device="cpu")  # some are big-endian


def _no_stamps(came: str) -> str:
    return (
        f"generation must hold integers of dtype int64, got {came}. A stamp that was cast may equal that of another "
        "record. Pass the sample's index_generation without casting it, or as int64 NumPy array where a library has no "
        "64-bit integers (JAX without jax_enable_x64)."
    )


def normalise_handles(
    index: Any, generation: Any, space: Sequence[int], device: torch.device, *, inner: int = 0
) -> Handles:
    """Reads a batch of handles in any form that a sample can carry it.

    For an index space of ``n`` dimensions, ``index`` may be a tuple of ``n`` coordinate tensors or an integer tensor
    ``[..., n]``; for ``n == 1`` also simply ``[...]``. ``[...]`` is the shape of ``generation``, or the beginning of
    it where ``generation`` was expanded over the dimensions of a stored trajectory.

    A flat index into a space of several dimensions is refused: TorchRL's writers read it as rows and its samplers as
    cells, and the two cannot be told apart.

    Args:
        index: the index, as above; tensors, arrays, lists or ints.
        generation: the stamps, int64 of any shape.
        space: shape of the storage's index space.
        device: where the result lives.
        inner: dimensions of one record, where the storage keeps trajectories as records.

    Raises:
        TypeError: if the index does not hold integers, or the stamps are not int64.
        ValueError: if the two do not describe the same rows, or the index is ambiguous.
        IndexError: if an index outside the space carries a stamp that a record can have.
    """
    generation = as_generation(generation, device)
    shape = generation.shape
    if len(space) == 1 and isinstance(index, torch.Tensor) and index.shape == shape and device.type == "cpu":
        # what a training loop hands in: one pass over it
        rows = as_int64("index", index, device)
        low, high = bounds_of(rows)
        if low >= 0 and high < space[0]:
            if rows.ndim != 1:
                rows, generation = rows.reshape(-1), generation.reshape(-1)
            return Handles(rows, rows, generation, shape)
    coordinates = _coordinates(index, shape, len(space), device)
    if not repeats_from((generation,), coordinates.ndim - 1, inner):
        raise ValueError(_mismatch(coordinates.shape[:-1], shape))
    expanded = (*coordinates.shape[:-1], *(1,) * (len(shape) + 1 - coordinates.ndim), len(space))
    coordinates = coordinates.reshape(expanded).expand(*shape, len(space)).reshape(-1, len(space))
    generation = generation.reshape(-1)
    coordinates = _within(coordinates, generation, space)
    rows = coordinates[:, 0]
    cells = rows if len(space) == 1 else cells_of(coordinates, space)
    return Handles(rows, cells, generation, shape)


def _coordinates(index: Any, shape: torch.Size, ndim: int, device: torch.device) -> torch.Tensor:
    """``index`` as ``[S, ndim]`` where ``S`` is the beginning of ``shape``."""
    if isinstance(index, tuple):
        if len(index) != ndim:
            raise ValueError(
                f"index is a tuple of {len(index)} coordinates but the storage has {ndim} dimension(s). Pass one "
                "coordinate tensor per dimension, or a tensor with the coordinates in its last dimension."
            )
        parts = torch.functional.broadcast_tensors(*(as_int64("index", part, device) for part in index))  # type: ignore[no-untyped-call]
        stacked = torch.stack(parts, -1)
        # a slice sampler of a 1-D storage gives ([B],) in its info and [B, 1] in its sample: both end here
        if _begins(stacked.shape[:-1], shape):
            return stacked
        raise ValueError(_mismatch(parts[0].shape, shape))
    flat = as_int64("index", index, device)
    is_coordinates = flat.shape[-1:] == (ndim,) and _begins(flat.shape[:-1], shape)
    if ndim == 1:
        if _begins(flat.shape, shape):
            return flat.unsqueeze(-1)
        if is_coordinates:
            return flat
        raise ValueError(_mismatch(flat.shape, shape))
    if flat.shape == shape or (not is_coordinates and flat.shape[-1:] != (ndim,)):
        raise ValueError(
            f"index of shape {tuple(flat.shape)} for a storage with {ndim} dimensions could mean rows or flat cells. "
            f"Pass coordinates: a tensor of shape {(*shape, ndim)}, or a tuple of {ndim} tensors of shape "
            f"{tuple(shape)}, as the sample carries them."
        )
    if is_coordinates:
        return flat
    raise ValueError(_mismatch(flat.shape[:-1], shape))


def repeats_from(handles: Sequence[torch.Tensor], dim: int, inner: int) -> bool:
    """Whether all rows that differ only in dimensions from ``dim`` on are of one record, by their shape and handles.

    They are where those dimensions have size 1, or repeat the handle of a trajectory stored as one record.

    Args:
        handles: generations ``[...]`` and what else tells records apart, ``[..., n]`` or the beginning of ``[...]``.
        dim: a dimension of the generations, which come first.
        inner: dimensions of one record; 0 where each row is one.
    """
    over = handles[0].shape[dim:]
    if over.numel() == 1:
        return True
    places = (slice(None),) * dim + (slice(1),) * len(over)
    if not inner or not over.numel():
        return False
    return all(bool((handle == handle[places[: handle.ndim]]).all()) for handle in handles)


def _begins(start: Sequence[int], shape: Sequence[int]) -> bool:
    return tuple(shape[: len(start)]) == tuple(start)


def _mismatch(index_shape: Sequence[int], shape: Sequence[int]) -> str:
    return (
        f"index describes rows of shape {tuple(index_shape)} but generation has shape {tuple(shape)}. Pass one "
        "generation per index, both as the sample carries them."
    )


def _within(coordinates: torch.Tensor, generation: torch.Tensor, space: Sequence[int]) -> torch.Tensor:
    """Coordinates with those outside the space replaced; only handles that no record ever had may lie there."""
    size = torch.tensor(tuple(space), dtype=torch.int64, device=coordinates.device)
    outside = ((coordinates < 0) | (coordinates >= size)).any(-1)
    if not outside.any():
        return coordinates
    wrong = outside & (generation >= 0)
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        raise IndexError(
            f"index {_shown(coordinates[row])} (row {row} of the batch) lies outside the storage's index space "
            f"{tuple(space)} but carries generation {int(generation[row])}: no sample of this buffer can have it. "
            "Pass the index of a sample of this very buffer."
        )
    return torch.where(outside.unsqueeze(-1), 0, coordinates)


def _shown(coordinates: torch.Tensor) -> str:
    values = coordinates.tolist()
    return str(values[0] if len(values) == 1 else tuple(values))


def bounds_of(rows: torch.Tensor) -> tuple[int, int]:
    """Smallest and largest of ``rows``; ``(0, -1)`` if there are none. Synchronises."""
    if not rows.numel():
        return 0, -1
    if rows.is_cpu:
        array = rows.numpy()  # whose reductions are the quicker ones for a batch
        return int(array.min()), int(array.max())
    low, high = rows.aminmax()
    return int(low), int(high)


def cells_of(coordinates: torch.Tensor, space: Sequence[int]) -> torch.Tensor:
    """Flat cells, C order, of coordinates ``[..., n]``. O(rows)."""
    cells = coordinates[..., 0]
    for dim in range(1, len(space)):
        cells = cells * space[dim] + coordinates[..., dim]
    return cells


def cells_in(rows: torch.Tensor, space: Sequence[int]) -> torch.Tensor:
    """The flat cells of whole rows ``[M]`` of an index space, row after row."""
    lanes = torch.arange(torch.Size(space[1:]).numel(), device=rows.device)
    return (rows[:, None] * lanes.numel() + lanes).reshape(-1)


def rows_of(index: Any) -> torch.Tensor:
    """Dim-0 rows of an index that a sampler produced: a tensor of rows, or a tuple of coordinates."""
    rows = index[0] if isinstance(index, tuple) else index
    if type(rows) is torch.Tensor and rows.dtype is torch.int64:
        return rows
    return as_tensor(rows).to(torch.int64)


def rows_written(cursor: Any, num_rows: int) -> int | slice | torch.Tensor:
    """The dim-0 rows that ``storage[cursor] = data`` writes to.

    Args:
        cursor: any index that TorchRL's storages accept.
        num_rows: rows of the storage.

    Returns:
        A non-negative int, a slice, or an int64 tensor of non-negative rows.

    Raises:
        IndexError: if a row lies outside the storage.
        TypeError: if the cursor is of no known kind.
    """
    if type(cursor) is int:
        return _row_in(cursor, num_rows)
    if (
        type(cursor) is torch.Tensor
        and cursor.dtype is torch.int64
        and cursor.ndim == 1
        and cursor.device.type == "cpu"
    ):
        return _rows_in(cursor, num_rows)
    if isinstance(cursor, tuple):
        if not cursor:
            return slice(None)
        return rows_written(cursor[0], num_rows)
    if cursor is None or cursor is Ellipsis:
        return slice(None)
    if isinstance(cursor, slice):
        return slice(*cursor.indices(num_rows))
    if isinstance(cursor, range):
        cursor = torch.arange(cursor.start, cursor.stop, cursor.step, device="cpu")
    if isinstance(cursor, bool) or (not isinstance(cursor, torch.Tensor) and np.asarray(cursor).dtype == np.bool_):
        cursor = torch.tensor(np.asarray(cursor), device="cpu")
    if isinstance(cursor, torch.Tensor) and cursor.dtype == torch.bool:
        # a mask may cover more dimensions than the rows
        return cursor.nonzero()[:, 0] if cursor.ndim else slice(None)
    rows = as_int64("cursor", cursor)
    if rows.ndim == 0:
        return _row_in(int(rows), num_rows)
    return _rows_in(rows.reshape(-1), num_rows)


def _row_in(row: int, num_rows: int) -> int:
    if not -num_rows <= row < num_rows:
        raise IndexError(f"cursor {row} is outside the storage, which has {num_rows} rows.")
    return row % num_rows


def _rows_in(rows: torch.Tensor, num_rows: int) -> slice | torch.Tensor:
    low, high = bounds_of(rows)
    if low < -num_rows or high >= num_rows:
        raise IndexError(f"cursor spans rows {low} to {high}, the storage has {num_rows}.")
    if low < 0:
        return rows % num_rows
    count = high - low + 1
    if count == rows.numel() > 1 and rows.device.type == "cpu":
        # what a round-robin writer names unless the ring wraps: consecutive rows, cheaper as a slice
        array = rows.numpy()
        if (array[1:] - array[:-1] == 1).all():
            return slice(low, high + 1)
    return rows


def as_rows(written: int | slice | torch.Tensor, num_rows: int) -> torch.Tensor:
    """What :func:`rows_written` returned, as an int64 tensor. O(rows named)."""
    if isinstance(written, torch.Tensor):
        return written
    start, stop, step = (written if isinstance(written, slice) else slice(written, written + 1)).indices(num_rows)
    return torch.arange(start, max(start, stop), step, device="cpu")


def as_count(written: slice | torch.Tensor, num_rows: int) -> int:
    """How many rows :func:`rows_written` named."""
    return written.numel() if isinstance(written, torch.Tensor) else len(range(num_rows)[written])


def leading_shape(data: Any) -> tuple[int, ...]:
    """Shape of ``data``, or of the first leaf of a pytree; ``()`` where there is none."""
    for leaf in [data] if hasattr(data, "shape") else tree_leaves(data):
        return tuple(getattr(leaf, "shape", ()))
    return ()


def keep_last(cells: torch.Tensor) -> torch.Tensor | None:
    """Positions to keep so that each cell stands once, by its last occurrence; ``None`` if none repeats.

    O(n log n) on the host: a synchronisation if ``cells`` lives on CUDA.
    """
    backwards = cells.detach().cpu().numpy()[::-1]
    _, first = np.unique(backwards, return_index=True)
    if first.size == backwards.size:
        return None
    last = np.sort(backwards.size - 1 - first)
    return torch.from_numpy(last).to(cells.device)
