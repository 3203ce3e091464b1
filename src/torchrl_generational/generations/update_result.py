"""The one result type of every conditional update."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["UpdateResult"]


@dataclass(frozen=True, slots=True, eq=False)
class UpdateResult:
    """What a conditional update did, row by row.

    Every row is exactly one of *updated* (its record was still in its slot and took the new value), *stale* (the
    slot holds another record now, or none: nothing was touched) and *rejected* (the record was there, but a version
    comparison of :meth:`update_if_present` was lost). Counts are computed when they are read, so that a caller on
    CUDA is not synchronised unless it asks.

    Attributes:
        updated_mask: bool tensor, shape of the ``generation`` that was passed in, on the storage's device.
        rejected_mask: bool tensor of the same shape for a field update with ``version_key``, else ``None``.

    Immutable, picklable and safe to share between threads.

    Example:
        >>> result = UpdateResult(torch.tensor([True, False, True]))
        >>> result.num_updated, result.num_stale, result.num_rejected
        (2, 1, 0)
        >>> result.stale_mask
        tensor([False,  True, False])
    """

    updated_mask: torch.Tensor
    rejected_mask: torch.Tensor | None = None

    @property
    def stale_mask(self) -> torch.Tensor:
        """Bool tensor like :attr:`updated_mask`: the rows whose record has left its slot."""
        if self.rejected_mask is None:
            return ~self.updated_mask
        return ~(self.updated_mask | self.rejected_mask)

    @property
    def num_updated(self) -> int:
        """Number of rows that were applied."""
        return int(self.updated_mask.count_nonzero())

    @property
    def num_rejected(self) -> int:
        """Number of rows that lost a version comparison."""
        return 0 if self.rejected_mask is None else int(self.rejected_mask.count_nonzero())

    @property
    def num_stale(self) -> int:
        """Number of rows that were left alone because their record is gone."""
        return self.updated_mask.numel() - self.num_updated - self.num_rejected

    # TorchRL's spellings (its ConditionalUpdateResult), so that code written for it runs unchanged.
    @property
    def updated(self) -> torch.Tensor:
        """:attr:`updated_mask` under TorchRL's name."""
        return self.updated_mask

    @property
    def updated_count(self) -> int:
        """:attr:`num_updated` under TorchRL's name."""
        return self.num_updated

    @property
    def stale_count(self) -> int:
        """:attr:`num_stale` under TorchRL's name."""
        return self.num_stale

    @property
    def version_rejected(self) -> torch.Tensor | None:
        """:attr:`rejected_mask` under TorchRL's name."""
        return self.rejected_mask

    @property
    def version_rejected_count(self) -> int:
        """:attr:`num_rejected` under TorchRL's name."""
        return self.num_rejected

    def __repr__(self) -> str:
        return (
            f"UpdateResult(num_updated={self.num_updated}, num_stale={self.num_stale}, "
            f"num_rejected={self.num_rejected}, shape={tuple(self.updated_mask.shape)})"
        )
