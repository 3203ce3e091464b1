"""The parts of a checkpoint, checked before anything is made of them.

What is mapped into memory must be as long as its metadata say: reading a shorter file through a mapping kills the
process, and TorchRL's way of opening one lengthens it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.base import _ACCEPTED_CLASSES
from tensordict.utils import _encode_key_for_filesystem
from torchrl._utils import _STRDTYPE2DTYPE

from torchrl_generational.persistence.reading import ANOTHER, field, is_count, is_number, read_json, reading

__all__ = ["check_parts", "check_tensordict"]


def check_parts(path: Path, *, members: int | None = None) -> None:
    """Refuses a checkpoint with a part that nothing can be made of. Maps no file whose length was not checked.

    Args:
        path: the directory.
        members: how many buffers it holds, if it is that of an ensemble.

    Raises:
        FileNotFoundError: if a file is missing that others speak of.
        ValueError: if one is damaged.
    """
    storage, sampler, writer = path / "storage", path / "sampler", path / "writer"
    if members is None:
        _check_buffer(storage, sampler, writer)
    else:
        empty = _empty_members(storage, members)
        for number in map(str, range(members)):
            _check_buffer(None if int(number) in empty else storage / number, sampler / number, writer / number)
    for folder in (storage, sampler):
        for file in folder.glob("*.pt"):
            _check_pickled(file)
    if (path / "transform.t").exists():
        _check_pickled(path / "transform.t")
    if (path / "rng_state").exists():
        _check_generator(path / "rng_state")
    file = path / "buffer_metadata.json"
    metadata = read_json(file)
    if "batch_size" not in metadata:
        raise ValueError(f"{file} is damaged: its 'batch_size' is missing. {ANOTHER}")
    for name in ("batch_size", "consume_after_n_samples"):
        field(metadata, file, name, "null or a number above 0", lambda value: value is None or _is_positive(value))


def check_tensordict(folder: Path) -> None:
    """Refuses a folder of memory-mapped tensors whose files are not as long as its metadata say.

    Raises:
        FileNotFoundError, ValueError: as :func:`check_parts`.
    """
    waiting = [folder]
    known = [str(cls) for cls in _ACCEPTED_CLASSES]
    while waiting:
        folder = waiting.pop()
        file = folder / "meta.json"
        metadata = read_json(file)
        kind = field(metadata, file, "_type", "the name of a tensordict class", lambda value: value in known)
        nested = {entry.name: entry for entry in folder.iterdir() if entry.is_dir()}
        waiting += nested.values()
        if kind != str(TensorDict):
            continue  # keeps its tensors in folders of their own
        entries = {key: entry for key, entry in metadata.items() if isinstance(entry, dict)}
        files = {found.name: found for found in folder.glob("*.memmap")}
        for key, entry in entries.items():
            if entry.get("type") is None:
                _check_tensor(files, key, entry, file)
            elif _file_of(key, "", nested) not in nested:
                raise FileNotFoundError(f"{folder} lacks the folder of the entry {key!r}. {ANOTHER}")


def _check_buffer(storage: Path | None, sampler: Path, writer: Path) -> None:
    if storage is not None:
        _check_storage(storage)
    if (sampler / "sampler_metadata.json").exists():
        _check_trees(sampler)
    elif (sampler / "meta.json").exists():
        check_tensordict(sampler)
        with reading(sampler):
            TensorDict.load_memmap(sampler).to_dict()
    _check_writer(writer)


def _check_storage(folder: Path) -> None:
    file = folder / "storage_metadata.json"
    if not file.exists():
        return  # of a checkpointer with files of its own, or not of this buffer: it says so itself
    metadata = read_json(file)
    field(metadata, file, "len", "a number of records", is_count)
    pytree = field(metadata, file, "is_pytree", "true or false", lambda value: type(value) is bool)
    saved = field(metadata, file, "metadata", "an object", lambda value: type(value) is dict)
    if pytree:
        for name, entry in saved.items():
            parts = name.replace(".", "/").split("/")  # TorchRL's way
            if {"", ".."} & set(parts) or os.path.isabs(name):
                raise ValueError(f"{file} is damaged: {name!r} is not the name of a file in {folder}. {ANOTHER}")
            _check_file(folder.joinpath(*parts[:-1], f"{parts[-1]}.memmap"), *_shape_and_dtype(entry, name, file))
    elif not metadata.get("never_written"):
        check_tensordict(folder)


def _check_trees(folder: Path) -> None:
    file = folder / "sampler_metadata.json"
    metadata = read_json(file)
    for name in ("_alpha", "_beta", "_eps"):
        field(metadata, file, name, "a number", is_number)
    version = metadata.get("_schema_version", 0)
    field({"_schema_version": version}, file, "_schema_version", "a number", is_count)
    capacity = field(metadata, file, "_max_capacity", "a number of slots", _is_whole)
    field(
        metadata,
        file,
        "_max_priority",
        "the largest priority and its slot",
        lambda value: (
            type(value) is list
            and len(value) == 2
            and (value[0] is None or is_number(value[0]))
            and (value[1] is None or _is_whole(value[1]))
        ),
    )
    for name in ("sumtree.memmap", "mintree.memmap"):
        _check_file(folder / name, (int(capacity),), torch.float64)


def _check_writer(folder: Path) -> None:
    file = folder / "metadata.json"
    metadata = read_json(file)
    field(metadata, file, "cursor", "a number of slots", is_count)
    for name, value in metadata.items():
        if name == "write_count" or name.startswith("_generation_"):
            field(metadata, file, name, "a number", is_count)
        elif name == "rank_key":
            field(metadata, file, name, "the key of an entry", lambda value: _is_key(value))
    if metadata.get("generation_shape") is not None:
        entry = {"shape": metadata["generation_shape"], "dtype": metadata.get("generation_dtype")}
        shape, dtype = _shape_and_dtype(entry, "generation", file)
        if len(shape) != 1 or dtype != torch.int64:
            raise ValueError(f"{file} is damaged: generations of shape {list(shape)} and {dtype}. {ANOTHER}")
        _check_file(folder / "generation.memmap", shape, dtype)
    if "shape" in metadata:
        shape, dtype = _shape_and_dtype(metadata, "current_top_values", file)
        if len(shape) != 2 and _numel(shape):
            raise ValueError(f"{file} is damaged: its 'shape' is {list(shape)} and should be of pairs. {ANOTHER}")
        _check_file(folder / "current_top_values.memmap", shape, dtype)


def _check_generator(folder: Path) -> None:
    check_tensordict(folder)
    with reading(folder):
        saved = TensorDict.load_memmap(folder)
        torch.Generator(device=saved.device).set_state(saved["rng_state"].clone())


def _check_pickled(file: Path) -> None:
    with reading(file):
        torch.load(file)  # as TorchRL: tensors and numbers only


def _empty_members(storage: Path, members: int) -> set[int]:
    file = storage / "metadata.json"
    if not file.exists():
        return set()  # of an earlier TorchRL
    found: Iterable[int] = field(
        read_json(file),
        file,
        "empty_members",
        f"numbers below {members}",
        lambda value: type(value) is list and all(is_count(number) and number < members for number in value),
    )
    return set(found)


def _check_tensor(files: dict[str, Path], key: str, entry: dict[str, Any], metadata: Path) -> None:
    """Checks the file of one entry of a tensordict."""
    shape, dtype = _shape_and_dtype(entry, key, metadata)
    name = _file_of(key, ".memmap", files)
    if entry.get("is_nested"):  # the shape is that of a table with the shapes of its tensors
        table = files.get(f"{name.removesuffix('.memmap')}.shape.memmap", metadata.parent / name)
        _check_file(table, shape, torch.int64)
        shapes = np.fromfile(table, dtype=np.int64).reshape(shape)
        if (shapes < 0).any():
            raise ValueError(f"{table} is damaged: it holds a negative shape. {ANOTHER}")
        shape = (sum(_numel(map(int, one)) for one in shapes.reshape(-1, shape[-1] if shape else 1)),)
    if name in files or _numel(shape):
        _check_file(metadata.parent / name, shape, dtype)


def _file_of(key: str, ending: str, names: Iterable[str]) -> str:
    """The name of what an entry is saved in: tensordict encodes some characters, which it did not always."""
    encoded = f"{_encode_key_for_filesystem(key)}{ending}"
    return f"{key}{ending}" if encoded not in names and f"{key}{ending}" in names else encoded


def _check_file(file: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size = _numel(shape) * dtype.itemsize
    if file.is_symlink() or not file.is_file():
        if not file.exists() and not size:
            return  # nothing is written for a tensor without elements
        raise FileNotFoundError(f"{file} is missing, or is no file. {ANOTHER}")
    found = file.stat().st_size
    if found != size:
        raise ValueError(
            f"{file} is damaged: it has {found} bytes instead of the {size} of {tuple(shape)} {dtype}. {ANOTHER}"
        )


def _shape_and_dtype(entry: Any, key: str, file: Path) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a tensor that metadata speak of."""
    saved = {key: entry}
    field(saved, file, key, "shape and dtype of a tensor", lambda value: type(value) is dict)
    shape = entry.get("shape")
    if type(shape) is not list or not all(map(is_count, shape)) or _numel(shape) >= 2**63:
        raise ValueError(f"{file} is damaged: the shape of {key!r} is {shape!r:.80}. {ANOTHER}")
    dtype = entry.get("dtype")
    if type(dtype) is not str or dtype not in _STRDTYPE2DTYPE:
        raise ValueError(f"{file} is damaged: the dtype of {key!r} is {dtype!r:.80}. {ANOTHER}")
    return tuple(shape), _STRDTYPE2DTYPE[dtype]


def _numel(shape: Iterable[int]) -> int:
    """How many elements a tensor of that shape has, however large."""
    return math.prod(shape)  # type: ignore[arg-type, unused-ignore]  # which is stubbed for literals


def _is_whole(value: Any) -> bool:
    """Whether a value is a count, also as a float, as TorchRL writes it."""
    return is_count(value) or (type(value) is float and 0 <= value < 2**53 and value.is_integer())


def _is_positive(value: Any) -> bool:
    return is_count(value) and bool(value > 0)


def _is_key(value: Any) -> bool:
    return type(value) is str or (type(value) is list and all(type(part) is str for part in value))
