from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_generational.generations.indexing import keep_last, normalise_handles, rows_written

CPU = torch.device("cpu")
ROWS = torch.tensor([3, 0, 3])
CELLS = torch.tensor([[1, 2], [0, 0], [3, 1]])  # of a space (4, 3): cells 5, 0, 10
STAMPS = torch.tensor([7, 8, 9])


def handles(index, generation, space, inner=0):
    found = normalise_handles(index, generation, space, CPU, inner=inner)
    return found.rows.tolist(), found.cells.tolist(), found.generation.tolist(), tuple(found.shape)


@pytest.mark.parametrize(
    "index",
    [
        ROWS,
        ROWS.to(torch.int32),
        ROWS.numpy(),
        ROWS.tolist(),
        ROWS.unsqueeze(-1),  # the sample of a slice sampler
        (ROWS,),  # its info
        (ROWS.numpy(),),
    ],
)
def test_every_form_of_a_one_dimensional_index_means_the_same(index):
    assert handles(index, STAMPS, (4,)) == ([3, 0, 3], [3, 0, 3], [7, 8, 9], (3,))


@pytest.mark.parametrize(
    "index", [CELLS, CELLS.tolist(), tuple(CELLS.unbind(-1)), (CELLS[:, 0].tolist(), CELLS[:, 1].numpy())]
)
def test_every_form_of_a_coordinate_index_means_the_same(index):
    assert handles(index, STAMPS, (4, 3)) == ([1, 0, 3], [5, 0, 10], [7, 8, 9], (3,))


def test_cells_are_numbered_like_the_trees():
    space = (3, 4, 5)
    index = torch.stack(torch.unravel_index(torch.arange(60), space), -1)
    assert handles(index, torch.zeros(60, dtype=torch.int64), space)[1] == list(range(60))


def test_reshaped_batches_keep_their_shape():
    index = torch.arange(6).reshape(2, 3)
    assert handles(index, index + 1, (8,)) == (list(range(6)), list(range(6)), list(range(1, 7)), (2, 3))
    index = CELLS.repeat(2, 1).reshape(2, 3, 2)
    rows, cells, _, shape = handles(index, torch.zeros(2, 3, dtype=torch.int64), (4, 3))
    assert (rows, cells, shape) == ([1, 0, 3] * 2, [5, 0, 10] * 2, (2, 3))


def test_handles_expanded_over_a_stored_trajectory_repeat():
    index, generation = ROWS[:, None].expand(3, 2), STAMPS[:, None].expand(3, 2)
    expected = ([3, 3, 0, 0, 3, 3], [3, 3, 0, 0, 3, 3], [7, 7, 8, 8, 9, 9], (3, 2))
    assert handles(index, generation, (4,)) == expected
    assert handles(ROWS, generation, (4,), inner=1) == expected
    with pytest.raises(ValueError, match=r"rows of shape \(3,\) but generation has shape \(3, 2\)"):
        handles(ROWS, generation, (4,))
    with pytest.raises(ValueError, match=r"rows of shape \(3,\) but generation has shape \(3, 2\)"):
        handles(ROWS, generation + torch.arange(2), (4,), inner=1)


def test_a_single_handle_needs_no_batch():
    assert handles(3, 7, (4,)) == ([3], [3], [7], ())
    assert handles((1, 2), 7, (4, 3)) == ([1], [5], [7], ())
    assert handles(torch.tensor([1, 2]), torch.tensor(7), (4, 3)) == ([1], [5], [7], ())


def test_an_empty_batch_is_a_batch():
    assert handles([], [], (4,)) == ([], [], [], (0,))
    assert handles(torch.zeros(0, 2, dtype=torch.int64), [], (4, 3)) == ([], [], [], (0,))


@pytest.mark.parametrize(
    "index",
    [torch.tensor([5, 0, 10]), torch.tensor([0, 1])],
    ids=["flat cells", "as long as a coordinate"],
)
def test_a_flat_index_into_several_dimensions_is_refused(index):
    with pytest.raises(ValueError, match=r"with 2 dimensions could mean rows or flat cells. Pass coordinates"):
        normalise_handles(index, torch.zeros_like(index), (4, 3), CPU)


def test_coordinates_whose_stamps_look_like_a_flat_index_are_refused_unless_given_as_a_tuple():
    index, generation = torch.tensor([[1, 2], [0, 0]]), torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="could mean rows or flat cells"):
        normalise_handles(index, generation, (4, 3), CPU)
    assert handles(tuple(index.unbind(-1)), generation, (4, 3), inner=1)[1] == [5, 5, 0, 0]


@pytest.mark.parametrize(
    ("index", "generation", "space", "error", "message"),
    [
        (ROWS, STAMPS[:2], (4,), ValueError, r"rows of shape \(3,\) but generation has shape \(2,\)"),
        (ROWS, 7, (4,), ValueError, r"rows of shape \(3,\) but generation has shape \(\)"),
        (ROWS.reshape(1, 3), STAMPS, (4,), ValueError, r"rows of shape \(1, 3\)"),
        (CELLS, STAMPS[:2], (4, 3), ValueError, r"rows of shape \(3,\) but generation has shape \(2,\)"),
        ((ROWS, ROWS), STAMPS, (4,), ValueError, "a tuple of 2 coordinates but the storage has 1 dimension"),
        ((ROWS,), STAMPS, (4, 3), ValueError, "a tuple of 1 coordinates but the storage has 2 dimension"),
        ((), STAMPS, (4,), ValueError, "a tuple of 0 coordinates"),
        (CELLS[:, [0, 1, 1]], STAMPS, (4, 3), ValueError, "could mean rows or flat cells"),
        (ROWS.float(), STAMPS, (4,), TypeError, "index must hold integers, got a tensor of torch.float32"),
        (ROWS > 0, STAMPS, (4,), TypeError, "index must hold integers, got a tensor of torch.bool"),
        (
            ROWS,
            STAMPS.double(),
            (4,),
            TypeError,
            "generation must hold .* int64, got a tensor of torch.float64",
        ),
        (np.array([0.5]), STAMPS, (4,), TypeError, "index must hold integers, got ndarray of float64"),
        (None, STAMPS, (4,), TypeError, "index must hold integers"),
        (ROWS, [[1], [1, 2]], (4,), TypeError, "generation must hold integers of one shape"),
        (
            ROWS + 1,
            STAMPS,
            (4,),
            IndexError,
            r"index 4 \(row 0 of the batch\) lies outside .* \(4,\) but carries generation 7",
        ),
        (ROWS - 1, STAMPS, (4,), IndexError, r"index -1 \(row 1 of the batch\)"),
        (CELLS + torch.tensor([0, 1]), STAMPS, (4, 3), IndexError, r"index \(1, 3\) \(row 0"),
        (CELLS - torch.tensor([0, 1]), STAMPS, (4, 3), IndexError, r"index \(0, -1\) \(row 1"),
    ],
)
def test_what_cannot_be_a_handle_is_refused(index, generation, space, error, message):
    with pytest.raises(error, match=message):
        normalise_handles(index, generation, space, CPU)


def test_rows_that_no_record_ever_had_may_lie_anywhere():
    # TorchRL's max-value writer marks rejected records by index -1
    rows, cells, generation, _ = handles([-1, 99, 2], [-1, -1, 5], (4,))
    assert generation == [-1, -1, 5]
    assert rows[2] == cells[2] == 2
    assert all(0 <= row < 4 for row in rows)


# torch refuses negative steps, so that no storage ever gets them
slices = st.slices(5).filter(lambda cursor: cursor.step is None or cursor.step > 0)
cursors = st.one_of(
    st.integers(-5, 4),
    st.lists(st.integers(-5, 4), min_size=1, max_size=8),
    st.lists(st.integers(-5, 4), min_size=1, max_size=8).map(torch.tensor),
    st.lists(st.integers(-5, 4), min_size=1, max_size=8).map(np.array),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5).map(torch.tensor),
    slices,
    st.builds(range, st.integers(0, 2), st.integers(3, 5)),
    st.just(Ellipsis),
    st.just(()),
    st.tuples(st.integers(-5, 4), st.integers(0, 2)),
    st.tuples(slices, st.integers(0, 2)),
    st.tuples(st.lists(st.integers(0, 4), min_size=2, max_size=2).map(torch.tensor), st.just(torch.tensor([0, 2]))),
)


@given(cursors)
def test_the_rows_written_are_those_that_the_assignment_touches(cursor):
    touched = torch.zeros(5, 3, dtype=torch.bool)
    touched[list(cursor) if isinstance(cursor, range) else cursor] = True
    rows = rows_written(cursor, 5)
    marked = torch.zeros(5, dtype=torch.bool)
    marked[rows] = True
    assert torch.equal(marked, touched.any(-1))
    if isinstance(rows, torch.Tensor):
        assert (rows >= 0).all()


@pytest.mark.parametrize("cursor", [5, -6, [0, 5], torch.tensor([-6, 0]), range(3, 7)])
def test_a_row_outside_the_storage_is_refused(cursor):
    with pytest.raises(IndexError, match="the storage"):
        rows_written(cursor, 5)


@given(st.lists(st.integers(0, 5), max_size=20))
def test_the_last_of_each_cell_is_kept_in_order(cells):
    kept = keep_last(torch.tensor(cells, dtype=torch.int64))
    expected = sorted({cell: position for position, cell in enumerate(cells)}.values())
    assert (list(range(len(cells))) if kept is None else kept.tolist()) == expected
    assert (kept is None) == (len(set(cells)) == len(cells))
