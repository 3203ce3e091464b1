"""The delayed-learner wraparound race, reproduced without sleeps and without luck.

Each scenario runs a learner and a writer on threads of their own, in a forced order of {sample, write, update}. What
must hold afterwards is what a naive oracle says: a dict of slot -> record, and a dict of record -> priority, in which
a TD error reaches the record that it was computed for, or none. Every scenario in which a record moves is run with the
raw ``update_priority`` as well, and shown to break the promise there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support import TIMEOUT, Actors, announce_blocked, leaves, prioritized, records, until_blocked_or_done

from torchrl_generational import SlotGenerations

CAPACITY, BATCH = 8, 64


@dataclass
class World:
    """A buffer and its oracle. Records are known by a serial number; the ``x`` of two of them may be equal."""

    rb: Any
    conditional: bool
    slots: dict[int, int] = field(default_factory=dict)  # slot -> record
    priority: dict[int, float] = field(default_factory=dict)  # record -> priority
    largest: float | None = None  # running maximum of priorities in use
    serial: int = 0
    cursor: int = 0

    def write(self, count: int, equal: bool = False) -> None:
        """Writes ``count`` records round robin; ``equal`` ones have the content that their slot has already."""
        slots = [(self.cursor + step) % CAPACITY for step in range(count)]
        start = self.cursor if equal else 1000 + self.serial
        data = records(count, start)
        if equal:
            data["x"] = torch.tensor(slots)
        self.rb.extend(data)
        for slot in slots:
            self.slots[slot], self.priority[self.serial] = self.serial, 1.0 if self.largest is None else self.largest
            self.serial += 1
        self.largest = self.largest or 1.0
        self.cursor = (self.cursor + count) % CAPACITY

    def empty(self) -> None:
        self.rb.empty()
        self.slots.clear()
        self.cursor, self.largest = 0, None

    def sample(self) -> tuple[Any, list[int]]:
        """A batch that holds every slot, and the record behind each of its rows."""
        batch = self.rb.sample()
        assert set(batch["index"].tolist()) == set(self.slots)
        return batch, [self.slots[slot] for slot in batch["index"].tolist()]

    def update(self, batch: Any, owners: list[int], td_error: float) -> None:
        """Hands TD errors back; the oracle gives them to the records that are still there."""
        batch["td_error"] = torch.full((len(owners),), td_error)
        present = set(self.slots.values())
        expected = [owner in present for owner in owners]
        if self.conditional:
            result = self.rb.update_tensordict_priority_if_present(batch)
            assert result.updated_mask.tolist() == expected
        else:
            self.rb.update_tensordict_priority(batch)
        for owner, live in zip(owners, expected, strict=True):
            if live:
                self.priority[owner] = td_error
        if any(expected):
            self.largest = max(self.largest or td_error, td_error)

    def check(self) -> None:
        held = leaves(self.rb).tolist()
        for slot, record in self.slots.items():
            assert held[slot] == pytest.approx(self.priority[record]), f"slot {slot} holds record {record}"
        assert float(self.rb.sampler.default_priority) == pytest.approx(self.largest or 1.0)


def live(world: World, actors: Actors) -> None:
    batch = actors.learner(world.sample)
    actors.learner(lambda: world.update(*batch, 50.0))
    actors.writer(lambda: world.write(3))


def written_before_the_sample(world: World, actors: Actors) -> None:
    actors.writer(lambda: world.write(CAPACITY))
    batch = actors.learner(world.sample)
    actors.learner(lambda: world.update(*batch, 50.0))


def overwritten_once(world: World, actors: Actors) -> None:
    batch = actors.learner(world.sample)
    actors.writer(lambda: world.write(CAPACITY))
    actors.learner(lambda: world.update(*batch, 50.0))


def overwritten_by_an_equal_record(world: World, actors: Actors) -> None:
    batch = actors.learner(world.sample)
    actors.writer(lambda: world.write(CAPACITY, equal=True))
    assert torch.equal(world.rb[:]["x"][batch[0]["index"]], batch[0]["x"])
    actors.learner(lambda: world.update(*batch, 50.0))


def lapped_twice(world: World, actors: Actors) -> None:
    batch = actors.learner(world.sample)
    actors.writer(lambda: world.write(2 * CAPACITY))
    actors.learner(lambda: world.update(*batch, 50.0))


def mixed(world: World, actors: Actors) -> None:
    batch = actors.learner(world.sample)
    actors.writer(lambda: world.write(3))
    actors.learner(lambda: world.update(*batch, 50.0))


def updated_before_and_after_the_write(world: World, actors: Actors) -> None:
    batch = actors.learner(world.sample)
    actors.learner(lambda: world.update(*batch, 20.0))
    actors.writer(lambda: world.write(5))
    actors.learner(lambda: world.update(*batch, 50.0))


def emptied(world: World, actors: Actors) -> None:
    batch = actors.learner(world.sample)
    actors.writer(world.empty)
    actors.learner(lambda: world.update(*batch, 50.0))


def emptied_and_refilled(world: World, actors: Actors) -> None:
    batch = actors.learner(world.sample)
    actors.writer(world.empty)
    actors.writer(lambda: world.write(CAPACITY))
    actors.learner(lambda: world.update(*batch, 50.0))


def prefetched(world: World, actors: Actors) -> None:
    actors.learner(world.sample)  # fills the queue
    world.rb.synchronize()
    drawn_from = dict(world.slots)
    actors.writer(lambda: world.write(5))
    for _ in range(3):
        batch = actors.learner(world.rb.sample)
        owners = [drawn_from[slot] for slot in batch["index"].tolist()]
        actors.learner(lambda batch=batch, owners=owners: world.update(batch, owners, 50.0))


def two_learners(world: World, actors: Actors) -> None:
    early = actors.first(world.sample)
    actors.writer(lambda: world.write(4))
    late = actors.second(world.sample)
    actors.second(lambda: world.update(*late, 30.0))
    actors.first(lambda: world.update(*early, 50.0))


HARMLESS: list[Callable[[World, Actors], None]] = [live, written_before_the_sample]
RACES: list[Callable[[World, Actors], None]] = [
    overwritten_once,
    overwritten_by_an_equal_record,
    lapped_twice,
    mixed,
    updated_before_and_after_the_write,
    emptied,
    emptied_and_refilled,
    prefetched,
    two_learners,
]


def run(scenario: Callable[[World, Actors], None], actors: Actors, *, conditional: bool) -> World:
    prefetch = 3 if scenario is prefetched else None
    world = World(prioritized(CAPACITY, batch_size=BATCH, prefetch=prefetch), conditional)
    world.write(CAPACITY, equal=True)
    scenario(world, actors)
    return world


@pytest.mark.parametrize("scenario", [*HARMLESS, *RACES], ids=lambda scenario: scenario.__name__)
def test_a_td_error_reaches_its_own_record_or_none(scenario, actors):
    world = run(scenario, actors, conditional=True)
    world.check()
    world.rb.shutdown()


@pytest.mark.parametrize("scenario", RACES, ids=lambda scenario: scenario.__name__)
def test_the_raw_update_puts_td_errors_on_other_records(scenario, actors):
    with pytest.raises((AssertionError, IndexError)):
        run(scenario, actors, conditional=False).check()


@pytest.mark.parametrize("scenario", HARMLESS, ids=lambda scenario: scenario.__name__)
def test_where_no_record_moved_the_raw_update_is_as_good(scenario, actors):
    run(scenario, actors, conditional=False).check()


# ------------------------------------------------------------------ inside the sections


class Gate:
    """Stops one thread inside a call until the test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        original = getattr(owner, name)

        def gated(*args: Any, **kwargs: Any) -> Any:
            if not after:
                self._stop()
            result = original(*args, **kwargs)
            if after:
                self._stop()
            return result

        monkeypatch.setattr(owner, name, gated)

    def _stop(self) -> None:
        if not self.reached.is_set():  # only the first to come stops
            self.reached.set()
            assert self.open.wait(TIMEOUT)


def test_no_write_comes_between_the_comparison_and_the_update(actors, monkeypatch):
    """A writer that arrives when the stamps have been compared waits until the priorities are written."""
    world = World(prioritized(CAPACITY, batch_size=BATCH), True)
    world.write(CAPACITY)
    batch = actors.learner(world.sample)
    blocked = announce_blocked(world.rb.storage.lock, "writer")
    gate = Gate(monkeypatch, SlotGenerations, "live_array", after=True)
    update = actors.start("learner", lambda: world.update(*batch, 50.0))
    assert gate.reached.wait(TIMEOUT)
    write = actors.start("writer", lambda: world.rb.extend(records(CAPACITY, 1000)))
    until_blocked_or_done(blocked, write)
    assert not write.done()
    assert world.rb.storage.generations.tolist() == [0] * CAPACITY
    gate.open.set()
    update.result(TIMEOUT)
    write.result(TIMEOUT)
    # the TD errors went to the old records; the new ones were born at the largest priority in use
    assert leaves(world.rb).tolist() == [50.0] * CAPACITY
    batch[0]["td_error"] = torch.full((BATCH,), 7.0)
    assert world.rb.update_tensordict_priority_if_present(batch[0]).num_stale == BATCH


@pytest.mark.parametrize("stop_after", ["the stamps", "the data"])
def test_no_update_comes_between_the_stamps_and_the_priorities_of_a_write(stop_after, actors, monkeypatch):
    world = World(prioritized(CAPACITY, batch_size=BATCH), True)
    world.write(CAPACITY)
    batch, _ = actors.learner(world.sample)
    blocked = announce_blocked(world.rb.storage.lock, "learner")
    gate = (
        Gate(monkeypatch, SlotGenerations, "advance", after=True)
        if stop_after == "the stamps"
        else Gate(monkeypatch, world.rb.storage, "set", after=True)
    )
    write = actors.start("writer", lambda: world.rb.extend(records(CAPACITY, 1000)))
    assert gate.reached.wait(TIMEOUT)
    batch["td_error"] = torch.full((BATCH,), 50.0)
    update = actors.start("learner", lambda: world.rb.update_tensordict_priority_if_present(batch))
    until_blocked_or_done(blocked, update)
    assert not update.done()
    gate.open.set()
    write.result(TIMEOUT)
    assert update.result(TIMEOUT).num_stale == BATCH
    assert leaves(world.rb).tolist() == [1.0] * CAPACITY


def test_no_sample_comes_between_the_stamps_and_the_data_of_a_write(actors, monkeypatch):
    """Its handles would name records that it does not hold."""
    world = World(prioritized(CAPACITY, batch_size=BATCH), True)
    world.write(CAPACITY)
    blocked = announce_blocked(world.rb.storage.lock, "learner")
    gate = Gate(monkeypatch, SlotGenerations, "advance", after=True)
    write = actors.start("writer", lambda: world.rb.extend(records(CAPACITY, 1000)))
    assert gate.reached.wait(TIMEOUT)
    sample = actors.start("learner", world.rb.sample)
    until_blocked_or_done(blocked, sample)
    assert not sample.done()
    gate.open.set()
    write.result(TIMEOUT)
    batch = sample.result(TIMEOUT)
    assert batch["x"].tolist() == (batch["index"] + 1000).tolist()
    assert batch["index_generation"].tolist() == [1] * BATCH


def test_no_sample_comes_between_the_parts_of_an_emptying(actors, monkeypatch):
    """C16: stock samples trees that are empty from records that are not."""
    world = World(prioritized(CAPACITY, batch_size=BATCH), True)
    world.write(CAPACITY)
    blocked = announce_blocked(world.rb.storage.lock, "learner")
    gate = Gate(monkeypatch, world.rb.sampler, "_empty", after=True)
    emptying = actors.start("writer", world.rb.empty)
    assert gate.reached.wait(TIMEOUT)
    sample = actors.start("learner", lambda: world.rb._sample(BATCH))  # as a prefetching thread does
    until_blocked_or_done(blocked, sample)
    assert not sample.done()
    gate.open.set()
    emptying.result(TIMEOUT)
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        sample.result(TIMEOUT)


def test_the_stamps_of_a_write_advance_before_its_data(actors, monkeypatch):
    """Even a reader that ignores the lock sees the old handle stale as soon as a byte has changed."""
    world = World(prioritized(CAPACITY, batch_size=BATCH), True)
    world.write(CAPACITY)
    storage = world.rb.storage
    gate = Gate(monkeypatch, SlotGenerations, "advance", after=True)
    write = actors.start("writer", lambda: world.rb.extend(records(CAPACITY, 2000)))
    assert gate.reached.wait(TIMEOUT)
    assert storage.generations.tolist() == [1] * CAPACITY
    assert storage._storage["x"].tolist() == list(range(1000, 1000 + CAPACITY))
    gate.open.set()
    write.result(TIMEOUT)
    assert storage._storage["x"].tolist() == list(range(2000, 2000 + CAPACITY))
