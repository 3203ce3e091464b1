"""A batch of an ensemble while it is drawn, collated and transformed: each record keeps its place in the draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torch.utils._pytree import tree_map
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from torchrl_generational.buffers.sampling import on_device_of
from torchrl_generational.generations.indexing import leading_shape
from torchrl_generational.records.row_tracking import CARRIER_KEY, carrier_of, decode, place_of, take_bits
from torchrl_generational.samplers.torn_rows import complete_records, rows_drawn_together

__all__ = ["Draw", "attached", "follow_parts", "on_first"]

_WEIGHT = "priority_weight"


class Draw:
    """One batch of an ensemble while it is drawn: records and info of all members, by their *place* in the draw."""

    def __init__(self, rbs: tuple[Any, ...]) -> None:
        self._rbs = rbs
        self._parts: list[tuple[int, int, Any]] = []
        self._infos: list[dict[Any, torch.Tensor]] = []
        self._bounds_only = False

    def sampler(self, sampler: Any) -> Any:
        """The ensemble's sampler with members that answer with places here."""
        twin = copy(sampler)
        twin._samplers = [_MemberSampler(self, number, rb) for number, rb in enumerate(self._rbs)]
        self._bounds_only = sampler.sample_from_all
        return twin

    def places(self, answers: torch.Tensor) -> Iterator[torch.Tensor]:
        """The places of each part of the batch, by what the ensemble's sampler made of the members' answers."""
        return (torch.arange(*part.tolist(), device="cpu") if self._bounds_only else part for part in answers)

    def add(self, number: int, data: Any, index: Any, info: dict[str, Any]) -> torch.Tensor:
        """Takes what was drawn from a member, and names its places: by their bounds, where parts stay whole."""
        if isinstance(index, tuple):
            index = index[0] if len(index) == 1 else torch.stack(index, -1)
        count, start = index.shape[0], self._parts[-1][1] if self._parts else 0
        self._parts.append((start, start + count, data))
        entries = {key: value for key, value in info.items() if key != "index" and _per_row(value, count)}
        self._infos.append(entries | {"index": index, "buffer_ids": torch.full((count,), number, device="cpu")})
        bounds = torch.tensor([start, start + count], device="cpu")
        return bounds if self._bounds_only else torch.arange(start, start + count, device="cpu")

    def records(self, place: torch.Tensor) -> Any:
        """The records at consecutive places."""
        self._tell_apart()
        start, stop = (int(place[0]), int(place[-1]) + 1) if place.numel() else (0, 0)
        if start == stop:
            return _cut(self._parts[0][2], 0, 0)
        parts = [
            data if start <= low and high <= stop else _cut(data, max(start - low, 0), stop - low)
            for low, high, data in self._parts
            if low < stop and start < high
        ]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _tell_apart(self) -> None:
        """What only some of the members say about their records, as slice samplers of their ends, becomes an entry."""
        everywhere = set.intersection(*map(set, self._infos)) | {_WEIGHT}
        for (start, stop, data), info in zip(self._parts, self._infos, strict=True):
            for key in info.keys() - everywhere:
                value = info.pop(key)
                if isinstance(data, TensorDictBase) and start < stop:
                    with data.unlock_():
                        data.set(key, value)

    def keep(self, twin: Any, sampler: Any) -> None:
        """Has the ensemble's sampler remember what its twin has changed in itself while it drew."""
        vars(sampler).update({name: value for name, value in vars(twin).items() if name != "_samplers"})

    def info(self, place: torch.Tensor) -> TensorDict:
        """Handles and weights of the records at ``place``, as TorchRL's ensembles lay them out."""
        if any(_WEIGHT in info for info in self._infos):
            for info in self._infos:
                info.setdefault(_WEIGHT, torch.ones(info["buffer_ids"].shape, device="cpu"))
        keys = [key for key in self._infos[0] if all(key in info for info in self._infos)]
        rows = {key: torch.cat([info[key] for info in self._infos]) for key in keys}
        found = {key: value[place.to(value.device)] for key, value in rows.items()}
        handles = {key: found.pop(key) for key in ("buffer_ids", "index")}
        result = TensorDict({"index": TensorDict(handles, place.shape)}, place.shape)
        for key, value in found.items():
            result.set(key, value)
        return result


class _MemberSampler:
    """Draws from a member in one section: index, stamps and records."""

    def __init__(self, draw: Draw, number: int, rb: Any) -> None:
        self._draw, self._number, self._rb = draw, number, rb

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        rb = self._rb
        with rb._exclusive():
            storage, sampler = rb._storage, rb._drawing_sampler()
            rb._catch_up()
            if storage.slot_generations.interrupted:
                unit = rows_drawn_together(sampler, None, batch_size)
                once = isinstance(sampler, SamplerWithoutReplacement)
                index, info = complete_records(lambda: rb._draw(sampler, batch_size), unit=unit, once=once)
            else:
                index, info = rb._draw(sampler, batch_size)
            data = storage.get(on_device_of(index, storage))
        return self._draw.add(self._number, data, index, info), {}

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        with self._rb._exclusive():
            return bool(self._rb._drawing_sampler().can_sample(self._rb._storage, batch_size))

    def _sampleable_count(self, storage: Any, batch_size: int) -> Any:
        with self._rb._exclusive():
            return self._rb._drawing_sampler()._sampleable_count(self._rb._storage, batch_size)


def follow_parts(
    parts: list[Any], places: list[torch.Tensor], step: Callable[[list[Any]], Any]
) -> tuple[Any, torch.Tensor]:
    """Runs ``step`` on batches; returns its result and the place of each record in it. See :mod:`.carrier`.

    Args:
        parts: the batches, whose leading dimensions are those of ``places``.
        places: the place of each record.
        step: a transform or the collation.

    Raises:
        RuntimeError: if the records were rearranged in a way that cannot be followed.
    """
    flat = torch.cat([place.reshape(-1) for place in places])
    if not all(isinstance(part, TensorDictBase) for part in parts):
        result = step(parts)
        return result, _kept(result, places)
    batch_size = parts[0].batch_size
    inner = min(part.ndim - place.ndim for part, place in zip(parts, places, strict=True))
    # What has no elements is the same in every order. Kept alive, so that no new entry can take an old one's address.
    before = [leaf for leaf in parts[0].values(True, True) if not isinstance(leaf, torch.Tensor) or leaf.numel()]
    untouched = {place_of(leaf) for leaf in before}
    numbers = torch.split(carrier_of(TensorDict({}, [flat.numel()]), flat.shape), [place.numel() for place in places])
    for part, place, bits in zip(parts, places, numbers, strict=True):
        own = (
            bits.reshape(*place.shape, *(1,) * (part.ndim - place.ndim), -1)
            .expand(*part.batch_size, -1)
            .to(part.device)
        )
        part.unlock_().set(CARRIER_KEY, TensorDict({"bits": own.clone()}, part.batch_size, device=part.device))
    with _set_dispatch_td_nn_modules(True):
        result = step(parts)
    if isinstance(result, torch.Tensor):
        return result, _kept(result, places)
    if not isinstance(result, TensorDictBase):
        raise RuntimeError(
            f"A collation or a transform of this ensemble turned tensordicts into a {type(result).__name__}, in which "
            "records cannot carry their handles. Return one tensordict."
        )
    carried = take_bits(result)
    position = None if carried is None else decode(carried, flat.numel())
    if position is None:
        leaves = (place_of(leaf) for leaf in result.values(True, True))
        if len(parts) == 1 and result.batch_size == batch_size and any(leaf in untouched for leaf in leaves):
            return result, places[0]
        raise RuntimeError(
            "A collation or a transform of this ensemble dropped or overwrote the entry that ties records to their "
            f"handles, {CARRIER_KEY!r}, and rebuilt the others, so that it cannot be told where each record went. "
            "Return that one as well."
        )
    if 0 < inner < position.ndim:
        first = position[(..., *(slice(1),) * inner)]
        if bool((position == first).all()):  # trajectories stored as records, which are whole
            position = first[(..., *(0,) * inner)]
    return result, flat[position.to(flat.device)]


def _kept(result: Any, places: list[torch.Tensor]) -> torch.Tensor:
    """The places of records that carry none, if a step can have kept them in order, part after part."""
    flat = torch.cat([place.reshape(-1) for place in places])
    alike = len({place.shape for place in places}) == 1
    together = flat if not alike else places[0] if len(places) == 1 else torch.stack(places)
    shape = leading_shape(result)
    if shape[: together.ndim] == together.shape:
        return together
    if shape and shape[0] == flat.numel():
        return flat
    raise RuntimeError(
        f"A collation or a transform of this ensemble turned {flat.numel()} records into a {type(result).__name__} of "
        f"shape {shape}, in which they cannot carry their handles. Store and return tensordicts, or keep all records "
        "in their order."
    )


def attached(data: Any, info: TensorDict) -> Any:
    """``data`` with its handles, repeated over the dimensions of a stored trajectory."""
    if isinstance(data, TensorDictBase):
        inner = (1,) * (data.ndim - info.ndim)
        entries = info if not inner else _widened(info, inner, data.batch_size)
        with data.unlock_():
            data.update(entries)
    return data


def _widened(info: TensorDict, inner: tuple[int, ...], batch_size: torch.Size) -> TensorDict:
    def widen(leaf: torch.Tensor) -> torch.Tensor:
        rest = leaf.shape[info.ndim :]
        return leaf.reshape(*info.shape, *inner, *rest).expand(*batch_size, *rest)

    return info.apply(widen, batch_size=batch_size)


def _per_row(value: Any, count: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == count


def _cut(data: Any, start: int, stop: int) -> Any:
    if isinstance(data, list | torch.Tensor) or is_tensor_collection(data):
        return data[start:stop]
    return tree_map(lambda leaf: leaf[start:stop], data, is_leaf=is_tensor_collection)


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return [record for part in parts for record in part]
    if isinstance(parts[0], torch.Tensor) or is_tensor_collection(parts[0]):
        return torch.cat(parts)
    return tree_map(lambda *leaves: torch.cat(leaves), *parts, is_leaf=is_tensor_collection)


def on_first(step: Callable[[Any], Any], parts: list[Any]) -> Any:
    """A step of one batch, as one of several."""
    return step(parts[0])
