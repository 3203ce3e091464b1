"""Exchanged parts, work in flight, first use by many threads, and subclasses: what a review found, kept as tests."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from support import TIMEOUT, announce_blocked, buffer_state, filled, leaves, prioritized, records, until_blocked_or_done
from tensordict import TensorDict
from torchrl.data import (
    ConsumingSampler,
    HERReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    Sequence,
    TensorStorage,
)

import torchrl_generational as g
from torchrl_generational.records import record_io as stored_records

# ------------------------------------------------------------------ work in flight


def held_sample(rb, monkeypatch):
    """Makes the next draw wait in its section until the returned event is set."""
    drawing, go_on = threading.Event(), threading.Event()
    original = rb.sampler.sample

    def sample(*args):
        if not drawing.is_set():
            drawing.set()
            assert go_on.wait(TIMEOUT)
        return original(*args)

    monkeypatch.setattr(rb.sampler, "sample", sample)
    return drawing, go_on


@pytest.mark.parametrize("act", ["empty", "set_storage"])
def test_a_batch_that_is_being_prefetched_is_waited_for_and_dropped(act, monkeypatch, actors):
    rb = filled(prefetch=2)
    rb.sample()
    rb.synchronize()
    for _ in range(2):
        rb._prefetch_queue.popleft()
    drawing, go_on = held_sample(rb, monkeypatch)
    rb._prefetch_queue.append(rb._prefetch_executor.submit(rb._sample, 8))
    assert drawing.wait(TIMEOUT)
    new = g.GenerationalLazyTensorStorage(8)
    acting = actors.start("other", rb.empty if act == "empty" else lambda: rb.set_storage(new))
    go_on.set()
    acting.result(TIMEOUT)
    assert rb.stats()["prefetch_queue_size"] == 0
    rb.extend(records(8, 100))
    assert rb.sample()["x"].min() >= 100
    rb.shutdown()


def test_an_update_in_flight_is_answered_when_the_buffer_is_emptied():
    rb = filled(64, prefetch=3)
    for _ in range(30):
        sample = rb.sample()
        future = rb.submit_update_if_present(
            index=sample["index"], generation=sample["index_generation"], patch={"x": sample["x"]}
        )
        rb.empty()
        rb.extend(records(64))
        assert future.result(TIMEOUT).updated_mask.shape == (8,)
    rb.sample()
    rb.shutdown()


# ------------------------------------------------------------------ exchange


def test_a_thread_that_waited_through_an_exchange_works_under_the_lock_of_the_new_storage(actors):
    rb, new = filled(), g.GenerationalLazyTensorStorage(8)
    sibling = prioritized(8, storage=new)
    sibling.extend(records(8, 100))
    held = []
    original = new.get
    new.get = lambda index: held.append(new.lock._threads._is_owned()) or original(index)
    with rb.storage.lock:
        blocked = announce_blocked(rb.storage.lock, "learner")
        sample = actors.start("learner", rb.sample)
        until_blocked_or_done(blocked, sample)
        rb.set_storage(new)
        rb.sampler.mark_update(torch.arange(8), storage=new)
    assert sample.result(TIMEOUT)["x"].min() >= 100
    assert held == [True]


def test_an_update_whose_storage_is_exchanged_before_its_section_begins_again(monkeypatch):
    from torchrl_generational.buffers import priority_updates

    rb = filled()
    sample = rb.sample()
    new = g.GenerationalLazyTensorStorage(8)
    for _ in range(3):
        new.set(range(8), records(8, 100))
    original, once = priority_updates.checked_priority, []

    def exchange(*args, **kwargs):
        if not once:
            once.append(rb.set_storage(new))
            rb.sampler.mark_update(torch.arange(8), storage=new)
        return original(*args, **kwargs)

    monkeypatch.setattr(priority_updates, "checked_priority", exchange)
    result = rb.update_priority_if_present(index=sample["index"], generation=sample["index_generation"], priority=50.0)
    assert result.num_stale == 8
    assert leaves(rb).tolist() == [1] * 8


def test_an_exchange_that_torchrl_refuses_changes_nothing():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), consume_after_n_samples=1, batch_size=2
    )
    storage = rb.storage
    with pytest.raises(ValueError, match="only supports 1-dimensional storages"):
        rb.set_storage(g.GenerationalLazyTensorStorage(8, ndim=2))
    assert rb.storage is storage
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), prefetch=2, batch_size=2, sampler=RandomSampler()
    )
    sampler = rb.sampler
    with pytest.raises(ValueError, match="Prefetching is not supported"):
        rb.set_sampler(ConsumingSampler(1))
    assert rb.sampler is sampler
    rb.shutdown()


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # TorchRL's sampler, on coordinates
@pytest.mark.parametrize("path", ["extend", "add"])
def test_a_first_write_that_would_outgrow_a_stock_sampler_is_refused(path):
    """C10: the storage rounds its capacity up to whole rows, and the trees do not check bounds."""

    def grid(capacity):
        return g.GenerationalTensorDictReplayBuffer(
            storage=g.GenerationalLazyTensorStorage(capacity, ndim=2),
            sampler=PrioritizedSampler(capacity, 1.0, 1.0),
            batch_size=4,
        )

    rb = grid(16)
    data = TensorDict({"x": torch.zeros(5, 4)}, [5, 4])  # rows of five cells
    with pytest.raises(
        ValueError, match="Rows of 5 cells round the storage's capacity of 16 up to 20, and Prioritized"
    ):
        rb.extend(data) if path == "extend" else rb.add(data[:, 0])
    assert not rb.storage.initialized
    assert rb.write_count == 0
    rb = grid(20)
    rb.extend(data) if path == "extend" else rb.add(data[:, 0])
    assert len(rb) == (20 if path == "extend" else 5)


# ------------------------------------------------------------------ first use


def test_many_threads_may_be_the_first_to_use_a_buffer(actors):
    inside, go_on = threading.Event(), threading.Event()

    def slow_transform():
        inside.set()
        assert go_on.wait(TIMEOUT)
        return lambda td: td

    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), transform_factory=slow_transform, batch_size=2
    )
    first = actors.start("first", lambda: rb.extend(records(2)))
    assert inside.wait(TIMEOUT)
    assert not rb.initialized
    others = [actors.start(f"other{number}", lambda: rb.extend(records(2))) for number in range(3)]
    go_on.set()
    for future in (first, *others):
        future.result(TIMEOUT)
    assert rb.initialized
    assert len(rb) == 8


# ------------------------------------------------------------------ subclasses


def test_a_class_behind_the_mixin_whose_sampling_would_be_skipped_is_refused():
    with pytest.raises(TypeError, match="HERReplayBuffer has one of its own that would be skipped"):

        class Hindsight(g.GenerationalTensorDictReplayBufferMixin, HERReplayBuffer):
            pass


def test_a_class_in_front_of_the_mixin_may_sample_its_own_way():
    class Doubling(g.GenerationalTensorDictReplayBuffer):
        def _sample(self, batch_size):
            data, info = super()._sample(batch_size)
            return data.set("x", data["x"] * 2), info

    rb = Doubling(storage=g.GenerationalLazyTensorStorage(8), batch_size=4)
    rb.extend(records(8))
    sample = rb.sample()
    assert torch.equal(sample["x"], sample["index"] * 2)


def test_a_sampler_that_does_something_of_its_own_with_priorities_is_asked():
    class Clipping(g.GenerationalPrioritizedSampler):
        def update_priority(self, index, priority, *, storage=None):
            super().update_priority(index, torch.as_tensor(priority).clamp(max=2.0), storage=storage)

    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), sampler=Clipping(8, 1.0, 1.0), batch_size=8
    )
    rb.extend(records(8))
    rb.update_priority_if_present(index=[3], generation=[0], priority=9.0)
    assert leaves(rb)[3].item() == 2.0


# ------------------------------------------------------------------ writing


def test_a_failed_write_leaves_the_cursor_for_the_next_one(monkeypatch):
    rb = filled()
    sample = rb.sample()
    before = rb.writer._cursor, rb.write_count, len(rb)

    def full_disk(*args, **kwargs):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(TensorStorage, "set", full_disk)
        patch.setattr(stored_records, "copy", full_disk)
        with pytest.raises(OSError, match="no space left"):
            rb.extend(records(3, 100))
        with pytest.raises(OSError, match="no space left"):
            rb.add(records(1, 100)[0])
    assert (rb.writer._cursor, rb.write_count, len(rb)) == before
    # nobody knows how far the writes came: these slots hold no record, and are not drawn
    assert rb.storage.generations.tolist() == [-4, -3, -3, 0, 0, 0, 0, 0]
    assert not any((rb.sample()["index"] < 3).any() for _ in range(20))
    result = rb.update_priority_if_present(index=sample["index"], generation=sample["index_generation"], priority=9.0)
    assert torch.equal(result.stale_mask, sample["index"] < 3)
    rb.extend(records(3, 100))
    assert rb[:]["x"].tolist() == [100, 101, 102, 3, 4, 5, 6, 7]
    assert rb.storage.generations.tolist() == [3, 2, 2, 0, 0, 0, 0, 0]
    assert set(torch.cat([rb.sample()["index"] for _ in range(20)]).tolist()) == set(range(8))


def test_data_that_does_not_fit_changes_nothing_at_all():
    rb = prioritized(4)
    rb.extend(TensorDict({"a": torch.zeros(4), "b": torch.zeros(4)}, [4]))
    before = buffer_state(rb)
    bad = TensorDict({"a": torch.ones(2), "b": torch.ones(2, 7)}, [2])
    with pytest.raises(RuntimeError, match=r"The entry 'b' has shape \(2, 7\) but the storage takes \(2,\) here"):
        rb.extend(bad)
    with pytest.raises(RuntimeError, match=r"The entry 'b' has shape \(7,\) but the storage takes \(\) here"):
        rb.add(bad[0])
    assert buffer_state(rb) == before


def test_rows_may_be_written_at_places_of_a_grid():
    rb = prioritized(12, storage=g.GenerationalLazyTensorStorage(12, ndim=2))
    rb.extend(TensorDict({"x": torch.zeros(3, 2)}, [3, 2]))
    rb.writer.write_at(torch.tensor([3]), TensorDict({"x": torch.ones(1, 3)}, [1, 3]))
    assert len(rb) == 12
    assert rb.storage.generations[:, 0].tolist() == [0, 0, -1, 0]


@pytest.mark.parametrize("index", [-1, slice(-2, None), torch.tensor([0, 3]), [True, False, True, False]])
def test_item_assignment_gives_new_records_the_default_priority(index):
    rb = prioritized(8)
    rb.extend(records(4, td_error=torch.tensor([5.0, 6.0, 7.0, 50.0])))
    rb.update_priority(torch.tensor([3]), torch.tensor([2.0]))
    stamps = rb.storage.generations.clone()
    if isinstance(index, int):
        index = 3  # of eight slots: the last record
    elif isinstance(index, slice):
        index = slice(2, 4)
    elif isinstance(index, list):
        index = torch.tensor([*index, *[False] * 4])
    value = rb.storage._storage[index].clone()
    rb[index] = value
    new = rb.storage.generations != stamps
    assert new.sum() == torch.arange(8)[index].numel()
    assert leaves(rb)[new].tolist() == [50.0] * int(new.sum())


@pytest.mark.parametrize("index", [(-1, 0), (slice(-2, None), 0), (None, 0, 1)])
def test_negative_and_new_axes_stamp_the_rows_that_change(index):
    rb = g.GenerationalReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=4)
    rb.extend(torch.zeros(4, 3))
    rb[index] = 5.0
    changed = (rb.storage._storage[:4] != 0).any(-1)
    assert changed.any()
    assert torch.equal(rb.storage.generations[:4] == 1, changed)
    assert rb.storage.generations[4:].tolist() == [-1] * 4


def test_a_mask_over_rows_and_lanes_stamps_the_rows_that_change():
    rb = g.GenerationalReplayBuffer(storage=g.GenerationalLazyTensorStorage(12, ndim=2), batch_size=4)
    rb.extend(torch.zeros(3, 4, 2))  # stored as 4 rows of 3 lanes
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1, 2] = True
    rb[mask, 0] = 5.0
    changed = (rb.storage._storage != 0).flatten(1).any(-1)
    assert changed.tolist() == [False, False, True, False]
    assert torch.equal(rb.storage.generations[:, 0] == 1, changed)


def test_positions_given_as_a_matrix_are_written_as_they_are():
    storage = g.GenerationalTensorStorage(torch.zeros(3))
    storage.set(torch.tensor([[0, 1], [1, 2]]), torch.ones(2, 2))
    assert storage.generations.tolist() == [1, 2, 1]


def test_emptying_passes_over_entities_without_a_writer():
    class Watcher:
        def mark_update(self, index):
            pass

    rb = filled()
    rb.storage.attach(Watcher())
    rb.empty()
    assert len(rb) == 0


# ------------------------------------------------------------------ updates


@pytest.mark.parametrize("bad", [torch.ones(8, dtype=torch.bool), torch.ones(8, dtype=torch.complex64)])
def test_td_errors_of_the_wrong_kind_are_refused_before_they_are_reduced(bad):
    rb = filled()
    sample = rb.sample().set("td_error", bad)
    before = buffer_state(rb)
    with pytest.raises(TypeError, match="td_error must hold real numbers"):
        rb.update_tensordict_priority_if_present(sample)
    assert buffer_state(rb) == before


def test_a_negative_error_does_not_hide_behind_a_larger_one():
    rb = filled()
    sample = rb.sample().set("td_error", torch.tensor([[1.0, -1.0]] * 8))
    before = buffer_state(rb)
    with pytest.raises(ValueError, match=r"td_error must be finite and >= 0"):
        rb.update_tensordict_priority_if_present(sample)
    assert buffer_state(rb) == before


def test_versions_come_in_the_shape_of_the_handles():
    rb = prioritized(4)
    rb.extend(records(4, version=torch.tensor([5, 5, 5, 5])))
    result = rb.update_if_present(
        index=torch.tensor([[0], [1]]),
        generation=torch.tensor([[0], [0]]),
        patch={"x": torch.tensor([9, 9])},
        version_key="version",
        version=torch.tensor([[7], [4]]),
    )
    assert result.updated_mask.tolist() == [[True], [False]]
    assert result.rejected_mask.tolist() == [[False], [True]]


def test_rows_outside_a_grid_are_refused_with_a_stamp():
    rb = prioritized(12, storage=g.GenerationalLazyTensorStorage(12, ndim=2))
    rb.extend(TensorDict({"x": torch.zeros(3, 4)}, [3, 4]))
    with pytest.raises(IndexError, match="outside the storage's index space"):
        rb.update_if_present(index=torch.tensor([9]), generation=torch.tensor([0]), patch={"x": torch.zeros(1, 3)})


def test_a_part_of_an_expanded_sample_without_a_valid_row_names_no_record():
    rb = prioritized(20, batch_size=4, sample_unit=Sequence(length=3))
    done = torch.zeros(20, 1, dtype=torch.bool)
    done[::2] = True
    rb.extend(TensorDict({"x": torch.arange(20), ("next", "done"): done}, [20]))
    sample = rb.sample()
    sample["td_error"] = torch.rand(12) + 1
    last = sample[2::3]
    assert not last["validity_mask"].all()
    result = rb.update_tensordict_priority_if_present(last)
    assert torch.equal(
        result.updated_mask, torch.isin(last["anchor_index"], last["anchor_index"][last["validity_mask"]])
    )


def test_a_learner_that_catches_up_by_count_leaves_out_slots_that_were_emptied():
    rb = prioritized(8, sync=False)
    rb.extend(records(5))
    rb.sample()
    rb.empty(empty_write_count=False)
    rb.extend(records(2))
    assert set(rb.sample()["index"].tolist()) <= {0, 1}


@pytest.mark.parametrize("renewed", ["as built", "set_sampler", "set_storage", "unpickled"])
def test_annealing_alpha_holds_the_lock_of_the_storage(renewed, actors):
    rb = filled()
    if renewed == "set_sampler":
        rb.set_sampler(g.GenerationalPrioritizedSampler(8, 1.0, 1.0))
    elif renewed == "set_storage":
        new = g.GenerationalLazyTensorStorage(8)
        prioritized(8, storage=new)
        rb.set_storage(new)
    elif renewed == "unpickled":
        rb = pickle.loads(pickle.dumps(rb))
    with rb.storage.lock:
        blocked = announce_blocked(rb.storage.lock, "scheduler")
        annealing = actors.start("scheduler", lambda: setattr(rb.sampler, "alpha", 0.5))
        until_blocked_or_done(blocked, annealing)
        assert rb.sampler.alpha == 1.0
    annealing.result(TIMEOUT)
    assert rb.sampler.alpha == 0.5


def test_annealing_alpha_rewrites_the_leaves():
    rb = filled()
    rb.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    rb.sampler.alpha = 0.5
    assert torch.allclose(leaves(rb), torch.arange(1.0, 9.0).sqrt())
    with pytest.raises(ValueError, match="alpha must be greater or equal to 0"):
        rb.sampler.alpha = -1.0
