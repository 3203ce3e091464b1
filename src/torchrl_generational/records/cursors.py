"""What ``storage[cursor] = data`` names, whatever the cursor is: its rows, and the shape of the data it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchrl_generational.generations.indexing import as_int64

__all__ = ["advanced", "is_plain", "plain_cursor", "region", "rows_named"]


def is_plain(cursor: Any) -> bool:
    """Whether :func:`plain_cursor` has nothing to do: of the cursors that writers use, and of slices."""
    if type(cursor) is slice:
        return type(cursor.step) is not int or cursor.step > 0
    return type(cursor) is int or (isinstance(cursor, torch.Tensor) and cursor.dtype is torch.int64)


def plain_cursor(cursor: Any, size: int | None = None) -> Any:
    """The same cursor in the forms that torch, tensordict and this package read alike.

    Those are ints, slices, ``None``, ``...``, int64 tensors, masks, and tuples of them. Of a mask over rows the rows.

    Args:
        cursor: anything that a storage takes.
        size: number of rows, if ``cursor`` is not a part of a tuple.

    Raises:
        IndexError: if a mask has not one entry for each row.
        TypeError: if it does not hold integers, or is of uint8, which torch takes for a mask.
    """
    if isinstance(cursor, tuple):
        if len(cursor) == 1:
            return plain_cursor(cursor[0], size)
        return tuple(plain_cursor(part) for part in cursor)
    if isinstance(cursor, slice) and cursor.step is not None and cursor.step < 0:
        raise ValueError(
            f"{cursor} runs backwards, which torch cannot. Nothing was written. Name the rows in a tensor."
        )
    if cursor is None or cursor is Ellipsis or isinstance(cursor, slice):
        return cursor
    if isinstance(cursor, bool | np.bool_):
        return None if cursor else torch.empty(0, dtype=torch.int64, device="cpu")
    if isinstance(cursor, int | np.integer):
        return int(cursor)
    if isinstance(cursor, range):
        return torch.arange(cursor.start, cursor.stop, cursor.step, device="cpu")
    dtype = cursor.dtype if isinstance(cursor, torch.Tensor | np.ndarray) else np.asarray(cursor).dtype
    if dtype in (torch.uint8, np.uint8):
        raise TypeError(
            "cursor holds uint8, which torch takes for a mask and others for rows. Pass rows as int64, or a mask as "
            "bool. Nothing was written."
        )
    if dtype in (torch.bool, np.bool_):
        mask = torch.as_tensor(np.asarray(cursor), device="cpu") if not isinstance(cursor, torch.Tensor) else cursor
        if not mask.ndim:
            return plain_cursor(bool(mask))
        if size is None or mask.ndim > 1:
            return mask
        if mask.shape[0] != size:
            raise IndexError(
                f"cursor is a mask of {mask.shape[0]} entries, the storage has {size} rows. Nothing was written. Pass "
                "one entry per row, or the rows themselves."
            )
        return mask.nonzero()[:, 0]
    rows = as_int64("cursor", cursor)
    return rows if rows.ndim else int(rows)


def advanced(cursor: Any) -> bool:
    """Whether a plain cursor names places by tensors, for which torch converts no dtypes."""
    if isinstance(cursor, tuple):
        return any(isinstance(part, torch.Tensor) for part in cursor)
    return isinstance(cursor, torch.Tensor)


def region(cursor: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of ``x[cursor]`` for an ``x`` of this shape.

    Raises:
        IndexError: if it names what is not there.
    """
    if isinstance(cursor, int):
        return tuple(shape[1:])
    if isinstance(cursor, torch.Tensor) and cursor.dtype != torch.bool:
        return (*cursor.shape, *shape[1:])
    if isinstance(cursor, slice):
        return (len(range(*cursor.indices(shape[0]))), *shape[1:])
    return tuple(torch.empty((), dtype=torch.bool, device="cpu").expand(tuple(shape))[_on_cpu(cursor)].shape)


def rows_named(cursor: Any, shape: Sequence[int], dim: int = 0) -> torch.Tensor:
    """The places along dim 0 of which ``x[cursor]`` has any part, for an ``x`` of this shape.

    Args:
        cursor: a plain cursor.
        shape: of ``x``.
        dim: where ``cursor`` has dim 0 of ``x``: the two are exchanged before it is used.

    Raises:
        IndexError: if it names what is not there.
        ValueError: if it names a place more than once: torch does not say what stays there.
    """
    shape = tuple(shape)
    parts = cursor if isinstance(cursor, tuple) else (cursor,)
    if Ellipsis not in [part for part in parts if not isinstance(part, torch.Tensor)]:
        # what lies behind the dimensions that it speaks of goes along
        spoken = sum(part.ndim if _is_mask(part) else part is not None for part in parts)
        shape = shape[: max(spoken, dim + 1)]
    cursor = _on_cpu(cursor)
    numbers = []
    for place, size in enumerate(shape if advanced(cursor) else shape[:1]):
        along = torch.arange(size, device="cpu").reshape(-1, *(1,) * (len(shape) - place - 1)).expand(shape)
        numbers.append(along.transpose(0, dim)[cursor].reshape(-1))
    if advanced(cursor):
        cells = numbers[0]
        for size, number in zip(shape[1:], numbers[1:], strict=True):
            cells = cells * size + number
        if torch.unique(cells).numel() < cells.numel():
            raise ValueError(
                "cursor names a place more than once, and torch does not say which of its records stays. Nothing was "
                "written. Name each place once, or write them one after the other."
            )
    rows: torch.Tensor = torch.unique(numbers[0])
    return rows


def _is_mask(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype == torch.bool


def _on_cpu(cursor: Any) -> Any:
    if isinstance(cursor, tuple):
        return tuple(map(_on_cpu, cursor))
    return cursor.cpu() if isinstance(cursor, torch.Tensor) else cursor
