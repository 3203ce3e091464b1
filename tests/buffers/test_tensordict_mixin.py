"""Tensordict buffers: conditional updates from samples, and records born with their priority."""

from __future__ import annotations

import threading

import pytest
import torch
from support import (
    TIMEOUT,
    announce_blocked,
    buffer_state,
    filled,
    leaves,
    prioritized,
    records,
    sampler_state,
    until_blocked_or_done,
)
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, Sequence, TensorDictPrioritizedReplayBuffer
from torchrl.envs.transforms import Transform

import torchrl_generational as g

# ------------------------------------------------------------------ updates from samples


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 3)])
def test_td_errors_are_reduced_as_by_the_raw_twin(shape):
    raw, conditional = filled(), filled()
    sample = raw.sample()
    td_error = torch.rand(shape)
    raw.update_tensordict_priority(sample.set("td_error", td_error))
    result = conditional.update_tensordict_priority_if_present(sample)
    assert result.updated_mask.tolist() == [True] * 8
    assert sampler_state(raw) == sampler_state(conditional)


@pytest.mark.parametrize("reduction", ["max", "min", "mean", "median", "sum"])
def test_a_stored_trajectory_is_reduced_to_one_priority(reduction):
    raw, conditional = (prioritized(8, reduction=reduction) for _ in range(2))
    for rb in (raw, conditional):
        rb.extend(TensorDict({"x": torch.zeros(8, 5)}, [8, 5]))
    sample = raw.sample().set("td_error", torch.rand(8, 5))
    raw.update_tensordict_priority(sample)
    result = conditional.update_tensordict_priority_if_present(sample)
    assert result.updated_mask.shape == (8,)
    assert sampler_state(raw) == sampler_state(conditional)


def test_coordinates_of_a_sample_are_read_as_by_the_raw_twin():
    raw, conditional = (prioritized(12, storage=g.GenerationalLazyTensorStorage(12, ndim=2)) for _ in range(2))
    for rb in (raw, conditional):
        rb.extend(TensorDict({"x": torch.arange(12).reshape(3, 4)}, [3, 4]))
    sample = raw.sample().set("td_error", torch.rand(8))
    raw.update_tensordict_priority(sample)
    assert conditional.update_tensordict_priority_if_present(sample).num_stale == 0
    assert sampler_state(raw) == sampler_state(conditional)


@pytest.mark.parametrize("reshape", [(2, 4), (4, 2, 1), (8, 1)])
def test_a_reshaped_batch_updates_every_record(reshape):
    rb = filled()
    sample = rb.sample().reshape(reshape)
    sample["td_error"] = torch.arange(11.0, 19.0).reshape(*reshape, 1)
    result = rb.update_tensordict_priority_if_present(sample)
    assert result.updated_mask.shape == reshape
    last = dict(zip(sample["index"].flatten().tolist(), sample["td_error"].flatten().tolist(), strict=True))
    assert leaves(rb).tolist() == [last.get(slot, 1.0) for slot in range(8)]


def test_parts_of_a_sample_update_their_records():
    rb = filled()
    sample = rb.sample().set("td_error", torch.full((8,), 5.0))
    assert rb.update_tensordict_priority_if_present(sample[2]).updated_mask.shape == ()
    assert leaves(rb)[sample["index"][2]] == 5.0
    assert rb.update_tensordict_priority_if_present(sample[3:6]).num_updated == 3


@pytest.mark.parametrize("missing", ["index", "index_generation", "td_error"])
def test_a_missing_entry_is_named(missing):
    rb = filled()
    sample = rb.sample().set("td_error", torch.ones(8))
    before = sampler_state(rb)
    with pytest.raises(KeyError, match=f"reads the entry '{missing}', and the data has only"):
        rb.update_tensordict_priority_if_present(sample.exclude(missing))
    assert sampler_state(rb) == before


def test_a_nested_priority_key_is_read():
    rb = prioritized(8, priority_key=("loss", "td"))
    rb.extend(records(8))
    sample = rb.sample().set(("loss", "td"), torch.full((8,), 3.0))
    rb.update_tensordict_priority_if_present(sample)
    assert leaves(rb)[sample["index"].unique()].unique().tolist() == [3.0]


@pytest.mark.parametrize("ndim", [1, 2])
def test_an_expanded_sample_updates_its_anchors(ndim):
    storage = g.GenerationalLazyTensorStorage(20, ndim=ndim)
    raw, conditional = (
        prioritized(20, storage=made, batch_size=4, sample_unit=Sequence(length=3))
        for made in (storage, g.GenerationalLazyTensorStorage(20, ndim=ndim))
    )
    shape = (20,) if ndim == 1 else (2, 10)
    done = torch.zeros(*shape, 1, dtype=torch.bool)
    for rb in (raw, conditional):
        rb.extend(TensorDict({"x": torch.arange(20).reshape(shape), ("next", "done"): done}, shape))
    sample = raw.sample()
    assert sample.shape == sample["anchor_generation"].shape == (12,)
    sample["td_error"] = torch.rand(12)
    raw.update_tensordict_priority(sample)
    result = conditional.update_tensordict_priority_if_present(sample)
    assert result.updated_mask.tolist() == [True] * 12
    assert leaves(raw).tolist() == leaves(conditional).tolist()

    conditional.extend(TensorDict({"x": torch.arange(20).reshape(shape), ("next", "done"): done}, shape))
    before = sampler_state(conditional)
    assert conditional.update_tensordict_priority_if_present(sample).num_stale == 12
    assert sampler_state(conditional) == before


# ------------------------------------------------------------------ writing


def between_record_and_priority(rb, monkeypatch, act):
    """Runs ``act`` at the point where stock has let go of the lock, the record written and its priority not yet."""
    done = []

    def hooked(original):
        def hook(*args, **kwargs):
            result = original(*args, **kwargs)
            if not done:
                done.append(True)
                act()
            return result

        return hook

    for name in ("_set_index_in_td", "_extend", "_add"):  # stock passes the first, ours the others
        monkeypatch.setattr(rb, name, hooked(getattr(rb, name)))


class Rival:
    """Another thread that acts as soon as the lock lets it."""

    def __init__(self, rb, actors, act):
        self.rb, self.actors, self.act = rb, actors, act

    def strike(self):
        """Returns once the rival is through, or waits at the lock."""
        lock = getattr(self.rb.storage, "lock", None)
        blocked = threading.Event() if lock is None else announce_blocked(lock, "rival")
        self.future = self.actors.start("rival", self.act)
        until_blocked_or_done(blocked, self.future)

    def finish(self):
        self.future.result(TIMEOUT)


def stock(capacity=8):
    return TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(capacity), batch_size=8)


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_no_writer_comes_between_a_record_and_its_first_priority(kind, monkeypatch, actors):
    """C06: in stock the older priority lands on the newer record."""
    rb = prioritized(8) if kind == "ours" else stock()
    rb.extend(records(8))
    rival = Rival(rb, actors, lambda: rb.extend(records(8, 100, td_error=torch.full((8,), 2.0))))
    between_record_and_priority(rb, monkeypatch, rival.strike)
    rb.extend(records(8, 50, td_error=torch.full((8,), 7.0)))
    rival.finish()
    assert rb[:]["x"].tolist() == list(range(100, 108))
    born = [2.0] * 8
    assert (leaves(rb).tolist() == born) == (kind == "ours")


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_no_update_comes_between_a_record_and_its_first_priority(kind, monkeypatch, actors):
    """C07: in stock the second step of add erases it."""
    rb = prioritized(8) if kind == "ours" else stock()
    rb.extend(records(3))
    rival = Rival(rb, actors, lambda: rb.update_priority(torch.tensor([3]), torch.tensor([0.5])))
    between_record_and_priority(rb, monkeypatch, rival.strike)
    rb.add(records(1, 50, td_error=torch.tensor([7.0]))[0])
    rival.finish()
    assert (leaves(rb)[3].item() == 0.5) == (kind == "ours")


@pytest.mark.parametrize("path", ["extend", "add"])
@pytest.mark.parametrize(
    ("bad", "message"), [(float("nan"), "got nan"), (-1.0, "got -1.0"), (float("inf"), "got inf"), (1e38, "too large")]
)
def test_a_first_priority_that_no_tree_can_hold_is_refused_before_the_write(path, bad, message):
    rb = filled(4)
    before = buffer_state(rb)
    data = records(2, 50, td_error=torch.tensor([1.0, bad]))
    with pytest.raises(ValueError, match=f"entry 'td_error'.*{message}"):
        rb.extend(data) if path == "extend" else rb.add(data[1])
    assert buffer_state(rb) == before


def test_first_priorities_of_the_wrong_number_are_refused_before_the_write():
    rb = filled(4)
    before = buffer_state(rb)
    with pytest.raises(
        RuntimeError, match=r"Failed to update priority of extended data: 2 records came with 'td_error'"
    ):
        rb.extend(records(2, td_error=torch.ones(2, 3)))
    assert buffer_state(rb) == before
    rb.extend(records(2, td_error=torch.ones(2, 3)), update_priority=False)


def test_first_priorities_reach_the_tree_in_every_layout():
    rb = prioritized(4)
    rb.extend(records(2, td_error=torch.tensor([[2.0], [3.0]])))
    rb.add(records(1, td_error=torch.tensor([4.0]))[0])
    assert leaves(rb)[:3].tolist() == [2, 3, 4]
    rb = prioritized(6, storage=g.GenerationalLazyTensorStorage(6, ndim=2))
    td_error = torch.arange(1.0, 7.0).reshape(2, 3)
    rb.extend(TensorDict({"x": td_error.clone(), "td_error": td_error}, [2, 3]))
    assert leaves(rb)[:6].tolist() == rb.storage._storage["x"].flatten().tolist()


@pytest.mark.parametrize("path", ["extend", "add", "setitem", "write_all", "write_at"])
def test_a_sample_written_back_is_a_new_record_and_stores_no_handle(path):
    """C32."""
    rb = filled()
    sample = rb.sample()
    handle = sample["index"].clone(), sample["index_generation"].clone()
    stamps = rb.storage.generations.clone()
    if path == "extend":
        rb.extend(sample[:3])
    elif path == "add":
        rb.add(sample[0])
    elif path == "setitem":
        rb[0:3] = sample[:3].exclude("priority_weight")
    elif path == "write_all":
        rb.write_all(sample.exclude("priority_weight"))
    else:
        rb.writer.write_at(torch.arange(3), sample[:3].clone())
    assert set(rb.storage._storage.keys()) - {"priority_weight"} == {"x", "index"}
    assert rb.storage._storage["index"].tolist() == list(range(8)) or path in ("setitem", "write_all")
    assert (rb.storage.generations != stamps)[0]
    # the caller's batch still names the records that it was drawn from
    assert torch.equal(sample["index"], handle[0])
    assert torch.equal(sample["index_generation"], handle[1])
    sample["td_error"] = torch.full((8,), 6.0)
    result = rb.update_tensordict_priority_if_present(sample)
    assert torch.equal(result.updated_mask, (rb.storage.generations == stamps)[sample["index"]])


def test_the_handles_of_a_sample_that_is_the_very_first_record_are_not_stored():
    rb = prioritized(8)
    rb.extend(filled().sample())
    assert "index_generation" not in rb.storage._storage
    sample = rb.sample()
    assert torch.equal(sample["index_generation"], rb.storage.generations[sample["index"]])


class Watch(Transform):
    """Records how deep the lock is held when data is written through it; may withhold the data."""

    def __init__(self, lock, withhold=False):
        super().__init__()
        self.lock, self.withhold, self.depths = lock, withhold, []

    def _inv_call(self, tensordict):
        self.depths.append(self.lock._depth)
        return None if self.withhold else tensordict


def test_inverse_transforms_run_before_the_lock_is_taken():
    rb = prioritized(8)
    watch = Watch(rb.storage.lock)
    rb.append_transform(watch)
    rb.extend(records(2))
    rb.add(records(1)[0])
    assert watch.depths == [0, 0]
    assert len(rb) == 3


def test_a_transform_may_withhold_the_data():
    rb = prioritized(8)
    rb.append_transform(Watch(rb.storage.lock, withhold=True))
    assert rb.extend(records(2)).shape == (0, 1)
    assert rb.add(records(1)[0]).shape == (0, 1)
    assert len(rb) == 0


def test_data_that_is_no_tensordict_is_refused_as_by_torchrl():
    with pytest.raises(ValueError, match="only accepts TensorDictBase subclasses"):
        prioritized(8).extend(torch.arange(3))


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2), (3, 2), (2, 2, 1), (1, 2, 3), (3, 1, 1)])
@pytest.mark.parametrize("dim_extend", [0, 1])
def test_records_of_every_layout_are_born_with_their_priority(shape, dim_extend):
    """Stock fails where a row has as many cells as the data has leading elements, after it has written the record."""
    ndim, cells = len(shape), torch.Size(shape).numel()
    rb = prioritized(cells, storage=g.GenerationalLazyTensorStorage(cells, ndim=ndim), dim_extend=dim_extend)
    td_error = torch.arange(1.0, cells + 1).reshape(shape)
    rb.extend(TensorDict({"x": td_error.clone(), "td_error": td_error}, shape))
    assert leaves(rb)[:cells].tolist() == rb.storage._storage["x"].flatten().tolist()
    row = td_error.select(dim_extend, 0).reshape(rb.storage._storage["x"].shape[1:]) + 50
    rb.add(TensorDict({"x": row.clone(), "td_error": row}, row.shape))
    assert rb.storage._storage["x"][0].tolist() == row.tolist()
    assert leaves(rb)[:cells].tolist() == rb.storage._storage["x"].flatten().tolist()


def test_a_row_added_with_several_errors_per_cell_is_reduced():
    rb = prioritized(4, storage=g.GenerationalLazyTensorStorage(4, ndim=2))
    rb.add(TensorDict({"x": torch.zeros(2), "td_error": torch.tensor([[1.0, 5.0], [7.0, 2.0]])}, [2]))
    assert leaves(rb)[:2].tolist() == [5, 7]
