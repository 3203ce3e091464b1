"""Records about to be written: what they fit, which of them stay, and what of them is not stored."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, is_tensor_collection, is_tensorclass
from torch.utils._pytree import tree_map

from torchrl_generational.generations.indexing import keep_last
from torchrl_generational.generations.slot_generations import GENERATION_KEY
from torchrl_generational.persistence.serialization import objects_in
from torchrl_generational.records.record_io import entries_of

__all__ = [
    "Inverted",
    "last_of_each",
    "names_rows",
    "refuse_layout",
    "refuse_varying_objects",
    "select",
    "without_handles",
]


class Inverted(NamedTuple):
    """Records that have been through the inverse of their buffer's transform."""

    data: Any


def names_rows(cursor: Any) -> bool:
    """Whether ``storage[cursor]`` are whole rows, in the order in which the cursor names them."""
    if isinstance(cursor, torch.Tensor):
        return cursor.ndim <= 1 and cursor.dtype != torch.bool
    return type(cursor) in (int, range) or (isinstance(cursor, slice) and cursor.step in (None, 1))


def refuse_layout(buffer: Any, data: Any, ndim: int) -> None:
    """Refuses records whose samples could not hold their handles as entries, before anything is written.

    Args:
        buffer: a tensordict buffer.
        data: what it is given.
        ndim: how many dimensions of the data are the storage's.

    Raises:
        ValueError: for a tensorclass, and for records with dimensions of their own in a storage of several.
    """
    if is_tensorclass(data):
        raise ValueError(
            f"{type(buffer).__name__} takes tensordicts, got {type(data).__name__}: a tensorclass has no entries for "
            "handles. Use GenerationalReplayBuffer or GenerationalPrioritizedReplayBuffer, whose info has them."
        )
    if buffer._storage.ndim > 1 and is_tensor_collection(data) and data.ndim > ndim:
        raise ValueError(
            f"The records have batch size {tuple(data.batch_size[ndim:])} of their own, got data of batch size "
            f"{tuple(data.batch_size)} for a storage with ndim={buffer._storage.ndim}: coordinates do not fit into "
            f"their samples. Give the data batch size {tuple(data.batch_size[:ndim])}, or use "
            "GenerationalReplayBuffer, whose info has the handles."
        )


def refuse_varying_objects(stored: Any, data: Any) -> None:
    """Refuses entries that are no tensors and not the same in all records, of which memory-mapped files keep the first.

    Raises:
        TypeError: naming the entry, what the storage holds, and what came.
    """
    kept: dict[tuple[str, ...], Any] = {}
    unknown = set()  # a tuple comes back from a checkpoint as a stack of its items
    for key, value in _objects(stored):
        if not _same(kept.setdefault(key, value), value):
            unknown.add(key)
    for key in unknown:
        del kept[key]
    for item in data if isinstance(data, list) else [data]:
        for key, value in _objects(item):
            if not _same(kept.setdefault(key, value), value):
                name = key[0] if len(key) == 1 else key
                raise TypeError(
                    f"The entry {name!r} is no tensor and differs between records: {kept[key]!r} and {value!r}. "
                    "Memory-mapped records would all have the first. Nothing was written. Store it as a tensor, or use "
                    "GenerationalLazyTensorStorage."
                )


def _objects(data: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of the entries of records that are no tensors, with their keys."""
    if not is_tensor_collection(data):
        return
    if isinstance(data, LazyStackedTensorDict):  # whose records may have other entries and shapes each
        for item in data.tensordicts:
            yield from _objects(item)
        return
    for key, entry in objects_in(data):
        if isinstance(entry, NonTensorStack):
            yield from ((key, leaf.data) for item in entry.tensordicts for _, leaf in objects_in({"": item}))
        else:
            yield key, entry.data


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, or would be once they have been to a checkpoint and back."""
    try:
        return one is other or bool(_as_loaded(one) == _as_loaded(other)) or pickle.dumps(one) == pickle.dumps(other)
    except ValueError:  # arrays do not compare to a truth value
        return pickle.dumps(one) == pickle.dumps(other)
    except Exception:  # what cannot be pickled either
        return False


def _as_loaded(value: Any) -> Any:
    """What TorchRL's metadata, which are JSON, make of a value: lists of tuples, and None of NaN."""
    if isinstance(value, Mapping):
        return {key: _as_loaded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_as_loaded(entry) for entry in value]
    return None if isinstance(value, float) and value != value else value


def without_handles(data: Any) -> Any:
    """The data without the stamps that a sample among it had."""
    entries = entries_of(data)
    if entries is not None:
        return data.exclude(GENERATION_KEY) if GENERATION_KEY in entries else data
    if is_tensor_collection(data) and not is_tensorclass(data):
        if GENERATION_KEY in data:
            return data.exclude(GENERATION_KEY)
    elif isinstance(data, list):
        return [without_handles(item) for item in data]
    return data


def last_of_each(rows: torch.Tensor, num_rows: int) -> slice | torch.Tensor | None:
    """Which records to write so that each row is written once, by its last record; ``None`` for all of them.

    Torch does not say which of several writes to one row stays.
    """
    step = rows.diff()
    if bool(((step == 1) | (step == 1 - num_rows)).all()):  # round robin: rows repeat once the ring is full
        return slice(-num_rows, None) if rows.numel() > num_rows else None
    return keep_last(rows)


def select(data: Any, keep: slice | torch.Tensor) -> Any:
    """Some of the records."""
    if isinstance(data, list):
        return data[keep] if isinstance(keep, slice) else [data[position] for position in keep.tolist()]
    if is_tensor_collection(data) or isinstance(data, torch.Tensor):
        return data[keep]
    return tree_map(lambda leaf: leaf[keep], data)
