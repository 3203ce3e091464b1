"""Follows records through collation and transforms, so that handles end up beside the records they name.

TorchRL attaches ``index`` and the rest of a sampler's info *after* the transforms have run, in the order of the draw.
A transform that reorders, subsets or reshapes the batch then leaves them beside the wrong records. Here each record
carries its position in the draw through every step, and the info is taken in that order afterwards.

The position travels as one more, nested entry of the batch: its bits, beside a 0 and a 1 for reference. Whatever
function a step applies elementwise to all entries (a cast, a scale, a logarithm), the bits still equal one of the two
references; a blend of two records shows as a bit that equals neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs.transforms import Compose

from torchrl_generational.generations.indexing import leading_shape
from torchrl_generational.generations.slot_generations import GENERATION_KEY

__all__ = ["CARRIER_KEY", "carrier_of", "decode", "follow", "place_of", "steps_of", "take_bits"]

#: The entry that a batch carries while it is collated and transformed.
CARRIER_KEY = "_position_in_draw"


def follow(
    data: Any, info: dict[str, Any], step: Callable[[Any], Any], *, attach: tuple[str, ...] = ()
) -> tuple[Any, dict[str, Any]]:
    """Runs ``step`` on ``data`` and returns its result with ``info`` in the order of the records it kept.

    Data that takes no further entry (tensors, pytrees, tensorclasses) cannot be followed: its step has to keep
    records where they are, and one that changes their number is refused.

    Args:
        data: the batch drawn, ``n`` records along dim 0.
        info: the sampler's info; entries with ``n`` rows follow their records, others stay.
        step: a transform, or the collation.
        attach: entries of ``info`` that the step may read in a tensordict batch.

    Raises:
        RuntimeError: if the records were rearranged in a way that cannot be followed.
    """
    if not isinstance(data, TensorDictBase) or not data.ndim:
        return _same_length(data, step(data)), info
    batch_size = data.batch_size
    # One handle for each element of the dimensions that the stamps have: an earlier step may have given them several.
    lead = batch_size[: max(info[GENERATION_KEY].ndim, 1)]
    # What has no elements is the same in every order. Kept alive, so that no new entry can take an old one's address.
    before = [leaf for leaf in data.values(True, True) if not isinstance(leaf, torch.Tensor) or leaf.numel()]
    places = {place_of(leaf) for leaf in before}
    carrier = carrier_of(data, lead)
    # nested, so that code that concatenates all entries notices it
    data.set(CARRIER_KEY, TensorDict({"bits": carrier.clone()}, batch_size, device=data.device))
    for key in attach:
        value = info[key]
        value = torch.stack(value, -1) if isinstance(value, tuple) else _expand_right(value, data)
        data.set(key, value.clone())  # a step may write into it
    result = step(data)
    if not isinstance(result, TensorDictBase):
        return _same_length(data, result), info
    bits = take_bits(result)
    if bits is not None and result.batch_size == batch_size and torch.equal(bits, carrier):
        return result, info  # as they were
    position = None if bits is None else decode(bits, lead.numel())
    if position is None:
        if result.batch_size == batch_size and any(place_of(leaf) in places for leaf in result.values(True, True)):
            return result, info  # some entry is untouched, so the records are where they were
        raise RuntimeError(
            "A transform rebuilt every entry of the batch and dropped or overwrote the one that ties records to their "
            f"handles, {CARRIER_KEY!r}, so that it cannot be told where each record went. Return that one as well: set "
            f"the entries that you need in the tensordict you were given, or copy its {CARRIER_KEY!r} to the new one."
        )
    in_place = _places(lead, len(batch_size), position.device)
    if position.shape == batch_size and bool((position == in_place).all()):
        return result, info
    return result, {key: _take(value, position, lead) for key, value in info.items()}


def steps_of(transform: Any) -> tuple[Callable[[Any], Any], ...]:
    """The transforms that one is made of, to be followed one by one; itself, where it does more than they do."""
    if transform is None:
        return ()
    plain = isinstance(transform, Compose) and type(transform).forward is Compose.forward
    if plain and "forward" not in vars(transform) and not transform._forward_hooks and not transform._forward_pre_hooks:
        return tuple(transform.transforms)
    return (transform,)


def take_bits(result: TensorDictBase) -> torch.Tensor | None:
    """Removes the carrier from a batch, also where a step put it below another entry; its bits, one per record."""
    keys = [(CARRIER_KEY,)] if CARRIER_KEY in result else []
    keys = keys or [key for key in result.keys(True) if isinstance(key, tuple) and key[-1] == CARRIER_KEY]
    bits = None
    for key in keys:
        bits = result.get((*key, "bits"), None)
        with result.unlock_():
            result.del_(key if len(key) > 1 else key[0])
    return bits if bits is not None and bits.shape[: result.ndim] == result.batch_size else None


def _same_length(data: Any, result: Any) -> Any:
    """``result``, if a step that cannot be followed may have kept the records of ``data`` in place."""
    before, after = _length(data), _length(result)
    if before is not None and after != before:
        raise RuntimeError(
            f"A transform turned {before} records into {'something else' if after is None else after}, and in a "
            f"{type(result).__name__} records cannot carry their handles. Store and return tensordicts, or keep all "
            "records in place."
        )
    return result


def _length(data: Any) -> int | None:
    """Records along dim 0, where that can be said."""
    shape = leading_shape(data)
    return shape[0] if shape else None


def _expand_right(value: torch.Tensor, data: TensorDictBase) -> torch.Tensor:
    missing = data.ndim - value.ndim
    return value if missing <= 0 else value.reshape([*value.shape, *[1] * missing]).expand(data.shape)


def _num_bits(num_records: int) -> int:
    return max(num_records - 1, 1).bit_length()


def _places(lead: torch.Size, ndim: int, device: torch.device | None) -> torch.Tensor:
    """The position of each record in the draw, C order, with dimensions of size 1 behind it up to ``ndim``."""
    return torch.arange(lead.numel(), device=device).reshape([*lead, *[1] * (ndim - len(lead))])


def carrier_of(data: TensorDictBase, lead: torch.Size) -> torch.Tensor:
    """The position of each record, expanded without memory of its own: float ``[*data.shape, bits]``."""
    places = _places(lead, data.ndim, data.device)[..., None]
    weights = 2 ** torch.arange(_num_bits(lead.numel()), device=data.device)
    reference = torch.tensor([0.0, 1.0], device=data.device).expand(*places.shape[:-1], 2)
    bits = torch.cat([reference, (places // weights % 2).float()], -1)  # float: in-place scaling works
    return bits.expand(*data.shape, -1)


def decode(bits: torch.Tensor, num_records: int) -> torch.Tensor | None:
    """Positions ``[...]``, or ``None`` if the entry does not hold any."""
    if bits.shape[-1] != 2 + _num_bits(num_records):
        return None
    zero, one, bits = bits[..., :1], bits[..., 1:2], bits[..., 2:]
    is_one = bits == one
    # NaN, and references that have become equal, fail this
    sound = (is_one != (bits == zero)).all()
    position = (is_one * 2 ** torch.arange(bits.shape[-1], device=bits.device)).sum(-1)
    return position if bool(sound & (position < num_records).all()) else None


def place_of(leaf: Any) -> Any:
    """Where an entry lies in memory."""
    if not isinstance(leaf, torch.Tensor) or not leaf.numel():
        return id(leaf)
    return leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.shape, leaf.stride()


def _take(value: Any, position: torch.Tensor, lead: torch.Size) -> Any:
    if isinstance(value, tuple):
        return tuple(_take(part, position, lead) for part in value)
    if isinstance(value, torch.Tensor) and len(lead) and value.shape[: len(lead)] == lead:
        return value.flatten(0, len(lead) - 1)[position.to(value.device)]
    return value
