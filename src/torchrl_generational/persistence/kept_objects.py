"""What the layouts of checkpoints cannot keep is refused when it is saved; objects that they keep are brought back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
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
from tensordict.tensorclass import _is_json_serializable
from tensordict.utils import _json_dumps
from torch.utils._pytree import tree_flatten_with_path
from torchrl.data.replay_buffers.checkpointers import H5StorageCheckpointer
from torchrl.data.replay_buffers.utils import _path2str

from torchrl_generational.persistence.directory_layout import NUMBER
from torchrl_generational.persistence.serialization import objects_in

__all__ = ["refuse_lost_in_files", "refuse_lost_in_state", "refuse_other_objects", "take_objects"]

_METADATA = ("shape", "device", "_type")  # what tensordict's metadata say of a tensordict, beside its entries
_FILES = ("meta.json", "storage_metadata.json", NUMBER)  # which lie where nested entries have their folders
_REMEDY = "Nothing was saved. Store it under another name"


def refuse_lost_in_files(storage: Any) -> None:
    """Refuses entries that would not come back from ``dumps``.

    Raises:
        ValueError: naming the entry.
    """
    data = storage._storage
    if not storage.initialized:
        return
    if not is_tensor_collection(data):
        _refuse_lost_leaves(data)
        return
    hooked = bool(getattr(storage.checkpointer, "_save_hooks", None))
    for collection, path in _collections(data):
        names = set(collection.keys())
        for name in names:
            folder = is_tensor_collection(collection.get(name)) and (
                name in _FILES or (name.endswith(".memmap") and name.removesuffix(".memmap") in names)
            )
            in_h5 = isinstance(storage.checkpointer, H5StorageCheckpointer) and bool({"/", "."} & {*name})
            if name in _METADATA or folder or in_h5:
                raise ValueError(
                    f"The entry {(*path, name)} would be lost in a checkpoint directory, where {name!r} is not the "
                    f"name of an entry. {_REMEDY}, or use state_dict()."
                )
        for key, entry in objects_in(collection):
            if isinstance(entry, NonTensorStack) and (hooked or not _comes_back(entry)):
                raise ValueError(
                    f"The entry {(*path, *key)} holds objects that would not come back from a checkpoint directory as "
                    "they are: there they are JSON, which knows texts, numbers, lists of different lengths, and dicts "
                    f"with texts as keys{', and compressed storages keep no objects' if hooked else ''}. Nothing was "
                    "saved. Use state_dict(), or store tensors."
                )


def refuse_lost_in_state(data: Any) -> None:
    """Refuses entries of records that would not come back from ``state_dict``, where a dot stands for nesting.

    Raises:
        ValueError: naming the entry.
    """
    if not is_tensor_collection(data):
        return
    for collection, path in _collections(data):
        for name in collection.keys():  # noqa: SIM118
            if "." in name:
                raise ValueError(
                    f"The entry {(*path, name)} would come back from a state dict as nested entries, because of the "
                    f"dot in its name. {_REMEDY}, or use dumps()."
                )


def refuse_other_objects(data: Any, saved: Iterable[tuple[str, ...]]) -> None:
    """Refuses a checkpoint with other entries that are no tensors than the records: some would keep those of before.

    Raises:
        ValueError: naming both.
    """
    if is_tensor_collection(data):
        own, held = {key for key, _ in objects_in(data)}, set(saved)
        if own != held:
            raise ValueError(
                f"The checkpoint holds the entries {sorted(held)} that are no tensors but this storage {sorted(own)}. "
                "Load it into a buffer like the one that it was saved from."
            )


def take_objects(data: Any, folder: Path) -> None:
    """Brings back the entries that are no tensors, of which TorchRL leaves those that were there before."""
    if is_tensor_collection(data) and (folder / "meta.json").is_file():
        _take_objects(data, TensorDict.load_memmap(folder))


def _take_objects(data: Any, saved: Any) -> None:
    if _is_stack(data) and _is_stack(saved):
        for item, saved_item in zip(data.tensordicts, saved.tensordicts, strict=True):
            _take_objects(item, saved_item)
        return
    for key, entry in objects_in(saved):
        with data.unlock_():
            data.set(key, entry)


def _collections(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """A tensordict and those nested in it, with their keys."""
    if _is_stack(data):  # whose records may have other entries each
        for item in data.tensordicts:
            yield from _collections(item, path)
        return
    if not is_tensorclass(data):
        yield data, path
    for key, entry in data.items():
        if is_tensor_collection(entry) and not isinstance(entry, NonTensorStack | NonTensorData):
            yield from _collections(entry, (*path, key))


def _is_stack(data: Any) -> bool:
    return isinstance(data, LazyStackedTensorDict) and not isinstance(data, NonTensorStack)


def _comes_back(entry: NonTensorStack) -> bool:
    """Whether tensordict makes the same of what it writes for these objects."""
    objects = entry.tolist()
    if not _is_json_serializable(objects):
        return True  # pickled
    try:
        again = NonTensorStack._from_list(json.loads(_json_dumps(objects)), device=None)
    except (TypeError, ValueError, RecursionError):
        return False
    return again.batch_size == entry.batch_size and _is_same(again.tolist(), objects)


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_is_same, one.values(), other.values()))
    return bool(one == other)


def _refuse_lost_leaves(data: Any) -> None:
    """Refuses the leaves of a pytree that TorchRL does not find again by the names that it gives them."""
    for path, leaf in tree_flatten_with_path(data)[0]:
        if not path or not isinstance(leaf, torch.Tensor):
            continue
        try:
            name = _path2str(path)
            parts, found = name.replace("/", ".").split("."), data
            for part in parts:
                found = _below(found, part)
        except (KeyError, IndexError, TypeError):  # the first of TorchRL's, for named tuples and data classes
            name, parts, found = str(path), [], None
        if found is not leaf or "" in parts:
            raise ValueError(
                f"The entry {name!r} would not be found again in a checkpoint directory, by this name. Nothing was "
                "saved. Use lists, tuples, and dicts whose keys are texts without dots and slashes that are no numbers."
            )


def _below(found: Any, part: str) -> Any:
    if part.isdigit():
        try:
            return found[int(part)]
        except IndexError:
            pass
    return found[part]
