"""The explorer finds planted faults, in every kind; its schedules replay; the suite says what stock breaks."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading

import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorStorage
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter

import torchrl_generational as g
from torchrl_generational import SlotGenerations
from torchrl_generational.buffers import base, section
from torchrl_generational.buffers.mixin import GenerationalReplayBufferMixin
from torchrl_generational.generations.indexing import as_rows, rows_written
from torchrl_generational.storages.tensor_storages import GenerationalStorageMixin
from torchrl_generational.testing import BufferScene, RaceError, RaceSuite, Sequencer, StuckError, explore, replay

# ------------------------------------------------------------------ the sequencer


def test_one_thread_runs_at_a_time_in_the_order_that_is_chosen():
    order = iter(["b", "a", "b", "a"])
    seen = []
    sequencer = Sequencer(lambda names, last: next(order))

    def program(name):
        seen.append((name, 1))
        sequencer.point("the middle")
        seen.append((name, 2))

    sequencer.run({"a": lambda: program("a"), "b": lambda: program("b")})
    assert seen == [("b", 1), ("a", 1), ("b", 2), ("a", 2)]


def test_a_thread_that_waits_for_a_lock_cannot_be_chosen():
    seen = []
    sequencer = Sequencer(lambda names, last: seen.append(list(names)) or names[-1])
    lock = sequencer.lock()

    def hold():
        with lock:
            sequencer.point("inside")

    sequencer.run({"a": hold, "b": hold})
    assert ["a"] not in seen[:3]  # b is chosen whenever it can go on
    assert seen[-1] == ["a"]


def test_a_deadlock_is_reported_with_the_places_of_its_threads():
    def build(sequencer):
        first, second = sequencer.lock(), sequencer.lock()

        class Embrace:
            def programs(self):
                return {"a": lambda: self.take(first, second), "b": lambda: self.take(second, first)}

            def take(self, one, other):
                with one, other:
                    pass

            def check(self):
                pass

        return Embrace()

    with pytest.raises(RaceError, match="StuckError: every thread waits for another: a at a lock that is held, b at"):
        explore(build)


def test_a_lock_that_the_sequencer_does_not_know_is_reported(monkeypatch):
    from torchrl_generational.testing import sequencer as module

    monkeypatch.setattr(module, "PATIENCE", 0.2)
    foreign = threading.Lock()
    sequencer = Sequencer(lambda names, last: names[0] if last is None else names[-1])

    def hold():
        with foreign:
            sequencer.point("inside")

    with pytest.raises(StuckError, match="waits for a lock that the sequencer does not know"):
        sequencer.run({"a": hold, "b": hold})


@pytest.mark.parametrize(("threads", "points"), [(2, 1), (2, 3), (3, 1)])
def test_all_orders_are_explored(threads, points):
    """As many as there are ways to shuffle the threads' turns."""

    class Free:
        def __init__(self, sequencer):
            self.sequencer = sequencer

        def walk(self):
            for _ in range(points):
                self.sequencer.point("a step")

        def programs(self):
            return {str(number): self.walk for number in range(threads)}

        def check(self):
            pass

    turns = points + 1
    expected = math.factorial(threads * turns) // math.factorial(turns) ** threads
    report = explore(Free, preemptions=None)
    assert (report.schedules, report.complete, report.longest) == (expected, True, threads * turns)
    assert explore(Free, preemptions=0).schedules == math.factorial(threads)
    assert not explore(Free, preemptions=None, most=3).complete


# ------------------------------------------------------------------ planted faults


def scene(threads, count=1, before=(("extend", 3),), make=None):
    def build(sequencer):
        torch.manual_seed(0)
        storage = g.GenerationalLazyTensorStorage(3)
        buffers = [RaceSuite().buffer(storage, 3) for _ in range(count)]
        return BufferScene(sequencer, buffers, threads, before)

    return build


LEARNER = [("sample",), ("update",)]


def comparison_outside_the_lock(patch):
    original = g.GenerationalReplayBuffer.update_priority_if_present

    def update(self, *, index, generation, priority):
        live = self.storage.slot_generations.live(index, generation)  # then the section begins
        now = self.storage.slot_generations
        trusting = torch.where(live, now.lookup(index), -1)
        with self.storage.lock:
            trusting = torch.where(live, now.lookup(index), -1)
            return original(self, index=index, generation=trusting, priority=priority)

    patch.setattr(GenerationalReplayBufferMixin, "update_priority_if_present", update, raising=False)
    return scene({"learner": LEARNER, "writer": [("extend", 2)]})


def stamps_after_the_data(patch):
    def late(self, cursor, data, *, set_cursor=True):
        rows = as_rows(rows_written(cursor, 3), 3)
        TensorStorage.set(self, cursor, data, set_cursor=set_cursor)
        self._generations.advance(rows)
        self.reach(rows)

    patch.setattr(GenerationalStorageMixin, "set", late)
    return scene({"learner": [("sample",), ("update",)], "writer": [("fail", 2)]})


def first_priority_in_a_second_section(patch):
    def extend(self, data, *, update_priority=None):
        index = self._extend(data)
        self._set_index_in_td(data, index)
        self.update_tensordict_priority(data)
        return index

    patch.setattr(g.GenerationalTensorDictPrioritizedReplayBuffer, "extend", extend)
    return scene({"learner": LEARNER, "writer": [("extend", 3)]})


def siblings_without_a_common_lock(patch):
    def own(fields):
        storage = fields.get("_storage")
        if storage is None:
            return fields["_replay_lock"]
        if "_own_lock" not in fields:
            known = getattr(storage.lock, "_sequencer", None)
            if known is None:
                return storage.lock
            fields["_own_lock"] = known.lock()
        return fields["_own_lock"]

    for module in (base, section):
        patch.setattr(module, "lock_of", own)
    return scene({"learner": LEARNER, "writer": [("extend", 2, 1)]}, count=2)


def plain_counters_on_a_restore(patch):
    patch.setattr(SlotGenerations, "_later", lambda self, after=0: self.incarnation)
    before = [("extend", 3), ("save",)]
    writer = [("extend", 2), ("restore",), ("extend", 2)]
    return scene({"learner": [("sample",), ("update",)], "writer": writer}, before=before)


FAULTS = [
    comparison_outside_the_lock,
    stamps_after_the_data,
    first_priority_in_a_second_section,
    siblings_without_a_common_lock,
    plain_counters_on_a_restore,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_and_replays(fault):
    with pytest.MonkeyPatch.context() as patch:
        build = fault(patch)
        with pytest.raises(RaceError) as found:
            explore(build)
        with pytest.raises(RaceError) as again:
            replay(build, found.value.schedule)
    assert again.value.problem == found.value.problem
    assert again.value.schedule == found.value.schedule


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_without_the_fault_the_same_threads_keep_every_promise(fault):
    with pytest.MonkeyPatch.context() as patch:
        build = fault(patch)
        patch.undo()
        report = explore(build)
    assert report.complete
    assert report.schedules > 5


def test_a_schedule_that_does_not_fit_is_refused():
    build = scene({"learner": LEARNER, "writer": [("extend", 2)]})
    with pytest.raises(RaceError, match="the schedule does not fit: nobody cannot go on at turn 0"):
        replay(build, "nobody")


# ------------------------------------------------------------------ the suite on stock


class RawBuffer(TensorDictPrioritizedReplayBuffer):
    """TorchRL's, with its own stamps on, handing TD errors back by raw index."""

    def update_tensordict_priority_if_present(self, data):
        self.update_tensordict_priority(data)
        return g.UpdateResult(torch.ones(data.batch_size, dtype=torch.bool))


class OnStock(RaceSuite):
    def storage(self, capacity):
        return LazyTensorStorage(capacity)

    def buffer(self, storage, capacity):
        rb = RawBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=storage, batch_size=4)
        rb.set_writer(TensorDictRoundRobinWriter(track_generations=True))
        rb.writer.register_storage(storage)
        return rb


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("test_the_storage_supports_generations", "see the protocol SupportsGenerations"),
        ("test_a_wrapped_ring_makes_its_handles_stale", "every record of the sample is gone"),
        ("test_a_learner_and_a_writer", r"counts as done, and the record was gone|is on record \d+ in slot"),
        ("test_two_buffers_on_one_storage", r"counts as done, and the record was gone|is on record \d+ in slot"),
        ("test_a_buffer_that_is_restored", r"counts as done|names two records|is on record"),
        ("test_a_write_that_fails", r"names two records|counts as done|is on record"),
    ],
)
def test_the_suite_says_what_stock_breaks(test, message):
    with pytest.raises(AssertionError, match=message) as found:
        getattr(OnStock(), test)()
    if isinstance(found.value, RaceError):
        assert "in this order (replay it with its schedule):" in str(found.value)


@pytest.mark.system
def test_the_suite_runs_by_the_name_of_the_package(tmp_path):
    """What the documentation tells users to run."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--pyargs",
        "torchrl_generational.testing",
        "-p",
        "no:cacheprovider",
    ]
    selected = [*command, "-k", "TestPrioritizedBuffer and not writers and not restored"]
    environment = os.environ | {"RL_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(selected, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
