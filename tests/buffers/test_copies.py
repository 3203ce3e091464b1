"""Copies of a buffer: of one moment, with timelines of their own."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import Future

import pytest
import torch
from support import TIMEOUT, announce_blocked, buffer_state, filled, prioritized, records, until_blocked_or_done

import torchrl_generational as g

WAYS = {"pickle": lambda rb: pickle.loads(pickle.dumps(rb)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_holds_records_and_stamps_of_one_moment(way, actors):
    """A writer that is between the stamps and the data of a write is waited for."""
    rb = filled()
    with rb.storage.lock:
        blocked = announce_blocked(rb.storage.lock, "copier")
        future = actors.start("copier", lambda: WAYS[way](rb.storage))
        until_blocked_or_done(blocked, future)
        assert not future.done()
        rb.extend(records(3, 100))
    twin = future.result(TIMEOUT)
    assert twin.generations.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert twin._storage["x"].tolist() == [100, 101, 102, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("storage", [g.GenerationalLazyTensorStorage, g.GenerationalLazyMemmapStorage])
def test_a_copy_and_its_original_do_not_see_each_others_writes(way, storage):
    """TorchRL's memory-mapped copies write to the same files, each with stamps of its own."""
    rb = prioritized(8, storage=storage(8))
    rb.extend(records(8))
    before = buffer_state(rb)
    twin = WAYS[way](rb)
    assert buffer_state(twin) == before
    twin.extend(records(5, 100))
    assert buffer_state(rb) == before
    rb.extend(records(2, 200))
    assert twin.storage._storage["x"].tolist() == [100, 101, 102, 103, 104, 5, 6, 7]


@pytest.mark.parametrize("way", WAYS)
def test_siblings_stay_siblings_in_a_copy(way):
    storage = g.GenerationalLazyTensorStorage(8)
    first, second = (prioritized(8, storage=storage) for _ in range(2))
    first.extend(records(8))
    one, other = WAYS[way]((first, second))
    assert one.storage is other.storage
    assert one.sampler.lock is other.sampler.lock is one.storage.lock
    sample = one.sample().set("td_error", torch.ones(8))
    other.extend(records(8, 100))
    assert one.update_tensordict_priority_if_present(sample).num_stale == 8
    assert first.storage.generations.tolist() == [0] * 8


def test_a_draw_under_way_that_fails_is_drawn_again(monkeypatch):
    """A sibling empties the storage and fills it again while the next batch is being drawn."""
    storage = g.GenerationalLazyTensorStorage(8)
    first, second = prioritized(8, storage=storage, prefetch=1), prioritized(8, storage=storage)
    first.extend(records(8))
    later = Later()
    first._prefetch_executor.shutdown()
    first._prefetch_executor = later
    first.sample()

    drawn: list[bool] = []

    def draw_meanwhile() -> None:
        if not drawn:  # by whoever waits for the draw first
            drawn.append(True)
            second.empty()
            later.go()
            second.extend(records(8, 100))

    (future,) = first._prefetch_queue
    monkeypatch.setattr(future, "result", lambda: draw_meanwhile() or Future.result(future))
    monkeypatch.setattr("torchrl_generational.buffers.sampling.wait", lambda futures: draw_meanwhile())
    assert (first.sample()["x"] >= 100).all()
    monkeypatch.undo()
    later.go()
    first.shutdown()


class Later:
    """An executor that draws when it is told to."""

    def __init__(self) -> None:
        self.work: list[tuple[Future, object]] = []

    def submit(self, draw):
        self.work.append((Future(), draw))
        return self.work[-1][0]

    def go(self) -> None:
        for future, draw in self.work:
            try:
                future.set_result(draw())
            except RuntimeError as error:
                future.set_exception(error)
        self.work.clear()

    def shutdown(self, wait: bool) -> None:
        self.go()


@pytest.mark.parametrize(
    "then",
    [
        lambda rb, state: rb.state_dict(),
        lambda rb, state: pickle.dumps(rb),
        lambda rb, state: rb.load_state_dict(state),
        lambda rb, state: rb.synchronize(),
        lambda rb, state: (rb.extend(records(8, 100)), rb.sample()),
    ],
    ids=["state_dict", "pickle", "load_state_dict", "synchronize", "sample"],
)
def test_a_draw_made_ahead_that_failed_spoils_nothing(then, monkeypatch):
    """A sibling had emptied the storage when it was made."""
    storage = g.GenerationalLazyTensorStorage(8)
    first, second = prioritized(8, storage=storage, prefetch=2), prioritized(8, storage=storage)
    first.extend(records(8))
    state = first.state_dict()
    later = Later()
    first._prefetch_executor.shutdown()
    first._prefetch_executor = later
    first.sample()
    second.empty()
    later.go()
    assert [type(future.exception()) for future in first._prefetch_queue] == [RuntimeError] * 2
    with monkeypatch.context() as patch:
        patch.setattr(later, "work", [])
        then(first, state)
        later.go()
    first.shutdown()
