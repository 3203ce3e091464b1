"""The conditional updates: what they do row by row, every form of their arguments, and every argument they refuse."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import buffer_state, filled, leaves, plain_prioritized, prioritized, records, sampler_state
from tensordict import TensorDict
from torchrl.data import PrioritizedSampler, RandomSampler

import torchrl_generational as g
from torchrl_generational import UpdateResult


def handles(rb, index):
    index = torch.as_tensor(index)
    return index, rb.writer.generations_of(index)


# ------------------------------------------------------------------ live, stale and mixed


def test_live_rows_are_updated_and_counted():
    rb = filled()
    index, generation = handles(rb, [1, 6])
    result = rb.update_priority_if_present(index=index, generation=generation, priority=torch.tensor([4.0, 2.0]))
    assert isinstance(result, UpdateResult)
    assert result.updated_mask.tolist() == [True, True]
    assert leaves(rb).tolist() == [1, 4, 1, 1, 1, 1, 2, 1]
    stats = rb.stats()
    assert (stats["conditional_updated"], stats["conditional_stale"]) == (2, 0)


@pytest.mark.parametrize("within", [True, False])
def test_a_stale_row_changes_nothing_at_all(within):
    """C01."""
    rb = plain_prioritized(8, max_priority_within_buffer=within)
    rb.extend(torch.arange(8))
    index, generation = handles(rb, list(range(8)))
    rb.extend(torch.arange(8))
    before = sampler_state(rb), rb.storage.generations.tolist(), rb.storage[:].tolist()
    result = rb.update_priority_if_present(index=index, generation=generation, priority=50.0)
    assert result.num_stale == 8
    assert (sampler_state(rb), rb.storage.generations.tolist(), rb.storage[:].tolist()) == before


def test_a_stale_outlier_does_not_raise_the_default_of_later_records():
    """C02."""
    rb = filled()
    index, generation = handles(rb, [0])
    rb.extend(records(1))
    rb.update_priority_if_present(index=index, generation=generation, priority=1e6)
    rb.add(records(1)[0])
    assert leaves(rb)[1].item() == 1.0
    assert rb.sample()["priority_weight"].tolist() == [1.0] * 8


def test_a_slot_never_written_is_never_live():
    """C03."""
    rb = prioritized(8)
    rb.extend(records(3))
    before = buffer_state(rb)
    result = rb.update_priority_if_present(index=[5, 5], generation=[-1, 0], priority=9.0)
    assert result.num_stale == 2
    assert buffer_state(rb) == before


def test_each_row_of_a_mixed_batch_is_judged_on_its_own():
    rb = filled()
    index, generation = handles(rb, list(range(8)))
    rb.extend(records(3))
    result = rb.update_priority_if_present(index=index, generation=generation, priority=torch.arange(11.0, 19.0))
    assert result.updated_mask.tolist() == [False] * 3 + [True] * 5
    assert leaves(rb).tolist() == [1, 1, 1, 14, 15, 16, 17, 18]
    assert rb.sampler.default_priority == 18.0
    stats = rb.stats()
    assert (stats["conditional_updated"], stats["conditional_stale"]) == (5, 3)


def test_one_record_named_twice_keeps_the_last_value_and_both_rows_count():
    """C05."""
    rb = filled()
    index, generation = handles(rb, [2, 2])
    result = rb.update_priority_if_present(index=index, generation=generation, priority=[9.0, 3.0])
    assert result.num_updated == 2
    assert leaves(rb)[2].item() == 3.0
    assert rb.sampler.default_priority == 3.0


def test_rows_that_a_writer_rejected_are_ignored():
    rb = filled()
    before = sampler_state(rb)
    assert rb.update_priority_if_present(index=[-1, -1], generation=[-1, -1], priority=50.0).num_stale == 2
    assert sampler_state(rb) == before


def test_an_empty_batch_updates_nothing():
    rb = filled()
    before = sampler_state(rb)
    assert rb.update_priority_if_present(index=[], generation=[], priority=[]).updated_mask.shape == (0,)
    assert sampler_state(rb) == before


def test_a_record_beyond_the_length_of_the_storage_is_stale():
    rb = filled()
    index, generation = handles(rb, [6])
    rb.storage._len = 5
    assert rb.update_priority_if_present(index=index, generation=generation, priority=9.0).num_stale == 1


@pytest.mark.parametrize("make", [PrioritizedSampler, g.GenerationalPrioritizedSampler])
def test_any_prioritized_sampler_will_do(make):
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), sampler=make(8, 1.0, 1.0), batch_size=8
    )
    rb.extend(records(8))
    index, generation = handles(rb, [3, 3, 4])
    rb.extend(records(4))
    result = rb.update_priority_if_present(index=index, generation=generation, priority=[7.0, 6.0, 5.0])
    assert result.updated_mask.tolist() == [False, False, True]
    assert leaves(rb).tolist() == [1, 1, 1, 1, 5, 1, 1, 1]


# ------------------------------------------------------------------ equality with update_priority

dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64])


@settings(max_examples=150, deadline=None)
@given(
    cells=st.lists(st.integers(0, 15), min_size=1, max_size=24),
    values=st.data(),
    dtype=dtypes,
    alpha=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.6]),
    within=st.booleans(),
    tree=st.sampled_from([torch.float32, torch.float64]),
    shape=st.sampled_from(["[N]", "[N, 1]", "scalar"]),
    ndim=st.sampled_from([1, 2]),
)
def test_without_a_stale_row_the_sampler_is_bit_for_bit_what_update_priority_leaves(
    cells, values, dtype, alpha, within, tree, shape, ndim
):
    rb = plain_prioritized(16, alpha=alpha, max_priority_within_buffer=within, dtype=tree, ndim=ndim)
    rb.extend(torch.arange(16) if ndim == 1 else torch.arange(16).reshape(4, 4))
    rb.update_priority(torch.tensor([1]) if ndim == 1 else torch.tensor([[0, 1]]), torch.tensor([2.5]))
    raw, conditional = copy.deepcopy(rb), copy.deepcopy(rb)
    index = torch.tensor(cells)
    if ndim == 2:
        index = torch.stack([index // 4, index % 4], -1)
    given_values = values.draw(
        st.lists(st.integers(0, 100), min_size=len(cells), max_size=len(cells)).map(
            lambda drawn: torch.tensor(drawn) / 7
        )
    )
    priority = given_values.to(dtype)
    priority = {"[N]": priority, "[N, 1]": priority.unsqueeze(-1), "scalar": priority[0]}[shape]
    raw.update_priority(index, priority)
    generation = conditional.writer.generations_of(index)
    result = conditional.update_priority_if_present(index=index, generation=generation, priority=priority)
    assert result.num_stale == 0
    assert sampler_state(raw) == sampler_state(conditional)


@settings(max_examples=60, deadline=None)
@given(
    cells=st.lists(st.integers(0, 15), min_size=1, max_size=16, unique=True),
    values=st.data(),
    alpha=st.sampled_from([0.0, 0.7, 1.0, 1.6]),
    within=st.booleans(),
)
def test_where_no_slot_repeats_the_sampler_is_bit_for_bit_the_stock_one(cells, values, alpha, within):
    ours = plain_prioritized(16, alpha=alpha, max_priority_within_buffer=within)
    ours.extend(torch.arange(16))
    stock = PrioritizedSampler(16, alpha, 1.0, max_priority_within_buffer=within)
    stock.mark_update(torch.arange(16))
    index = torch.tensor(cells)
    for _ in range(3):
        priority = torch.tensor(
            values.draw(st.lists(st.floats(0, 1e3, width=32), min_size=len(cells), max_size=len(cells)))
        )
        stock.update_priority(index, priority)
        generation = ours.writer.generations_of(index)
        ours.update_priority_if_present(index=index, generation=generation, priority=priority)

    class Holder:
        sampler = stock

    *trees, total, least, maximum, where, default = sampler_state(ours)
    *stock_trees, stock_total, stock_least, stock_maximum, stock_where, stock_default = sampler_state(Holder)
    assert trees == stock_trees
    assert (least, maximum, where, default) == (stock_least, stock_maximum, stock_where, stock_default)
    assert total == pytest.approx(math.fsum(trees[0]), rel=1e-15)  # TorchRL adds in float32
    assert stock_total == pytest.approx(total, rel=1e-6)


# ------------------------------------------------------------------ forms


@pytest.mark.parametrize(
    "priority",
    [
        torch.tensor([3.0, 5.0]),
        torch.tensor([[3.0], [5.0]]),
        torch.tensor([3.0, 5.0], dtype=torch.float64),
        torch.tensor([3.0, 5.0], dtype=torch.float16),
        torch.tensor([3.0, 5.0], dtype=torch.bfloat16),
        torch.tensor([3, 5]),
        np.array([3.0, 5.0]),
        np.array([[3], [5]]),
        [3.0, 5.0],
        (3, 5),
        torch.tensor([3.0, 5.0], requires_grad=True),
    ],
)
def test_priorities_come_in_every_real_form(priority):
    """C24."""
    rb = filled()
    index, generation = handles(rb, [2, 5])
    rb.update_priority_if_present(index=index, generation=generation, priority=priority)
    assert leaves(rb)[[2, 5]].tolist() == [3, 5]


@pytest.mark.parametrize("priority", [4, 4.0, np.float32(4), torch.tensor(4.0), torch.tensor(4)])
def test_a_number_is_the_priority_of_every_row(priority):
    rb = filled()
    index, generation = handles(rb, [2, 5])
    rb.update_priority_if_present(index=index, generation=generation, priority=priority)
    assert leaves(rb).tolist() == [1, 1, 4, 1, 1, 4, 1, 1]


@pytest.mark.parametrize(
    "form",
    [
        lambda index, generation: (index, generation),
        lambda index, generation: (index.unsqueeze(-1), generation),
        lambda index, generation: (index.unsqueeze(-1), generation.unsqueeze(-1)),
        lambda index, generation: ((index,), generation),
        lambda index, generation: (index.reshape(2, 3), generation.reshape(2, 3)),
        lambda index, generation: (index.tolist(), generation.tolist()),
        lambda index, generation: (index.numpy(), generation.numpy()),
        lambda index, generation: (index.int(), generation),
        lambda index, generation: (index.to(torch.uint64), generation),
        lambda index, generation: (index.numpy().astype(np.uint64), generation.numpy()),
    ],
)
def test_an_index_comes_in_every_form_that_a_sample_can_carry(form):
    rb = filled()
    index, generation = form(*handles(rb, [7, 0, 3, 1, 2, 4]))
    shape = torch.as_tensor(generation).shape
    rb.extend(records(2))
    priority = torch.arange(11.0, 17.0).reshape(shape)
    result = rb.update_priority_if_present(index=index, generation=generation, priority=priority)
    assert result.updated_mask.shape == shape
    assert result.updated_mask.reshape(-1).tolist() == [True, False, True, False, True, True]
    assert leaves(rb).tolist() == [1, 1, 15, 13, 16, 1, 1, 11]


def grid():
    """4 rows of 3 cells; x numbers the cells."""
    rb = prioritized(12, storage=g.GenerationalLazyTensorStorage(12, ndim=2), batch_size=64)
    rb.extend(TensorDict({"x": torch.arange(12).reshape(4, 3).transpose(0, 1)}, [3, 4]))
    assert rb.storage._storage["x"].tolist() == torch.arange(12).reshape(4, 3).tolist()
    return rb


@pytest.mark.parametrize(
    "form",
    [
        lambda coordinates: coordinates,
        lambda coordinates: tuple(coordinates.unbind(-1)),
        lambda coordinates: coordinates.tolist(),
        lambda coordinates: tuple(part.tolist() for part in coordinates.unbind(-1)),
    ],
)
def test_coordinates_update_the_right_cells_only(form):
    """C23."""
    rb = grid()
    coordinates = torch.tensor([[0, 1], [1, 0], [2, 2], [3, 1]])
    generation = rb.storage.generations[tuple(coordinates.unbind(-1))].clone()
    rb.extend(TensorDict({"x": torch.zeros(3, 2, dtype=torch.int64)}, [3, 2]))  # rows 0 and 1
    result = rb.update_priority_if_present(
        index=form(coordinates), generation=generation, priority=[5.0, 6.0, 7.0, 8.0]
    )
    assert result.updated_mask.tolist() == [False, False, True, True]
    expected = torch.ones(4, 3)
    expected[2, 2], expected[3, 1] = 7, 8
    assert leaves(rb)[:12].reshape(4, 3).tolist() == expected.tolist()


def test_a_flat_index_into_several_dimensions_is_refused():
    """C23: TorchRL reads it as rows in one place and as cells in another."""
    rb = grid()
    before = sampler_state(rb)
    with pytest.raises(ValueError, match="could mean rows or flat cells"):
        rb.update_priority_if_present(
            index=torch.tensor([0, 1, 2]), generation=torch.zeros(3, dtype=torch.int64), priority=9.0
        )
    assert sampler_state(rb) == before


def test_stored_trajectories_take_one_priority_each():
    rb = prioritized(8)
    rb.extend(TensorDict({"x": torch.arange(40).reshape(8, 5)}, [8, 5]))
    sample = rb.sample()
    assert sample["index"].shape == sample["index_generation"].shape == (8, 5)
    rb.extend(TensorDict({"x": torch.arange(20).reshape(4, 5)}, [4, 5]))
    result = rb.update_priority_if_present(
        index=sample["index"], generation=sample["index_generation"], priority=torch.full((8,), 6.0)
    )
    assert result.updated_mask.shape == (8, 5)
    live = sample["index"] >= 4
    assert torch.equal(result.updated_mask, live)
    expected = torch.ones(8)
    expected[sample["index"][live].unique()] = 6
    assert leaves(rb).tolist() == expected.tolist()


def test_the_handles_of_a_sample_work_wherever_the_sample_goes():
    import io
    import pickle

    rb = filled()
    sample = rb.sample()
    stream = io.BytesIO()
    torch.save(sample, stream)
    stream.seek(0)
    for travelled in (
        sample.to("cpu"),
        pickle.loads(pickle.dumps(sample)),
        torch.load(stream, weights_only=False),
        sample.reshape(2, 4),
        sample[2:5],
        torch.stack([sample[1], sample[7]]),
        sample[3],
    ):
        result = rb.update_priority_if_present(
            index=travelled["index"], generation=travelled["index_generation"], priority=2.0
        )
        assert result.updated_mask.shape == travelled.shape
        assert result.num_stale == 0


# ------------------------------------------------------------------ bad input

BAD = [
    (
        {"priority": [1.0, float("nan")]},
        ValueError,
        "priority must be finite and >= 0 .* at row 1. Nothing was updated",
    ),
    ({"priority": [float("inf"), 1.0]}, ValueError, "at row 0"),
    ({"priority": [-1.0, 1.0]}, ValueError, "got -1.0 at row 0"),
    ({"priority": [1.0, 1e38]}, ValueError, "is too large"),
    ({"priority": [1.0, 2.0, 3.0]}, ValueError, r"priority has shape \(3,\) but the handles have shape \(2,\)"),
    ({"priority": [1.0]}, ValueError, r"priority has shape \(1,\)"),
    ({"priority": torch.ones(1, 2)}, ValueError, r"priority has shape \(1, 2\)"),
    ({"priority": "high"}, TypeError, "priority must hold real numbers"),
    ({"priority": torch.tensor([True, False])}, TypeError, "priority must hold real numbers"),
    ({"priority": None}, TypeError, "priority must hold real numbers"),
    ({"index": [0.0, 1.0]}, TypeError, "index must hold integers"),
    ({"index": [True, False]}, TypeError, "index must hold integers"),
    ({"index": [0, 8]}, IndexError, r"index 8 \(row 1 of the batch\) lies outside .* but carries generation 0"),
    ({"index": [0, -1]}, IndexError, "index -1"),
    ({"index": [0, 10**12]}, IndexError, "index 1000000000000"),
    ({"index": [0, 1, 2]}, ValueError, r"index describes rows of shape \(3,\) but generation has shape \(2,\)"),
    ({"index": ([0, 1], [0, 1])}, ValueError, "a tuple of 2 coordinates but the storage has 1 dimension"),
    ({"index": slice(0, 2)}, TypeError, "index must hold integers"),
    ({"generation": [0.0, 0.0]}, TypeError, "generation must hold integers"),
    ({"generation": [0]}, ValueError, r"generation has shape \(1,\)"),
    ({"generation": None}, TypeError, "generation must hold integers"),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"), BAD, ids=[f"{next(iter(bad))}-{bad[next(iter(bad))]!s:.20}" for bad, *_ in BAD]
)
def test_bad_input_to_the_conditional_priority_update_changes_nothing(arguments, error, message):
    """C08, C09 and their kind."""
    rb = filled()
    rb.extend(records(1))
    before, stats = buffer_state(rb), rb.stats()
    good = {"index": [1, 2], "generation": [0, 0], "priority": [1.0, 2.0]}
    with pytest.raises(error, match=message):
        rb.update_priority_if_present(**{**good, **arguments})
    assert buffer_state(rb) == before
    assert rb.stats() == stats
    assert rb.update_priority_if_present(**good).num_updated == 2


def test_a_value_is_refused_even_where_its_row_is_stale():
    rb = filled()
    before = sampler_state(rb)
    with pytest.raises(ValueError, match="at row 1"):
        rb.update_priority_if_present(index=[0, 1], generation=[0, 77], priority=[1.0, float("nan")])
    assert sampler_state(rb) == before


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("call", ["priority", "tensordict", "field"])
def test_a_buffer_never_written_to_is_refused(delayed, call):
    """C31."""
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=lambda: g.GenerationalLazyTensorStorage(8),
        sampler=lambda: g.GenerationalPrioritizedSampler(8, 1.0, 1.0),
        delayed_init=delayed,
    )
    with pytest.raises(RuntimeError, match="require an initialized storage, and nothing has been written .* Call add"):
        if call == "priority":
            rb.update_priority_if_present(index=[0], generation=[0], priority=1.0)
        elif call == "tensordict":
            rb.update_tensordict_priority_if_present(records(1))
        else:
            rb.update_if_present(index=[0], generation=[0], patch={"x": torch.zeros(1)})


@pytest.mark.parametrize("call", ["priority", "tensordict"])
def test_a_sampler_without_priorities_is_refused_at_the_call(call):
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), sampler=RandomSampler(), batch_size=2
    )
    rb.extend(records(8))
    sample = rb.sample().set("td_error", torch.ones(2))
    with pytest.raises(TypeError, match="needs a sampler with priorities, got RandomSampler. Build the buffer with"):
        if call == "priority":
            rb.update_priority_if_present(index=sample["index"], generation=sample["index_generation"], priority=1.0)
        else:
            rb.update_tensordict_priority_if_present(sample)


# ------------------------------------------------------------------ fields


def test_a_field_update_gives_the_same_kind_of_result():
    rb = filled()
    index, generation = handles(rb, [[1], [6]])
    rb.extend(records(2))
    result = rb.update_if_present(index=index, generation=generation, patch={"x": torch.tensor([50, 60])})
    assert isinstance(result, UpdateResult)
    assert result.updated_mask.tolist() == [[False], [True]]
    assert rb.storage._storage["x"].tolist() == [0, 1, 2, 3, 4, 5, 60, 7]
    assert rb.storage.generations.tolist() == [1, 1] + [0] * 6
    assert (rb.stats()["conditional_updated"], rb.stats()["conditional_stale"]) == (1, 1)


def test_versions_that_lose_are_rejected_and_not_stale():
    rb = prioritized(4)
    rb.extend(records(4, version=torch.tensor([5, 5, 5, 5])))
    index, generation = handles(rb, [0, 1, 2])
    rb.extend(records(1, version=torch.tensor([5])))
    result = rb.update_if_present(
        index=index,
        generation=generation,
        patch={"x": torch.tensor([9, 9, 9])},
        version_key="version",
        version=torch.tensor([7, 4, 7]),
    )
    assert result.updated_mask.tolist() == [False, False, True]
    assert result.rejected_mask.tolist() == [False, True, False]
    assert result.stale_mask.tolist() == [True, False, False]


def test_coordinates_and_rows_patch_several_dimensions():
    rb = grid()
    coordinates = torch.tensor([[0, 1], [2, 2]])
    for index in (coordinates, tuple(coordinates.unbind(-1))):
        assert (
            rb.update_if_present(index=index, generation=[0, 0], patch={"x": torch.tensor([50, 60])}).num_updated == 2
        )
    assert rb.storage._storage["x"].tolist() == [[0, 50, 2], [3, 4, 5], [6, 7, 60], [9, 10, 11]]
    rows = torch.tensor([1, 3])
    patch = {"x": torch.tensor([[1, 1, 1], [2, 2, 2]])}
    assert rb.update_if_present(index=rows, generation=torch.zeros(2, dtype=torch.int64), patch=patch).num_updated == 2
    assert rb.storage._storage["x"].tolist() == [[0, 50, 2], [1, 1, 1], [6, 7, 60], [2, 2, 2]]


@pytest.mark.parametrize(
    "nested",
    [torch.ones(2), {"a": torch.ones(2)}, TensorDict({"a": torch.ones(2)}, [2]), TensorDict({"z": torch.ones(2)}, [2])],
    ids=lambda value: type(value).__name__,
)
def test_a_patch_of_a_nested_entry_as_a_whole_is_refused_before_other_fields_change(nested):
    rb = prioritized()
    rb.extend(records(8, o=TensorDict({"a": torch.zeros(8), "b": torch.zeros(8, 3)}, [8])))
    before = rb[:].clone()
    with pytest.raises(ValueError, match=r"patch key 'o' names a nested entry.*Name each of its fields"):
        rb.update_if_present(index=[1, 2], generation=[0, 0], patch={"x": torch.tensor([70, 71]), "o": nested})
    assert (rb[:] == before).all()
    fields = {"x": torch.tensor([70, 71]), ("o", "a"): torch.ones(2)}
    for patch in (fields, TensorDict(fields, [2])):
        assert rb.update_if_present(index=[1, 2], generation=[0, 0], patch=patch).num_updated == 2
    assert rb[:]["o", "a"].tolist() == [0, 1, 1, 0, 0, 0, 0, 0]


def test_stored_trajectories_are_patched_as_one_record():
    rb = prioritized(4, batch_size=4)
    rb.extend(TensorDict({"x": torch.zeros(4, 3)}, [4, 3]))
    index = torch.tensor([1, 2])[:, None].expand(2, 3)
    generation = torch.tensor([0, 9])[:, None].expand(2, 3)
    result = rb.update_if_present(index=index, generation=generation, patch={"x": torch.ones(2, 3)})
    assert result.updated_mask.tolist() == [[True] * 3, [False] * 3]
    assert rb.storage._storage["x"].tolist() == [[0] * 3, [1] * 3, [0] * 3, [0] * 3]


@pytest.mark.parametrize(("arguments", "error", "message"), [bad for bad in BAD if "priority" not in bad[0]])
def test_bad_handles_of_a_field_update_change_nothing(arguments, error, message):
    rb = filled()
    before = buffer_state(rb)
    good = {"index": [1, 2], "generation": [0, 0], "patch": {"x": torch.tensor([7, 8])}}
    with pytest.raises(error, match=message):
        rb.update_if_present(**{**good, **arguments})
    assert buffer_state(rb) == before


def test_an_ordered_background_update_gives_the_same_result():
    rb = filled()
    index, generation = handles(rb, [1, 2])
    rb.extend(records(2))
    future = rb.submit_update_if_present(index=index, generation=generation, patch={"x": torch.tensor([50, 60])})
    assert future.result(60).updated_mask.tolist() == [False, True]
    rb.shutdown()
