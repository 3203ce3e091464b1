"""Keeping slots whose last write did not end out of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import SliceSampler

from torchrl_generational.generations import GENERATION_KEY, NEVER_WRITTEN

__all__ = ["rows_are_independent", "whole_records"]

_ATTEMPTS = 1000

_Drawn = tuple[Any, dict[str, Any]]


def whole_records(draw: Callable[[], _Drawn], *, rows_alone: bool) -> _Drawn:
    """Draws until no slot is among the batch that holds no record because its last write did not end.

    Args:
        draw: draws an index and its info, with the generations in it; the storage's lock is held.
        rows_alone: whether rows are drawn independently of each other, so that single ones can be replaced. Otherwise
            (slices, windows) the whole batch is drawn again.

    Raises:
        RuntimeError: if that does not happen in 1000 draws.
    """
    index, info = draw()
    torn = _torn(info)
    for _ in range(_ATTEMPTS):
        if not bool(torn.any()):
            return index, info
        fresh_index, fresh_info = draw()
        if not rows_alone or torn.ndim != 1 or torn.shape != _torn(fresh_info).shape:
            index, info, torn = fresh_index, fresh_info, _torn(fresh_info)
            continue
        good = (~_torn(fresh_info)).nonzero()[:, 0]
        places = torn.nonzero()[: good.numel(), 0]
        good = good[: places.numel()]
        index = _replaced(index, fresh_index, places, good)
        info = {key: _replaced(value, fresh_info[key], places, good) for key, value in info.items()}
        torn = _torn(info)
    raise RuntimeError(
        f"Cannot sample: {_ATTEMPTS} draws in a row hit slots whose last write did not end, because it failed or its "
        "process was killed. Write new records over them: the next writes of the ring do."
    )


def rows_are_independent(sampler: Any, sample_unit: Any) -> bool:
    """Whether single rows of a batch can be replaced by others."""
    return sample_unit is None and not isinstance(sampler, SliceSampler)


def _torn(info: dict[str, Any]) -> torch.Tensor:
    torn: torch.Tensor = info[GENERATION_KEY] < NEVER_WRITTEN
    return torn


def _replaced(old: Any, new: Any, places: torch.Tensor, rows: torch.Tensor) -> Any:
    if isinstance(old, tuple):
        return tuple(_replaced(*pair, places, rows) for pair in zip(old, new, strict=True))
    if not isinstance(old, torch.Tensor) or not old.ndim:
        return old
    return old.index_copy(0, places, new.index_select(0, rows))
