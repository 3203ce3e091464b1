"""Samples as dicts, lists, tensors and numbers, for state dicts that ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy, deepcopy
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
    is_tensorclass,
)

__all__ = ["RECORD_OBJECTS", "from_plain", "like", "objects_in", "to_plain", "unshared"]

#: Key in the state of a storage: its entries that are no tensors.
RECORD_OBJECTS = "_generational_objects"

_ENTRIES, _OBJECTS, _OBJECT = "__tensordict__", "__objects__", "__object__"


def to_plain(value: Any) -> Any:
    """``value`` with every tensordict in it, however nested, as a dict. Tensorclasses and other objects stay.

    Example:
        >>> plain = to_plain((TensorDict({"x": [1, 2]}, [2]), {"weight": 0.5}))
        >>> plain[0]["batch_size"]
        [2]
        >>> from_plain(plain)[0]["x"]
        tensor([1, 2])
    """
    if isinstance(value, NonTensorStack):
        return {_OBJECTS: [to_plain(item) for item in value.tensordicts]}
    if isinstance(value, NonTensorData):
        return {_OBJECT: value.data, "batch_size": list(value.batch_size)}
    if is_tensor_collection(value) and not is_tensorclass(value):
        entries = {key: to_plain(entry) for key, entry in value.items()}
        return {_ENTRIES: entries, "batch_size": list(value.batch_size), "locked": value.is_locked}
    if isinstance(value, dict):
        return {key: to_plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return like(value, map(to_plain, value))
    return value


def from_plain(value: Any) -> Any:
    """Undoes :func:`to_plain`."""
    if isinstance(value, dict) and _OBJECTS in value:
        return NonTensorStack(*map(from_plain, value[_OBJECTS]))
    if isinstance(value, dict) and _OBJECT in value:
        return NonTensorData(data=value[_OBJECT], batch_size=value["batch_size"])
    if isinstance(value, dict) and _ENTRIES in value:
        entries = {key: from_plain(entry) for key, entry in value[_ENTRIES].items()}
        data = TensorDict(entries, value["batch_size"])
        return data.lock_() if value["locked"] else data
    if isinstance(value, dict):
        return {key: from_plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return like(value, map(from_plain, value))
    return value


def objects_in(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The entries of a tensordict that are no tensors, with their keys."""
    for key, entry in data.items():
        if isinstance(entry, NonTensorStack | NonTensorData):
            yield (*path, key), entry
        elif is_tensor_collection(entry):
            yield from objects_in(entry, (*path, key))


def unshared(value: Any) -> Any:
    """A copy of a sample, or of a storage's state, that shares no memory with it, and no autograd graph."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, NonTensorStack | NonTensorData):
        return value.clone()  # which copies the objects
    if isinstance(value, LazyStackedTensorDict):
        return type(value)(*map(unshared, value.tensordicts), stack_dim=value.stack_dim)
    if is_tensor_collection(value):
        # leaf by leaf: tensordict's clone() copies by additions, which not all dtypes have
        twin = value.apply(lambda leaf: leaf.detach().clone(), filter_empty=False)
        for key, entry in list(objects_in(twin)):
            twin.set(key, entry.clone())
        return twin
    if isinstance(value, dict):
        twin = copy(value)  # with its attributes: tensordict keeps the batch size of a state in one
        twin.update((key, unshared(entry)) for key, entry in value.items())
        return twin
    if isinstance(value, tuple | list):
        return like(value, map(unshared, value))
    return deepcopy(value)


def like(value: Any, entries: Iterable[Any]) -> Any:
    """A tuple, named tuple or list like ``value``."""
    return value._make(entries) if hasattr(value, "_make") else type(value)(entries)
