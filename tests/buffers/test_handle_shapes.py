"""A batch that was rebuilt, reshaped or given another batch size: its handles say which TD error is of which record."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import buffer_state, filled, leaves, prioritized, records, sampler_state
from tensordict import TensorDict, lazy_stack, tensorclass
from torchrl.data import Sequence
from torchrl.data.replay_buffers.utils import _reduce

import torchrl_generational as g

E = "td_error"
CANNOT_TELL = "cannot be told which TD error is of which record"


def grid(shape=(4, 3), inner=(), **kwargs):
    """A full buffer over ``shape``, each of whose records has the batch dimensions ``inner``."""
    cells = torch.Size(shape).numel()
    storage = g.GenerationalLazyTensorStorage(cells, ndim=len(shape))
    rb = prioritized(cells, storage=storage, dim_extend=0, **kwargs)
    x = torch.arange(torch.Size((*shape, *inner)).numel()).reshape(*shape, *inner)
    rb.extend(TensorDict({"x": x}, x.shape))
    return rb


def by_batch_size(sample, size):
    sample = TensorDict(dict(sample.items()), sample.batch_size)  # a lazy stack keeps its size
    sample.batch_size = size
    return sample


def untouched(rb, data, error, message):
    before, stats = buffer_state(rb), rb.stats()
    with pytest.raises(error, match=message):
        rb.update_tensordict_priority_if_present(data)
    assert buffer_state(rb) == before
    assert rb.stats() == stats


# ------------------------------------------------------------------ the inputs that showed it


@pytest.mark.parametrize("form", [lambda sample: TensorDict(sample.to_dict()), lambda sample: sample.to_dict()])
def test_a_sample_rebuilt_from_a_dict_updates_every_record(form):
    """C36: of eight TD errors one record got the largest."""
    rb = filled()
    sample = rb.sample().set("td_error", torch.arange(11.0, 19.0))
    result = rb.update_tensordict_priority_if_present(form(sample))
    assert result.updated_mask.shape == (8,)
    last = dict(zip(sample["index"].tolist(), sample["td_error"].tolist(), strict=True))
    assert leaves(rb).tolist() == [last.get(slot, 1.0) for slot in range(8)]


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("size", [[], [2]])
def test_a_batch_size_shorter_than_the_handles_updates_every_record(ndim, size):
    """C36: six of the TD errors were dropped, and with two dimensions a cell changed that was not in the batch."""
    rb = grid((4, 3, 2)[:ndim])
    sample = rb.sample().set("td_error", torch.arange(11.0, 19.0)).reshape(2, 4)
    result = rb.update_tensordict_priority_if_present(by_batch_size(sample, size))
    assert result.updated_mask.shape == (2, 4)
    held = leaves(rb)
    for place, error in zip(sample["x"].flatten().tolist(), sample["td_error"].flatten().tolist(), strict=True):
        expected = [e for p, e in zip(sample["x"].flatten(), sample["td_error"].flatten(), strict=True) if p == place]
        assert held[place] == expected[-1]
        assert error in expected
    drawn = set(sample["x"].flatten().tolist())
    assert all(held[place] == 1.0 for place in range(torch.Size((4, 3, 2)[:ndim]).numel()) if place not in drawn)


# ------------------------------------------------------------------ any rebuild of any sample, against an oracle

FLAT_STEPS = {
    "unsqueeze": lambda draw, td: td.unsqueeze(draw(st.integers(0, td.ndim))),
    "reshape": lambda draw, td: td.reshape(draw(st.sampled_from(factorisations(td.numel())))),
    "permute": lambda draw, td: td.permute(draw(st.permutations(range(td.ndim)))),
    "expand": lambda draw, td: td.expand(draw(st.integers(1, 2)), *td.shape),
    "index": lambda draw, td: td[draw(st.lists(st.integers(0, td.shape[0] - 1), min_size=1, max_size=4))],
    "narrow": lambda draw, td: td[: draw(st.integers(1, td.shape[0]))],
    "pick": lambda draw, td: td[draw(st.integers(0, td.shape[0] - 1))],
    "last dim": lambda draw, td: td[..., draw(st.integers(0, td.shape[-1] - 1))],
    "stack": lambda draw, td: torch.stack([td, td.clone()], draw(st.integers(0, td.ndim))),
    "lazy stack": lambda draw, td: lazy_stack([td, td.clone()], draw(st.integers(0, td.ndim))),
    "chunk": lambda draw, td: torch.cat(list(td.chunk(2, 0))[::-1], 0),
    "squeeze": lambda draw, td: td.squeeze() if td.numel() > 1 else td,  # tensordict fails there
    "contiguous": lambda draw, td: td.contiguous(),
}


def factorisations(count):
    pairs = [(a, count // a) for a in range(1, count + 1) if count % a == 0]
    return [(count,), *pairs, *((1, a, b) for a, b in pairs), *((a, 1, b) for a, b in pairs)]


@st.composite
def layouts(draw):
    """Space, dimensions of a record, heads behind a TD error, and how often to write before and after the draw."""
    shape = draw(st.sampled_from([(8,), (4, 2), (2, 2, 2)]))
    inner = draw(st.sampled_from([(), (), (3,), (2, 3)])) if len(shape) == 1 else ()
    return shape, inner, draw(st.sampled_from([(), (), (1,), (3,)])), draw(st.integers(0, shape[0]))


def with_errors(td, heads, next_error=100):
    """Each row of the batch gets TD errors of its own, so that a leaf says whence it is."""
    count = td.batch_size.numel() * torch.Size(heads).numel()
    return td.copy().set(E, torch.arange(next_error, next_error + count).float().reshape((*td.batch_size, *heads)))


def possible(td, row_shape, cell_of, heads, reduction):
    """For each cell in the batch, what its leaf may be: the last of its rows, or a reduction over all of them."""
    errors = td["td_error"].reshape(len(row_shape), -1)
    found = {}
    for place, error in zip(row_shape, errors, strict=True):
        found.setdefault(cell_of(place), []).append(error)
    allowed = {}
    for cell, each in found.items():
        rows = torch.stack(each)
        reduced = _reduce(rows, reduction, dim=-1)
        allowed[cell] = {reduced[-1].item(), _reduce(reduced, reduction, dim=0).item()}
        allowed[cell].add(_reduce(rows.reshape(-1), reduction, dim=0).item())
        # the rows that are the steps of one trajectory at a time
        for size in range(1, len(each)):
            if len(each) % size == 0:
                part = _reduce(rows[-size:].reshape(-1), reduction, dim=0)
                allowed[cell] |= {part.item(), _reduce(reduced[-size:], reduction, dim=0).item()}
    return allowed


@settings(max_examples=120, deadline=None)
@given(st.data(), layouts(), st.sampled_from(["max", "min", "mean", "median", "sum"]))
def test_whatever_is_done_to_a_sample_each_td_error_reaches_its_record_or_none(data, layout, reduction):
    shape, inner, heads, overwritten = layout
    rb = grid(shape, inner, reduction=reduction, batch_size=data.draw(st.integers(1, 8)))
    sample = rb.sample()
    if overwritten:
        fresh = torch.full((overwritten, *shape[1:], *inner), -1)
        rb.extend(TensorDict({"x": fresh}, fresh.shape))
    per_record = torch.Size(inner).numel()
    for name in data.draw(st.lists(st.sampled_from(sorted(FLAT_STEPS)), max_size=3)):
        if sample.ndim:
            sample = FLAT_STEPS[name](data.draw, sample)
    sample = with_errors(sample, heads)
    places = sample["x"].reshape(-1).tolist()
    allowed = possible(sample, places, lambda place: place // per_record, heads, reduction)
    rows = torch.Size(shape[1:]).numel()
    stale = {cell for cell in allowed if cell // rows < overwritten}
    size = data.draw(st.integers(0, sample.ndim))
    form = data.draw(st.sampled_from(["as it is", "batch size", "dict", "tensordict of a dict"]))
    if form == "batch size":
        sample = by_batch_size(sample, sample.batch_size[:size])
    elif form == "dict":
        sample = sample.to_dict()
    elif form == "tensordict of a dict":
        sample = TensorDict(sample.to_dict())
    before = leaves(rb).tolist()
    result = rb.update_tensordict_priority_if_present(sample)
    assert (result.num_updated == 0) == (stale == set(allowed))
    for cell, leaf in enumerate(leaves(rb).tolist()):
        if cell in allowed and cell not in stale:
            assert any(leaf == pytest.approx(value, rel=1e-6) for value in allowed[cell]), (cell, leaf, allowed[cell])
        else:
            assert leaf == before[cell]


# ------------------------------------------------------------------ what cannot be told


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.set(E, torch.rand(2)),  # one for each row of four
        lambda s: s.set(E, torch.rand(2, 3)),
        lambda s: s.set(E, torch.rand(2, 1)),
        lambda s: TensorDict({**s.to_dict(), E: torch.rand(4, 2)}),
        lambda s: TensorDict({**s.to_dict(), E: torch.rand(8)}),
        lambda s: TensorDict({**s.to_dict(), E: torch.rand(1, 2, 4)}),  # heads in front
        lambda s: TensorDict({**s.to_dict(), E: torch.rand(())}),  # the loss
        lambda s: TensorDict({**s.to_dict(), E: torch.rand(1)}),
        lambda s: s.set("index", s["index"][:, 0]),
        lambda s: TensorDict({**s.to_dict(), "index": s["index"].reshape(8)}),
        lambda s: TensorDict({**s.to_dict(), "index": s["index"].T}),
        lambda s: s.set("index", s["index"].unsqueeze(-1).expand(2, 4, 2)),
        lambda s: s.set("index_generation", s["index_generation"][:, 0]),
        lambda s: s.set("index_generation", s["index_generation"].unsqueeze(1)),
        lambda s: TensorDict({**s.to_dict(), "index_generation": s["index_generation"][0, 0]}),
    ],
)
def test_handles_and_errors_whose_shapes_disagree_are_refused(change):
    rb = filled()
    sample = by_batch_size(rb.sample().set(E, torch.rand(8)).reshape(2, 4), [2])
    untouched(rb, change(sample), ValueError, f"{CANNOT_TELL} from the shapes 'td_error' .* Nothing was updated. Resh")


def test_the_message_gives_the_shapes():
    rb = filled()
    sample = by_batch_size(rb.sample().reshape(2, 4), [2]).set(E, torch.rand(2))
    shapes = r"'td_error' \(2,\), 'index_generation' \(2, 4\), 'index' \(2, 4\)"
    untouched(rb, sample, ValueError, shapes)


def test_no_error_for_any_row_is_refused():
    rb = filled()
    untouched(rb, rb.sample().set(E, torch.rand(8, 0)), ValueError, "no TD error for any row")


def test_what_is_no_sample_is_refused():
    for data in ([1, 2], None, torch.ones(3)):
        untouched(filled(), data, TypeError, "needs a sample, as a tensordict or a dict, got")


def test_a_dimension_of_size_one_does_not_have_to_be_in_the_errors():
    rb = filled()
    sample = by_batch_size(rb.sample().unsqueeze(-1), [8]).set(E, torch.arange(11.0, 19.0))
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 8
    last = dict(zip(sample["index"].flatten().tolist(), sample[E].tolist(), strict=True))
    assert leaves(rb).tolist() == [last.get(slot, 1.0) for slot in range(8)]


def test_the_path_of_a_trainer_goes_by_the_handles_too():
    rb = filled(conditional_updates=True)
    sample = rb.sample().set(E, torch.arange(11.0, 19.0))
    rb.update_tensordict_priority(TensorDict(sample.to_dict()))
    last = dict(zip(sample["index"].tolist(), sample[E].tolist(), strict=True))
    assert leaves(rb).tolist() == [last.get(slot, 1.0) for slot in range(8)]
    before = buffer_state(rb)
    with pytest.raises(ValueError, match=CANNOT_TELL):
        rb.update_tensordict_priority(TensorDict({**sample.to_dict(), E: torch.rand(())}))
    assert buffer_state(rb) == before


# ------------------------------------------------------------------ trajectories stored as records


def test_trajectories_take_their_errors_in_every_shape():
    sample = grid((8,), (3,)).sample()
    errors = torch.arange(1.0, 25.0).reshape(8, 3)
    expected = {}
    for slot, error in zip(sample["index"][:, 0].tolist(), errors, strict=True):
        expected[slot] = error.max().item()
    for batch in (
        sample.set(E, errors),
        by_batch_size(sample, [8]).set(E, errors),
        by_batch_size(sample, [8]).set(E, errors.max(-1).values),
        by_batch_size(sample, []).set(E, errors.unsqueeze(-1).expand(8, 3, 2)),
    ):
        rb = grid((8,), (3,))
        result = rb.update_tensordict_priority_if_present(batch)
        assert result.updated_mask.shape == (8,)
        held = leaves(rb).tolist()
        assert [held[slot] for slot in expected] == pytest.approx(list(expected.values()))


@pytest.mark.parametrize("reduction", ["max", "sum", "mean"])
def test_the_parts_of_a_trajectory_in_several_rows_are_reduced_together(reduction):
    sample = grid((4,), (6,), batch_size=4).sample()
    errors = torch.arange(1.0, 25.0).reshape(4, 6)
    sample = by_batch_size(sample[:1].set(E, errors[:1]).reshape(3, 2), [3])
    rb = grid((4,), (6,), reduction=reduction, batch_size=4)
    rb.update_tensordict_priority_if_present(sample)
    slot = sample["index"][0, 0].item()
    assert leaves(rb)[slot].item() == pytest.approx(_reduce(errors[0], reduction, dim=0).item())


def test_an_error_per_step_of_many_trajectories_is_refused():
    rb = grid((8,), (3,))
    steps_first = by_batch_size(rb.sample().permute(1, 0), [3]).set(E, torch.rand(3))
    untouched(rb, steps_first, ValueError, CANNOT_TELL)


# ------------------------------------------------------------------ sample units


@pytest.mark.parametrize("ndim", [1, 2])
def test_the_anchors_of_a_rebuilt_sequence_get_the_largest_error_of_theirs(ndim):
    shape = (20,) if ndim == 1 else (10, 2)

    def make():
        rb = prioritized(
            20, storage=g.GenerationalLazyTensorStorage(20, ndim=ndim), batch_size=4, sample_unit=Sequence(length=3)
        )
        done = torch.zeros(*shape, 1, dtype=torch.bool)
        rb.extend(TensorDict({"x": torch.arange(20).reshape(shape), ("next", "done"): done}, shape))
        return rb

    whole, rebuilt, shorter, refused = make(), make(), make(), make()
    sample = whole.sample().set(E, torch.rand(12))
    whole.update_tensordict_priority_if_present(sample)
    rebuilt.update_tensordict_priority_if_present(TensorDict(sample.to_dict()))
    shorter.update_tensordict_priority_if_present(by_batch_size(sample.reshape(4, 3), [4]))
    assert leaves(whole).tolist() == leaves(rebuilt).tolist() == leaves(shorter).tolist() != leaves(refused).tolist()
    sample = by_batch_size(sample.reshape(4, 3), [4])
    before = sampler_state(refused)
    for entry, value in ((E, torch.rand(4)), ("validity_mask", torch.ones(4, dtype=torch.bool))):
        with pytest.raises(ValueError, match=CANNOT_TELL):
            refused.update_tensordict_priority_if_present(sample.copy().set(entry, value))
    assert sampler_state(refused) == before


# ------------------------------------------------------------------ slices, whose index has a dimension more


@pytest.mark.parametrize("form", ["as it is", "dict", "batch size", "rows of four"])
def test_slices_keep_their_errors_in_every_shape(form):
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(16),
        sampler=g.GenerationalPrioritizedSliceSampler(
            16, alpha=1.0, beta=1.0, eps=0.0, slice_len=4, traj_key="trajectory", strict_length=False
        ),
        batch_size=8,
        generator=torch.Generator().manual_seed(0),
    )
    rb.extend(records(16, trajectory=torch.arange(16) // 8))
    sample = rb.sample()
    assert sample["index"].shape == (8, 1)
    sample.set(E, torch.arange(11.0, 19.0))
    batch = {
        "as it is": lambda: sample,
        "dict": sample.to_dict,
        "batch size": lambda: by_batch_size(sample, []),
        "rows of four": lambda: by_batch_size(sample.reshape(2, 4), [2]),
    }[form]()
    assert rb.update_tensordict_priority_if_present(batch).num_updated == 8
    last = dict(zip(sample["x"].tolist(), sample[E].tolist(), strict=True))
    assert leaves(rb).tolist() == [last.get(slot, 1.0) for slot in range(16)]
    for change in (
        {E: torch.ones(2)},
        {"index": sample["index"].reshape(1, 8)},
        {"index": sample["index"].expand(8, 8)},
        {"index_generation": sample["index_generation"][:4]},
    ):
        before = leaves(rb).tolist()
        with pytest.raises(ValueError, match=CANNOT_TELL):
            rb.update_tensordict_priority_if_present({**sample.to_dict(), **change})
        assert leaves(rb).tolist() == before


# ------------------------------------------------------------------ handles in the call itself


def test_an_error_for_each_row_of_several_records_is_refused():
    rb = filled()
    index = torch.arange(8).reshape(2, 4)
    generation = torch.zeros_like(index)
    before = buffer_state(rb)
    for priority in (torch.ones(2), torch.ones(2, 1)):
        with pytest.raises(ValueError, match=r"priority has shape \(2.*\) but the handles have shape \(2, 4\)"):
            rb.update_priority_if_present(index=index, generation=generation, priority=priority)
    for fewer in (index[:, 0], index[:, :1], (index[:, 0],)):
        with pytest.raises(ValueError, match=r"but generation has shape \(2, 4\)"):
            rb.update_priority_if_present(index=fewer, generation=generation, priority=1.0)
    assert buffer_state(rb) == before


def test_a_patch_in_another_order_than_its_handles_is_refused():
    rb = filled()
    index = torch.arange(8).reshape(2, 4)
    generation = torch.zeros_like(index)
    before = buffer_state(rb)
    for shape in ((4, 2), (8,), (2,), (), (2, 4, 2)):
        patch = {"x": torch.full(shape, 7)}
        for given_patch in (patch, TensorDict(patch)):
            with pytest.raises(ValueError, match="shape mismatch for patch key 'x'.*Pass one value per handle"):
                rb.update_if_present(index=index, generation=generation, patch=given_patch)
    assert buffer_state(rb) == before
    patch = {"x": torch.arange(8).reshape(2, 4, 1) + 50}
    assert rb.update_if_present(index=index, generation=generation, patch=patch).updated_mask.shape == (2, 4)
    assert rb.storage._storage["x"].tolist() == list(range(50, 58))


# ------------------------------------------------------------------ ensembles and other containers


def test_a_rebuilt_sample_of_an_ensemble_updates_every_record():
    def make():
        members = [filled(), filled()]
        return g.GenerationalReplayBufferEnsemble(*members, batch_size=8, generator=torch.Generator().manual_seed(3))

    sample = make().sample().set(E, torch.arange(11.0, 19.0).reshape(2, 4))
    for form in (
        lambda s: TensorDict(s.to_dict()),
        lambda s: s.to_dict(),
        lambda s: by_batch_size(s, [2]),
        lambda s: by_batch_size(s, []),
        lambda s: by_batch_size(s.reshape(8), []),
        lambda s: s.permute(1, 0),
    ):
        rb, given_sample = make(), form(sample)
        rb.update_tensordict_priority_if_present(given_sample)
        flat = (given_sample["index"]["buffer_ids"], given_sample["index"]["index"], given_sample[E])
        rows = zip(*(entry.flatten().tolist() for entry in flat), strict=True)
        expected = {(member, slot): error for member, slot, error in rows}  # the last of each
        for number in range(2):
            assert leaves(rb[number]).tolist() == [expected.get((number, slot), 1.0) for slot in range(8)]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.set(E, torch.rand(2)),
        lambda s: TensorDict({**s.to_dict(), "index": {**s["index"].to_dict(), "index": s["index", "index"][:, 0]}}),
        lambda s: s.set("index_generation", s["index_generation"].reshape(2, 2, 2)),
        lambda s: TensorDict({**s.to_dict(), E: torch.rand(8)}),
        lambda s: TensorDict({**s.to_dict(), E: torch.rand(4, 2)}),
    ],
)
def test_disagreeing_shapes_of_an_ensembles_sample_are_refused(change):
    rb = g.GenerationalReplayBufferEnsemble(filled(), filled(), batch_size=8)
    sample = rb.sample().set(E, torch.rand(2, 4))
    sample = by_batch_size(sample, [2])
    before = [buffer_state(rb[number]) for number in range(2)]
    with pytest.raises(ValueError, match=CANNOT_TELL):
        rb.update_tensordict_priority_if_present(change(sample))
    assert [buffer_state(rb[number]) for number in range(2)] == before


def test_disagreeing_shapes_of_handles_of_an_ensemble_are_refused():
    rb = g.GenerationalReplayBufferEnsemble(filled(), filled(), batch_size=8)
    sample = rb.sample()
    index, generation = sample["index"], sample["index_generation"]
    before = [buffer_state(rb[number]) for number in range(2)]
    with pytest.raises(ValueError, match=r"priority has shape \(2,\) but the handles have shape \(2, 4\)"):
        rb.update_priority_if_present(index=index, generation=generation, priority=torch.ones(2))
    with pytest.raises(ValueError, match=r"buffer_ids has shape \(2, 4\) but generation has shape \(4, 2\)"):
        rb.update_if_present(index=index, generation=generation.T, patch={"x": torch.ones(2, 4, dtype=torch.int64)})
    with pytest.raises(ValueError, match="priority has shape"):
        rb.update_priority(index, torch.ones(2))
    assert [buffer_state(rb[number]) for number in range(2)] == before


@tensorclass
class Batch:
    index: torch.Tensor
    index_generation: torch.Tensor
    td_error: torch.Tensor


def test_a_tensorclass_with_the_three_entries_is_a_sample():
    rb = filled()
    index = torch.tensor([[1, 2], [3, 4]])
    errors = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    batch = Batch(index=index, index_generation=torch.zeros_like(index), td_error=errors, batch_size=[2])
    assert rb.update_tensordict_priority_if_present(batch).updated_mask.shape == (2, 2)
    assert leaves(rb).tolist() == [1, 5, 6, 7, 8, 1, 1, 1]


# ------------------------------------------------------------------ generations of another dtype

CASTS = {
    "int32": lambda stamps: stamps.int(),
    "uint8": lambda stamps: stamps.to(torch.uint8),
    "uint64": lambda stamps: stamps.to(torch.uint64),
    "float64": lambda stamps: stamps.double(),
    "bool": lambda stamps: stamps.bool(),
    "an int32 array": lambda stamps: stamps.int().numpy(),
    "a uint64 array": lambda stamps: stamps.numpy().astype("uint64"),
    "a list of int32 arrays": lambda stamps: list(stamps.int().numpy()),
    "a list of floats": lambda stamps: stamps.double().tolist(),
    "a list of bools": lambda stamps: stamps.bool().tolist(),
}


def restored():
    """A buffer whose stamps do not fit into 32 bits, so that a cast hides which timeline they are of."""
    rb = filled()
    rb.load_state_dict(rb.state_dict())
    rb.extend(records(8, 100))
    return rb


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(
    "call", ["priority", "tensordict", "dict", "submit", "field", "ensemble", "ensemble field", "live"]
)
def test_a_generation_that_is_not_int64_is_refused(cast, call):
    """C40: int32 stamps of other timelines matched."""
    rb = restored()
    index, good = torch.arange(8), rb.storage.generations.clone()
    stamps = CASTS[cast](good)
    one = g.GenerationalReplayBufferEnsemble(rb, batch_size=8)
    routed = TensorDict({"index": index, "buffer_ids": torch.zeros(8, dtype=torch.int64)}, [8])
    before, stats = buffer_state(rb), rb.stats()
    calls = {
        "priority": lambda: rb.update_priority_if_present(index=index, generation=stamps, priority=9.0),
        "tensordict": lambda: rb.update_tensordict_priority_if_present(
            TensorDict({"index": index, "index_generation": torch.as_tensor(stamps), E: torch.ones(8)}, [8])
        ),
        "dict": lambda: rb.update_tensordict_priority_if_present(
            {"index": index, "index_generation": stamps, E: torch.ones(8)}
        ),
        "submit": lambda: rb.submit_update_priority_if_present(index=index, generation=stamps, priority=9.0),
        "field": lambda: rb.update_if_present(index=index, generation=stamps, patch={"x": torch.zeros_like(index)}),
        "ensemble": lambda: one.update_priority_if_present(index=routed, generation=stamps, priority=9.0),
        "ensemble field": lambda: one.update_if_present(index=routed, generation=stamps, patch={"x": index}),
        "live": lambda: rb.storage.slot_generations.live(index, torch.as_tensor(stamps)),
    }
    with pytest.raises(TypeError, match=r"generation must (hold integers of dtype int64|be int64), got"):
        outcome = calls[call]()
        if isinstance(outcome, Future):
            outcome.result(60)
    assert buffer_state(rb) == before
    assert rb.stats() == stats
    assert rb.update_priority_if_present(index=index, generation=good, priority=9.0).num_updated == 8


def test_python_ints_and_int64_arrays_are_generations():
    rb = restored()
    good = rb.storage.generations
    for stamps in (good.tolist(), tuple(good.tolist()), good.numpy(), good.numpy().astype(">i8"), list(good)):
        assert rb.update_priority_if_present(index=list(range(8)), generation=stamps, priority=2.0).num_updated == 8
