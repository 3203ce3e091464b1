"""Keeping slots whose last write did not end out of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import SliceSampler

from torchrl_generational.generations.slot_generations import GENERATION_KEY
from torchrl_generational.generations.write_protocol import NEVER_WRITTEN

__all__ = ["complete_records", "rows_drawn_together"]

_ATTEMPTS = 1000

_Drawn = tuple[Any, dict[str, Any]]


def complete_records(draw: Callable[[], _Drawn], *, unit: int | None, once: bool) -> _Drawn:
    """Draws until no slot is among the batch that holds no record because its last write did not end.

    Args:
        draw: draws an index and its info, with the generations in it; the storage's lock is held.
        unit: how many rows are drawn together and can be replaced together: 1, or the length of slices. ``None`` where
            the whole batch has to be drawn again.
        once: whether each record is drawn once in an epoch. Then the batch goes without such rows.

    Raises:
        RuntimeError: if that does not happen in 1000 draws.
    """
    index, info = draw()
    torn = _torn(info)
    for _ in range(_ATTEMPTS):
        if not bool(torn.any()):
            return index, info
        if once and not bool(torn.all()):
            rows = (~torn).nonzero()[:, 0]
            return _kept(index, rows), {key: _kept(value, rows) for key, value in info.items()}
        fresh_index, fresh_info = draw()
        fresh_torn = _torn(fresh_info)
        if once or unit is None or torn.ndim != 1 or torn.shape != fresh_torn.shape or len(torn) % unit:
            index, info, torn = fresh_index, fresh_info, fresh_torn
            continue
        good = (~fresh_torn.reshape(-1, unit).any(1)).nonzero()[:, 0]
        places = torn.reshape(-1, unit).any(1).nonzero()[: good.numel(), 0]
        places, good = (_rows_of(units, unit) for units in (places, good[: places.numel()]))
        index = _replaced(index, fresh_index, places, good)
        info = {key: _replaced(value, fresh_info[key], places, good) for key, value in info.items()}
        torn = _torn(info)
    raise RuntimeError(
        f"Cannot sample: {_ATTEMPTS} draws in a row hit slots whose last write did not end, because it failed or its "
        "process was killed. Write new records over them: the next writes of the ring do."
    )


def rows_drawn_together(sampler: Any, sample_unit: Any, batch_size: int) -> int | None:
    """How many rows of a batch belong together; ``None`` if that is not known."""
    if sample_unit is not None:
        return None
    if not isinstance(sampler, SliceSampler):
        return 1
    if not sampler.strict_length or any(sampler.span):  # slices of several lengths
        return None
    length: int = sampler.slice_len or batch_size // sampler.num_slices
    return length


def _rows_of(units: torch.Tensor, unit: int) -> torch.Tensor:
    return (units[:, None] * unit + torch.arange(unit, device=units.device)).reshape(-1)


def _kept(value: Any, rows: torch.Tensor) -> Any:
    if isinstance(value, tuple):
        return tuple(_kept(part, rows) for part in value)
    return value.index_select(0, rows) if isinstance(value, torch.Tensor) and value.ndim else value


def _torn(info: dict[str, Any]) -> torch.Tensor:
    torn: torch.Tensor = info[GENERATION_KEY] < NEVER_WRITTEN
    return torn


def _replaced(old: Any, new: Any, places: torch.Tensor, rows: torch.Tensor) -> Any:
    if isinstance(old, tuple):
        return tuple(_replaced(*pair, places, rows) for pair in zip(old, new, strict=True))
    if not isinstance(old, torch.Tensor) or not old.ndim:
        return old
    return old.index_copy(0, places, new.index_select(0, rows))
