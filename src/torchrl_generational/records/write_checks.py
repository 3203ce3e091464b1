"""What has to hold before records are written. Whatever can be refused is refused here, before anything changes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, is_non_tensor, is_tensor_collection, is_tensorclass, unravel_key
from torch.utils._pytree import tree_leaves, tree_map
from torchrl.data.replay_buffers.samplers import PrioritizedSampler
from torchrl.data.replay_buffers.storages.tensor import _flip_list

from torchrl_generational.generations.slot_generations import GENERATION_KEY
from torchrl_generational.records.cursors import advanced, region
from torchrl_generational.tensors.default_devices import as_tensor
from torchrl_generational.tensors.same_width import is_storable

__all__ = ["check_fields", "check_first", "check_write"]

_Path = tuple[str, ...]
_Shape = tuple[int, ...]

#: Entries that a buffer writes or replaces whenever it draws. What a record without them finds in its slot is right
#: (``index`` is the slot's number) or never seen.
_REPLACED_WHEN_DRAWN = frozenset({("index",), (GENERATION_KEY,), ("priority_weight",), ("_weight",)})


@dataclass(slots=True)
class _Write:
    """One write: what it names, and what was found on the way through its entries."""

    cursor: Any
    exact: bool  # whether dtypes must be those of the storage
    partial: bool = False  # whether it changes fields of records, not records
    lead: _Shape = ()  # shape of what the cursor names, of the dimensions of a storage of tensordicts
    ndim: int = 0  # how many those are
    managed: dict[_Path, float | None] = field(default_factory=dict)
    missing: list[_Path] = field(default_factory=list)
    extra: list[_Path] = field(default_factory=list)
    stacked: dict[_Path, torch.Tensor] = field(default_factory=dict)  # what the first item of a lazy stack has

    def expected(self, shape: _Shape, dropped: tuple[int, ...] = ()) -> _Shape:
        """Shape of what an entry of this shape receives, without the dimensions that lazy stacks run along."""
        sizes = [*self.lead, *shape[self.ndim :]]
        for dim in dropped:
            del sizes[dim]
        return tuple(sizes)


def check_write(storage: Any, stored: Any, cursor: Any, data: Any, *, exact: bool = False) -> Any:
    """Refuses records that ``stored[cursor] = data`` would not write whole, and returns what it is to write.

    Each entry has to be there, and to fit as torch's item assignment has it: shapes up to broadcasting, dtypes where
    torch does not convert, which it does where the cursor has no tensor in it.

    What is returned has the entries of the storage. One that a record lacks and a buffer manages is left to the
    buffer; a missing priority becomes the default that the record is born with, so that no sample shows its
    predecessor's. Entries that locked storages (memory-mapped and shared ones) cannot take are left out, and the first
    of them is told in a warning.

    Args:
        storage: of a buffer.
        stored: its records, or a view of them.
        cursor: what :func:`~torchrl_generational.records.cursors.plain_cursor` returned.
        data: the new records.
        exact: whether dtypes must be those of the storage, though torch would convert.

    Raises:
        ValueError: if a record lacks an entry, or has none.
        RuntimeError: if an entry has another shape or dtype than those stored.
        TypeError: if an entry is of another kind, or of a dtype that cannot be stored.
    """
    if isinstance(data, list) and not isinstance(stored, list):
        data = _flip_list(data)
    write = _Write(cursor, exact or advanced(cursor), managed=_managed(storage))
    if isinstance(data, int | float | complex) and is_tensor_collection(
        stored
    ):  # goes to all entries, whatever their dtypes
        data = stored[cursor].apply(lambda leaf: torch.full_like(leaf, data))
    if not is_tensor_collection(data):
        tree_map(lambda new, old: _check_entry(write, (), old, new), data, stored)
        return data
    if not is_tensor_collection(stored):
        raise TypeError(
            f"The storage holds records of type {type(stored).__name__}, got {type(data).__name__}. Nothing was "
            "written. Give every record the structure of the first one."
        )
    write.ndim, write.lead = len(stored.batch_size), region(cursor, stored.batch_size)
    if not is_tensorclass(data):
        data = _with_priorities(write, stored, data)
    _check_records(write, (), stored, data)
    if write.missing:
        raise ValueError(
            f"The records lack {_names(write.missing)}, which the storage has: the new ones would keep what their "
            "predecessors left there. Nothing was written. Give every record the entries of the first one, or change "
            "fields of records with update_if_present or set_at_."
        )
    for path in write.extra if stored is storage._storage and not stored.is_locked else ():
        entry = data.get(path if len(path) > 1 else path[0], None)
        if _is_only_for_first_records(entry):
            raise TypeError(
                f"The entry {_name(path)} is new, and a {type(entry).__name__}, of which the records that are there "
                "cannot be given one. Nothing was written. Give it to the first record, or store a tensor."
            )
    if write.extra and (stored.is_locked or stored is not storage._storage or isinstance(data, LazyStackedTensorDict)):
        data = _without(storage, stored, data, write)
    return data


def check_first(cursor: Any, data: Any, rows: int) -> Any:
    """Records as a storage that is made for ``data`` would hold them: the first one, ``rows`` times, in no memory.

    Raises:
        ValueError: if there is nothing to store.
        TypeError: if a dtype cannot be stored.
    """
    if isinstance(data, list):
        data = _flip_list(data)
    first = data
    if not isinstance(cursor, int):
        first = data[0] if is_tensor_collection(data) else tree_map(lambda leaf: leaf[0], data)
    leaves = list(_leaves(first))
    if not any(path not in _REPLACED_WHEN_DRAWN for path, _ in leaves):
        raise ValueError(
            "The records have no entries, so there is nothing to store. Nothing was written. Give them at least one."
        )
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not is_storable(leaf.dtype):
            raise TypeError(
                f"The entry {_name(path)} has dtype {leaf.dtype}, which torch cannot index. Nothing was written. Store "
                "it as an integer of the same width (.view)."
            )
    if is_tensor_collection(first):
        return first.expand(rows, *first.batch_size)
    return tree_map(lambda leaf: leaf.expand(rows, *leaf.shape), first)


def _is_only_for_first_records(entry: Any) -> bool:
    """Whether tensordict cannot make an entry like this one for records that are there already."""
    if is_non_tensor(entry) or isinstance(entry, LazyStackedTensorDict) or getattr(entry, "is_nested", False):
        return True
    return is_tensor_collection(entry) and any(map(_is_only_for_first_records, entry.values()))


def check_fields(stored: Any, cursor: Any, fields: Any) -> None:
    """Refuses changes of fields of which one does not fit, before the first field changes.

    Args:
        stored: a view of the records.
        cursor: what of them is changed.
        fields: keys and values.

    Raises:
        KeyError: if a field does not exist.
        RuntimeError, TypeError: as :func:`check_write`.
    """
    write = _Write(cursor, advanced(cursor), partial=True)
    if isinstance(cursor, int):
        cursor = torch.tensor([cursor], device="cpu")
    if isinstance(cursor, torch.Tensor) and cursor.dtype != torch.bool and cursor.numel():
        low, high, size = int(cursor.min()), int(cursor.max()), stored.batch_size[0]
        if low < -size or high >= size:
            raise IndexError(f"index spans {low} to {high}, and there are {size} records. Nothing was changed.")
    write.ndim, write.lead = len(stored.batch_size), region(write.cursor, stored.batch_size)
    for key, value in fields:
        path = _path(key)
        old = stored.get(path, None)
        if old is None:
            raise KeyError(
                f"The records have no entry {_name(path)}, only {sorted(map(str, stored.keys(True, True)))}. Nothing "
                "was changed."
            )
        _check_entry(write, path, old, value)
    if write.extra:
        raise KeyError(f"The records lack {_names(write.extra)}. Nothing was changed.")


def _managed(storage: Any) -> dict[_Path, float | None]:
    """Entries that buffers on a storage manage; those of priorities with what a record without one is born with."""
    managed: dict[_Path, float | None] = dict.fromkeys(_REPLACED_WHEN_DRAWN)
    for buffer in storage._attached_entities:
        key, sampler = getattr(buffer, "priority_key", None), getattr(buffer, "_sampler", None)
        sampler = getattr(sampler, "learners", sampler)
        if key is not None and (isinstance(sampler, PrioritizedSampler) or getattr(buffer, "keeps_priorities", False)):
            default = getattr(sampler, "default_priority", 1.0)
            managed[_path(key)] = float(default)
    return managed


def _with_priorities(write: _Write, stored: Any, data: Any) -> Any:
    """The data with the default in place of a priority that it lacks and the storage has."""
    copied = False
    for path, default in write.managed.items():
        old = None if default is None else stored.get(path, None)
        if isinstance(old, torch.Tensor) and data.get(path, None) is None:
            assert default is not None
            if not copied:
                data, copied = data.copy(), True
            shape, batch = write.expected(old.shape), tuple(data.batch_size)
            keeps = len(write.lead) if batch and batch == write.lead[-len(batch) :] else len(batch)
            data.set(path, torch.full((*batch, *shape[keeps:]), default, dtype=old.dtype, device=old.device))
    return data


def _check_records(write: _Write, path: _Path, stored: Any, data: Any, dropped: tuple[int, ...] = ()) -> None:
    stored, data = (getattr(part, "_tensordict", part) if is_tensorclass(part) else part for part in (stored, data))
    if isinstance(stored, LazyStackedTensorDict):
        _check_shapes_of_their_own(write, path, stored, data, dropped)
        return
    wanted = write.expected(stored.batch_size, dropped)
    if isinstance(data, LazyStackedTensorDict):
        along = data.stack_dim
        if data.batch_size[: len(wanted)] != wanted:
            raise RuntimeError(_misfit(path, f"batch size {tuple(data.batch_size)}", f"takes {wanted} here"))
        for item in data.tensordicts:
            _check_records(write, path, stored, item, (*dropped, along))
        return
    batch = tuple(data.batch_size)
    broadcast = bool(batch) and batch == wanted[-len(batch) :]
    entries = dict(data.items())
    for key, old in stored.items():
        new = entries.pop(key, None)
        if new is None:
            write.missing += _lacking(write, (*path, key), old)
            continue
        shape = getattr(new, "shape", None)
        if not broadcast and batch != wanted and shape is not None and tuple(shape[: len(wanted)]) != wanted:
            came = f"shape {tuple(shape)} in data of batch size {batch}"
            raise RuntimeError(_misfit((*path, key), came, f"takes {wanted} here"))
        _check_entry(write, (*path, key), old, new, dropped)
    write.extra += [(*path, key) for key in entries if (*path, key) not in write.extra]


def _check_entry(write: _Write, path: _Path, stored: Any, new: Any, dropped: tuple[int, ...] = ()) -> None:
    if is_tensor_collection(stored) and not is_non_tensor(stored):
        if is_non_tensor(new):
            raise TypeError(_misfit(path, "a value that is no tensor", "holds a tensordict"))
        if is_tensor_collection(new):
            if not write.lead and not write.ndim:  # in a pytree
                write.ndim, write.lead = len(stored.batch_size), region(write.cursor, stored.batch_size)
            _check_records(write, path, stored, new, dropped)
        elif path:
            raise TypeError(_misfit(path, f"type {type(new).__name__}", "holds a tensordict"))
        else:  # goes to all entries
            new = as_tensor(new)  # as tensordict makes it
            for key, old in stored.items():
                _check_entry(write, (*path, key), old, new, dropped)
        return
    if is_non_tensor(stored) or is_non_tensor(new):
        if not (is_non_tensor(stored) and is_non_tensor(new)):
            came, holds = ("a tensor", "no tensor") if is_non_tensor(stored) else ("no tensor", "a tensor")
            raise TypeError(_misfit(path, f"{came} ({type(new).__name__})", f"holds {holds}"))
        return
    if not isinstance(stored, torch.Tensor):
        raise TypeError(_misfit(path, f"type {type(new).__name__}", f"holds {type(stored).__name__}"))
    if is_tensor_collection(new):
        raise TypeError(_misfit(path, "a tensordict", "holds a tensor"))
    if stored.is_nested or getattr(new, "is_nested", False):
        return  # whose shapes torch compares itself
    _check_tensor(write, path, stored, new, dropped)


def _check_tensor(write: _Write, path: _Path, stored: torch.Tensor, new: Any, dropped: tuple[int, ...]) -> None:
    expected = write.expected(stored.shape, dropped) if write.ndim else region(write.cursor, stored.shape)
    if not isinstance(new, torch.Tensor):
        torch.empty(expected, dtype=stored.dtype, device="meta")[...] = new  # torch says what it takes
        return
    if write.exact and new.dtype != stored.dtype:
        raise RuntimeError(
            _misfit(
                path, f"dtype {new.dtype}", f"holds {stored.dtype}", "Give every record the dtypes of the first one."
            )
        )
    if new.is_quantized != stored.is_quantized:
        raise RuntimeError(_misfit(path, f"dtype {new.dtype}", f"holds {stored.dtype}", "Dequantize it."))
    if new.is_complex() and not stored.is_complex():
        raise RuntimeError(_misfit(path, f"dtype {new.dtype}", f"holds {stored.dtype}", "Give it real numbers."))
    if new.is_meta and not stored.is_meta:
        raise RuntimeError(_misfit(path, "no data (device meta)", f"holds it on {stored.device}", "Give it data."))
    if new.layout != stored.layout and not (new.is_nested or stored.is_nested):
        raise RuntimeError(
            _misfit(path, f"layout {new.layout}", f"holds {stored.layout}", "Convert it, as to_dense() does.")
        )
    if advanced(write.cursor) and new.device != stored.device and new.ndim and not write.partial:
        raise RuntimeError(_misfit(path, f"device {new.device}", f"holds it on {stored.device}", "Move it there."))
    first = write.stacked.setdefault(path, new) if dropped else new
    if not _broadcasts(new.shape, expected) or first.shape != new.shape or (dropped and first.dtype != new.dtype):
        raise RuntimeError(_misfit(path, f"shape {tuple(new.shape)}", f"takes {expected} here"))


def _check_shapes_of_their_own(
    write: _Write, path: _Path, stored: LazyStackedTensorDict, data: Any, dropped: tuple[int, ...]
) -> None:
    """Checks records whose parts have several shapes, part by part; the parts lie along one of the storage's dims."""
    along = stored.stack_dim - write.ndim + len(write.lead) - len(dropped)
    if isinstance(write.cursor, tuple) or along < 0 or not stored.stack_dim or write.expected(stored.batch_size) == ():
        if set(stored.keys()) - set(data.keys()):
            write.missing += [(*path, key) for key in set(stored.keys()) - set(data.keys())]
        return
    parts = data.unbind(along) if data.ndim > along else ()
    if len(parts) != len(stored.tensordicts):
        expected = write.expected(stored.batch_size, dropped)
        raise RuntimeError(_misfit(path, f"batch size {tuple(data.batch_size)}", f"takes {expected} here"))
    for old, new in zip(stored.tensordicts, parts, strict=True):
        part = _Write(write.cursor, write.exact, write.partial, managed=write.managed)
        part.ndim, part.lead = len(old.batch_size), region(write.cursor, old.batch_size)
        _check_records(part, path, old, new)
        write.missing += part.missing
        write.extra += part.extra


def _lacking(write: _Write, path: _Path, stored: Any) -> Iterator[_Path]:
    """The entries of ``stored`` that a record may not lack."""
    if write.partial:
        return
    if is_tensor_collection(stored) and not is_non_tensor(stored):
        for key, entry in stored.items():
            yield from _lacking(write, (*path, key), entry)
    elif path not in write.managed and path not in write.missing:
        yield path


def _without(storage: Any, stored: Any, data: Any, write: _Write) -> Any:
    """The data without entries that the storage does not take."""
    unknown = [path for path in write.extra if path not in write.managed]
    takes = stored is storage._storage and not stored.is_locked and not isinstance(stored, LazyStackedTensorDict)
    if takes and any(data.get(path, None) is not None for path in unknown):
        return data.contiguous()  # tensordict has no new entries from a lazy stack
    if unknown and not storage.__dict__.get("_told_of_extra_entries"):
        storage._told_of_extra_entries = True
        warnings.warn(
            f"{type(storage).__name__} does not store {_names(unknown)}: its memory was laid out by the first records, "
            "which did not have them. This is said once. Give the first record every entry, or leave these out.",
            stacklevel=2,
        )
    return data.exclude(*write.extra)


def _leaves(data: Any) -> Iterator[tuple[_Path, Any]]:
    if not is_tensor_collection(data):
        yield from (((str(place),), leaf) for place, leaf in enumerate(tree_leaves(data)))
    elif isinstance(data, LazyStackedTensorDict) and not is_non_tensor(data):
        for item in data.tensordicts:
            yield from _leaves(item)
    else:
        yield from ((_path(key), leaf) for key, leaf in data.items(True, True))


def _broadcasts(shape: torch.Size, expected: _Shape) -> bool:
    """Whether torch's item assignment takes ``shape`` for ``expected``: it drops leading dimensions of size 1."""
    if tuple(shape) == expected:
        return True
    missing = len(expected) - len(shape)
    if any(size != 1 for size in shape[: max(-missing, 0)]):
        return False
    return all(size in (1, wanted) for size, wanted in zip(shape[::-1], expected[::-1], strict=False))


@cache
def _path(key: Any) -> _Path:
    key = unravel_key(key)
    return (key,) if isinstance(key, str) else tuple(key)


def _name(path: _Path) -> str:
    return repr(path[0] if len(path) == 1 else path)


def _names(paths: list[_Path]) -> str:
    return ("the entry " if len(paths) == 1 else "the entries ") + ", ".join(map(_name, paths))


def _misfit(
    path: _Path, came: str, expected: str, remedy: str = "Give every record the shapes of the first one."
) -> str:
    entry = f"The entry {_name(path)} has" if path else "The data has"
    return f"{entry} {came} but the storage {expected}. Nothing was written. {remedy}"
