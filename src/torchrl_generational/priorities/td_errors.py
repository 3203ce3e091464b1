"""Which TD errors of a sample are of which handle.

The batch size of a sample says nothing here: one that was rebuilt, or given another batch size, has the handles of
before, and only they say how many rows there are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from torchrl_generational.generations.duplicate_handles import once_each
from torchrl_generational.generations.indexing import repeats_from

__all__ = ["ErrorRows", "as_sample", "rows_of_errors"]


class ErrorRows(NamedTuple):
    """TD errors and the handles that they are of.

    Attributes:
        errors: ``[*shape, k]``: ``k`` for each row, to be reduced to one.
        handles: what was handed in, as ``[*shape]``, or ``[*shape, n]`` for the index.
        shape: of the rows.
        apart: whether one trajectory stored as a record may be in several rows, each with a part of its errors.
        once: the handles without the dimensions of such trajectories, all along which they are the same; ``None``
            where those are not the last ones of ``shape``.
    """

    errors: torch.Tensor
    handles: list[torch.Tensor]
    shape: torch.Size
    apart: bool
    once: list[torch.Tensor] | None


def rows_of_errors(
    errors: torch.Tensor,
    handles: list[torch.Tensor],
    names: list[str],
    *,
    inner: int = 0,
    trajectories: Collection[torch.Size] = (),
    ndims: Collection[int] = (1,),
) -> ErrorRows:
    """Tells which of ``errors`` are of which handle, by the shape of the handles.

    Args:
        errors: of the shape of the handles and with any dimensions more; or of the beginning of that shape, where the
            handles repeat along the others.
        handles: generations ``[...]``; then the index, ``[...]`` or ``[..., n]``; then what else is one per row.
        names: of the errors and of each of the handles, for the message.
        inner: dimensions of one record, where the storage keeps trajectories as records.
        trajectories: shapes that such a record may have.
        ndims: how many coordinates an index may have.

    Raises:
        ValueError: if the shapes do not say it.
    """
    generation, index, *others = handles
    shape = generation.shape
    indexes = [torch.Size((*shape, n)) for n in ndims] + ([shape] if 1 in ndims else [])
    if index.shape not in indexes or any(other.shape != shape for other in others):
        raise ValueError(_cannot_tell(errors, handles, names))
    lead, whole, once = len(shape), len(shape) - inner, None
    if inner and whole > 0 and shape[whole:].numel():
        firsts = [once_each(handle, whole, lead) for handle in handles]
        rows = [first for first in firsts if first is not None]
        once = rows if len(rows) == len(handles) else None
    entire = once is not None and shape[whole:] in trajectories
    if errors.shape[:lead] == shape:
        kept = whole if entire else lead
    elif once is not None and errors.shape[:whole] == shape[:whole]:
        kept = whole
    elif errors.shape == shape[: errors.ndim] and repeats_from(handles, errors.ndim, inner):
        kept = errors.ndim
    else:
        raise ValueError(_cannot_tell(errors, handles, names))
    if not errors.numel() and shape.numel():
        raise ValueError(
            f"The entry {names[0]!r} has shape {tuple(errors.shape)}: no TD error for any row. Nothing was updated."
        )
    if kept < lead:
        first = (slice(None),) * kept + (0,) * (lead - kept)
        handles = [handle[first] for handle in handles]
    errors = errors.flatten(kept) if errors.ndim > kept else errors.unsqueeze(-1)
    return ErrorRows(errors, handles, shape[:kept], inner > 0 and not entire, once if kept == lead else None)


def _cannot_tell(errors: torch.Tensor, handles: list[torch.Tensor], names: list[str]) -> str:
    shapes = [f"{name!r} {tuple(part.shape)}" for name, part in zip(names, (errors, *handles), strict=True)]
    return (
        f"It cannot be told which TD error is of which record from the shapes {', '.join(shapes)}. Nothing was "
        "updated. Reshape these entries together, as a sample carries them: one handle per row, and the TD errors of "
        "a handle behind its place, in further dimensions."
    )


def as_sample(data: Any, user: str) -> TensorDictBase:
    """``data`` as a tensor collection, also where it came as a dict.

    Raises:
        TypeError: if it is neither.
    """
    if is_tensor_collection(data):
        sample: TensorDictBase = data
        return sample
    if not isinstance(data, Mapping):
        raise TypeError(
            f"{user} needs a sample, as a tensordict or a dict, got {type(data).__name__}. Handles that are not in one "
            "go to update_priority_if_present(index=..., generation=..., priority=...)."
        )
    return TensorDict(dict(data))
