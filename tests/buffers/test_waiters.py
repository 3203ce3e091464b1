"""Whoever waits for records is woken by writes, and never stands in their way. TorchRL after 0.14 lets one wait."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from children import forked
from support import AFTER_0_14, TIMEOUT, filled, prioritized, records, transfer

import torchrl_generational as g
from torchrl_generational.buffers import waiters
from torchrl_generational.buffers.waiters import Readiness

waits = pytest.mark.skipif(not AFTER_0_14, reason="this TorchRL has no waiters")


@pytest.fixture
def patience(monkeypatch) -> None:
    """Waiters do not look by themselves within the test."""
    monkeypatch.setattr(waiters, "_PATIENCE", TIMEOUT)


@contextlib.contextmanager
def held_by_a_waiter(condition: Readiness, actors: Any) -> Iterator[None]:
    """Another thread has entered the condition meanwhile, and does not wait on it."""
    inside, let_go = threading.Event(), threading.Event()

    def look() -> None:
        with condition:
            inside.set()
            assert let_go.wait(TIMEOUT)

    looking = actors.start("waiter", look)
    assert inside.wait(TIMEOUT)
    try:
        yield
    finally:
        let_go.set()
        looking.result(TIMEOUT)


# ---------------------------------------------------------------- the condition


def test_a_waiter_is_woken(actors, patience):
    condition, looked = Readiness(), threading.Event()

    def wait_for_it() -> bool:
        with condition:
            looked.set()
            return condition.wait()

    woken = actors.start("waiter", wait_for_it)
    assert looked.wait(TIMEOUT)
    with condition:  # it waits by now
        pass
    condition.wake()
    assert woken.result(TIMEOUT)


def test_a_waiter_looks_by_itself_after_a_while():
    condition = Readiness()
    with condition:
        assert not condition.wait()


def test_whoever_wakes_does_not_wait_for_one_who_is_looking(actors):
    condition = Readiness()
    with held_by_a_waiter(condition, actors):
        condition.wake()  # returns
    assert condition.inside == 0


def test_a_condition_is_copied_as_another_one():
    assert type(pickle.loads(pickle.dumps(Readiness()))) is Readiness


# ---------------------------------------------------------------- buffers


def one_record() -> Any:
    return records(1, 70).squeeze(0)


def loaded_from_another(rb: Any) -> None:
    rb.load_state_dict(filled().state_dict())


WRITES: dict[str, Callable[[Any], Any]] = {
    "add": lambda rb: rb.add(one_record()),
    "extend": lambda rb: rb.extend(records(8)),
    "load_state_dict": loaded_from_another,
    "the writer": lambda rb: rb.writer.extend(records(8)),
}


@waits
@pytest.mark.parametrize("write", WRITES)
def test_a_sample_that_waits_gets_the_records_of_a_write(write, actors):
    rb = prioritized(batch_size=4)
    sample = actors.start("waiter", lambda: rb.sample(wait=True, timeout=TIMEOUT))
    WRITES[write](rb)
    assert sample.result(TIMEOUT).batch_size == (4,)
    assert rb.stats()["sample_calls"] == 1
    assert rb.stats()["samples_returned"] == 4


@waits
@pytest.mark.parametrize("write", ["add", "extend"])
def test_a_write_wakes_those_who_wait(write, actors, patience):
    rb = prioritized(batch_size=4)
    condition, waiting = rb._readiness_condition, threading.Event()
    wait = condition.wait
    condition.wait = lambda timeout=None: (waiting.set(), wait(timeout))[1]
    sample = actors.start("waiter", lambda: rb.sample(wait=True, timeout=2 * TIMEOUT))
    assert waiting.wait(TIMEOUT)
    with condition:
        pass
    WRITES[write](rb)
    assert sample.result(TIMEOUT / 2).batch_size == (4,)


@waits
def test_writers_do_not_wait_for_a_waiter_that_waits_for_their_section(actors, monkeypatch):
    rb, looking, enter = prioritized(batch_size=4), threading.Event(), Readiness.__enter__

    def announced(condition: Readiness) -> bool:
        entered = enter(condition)
        looking.set()
        return entered

    with rb._exclusive():
        monkeypatch.setattr(Readiness, "__enter__", announced)
        sample = actors.start("waiter", lambda: rb.sample(wait=True, timeout=TIMEOUT))
        assert looking.wait(TIMEOUT)  # it holds the condition, and cannot enter the section
        rb.extend(records(8))
        rb.empty()
        rb.extend(records(8))
    assert sample.result(TIMEOUT).batch_size == (4,)


@waits
def test_a_sample_inside_a_section_does_not_wait_for_a_waiter(actors):
    rb = filled(batch_size=4)
    with held_by_a_waiter(rb._readiness_condition, actors), rb._exclusive():
        rb.sample()


@waits
def test_an_ensemble_waits_for_its_members(actors):
    members = [prioritized(), prioritized()]
    ensemble = g.GenerationalReplayBufferEnsemble(*members, sample_from_all=True, batch_size=4)
    sample = actors.start("waiter", lambda: ensemble.sample(wait=True, timeout=TIMEOUT))
    for member in members:
        member.extend(records(8))
    assert sample.result(TIMEOUT).batch_size == (2, 2)
    assert ensemble.stats()["sample_calls"] == 1


@waits
def test_a_learner_waits_for_another_process_and_nothing_is_left_taken_by_one_that_is_killed(actors):
    rb = prioritized(batch_size=4, shared=True)
    sample = actors.start("waiter", lambda: rb.sample(wait=True, timeout=TIMEOUT))
    with forked(lambda: rb.extend(records(8))) as child:
        assert child.exit_code() == 0
    assert sample.result(TIMEOUT).batch_size == (4,)
    assert isinstance(rb._readiness_condition, Readiness)  # of this process: a killed one cannot keep it
    with contextlib.ExitStack() as held:
        if hasattr(rb._sample_call_count_value, "get_lock"):
            held.enter_context(rb._sample_call_count_value.get_lock())
        rb.sample()
        assert actors.other(lambda: rb.stats()["sample_calls"]) == 2


@waits
def test_a_copy_waits_and_counts_on_its_own(actors):
    rb = filled(batch_size=4)
    rb.sample()
    twin = pickle.loads(pickle.dumps(rb))
    twin.empty()
    sample = actors.start("waiter", lambda: twin.sample(wait=True, timeout=TIMEOUT))
    twin.extend(records(8))
    assert sample.result(TIMEOUT).batch_size == (4,)
    assert (rb.stats()["sample_calls"], twin.stats()["sample_calls"]) == (1, 2)


@waits
def test_a_wait_ends_with_its_timeout_or_is_cancelled(actors):
    rb, cancel = prioritized(batch_size=4), threading.Event()
    with pytest.raises(TimeoutError):
        rb.sample(wait=True, timeout=0)
    cancel.set()
    with pytest.raises(RuntimeError, match="cancelled"):
        rb.sample(wait=True, cancel_event=cancel)


@waits
@pytest.mark.parametrize("way", ["state_dict", "dumps"])
def test_counts_of_samples_go_with_checkpoints(way, tmp_path):
    rb, other = filled(batch_size=4), prioritized(batch_size=4)
    rb.sample()
    rb.sample()
    transfer(rb, other, way, tmp_path)
    assert (other.stats()["sample_calls"], other.stats()["samples_returned"]) == (2, 8)


@waits
@pytest.mark.parametrize("count", [-1, 0.5, "2", None])
def test_counts_that_cannot_be_are_refused_and_nothing_has_changed(count):
    rb, other = filled(batch_size=4), filled(batch_size=4)
    other.sample()
    before = other.stats()
    with pytest.raises(ValueError, match="samples and records in them"):
        other.load_state_dict(rb.state_dict() | {"_sampled_items": count})
    assert other.stats() == before


@waits
@pytest.mark.parametrize("order", ["limit in front", "mixin in front"])
def test_a_limit_of_samples_per_record_works_with_handles(order, actors):
    from torchrl.data import RateLimitedReplayBuffer

    ours, limit = (g.GenerationalReplayBuffer, g.GenerationalReplayBufferMixin), RateLimitedReplayBuffer
    bases = (limit, ours[0]) if order == "limit in front" else (ours[1], limit)
    limited = type("Limited", bases, {})

    def make(ratio):
        return limited(
            storage=g.GenerationalLazyTensorStorage(8),
            sampler=g.GenerationalPrioritizedSampler(8, 1.0, 1.0),
            batch_size=4,
            samples_per_insert=ratio,
        )

    rb = make(0.5)
    rb.extend(records(8))
    _, info = rb.sample(return_info=True)
    handles = {"index": info["index"], "generation": info["index_generation"]}
    assert not rb.can_sample()
    with pytest.raises(RuntimeError, match="ratio"):
        rb.sample()
    waiting = actors.start("waiter", lambda: rb.sample(wait=True, timeout=TIMEOUT))
    rb.extend(records(8, 100))  # the ring wraps, and there is a budget again
    assert (waiting.result(TIMEOUT)["x"] >= 100).all()
    assert rb.update_priority_if_present(**handles, priority=torch.ones(4)).num_stale == 4
    other = make(0.5)
    other.load_state_dict(rb.state_dict())
    assert other.stats()["sample_budget"] == rb.stats()["sample_budget"] == 0
