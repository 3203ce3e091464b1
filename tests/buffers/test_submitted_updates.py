"""Conditional priority updates on a background thread, in order with prefetched batches."""

from __future__ import annotations

from concurrent.futures import wait

import pytest
import torch
from support import Actors, announce_blocked, filled, leaves, prioritized, records, sampler_state, until_blocked_or_done

import torchrl_generational as g

TIMEOUT = 60


def handles(rb, index):
    return {"index": index, "generation": rb.storage.generations[index].clone()}


def only(slot: int, slots: int = 8) -> torch.Tensor:
    """Priorities under which one slot alone is drawn."""
    return torch.zeros(slots).index_fill_(0, torch.tensor([slot]), 5.0)


def ring(**kwargs):
    """A full ring without eps, so that a priority of zero is never drawn."""
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8),
        sampler=g.GenerationalPrioritizedSampler(8, 1.0, 1.0, eps=0.0),
        batch_size=8,
        generator=torch.Generator().manual_seed(0),
        **kwargs,
    )
    rb.extend(records(8))
    return rb


def test_a_submitted_update_ends_as_one_that_is_waited_for():
    submitted, waited = filled(8), filled(8)
    index, priority = torch.tensor([1, 5, 1]), torch.tensor([3.0, 4.0, 2.0])
    future = submitted.submit_update_priority_if_present(**handles(submitted, index), priority=priority)
    result = waited.update_priority_if_present(**handles(waited, index), priority=priority)
    assert torch.equal(future.result(TIMEOUT).updated_mask, result.updated_mask)
    assert sampler_state(submitted) == sampler_state(waited)
    assert submitted.stats()["conditional_updated"] == 3


def test_rows_that_are_gone_by_the_time_it_runs_are_stale():
    rb = filled(8)
    old = handles(rb, torch.arange(4))
    rb.extend(records(2, 50))
    result = rb.submit_update_priority_if_present(**old, priority=torch.full((4,), 9.0)).result(TIMEOUT)
    assert result.updated_mask.tolist() == [False, False, True, True]
    assert leaves(rb).tolist() == [1.0, 1.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["list", "scalar", "tuple of coordinates"])
def test_it_takes_what_the_update_takes(kind):
    ndim = 2 if kind == "tuple of coordinates" else 1
    rb = g.GenerationalReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8, ndim=ndim),
        sampler=g.GenerationalPrioritizedSampler(8, 1.0, 1.0),
        batch_size=4,
    )
    rb.extend(torch.arange(8).reshape(2, 4) if ndim == 2 else torch.arange(8))
    _, info = rb.sample(return_info=True)
    priority = {"list": [2.0, 2.0, 2.0, 2.0], "scalar": 2.0, "tuple of coordinates": torch.full((4,), 2.0)}[kind]
    future = rb.submit_update_priority_if_present(
        index=info["index"], generation=info["index_generation"], priority=priority
    )
    assert future.result(TIMEOUT).num_updated == 4
    assert leaves(rb).max() == 2


def test_batches_drawn_ahead_before_it_do_not_see_it_and_those_drawn_ahead_later_do():
    rb = ring(prefetch=2)
    rb.update_priority(torch.arange(8), only(1))
    rb.sample()  # two more are drawn ahead
    every = torch.arange(8)
    future = rb.submit_update_priority_if_present(**handles(rb, every), priority=only(6))
    drawn = [set(rb.sample()["index"].tolist()) for _ in range(5)]
    assert drawn == [{1}, {1}, {6}, {6}, {6}]
    assert future.done()
    rb.shutdown()


def test_updates_run_in_the_order_in_which_they_were_submitted_those_of_fields_too():
    rb = filled(8)
    entered = []
    original = rb.update_if_present

    def noting(**arguments):
        entered.append(arguments)
        return original(**arguments)

    rb.update_if_present = noting
    actors = Actors()
    blocked = announce_blocked(rb.storage.lock, "ThreadPoolExecutor")
    one = handles(rb, torch.tensor([3]))
    with rb.storage.lock:
        futures = [rb.submit_update_priority_if_present(**one, priority=torch.tensor([2.0]))]
        until_blocked_or_done(blocked, futures[0])
        futures.append(rb.submit_update_if_present(**one, patch={"x": torch.tensor([77])}))
        futures.append(rb.submit_update_priority_if_present(**one, priority=torch.tensor([4.0])))
        assert not any(future.done() for future in futures)
    assert [future.result(TIMEOUT).num_updated for future in futures] == [1, 1, 1]
    assert ["x" in arguments["patch"] for arguments in entered] == [False, True, False]
    assert leaves(rb)[3] == 4
    assert rb[3]["x"] == 77
    actors.close()


def test_an_error_reaches_the_future_and_nothing_has_changed():
    rb = filled(8)
    before = sampler_state(rb)
    bad = torch.tensor([1.0, float("nan")])
    future = rb.submit_update_priority_if_present(**handles(rb, torch.tensor([1, 2])), priority=bad)
    with pytest.raises(ValueError, match="priority must be finite and >= 0 .* got nan at row 1"):
        future.result(TIMEOUT)
    assert sampler_state(rb) == before


def test_whoever_does_not_look_at_the_future_gets_its_error_at_the_next_sample():
    rb = filled(8)
    rb.submit_update_priority_if_present(**handles(rb, torch.tensor([1])), priority=torch.tensor([-1.0]))
    with pytest.raises(ValueError, match=r"got -1\.0"):
        rb.sample()
    with pytest.raises(ValueError, match=r"got -1\.0"):
        rb.synchronize()
    rb.sample()  # and then it is over


def test_a_shutdown_waits_for_it_and_takes_no_more():
    rb = filled(8)
    actors = Actors()
    blocked = announce_blocked(rb.storage.lock, "ThreadPoolExecutor")
    one = handles(rb, torch.tensor([3]))
    with rb.storage.lock:
        future = rb.submit_update_priority_if_present(**one, priority=torch.tensor([2.0]))
        until_blocked_or_done(blocked, future)
        ending = actors.start("shutdown", rb.shutdown)
        assert not ending.done()
    ending.result(TIMEOUT)
    assert future.done()
    assert leaves(rb)[3] == 2
    with pytest.raises(RuntimeError, match="shut down"):
        rb.submit_update_priority_if_present(**one, priority=torch.tensor([2.0]))
    actors.close()


def test_a_sampler_without_priorities_is_named_in_the_future():
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=4)
    rb.extend(records(8))
    future = rb.submit_update_priority_if_present(**handles(rb, torch.arange(4)), priority=torch.ones(4))
    with pytest.raises(TypeError, match="needs a sampler with priorities"):
        future.result(TIMEOUT)


def test_a_batch_drawn_ahead_that_failed_holds_up_neither_an_update_nor_later_samples(actors):
    """The update was left out, and every later sample raised its error again."""
    rb = filled(prefetch=2, batch_size=4)
    sibling = prioritized(8, storage=rb.storage)
    sample = rb.sample()
    wait(rb._prefetch_queue)
    actors.holder(rb.storage.lock.acquire)
    rb.sample()  # one that is ready; the next draw waits for the lock
    actors.holder(sibling.empty)
    future = rb.submit_update_priority_if_present(
        index=sample["index"], generation=sample["index_generation"], priority=2.0
    )
    later = rb.submit_update_priority_if_present(
        index=sample["index"], generation=sample["index_generation"], priority=3.0
    )
    actors.holder(rb.storage.lock.release)
    assert future.result(TIMEOUT).num_stale == later.result(TIMEOUT).num_stale == 4
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        for _ in range(3):  # a batch of before may be there still
            rb.sample()
    rb.extend(records(8, 100))
    assert (rb.sample()["x"] >= 100).all()
    rb.synchronize()
    rb.shutdown()
