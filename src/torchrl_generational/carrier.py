"""Follows records through the transforms of a sample, so that handles end up beside the records they name.

TorchRL attaches ``index`` and the rest of a sampler's info *after* the transforms have run, in the order of the draw.
A transform that reorders, subsets or reshapes the batch then leaves them beside the wrong records. Here each record
carries its position in the draw through the transforms, and the info is taken in that order afterwards.

The position travels as one more entry of the batch, four numbers a record: ``[p, n - 1 - p, 0, 1]``. Whatever
elementwise affine function a transform applies to all entries (a cast, a shift, a scale), the last two columns
undo it and the first two prove that it was undone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.utils._pytree import tree_leaves

__all__ = ["CARRIER_KEY", "follow"]

#: The entry that a batch carries while transforms run.
CARRIER_KEY = "_position_in_draw"


def follow(
    data: Any, info: dict[str, Any], transform: Callable[[Any], Any], *, attach: tuple[str, ...] = ()
) -> tuple[Any, dict[str, Any]]:
    """Runs ``transform`` on ``data`` and returns its result with ``info`` in the order of the records it kept.

    Data that takes no further entry (tensors, pytrees, tensorclasses) cannot be followed: its transform has to keep
    records where they are.

    Args:
        data: the batch drawn, ``n`` records along dim 0.
        info: the sampler's info; entries with ``n`` rows follow their records, others stay.
        transform: what the buffer applies.
        attach: entries of ``info`` that the transform may read in a tensordict batch.

    Raises:
        RuntimeError: if the records were rearranged in a way that cannot be followed.
    """
    if not isinstance(data, TensorDictBase) or not data.ndim:
        num_records = _length(data)
        result = transform(data)
        if num_records is not None and _length(result) not in (num_records, None):
            raise RuntimeError(
                f"A transform turned {num_records} records into {_length(result)}, and in a {type(data).__name__} "
                "records cannot carry their handles. Store tensordicts, or keep all records in place."
            )
        return result, info
    batch_size = data.batch_size
    num_records = batch_size[0]
    before = list(data.values(True, True))  # kept alive, so that no new entry can take an old one's address
    places = {_place(leaf) for leaf in before}
    data.set(CARRIER_KEY, _carrier(data))
    for key in attach:
        value = info[key]
        value = torch.stack(value, -1) if isinstance(value, tuple) else _expand_right(value, data)
        data.set(key, value.clone())  # a transform may write into it
    result = transform(data)
    if not isinstance(result, TensorDictBase):
        return result, info
    carrier = result.get(CARRIER_KEY, None)
    if carrier is not None:
        _drop(result)
    position = None if carrier is None else _decode(carrier, num_records)
    if position is None:
        if result.batch_size == batch_size and any(_place(leaf) in places for leaf in result.values(True, True)):
            return result, info  # some entry is untouched, so the records are where they were
        raise RuntimeError(
            f"A transform dropped or overwrote the entry {CARRIER_KEY!r} that ties records to their handles, and "
            "rebuilt every other entry, so that it cannot be told where each record went. Let the transform change "
            f"the entries that it needs and return the rest, {CARRIER_KEY!r} included."
        )
    if position.shape == batch_size:
        in_place = torch.arange(num_records, device=position.device).reshape([-1, *[1] * (len(batch_size) - 1)])
        if bool((position == in_place).all()):
            return result, info
    return result, {key: _take(value, position, num_records) for key, value in info.items()}


def _length(data: Any) -> int | None:
    """Records along dim 0, where that can be said."""
    for leaf in [data] if hasattr(data, "shape") else tree_leaves(data):
        shape: Any = getattr(leaf, "shape", ())
        return int(shape[0]) if len(shape) else None
    return None


def _expand_right(value: torch.Tensor, data: TensorDictBase) -> torch.Tensor:
    missing = data.ndim - value.ndim
    return value if missing <= 0 else value.reshape([*value.shape, *[1] * missing]).expand(data.shape)


def _carrier(data: TensorDictBase) -> torch.Tensor:
    position = _expand_right(torch.arange(data.shape[0], device=data.device), data)
    return torch.stack(
        [position, data.shape[0] - 1 - position, torch.zeros_like(position), torch.ones_like(position)], -1
    )


def _drop(result: TensorDictBase) -> None:
    with result.unlock_():
        result.pop(CARRIER_KEY)


def _decode(carrier: torch.Tensor, num_records: int) -> torch.Tensor | None:
    """Positions ``[...]``, or ``None`` if the entry does not hold any."""
    if carrier.shape[-1:] != (4,) or carrier.is_complex():
        return None
    forward, backward, zero, one = carrier.to(torch.float64).unbind(-1)
    scale = one - zero
    position, mirrored = ((forward - zero) / scale).round(), ((backward - zero) / scale).round()
    # NaN fails these comparisons
    sound = (position >= 0) & (mirrored >= 0) & (position + mirrored == num_records - 1)
    return position.to(torch.int64) if bool(sound.all()) else None


def _place(leaf: Any) -> Any:
    """Where an entry lies in memory."""
    if not isinstance(leaf, torch.Tensor) or not leaf.numel():
        return id(leaf)
    return leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.shape, leaf.stride()


def _take(value: Any, position: torch.Tensor, num_records: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_take(part, position, num_records) for part in value)
    if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == num_records:
        return value[position.to(value.device)]
    return value
