"""Handles that stand in several rows of a batch."""

from __future__ import annotations

import pytest
import torch
from torchrl.data.replay_buffers.utils import _reduce

from torchrl_generational.generations.duplicate_handles import per_handle


@pytest.mark.parametrize("coordinates", [1, 2])
@pytest.mark.parametrize("reduction", ["max", "min", "mean", "median", "sum"])
def test_each_row_has_the_reduction_over_all_rows_with_its_handle(reduction, coordinates):
    random = torch.Generator().manual_seed(0)
    for _ in range(50):
        index = torch.randint(3, (4, 5, coordinates), generator=random)
        generation = torch.randint(2, (4, 5), generator=random)
        priority = torch.randint(9, (4, 5), generator=random).double()
        rows = list(zip(index.reshape(20, -1).tolist(), generation.reshape(-1).tolist(), strict=True))
        values = priority.reshape(-1)
        expected = [
            _reduce(values[torch.tensor([other == row for other in rows])], reduction, dim=0).item() for row in rows
        ]
        result = per_handle(index, generation, priority, reduction)
        assert result.shape == (4, 5)
        assert result.reshape(-1).tolist() == pytest.approx(expected)
