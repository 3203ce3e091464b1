from __future__ import annotations

import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_generational import GenerationalLazyTensorStorage, SlotGenerations, SupportsGenerations, TracksGenerations
from torchrl_generational.generations import generations_on
from torchrl_generational.writers import GenerationalRoundRobinWriter

writes = st.one_of(
    st.integers(0, 4),
    st.lists(st.integers(0, 4), max_size=12).map(lambda rows: torch.tensor(rows, dtype=torch.int64)),
    st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda bounds: slice(min(bounds), max(bounds))),
)


@given(st.lists(writes, max_size=12))
def test_a_stamp_counts_every_record_its_row_received(history):
    generations = SlotGenerations(5)
    received: Counter[int] = Counter()
    for rows in history:
        generations.advance(rows)
        received.update([rows] if isinstance(rows, int) else torch.arange(5)[rows].tolist())
    assert generations.values.tolist() == [received[row] - 1 for row in range(5)]


def test_invalidation_moves_written_rows_on_and_leaves_the_others_unwritten():
    generations = SlotGenerations(4)
    generations.advance(torch.tensor([0, 0, 1]))
    generations.invalidate()
    assert generations.values.tolist() == [2, 1, -1, -1]


def test_only_a_stamp_that_a_record_can_have_is_ever_live():
    generations = SlotGenerations(3)
    generations.advance(0)
    rows = torch.tensor([0, 0, 1, 1])
    assert generations.live(rows, torch.tensor([0, 1, -1, 0])).tolist() == [True, False, False, False]


def test_the_tensor_of_stamps_keeps_its_place_in_memory():
    generations = SlotGenerations(4)
    view = generations.values
    generations.advance(slice(0, 4))
    generations.invalidate()
    generations.restore(torch.tensor([5, 6]))
    assert view.tolist() == [5, 6, -1, -1]
    assert view.data_ptr() == generations.values.data_ptr()


def test_stamps_survive_pickling():
    generations = SlotGenerations(3)
    generations.advance(1)
    assert pickle.loads(pickle.dumps(generations)).values.tolist() == [-1, 0, -1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(5, dtype=torch.int64), "cover 5 slots but this storage has 4"),
        (torch.zeros(4), "1-D int64 tensor, got torch.float32"),
        (torch.zeros(2, 2, dtype=torch.int64), r"shape \(2, 2\)"),
    ],
)
def test_stamps_of_another_kind_are_refused_and_change_nothing(values, message):
    generations = SlotGenerations(4)
    generations.advance(2)
    with pytest.raises(ValueError, match=message):
        generations.restore(values)
    assert generations.values.tolist() == [-1, -1, 0, -1]


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="num_rows must be >= 0, got -1"):
        SlotGenerations(-1)


def test_storages_and_writers_meet_the_protocols():
    storage, writer = GenerationalLazyTensorStorage(4), GenerationalRoundRobinWriter()
    writer.register_storage(storage)
    assert isinstance(storage, SupportsGenerations)
    assert isinstance(writer, TracksGenerations)
    assert generations_on(storage, user="test") is storage.slot_generations
