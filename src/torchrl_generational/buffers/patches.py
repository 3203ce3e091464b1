"""Which records a patch of fields is for, and whether its values are one for each of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_non_tensor, is_tensor_collection

from torchrl_generational.generations.indexing import as_generation, as_int64, normalise_handles

__all__ = ["PatchedRows", "patched_rows"]


class PatchedRows(NamedTuple):
    """The records of a patch, as TorchRL's ``update_if_present`` takes them.

    Attributes:
        places: int64 ``[M]``, or ``[M, n]`` coordinates.
        stamps: int64 ``[M]``.
        shape: of the handles as they came.
        records: of the handles with one for each stored trajectory; ``shape`` where there are none.
        first: where a trajectory has its one handle; ``None`` where there are none.
    """

    places: torch.Tensor
    stamps: torch.Tensor
    shape: torch.Size
    records: torch.Size
    first: Any

    def version_of(self, version: Any) -> Any:
        """Versions in the shape of the handles, one per record."""
        if not isinstance(version, torch.Tensor) or version.shape != self.shape:
            return version
        version = version if self.first is None else version[self.first]
        return version.reshape(-1) if self.shape else version

    def in_shape(self, mask: torch.Tensor) -> torch.Tensor:
        """A mask ``[M]`` in the shape of the handles."""
        mask = mask.reshape(self.records)
        return mask.reshape(*mask.shape, *(1,) * (len(self.shape) - mask.ndim)).expand(self.shape)


def patched_rows(storage: Any, index: Any, generation: Any, patch: Any) -> PatchedRows:
    """Reads the handles of a patch, and refuses values that are not one per handle.

    Raises:
        TypeError, ValueError, IndexError: as ``update_if_present``.
    """
    device, space = storage.slot_generations.device, storage.generations.shape
    generation = as_generation(generation, device)
    shape = generation.shape
    if len(space) > 1 and len(shape) == 1 and getattr(index, "shape", None) == shape:
        # TorchRL's documented form here: dim-0 rows
        handles = normalise_handles(index, generation, space[:1], device)
        _check_patch(storage, patch, shape, 1)
        return PatchedRows(handles.rows, handles.generation, shape, shape, None)
    if not isinstance(index, tuple):
        index = as_int64("index", index, device)
    inner, first = int(getattr(storage, "record_ndim", 0)), None
    if isinstance(index, torch.Tensor) and index.shape == shape and _repeats_handles(storage, patch, len(shape)):
        # a stored trajectory repeats its handle over its own dimensions, and is patched as one record
        first = (..., *(0,) * inner)
        index, generation = _first_handles(index, generation, first, inner)
    handles = normalise_handles(index, generation, space, device, inner=inner)
    _check_patch(storage, patch, handles.shape, len(space))
    cells = handles.cells
    if len(space) > 1:
        cells = torch.stack(torch.unravel_index(cells, space), -1)
    return PatchedRows(cells, handles.generation, shape, generation.shape, first)


def _first_handles(
    index: torch.Tensor, generation: torch.Tensor, first: Any, inner: int
) -> tuple[torch.Tensor, torch.Tensor]:
    lead = (..., *(None,) * inner)
    if not bool(((index == index[first][lead]) & (generation == generation[first][lead])).all()):
        raise ValueError(
            f"The handles of shape {tuple(generation.shape)} do not repeat along the last {inner} dimension(s), those "
            "of the records, and the patch has one value per record. Pass one handle per record, or the sample's as it "
            "carries them. Nothing was updated."
        )
    return index[first], generation[first]


def _check_patch(storage: Any, patch: Any, shape: torch.Size, ndim: int) -> None:
    """Refuses values that are not one per handle, in the handles' order, which TorchRL would bring into it.

    Args:
        storage: what is patched.
        patch: its fields, of which those that are not stored are left to TorchRL to refuse.
        shape: that of the handles; dimensions of size 1 do not count.
        ndim: how many dimensions of the storage a handle names a place in.
    """
    for key, value in patch.items(True, True) if is_tensor_collection(patch) else patch.items():
        stored = storage._storage.get(key, None) if is_tensor_collection(storage._storage) else None
        if is_tensor_collection(stored) and not is_non_tensor(stored):
            raise ValueError(
                f"patch key {key!r} names a nested entry of the records. Nothing was updated. Name each of its fields, "
                "as in patch={('nested', 'field'): values}, or pass a tensordict."
            )
        if isinstance(stored, torch.Tensor):
            if is_tensor_collection(value):  # which NumPy would go through without an end
                raise TypeError(f"patch key {key!r} must hold numbers, got a {type(value).__name__}.")
            expected, came = (*shape, *stored.shape[ndim:]), np.shape(value)
            if [size for size in came if size != 1] != [size for size in expected if size != 1]:
                raise ValueError(
                    f"shape mismatch for patch key {key!r}: got {tuple(came)}, expected {tuple(expected)}, handles of "
                    f"shape {tuple(shape)} and then the field. Nothing was updated. Pass one value per handle, in the "
                    "shape of the handles."
                )


def _repeats_handles(storage: Any, patch: Any, ndim: int) -> bool:
    """Whether ``ndim`` dimensions of handles include those of stored trajectories, and the patch has one for each."""
    inner = int(getattr(storage, "record_ndim", 0))
    if not 0 < inner <= ndim:
        return False
    for key, value in patch.items(True, True) if is_tensor_collection(patch) else patch.items():
        stored = storage._storage.get(key, None)
        if stored is not None:
            leading: int = np.ndim(value) - (stored.ndim - storage.ndim)
            return leading == ndim - inner
    return False
