"""Records in and out of a storage of tensordicts, without the machinery that other layouts need.

TorchRL indexes every entry with a tensor of slots. For entries that are plain tensors, copying a run of slots and
``index_select`` do the same in a fraction of the time, and do not open a team of threads for it, which is what makes
small batches slow where other processes keep the cores busy.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDict

__all__ = ["attach", "copy", "entries_of", "matched", "select", "shallow"]

_PLAIN = (torch.Tensor, MemoryMappedTensor)
_COPIED_BY_INDEX = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
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


def select(stored: Any, index: torch.Tensor, leave_out: Container[str] = ()) -> TensorDict | None:
    """``stored[index]``; ``None`` if something among it is not a plain tensor of the CPU.

    Args:
        stored: the records, on dim 0.
        index: int64 ``[B]`` within dim 0, on the CPU.
        leave_out: entries of the top level that are not wanted.
    """
    entries = entries_of(stored)
    if entries is None or stored._td_dim_names is not None:
        return None
    source: dict[str, Any] = {}
    for key, entry in entries.items():
        if key in leave_out:
            continue
        if type(entry) in _PLAIN:
            if not entry.is_cpu or entry.is_nested:
                return None
            source[key] = entry.index_select(0, index)
        else:
            part = select(entry, index)
            if part is None:
                return None
            source[key] = part
    size = torch.Size((index.shape[0], *stored.batch_size[1:]))
    selected: TensorDict = TensorDict._new_unsafe(source=source, batch_size=size, device=stored.device)
    return selected


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
    if isinstance(rows, torch.Tensor) and any(old.dtype not in _COPIED_BY_INDEX for old, _ in pairs):
        return None
    return pairs


def copy(pairs: list[tuple[torch.Tensor, torch.Tensor]], rows: int | slice | torch.Tensor) -> None:
    """Writes what :func:`matched` found to ``rows``, none of which is named twice."""
    # not by indexing, which memory-mapped tensors do in Python
    if isinstance(rows, torch.Tensor):
        for old, new in pairs:
            old.index_copy_(0, rows, new)
    elif isinstance(rows, slice):
        for old, new in pairs:
            old.narrow(0, rows.start, new.shape[0]).copy_(new)
    else:
        for old, new in pairs:
            old.select(0, rows).copy_(new)


def _match(stored: Any, data: Any, lead: tuple[int, ...], pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    held, given = entries_of(stored), entries_of(data)
    if held is None or given is None:
        return False
    for key, new in given.items():
        old: Any = held.get(key)
        if type(new) in _PLAIN:
            if (
                type(old) not in _PLAIN
                or new.shape != (*lead, *old.shape[1:])
                or (new.dtype != old.dtype and lead)  # which torch refuses, save for a single record
                or not (old.is_cpu and new.is_cpu)
                or old.requires_grad
                or new.requires_grad
                or old.is_nested
                or new.is_nested
            ):
                return False
            pairs.append((old, new))
        elif not _match(old, new, lead, pairs):
            return False
    return True
