"""Records in and out of a storage of tensordicts, without the machinery that other layouts need.

TorchRL indexes every entry with a tensor of slots. For entries that are plain tensors, copying a run of slots and
``index_select`` do the same in a fraction of the time, and do not open a team of threads for it, which is what makes
small batches slow where other processes keep the cores busy.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDict, is_non_tensor, is_tensor_collection, is_tensorclass

from torchrl_generational.tensors.same_width import as_integers

__all__ = ["attach", "copy", "entries_of", "gathers", "matched", "select", "shallow"]

_PLAIN = (torch.Tensor, MemoryMappedTensor)
_COPIED_BY_INDEX = frozenset(
    (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
)


def entries_of(data: Any) -> dict[str, Any] | None:
    """The live entries of a plain tensordict, nested ones as tensordicts; ``None`` for anything else."""
    if type(data) is not TensorDict:
        return None
    entries: dict[str, Any] = data._tensordict
    return entries


def shallow(data: TensorDict) -> TensorDict:
    """A copy of a plain tensordict whose top level can be changed; what is below is the original's."""
    copied: TensorDict = TensorDict._new_unsafe(
        source=data._tensordict,
        batch_size=data.batch_size,
        device=data.device,
        names=data._td_dim_names,
        nested=False,
    )
    return copied


def select(stored: Any, index: torch.Tensor, ndim: int = 1, leave_out: Container[str] = ()) -> Any:
    """``stored[index]``, or ``stored[*index]`` where the records fill several dimensions; ``None`` if it takes more.

    Plain tensors of the CPU are gathered, whatever else is among them (objects, nested tensors, tensors of another
    device) is indexed as TorchRL does.

    Args:
        stored: the records: a tensordict, a tensorclass, a tensor, or a dict, list or tuple of tensors.
        index: int64 ``[B]`` on the CPU: places in dim 0, or in the first ``ndim`` dimensions taken as one, C order.
        ndim: how many dimensions the records fill.
        leave_out: entries of the top level that are not wanted.
    """
    entries = entries_of(stored)
    if entries is not None:
        if stored._td_dim_names is not None:
            return None
        source: dict[str, Any] = {}
        for key, entry in entries.items():
            if key not in leave_out:
                part = source[key] = select(entry, index, ndim)
                if part is None:
                    return None
        size = torch.Size((index.shape[0], *stored.batch_size[ndim:]))
        selected: TensorDict = TensorDict._new_unsafe(source=source, batch_size=size, device=stored.device)
        return selected
    if type(stored) in _PLAIN and stored.is_cpu and not stored.is_nested:
        if ndim == 1:
            return stored.index_select(0, index)
        if stored.is_contiguous():  # else it would be copied as a whole
            return stored.flatten(0, ndim - 1).index_select(0, index)
    if is_tensorclass(stored) and not is_non_tensor(stored):
        inner = select(stored._tensordict, index, ndim)
        return None if inner is None else stored._from_tensordict(inner, dict(stored._non_tensordict))
    if isinstance(stored, torch.Tensor) or is_tensor_collection(stored):
        return stored[index] if ndim == 1 else stored[torch.unravel_index(index, stored.shape[:ndim])]
    if type(stored) is dict:
        parts = [select(entry, index, ndim) for entry in stored.values()]
        return None if any(part is None for part in parts) else dict(zip(stored, parts, strict=True))
    if type(stored) in (list, tuple):
        parts = [select(entry, index, ndim) for entry in stored]
        return None if any(part is None for part in parts) else type(stored)(parts)
    return None


def gathers(stored: TensorDict) -> bool:
    """Whether :func:`select` has an answer for a plain tensordict: none of those in it has names of dimensions."""
    if stored._td_dim_names is not None:
        return False
    return all(gathers(entry) for entry in stored._tensordict.values() if type(entry) is TensorDict)


def attach(data: TensorDict, entries: dict[str, torch.Tensor]) -> TensorDict:
    """Puts ``entries``, of the batch size and device of ``data``, into it, and returns it."""
    for key, entry in entries.items():
        data._set_str(key, entry, inplace=False, validated=True, non_blocking=False)
    return data


def matched(stored: Any, data: Any, rows: int | slice | torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """What ``stored[rows] = data`` copies; ``None`` if that takes more than copying plain tensors that fit.

    Args:
        stored: the records, on dim 0.
        data: new records, one for each row.
        rows: an int, a slice of step 1, or int64 ``[B]``.

    Returns:
        Pairs of a stored entry and its new values, for :func:`copy`.
    """
    if isinstance(rows, int):
        lead: tuple[int, ...] = ()
    else:
        lead = (rows.numel() if isinstance(rows, torch.Tensor) else max(rows.stop - rows.start, 0),)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    if not _match(stored, data, lead, pairs):
        return None
    return pairs


def copy(pairs: list[tuple[torch.Tensor, torch.Tensor]], rows: int | slice | torch.Tensor) -> None:
    """Writes what :func:`matched` found to ``rows``, none of which is named twice."""
    # not by indexing, which memory-mapped tensors do in Python
    if isinstance(rows, torch.Tensor):
        for old, new in pairs:
            if old.dtype not in _COPIED_BY_INDEX:
                old, new = as_integers(old), as_integers(new)
            old.index_copy_(0, rows, new)
    elif isinstance(rows, slice):
        for old, new in pairs:
            old.narrow(0, rows.start, new.shape[0]).copy_(new)
    else:
        for old, new in pairs:
            old.select(0, rows).copy_(new)


def _match(stored: Any, data: Any, lead: tuple[int, ...], pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    if type(data) in _PLAIN:
        if not _copies(stored, data, lead):
            return False
        pairs.append((stored, data))
        return True
    held, given = entries_of(stored), entries_of(data)
    if given is not None:
        if held is None or len(held) != len(given):  # one lacks an entry of the other
            return False
        return all(_match(held.get(key), new, lead, pairs) for key, new in given.items())
    if type(data) is not type(stored):
        return False
    if type(data) is dict:
        return data.keys() == stored.keys() and all(_match(stored[key], data[key], lead, pairs) for key in data)
    if type(data) in (list, tuple):
        matches = (_match(old, new, lead, pairs) for old, new in zip(stored, data, strict=True))
        return len(data) == len(stored) and all(matches)
    if is_tensorclass(data) and not is_non_tensor(data):
        plain = not data._non_tensordict and not stored._non_tensordict
        return plain and _match(stored._tensordict, data._tensordict, lead, pairs)
    return False


def _copies(old: Any, new: torch.Tensor, lead: tuple[int, ...]) -> bool:
    """Whether the values of ``new`` go to rows of ``old`` as they are."""
    return (
        type(old) in _PLAIN
        and new.shape == (*lead, *old.shape[1:])
        # torch refuses other dtypes, save for a single record
        and (new.dtype == old.dtype or not (lead or new.is_complex() or new.is_quantized))
        and old.is_cpu
        and new.is_cpu
        and not old.requires_grad
        and not new.requires_grad
        and not old.is_nested
        and not new.is_nested
        and new.layout is old.layout
    )
