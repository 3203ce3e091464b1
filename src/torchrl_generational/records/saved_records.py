"""Whether saved records fit a storage: their entries, shapes, dtypes and number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack
from tensordict import is_tensor_collection as is_collection
from torch.utils._pytree import tree_flatten_with_path
from torchrl.data.replay_buffers.utils import SINGLE_TENSOR_BUFFER_NAME

from torchrl_generational.persistence.restores import fitting

__all__ = ["check_pytree", "check_records", "file_of", "leaves_of", "refuse_length", "refuse_unlike"]


_LIKE = "Nothing was loaded. Load it into a buffer like the one that it was saved from."


def refuse_length(length: Any) -> None:
    """Refuses what is no number of records."""
    if not (type(length) is int and 0 <= length < 2**62):
        raise ValueError(f"The checkpoint says that it holds {length!r:.80} records: it is damaged. {_LIKE}")


def check_records(storage: Any, saved: Any, length: int) -> None:
    """Refuses saved records that do not fit a storage.

    Raises:
        ValueError: for other entries, shapes or dtypes, or another capacity.
    """
    own = leaves_of(storage._storage) if storage.initialized else {}
    room = max(storage.max_size, storage.generations.numel())
    found = leaves_of(saved, like=storage._storage if storage.initialized else None)
    # TorchRL's writers add "index" to what they write, and every sample has that of its own slot in its place
    if own and (own.keys() ^ found.keys()) - {"index"}:
        raise ValueError(
            f"The checkpoint holds the entries {sorted(found)} but this storage {sorted(own)}. Nothing was loaded. "
            "Load it into a buffer like the one that it was saved from."
        )
    for name, leaf in found.items():
        if name in own:
            refuse_unlike(name, leaf.shape, leaf.dtype, own[name])
        if not own:
            # a storage without data rounds its capacity up to whole rows
            cells, row = math.prod(leaf.shape[: storage.ndim]), math.prod(leaf.shape[1 : storage.ndim])
            if leaf.ndim < storage.ndim or not storage.max_size <= cells < storage.max_size + row:
                raise ValueError(
                    f"The checkpoint was saved from a storage of {cells} records but this one holds "
                    f"{storage.max_size}. Load it into a buffer of the same capacity."
                )
            room = max(room, cells)
    if not 0 <= length <= room:
        raise ValueError(
            f"The checkpoint holds {length} records but this storage has room for {room}. Load it into a buffer of "
            "the same capacity."
        )


def refuse_unlike(name: str, shape: Any, dtype: Any, own: torch.Tensor) -> None:
    """Refuses an entry of another shape or dtype, which a copy would broadcast or cast."""
    for what, theirs, ours in (("shape", tuple(shape), tuple(own.shape)), ("dtype", dtype, own.dtype)):
        if str(theirs) != str(ours):
            raise ValueError(
                f"The checkpoint holds {name!r} of {what} {theirs} but this storage has {what} {ours}. Nothing was "
                "loaded. Load it into a buffer like the one that it was saved from."
            )


def check_pytree(storage: Any, metadata: dict[str, Any]) -> None:
    """Refuses what TorchRL would cast or broadcast: the leaves of a pytree, or a tensor."""
    own = leaves_of(storage._storage)
    with fitting("What the checkpoint says of its records"):
        saved = {
            name if name != SINGLE_TENSOR_BUFFER_NAME else "data": (said["shape"], said["dtype"])
            for name, said in metadata["metadata"].items()
        }
    if saved.keys() != own.keys():
        raise ValueError(
            f"The checkpoint holds the entries {sorted(saved)} but this storage {sorted(own)}. Nothing was loaded. "
            "Load it into a buffer like the one that it was saved from."
        )
    for name, (shape, dtype) in saved.items():
        refuse_unlike(name, shape, dtype, own[name])


def _name(path: tuple[str, ...]) -> str:
    """The name of an entry, of which no other has the same: some have dots of their own, and one may be empty."""
    return ".".join(key.replace("\\", "\\\\").replace(".", "\\.") for key in path) if path else "data"


def leaves_of(data: Any, *, like: Any = None) -> dict[str, torch.Tensor]:
    """Tensors by name, of a storage's data or of what is loaded into one. Never copies.

    Args:
        data: a tensor, a tensor collection or a pytree.
        like: the data of the storage, whose lazy stacks say how those of ``data`` are taken apart.
    """
    found: dict[str, torch.Tensor] = {}

    def visit(data: Any, like: Any, path: tuple[str, ...]) -> None:
        if isinstance(data, torch.Tensor):
            found[_name(path)] = data
        elif isinstance(data, NonTensorData | NonTensorStack):
            return
        elif is_collection(data):
            parts = None
            if isinstance(like, LazyStackedTensorDict):
                parts = data.unbind(like.stack_dim)
            elif isinstance(data, LazyStackedTensorDict):
                parts = data.tensordicts
            if parts is not None:
                of = like.tensordicts if isinstance(like, LazyStackedTensorDict) else [None] * len(parts)
                for number, part in enumerate(parts):
                    visit(part, of[number] if number < len(of) else None, (*path, str(number)))
                return
            for key, entry in data.items():
                visit(entry, like.get(key, None) if is_collection(like) else None, (*path, key))
        else:
            for where, leaf in tree_flatten_with_path(data)[0]:
                if isinstance(leaf, torch.Tensor):
                    found[".".join(str(getattr(step, "idx", getattr(step, "key", step))) for step in where)] = leaf

    visit(data, like, ())
    return found


def file_of(leaf: Any) -> Path | None:
    """The file of a memory-mapped tensor, if it has one with a name."""
    try:
        return Path(leaf.filename).resolve()
    except (AttributeError, RuntimeError, TypeError):
        return None
