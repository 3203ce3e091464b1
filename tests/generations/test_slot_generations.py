from __future__ import annotations

import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_generational import GenerationalLazyTensorStorage, SlotGenerations, SupportsGenerations, TracksGenerations
from torchrl_generational.generations.protocols import generations_on
from torchrl_generational.generations.slot_generations import COUNT_BITS
from torchrl_generational.storages.round_robin_writers import GenerationalRoundRobinWriter

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
    generations.restore(torch.tensor([5, 6]), lineage=generations.lineage)
    assert view.tolist() == [5, 6, -1, -1]
    assert view.data_ptr() == generations.values.data_ptr()


def test_stamps_survive_pickling_and_the_copy_begins_its_own_timeline():
    generations = SlotGenerations(3)
    generations.advance(1)
    copy = pickle.loads(pickle.dumps(generations))
    assert copy.values.tolist() == [-1, 0, -1]
    assert copy.incarnation > generations.incarnation == 0
    assert copy.lineage == generations.lineage


BASE = 2**COUNT_BITS


def test_after_a_restore_new_records_get_stamps_of_a_later_incarnation():
    generations = SlotGenerations(4)
    generations.restore(torch.tensor([5, 0, -1]))
    assert generations.values.tolist() == [5, 0, -1, -1]
    incarnation = generations.incarnation
    assert 1 <= incarnation <= 2**16
    generations.advance(torch.tensor([0, 0, 2]))
    generations.advance(3)
    generations.advance(slice(1, 2))
    first = incarnation * BASE
    assert generations.values.tolist() == [first + 1, first, first, first]


def test_a_restore_is_later_than_both_timelines():
    live, saved = SlotGenerations(2), SlotGenerations(2)
    for _ in range(3):
        live.begin_incarnation()
        saved.begin_incarnation(after=live.incarnation)
    reached = saved.incarnation
    live.restore(saved.values.clone(), **saved.origin())
    assert live.incarnation > reached
    later = live.incarnation
    live.restore(torch.tensor([3, -1]), lineage=live.lineage, incarnation=0)
    assert live.incarnation > later
    live.restore(torch.tensor([(later + 10**6) * BASE + 7, -1]), lineage=live.lineage)
    assert live.incarnation > later + 10**6


def test_a_count_that_carries_into_the_incarnation_keeps_growing():
    generations = SlotGenerations(1)
    generations.restore(torch.tensor([BASE - 1]))
    generations._state[-1] = 0  # as if it had counted that far
    generations.advance(0)
    assert generations.values.tolist() == [BASE]
    generations.begin_incarnation()
    before = generations.values.clone()
    generations.advance(0)
    assert (generations.values > before).all()
    overtaken = (generations.incarnation + 5) * BASE + 3  # a row that counted past later incarnations
    generations.values[0] = overtaken
    generations.begin_incarnation()
    generations.advance(0)
    assert int(generations.values[0]) > overtaken


def test_the_last_incarnation_is_refused_before_a_stamp_could_turn_negative():
    generations = SlotGenerations(1)
    generations.begin_incarnation(after=2**31 - 2**16 - 2)
    generations.advance(0)
    assert int(generations.values[0]) > 0
    generations._state[-1] = (2**31 - 1) << COUNT_BITS
    with pytest.raises(OverflowError, match="restored so often"):
        generations.begin_incarnation()
    generations.advance(0)
    assert generations.values.tolist() == [(2**31 - 1) * BASE]


def test_the_step_of_a_restore_does_not_follow_the_seed():
    steps = set()
    for _ in range(20):
        torch.manual_seed(0)
        generations = SlotGenerations(1)
        generations.begin_incarnation()
        steps.add(generations.incarnation)
    assert len(steps) > 10


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


@pytest.mark.parametrize("loaded", [0, 2])
def test_records_written_into_an_exchanged_storage_count_as_issued(loaded):
    """Found by the oracle: their stamp is the one that loaded records get."""
    generations, other = SlotGenerations(4), SlotGenerations(4)
    other.advance(slice(0, 2))
    generations.replaced(loaded, after=3)  # as an exchange of storages does
    generations.advance(torch.tensor([2]))
    handle = generations.values[2:3].clone()
    generations.restore(other.values.clone(), **other.origin())
    assert not generations.live(torch.tensor([2]), handle).any()
    assert generations.lineage != other.lineage
    assert (generations.values[:2] > handle).all()  # the other's stamps are not taken over
