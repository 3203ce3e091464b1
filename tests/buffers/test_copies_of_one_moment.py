"""Copies that are made while other threads write, sample and update, and shared buffers sent through queues."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from children import forked
from support import TIMEOUT, announce_blocked, buffer_state, filled, prioritized, records, until_blocked_or_done

import torchrl_generational as g

CHANGED = "was written to by another thread or process while it was being pickled.*copy.deepcopy"


class Meanwhile:
    """Does something when its turn comes to be pickled, or copied."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __reduce__(self) -> Any:
        self.act()
        return bool, ()


def meanwhile(owner: Any, act: Callable[[], Any], *, first: bool) -> None:
    """Has ``act`` done before or after all parts of ``owner`` are pickled."""
    parts = dict(vars(owner))
    vars(owner).clear()
    if first:
        vars(owner)["_meanwhile"] = Meanwhile(act)
    vars(owner).update(parts)
    if not first:
        vars(owner)["_meanwhile"] = Meanwhile(act)


def clear(owner: Any) -> None:
    vars(owner).pop("_meanwhile")


def with_errors(rb: Any) -> Any:
    return rb.sample().set("td_error", torch.full((8,), 50.0))


def update(rb: Any, sample: Any) -> Any:
    return rb.submit_update_priority_if_present(
        index=sample["index"], generation=sample["index_generation"], priority=sample["td_error"]
    )


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["plain", "prefetch", "shared", "asynchronous"])
def test_a_pickle_has_nothing_of_what_is_updated_and_drawn_while_it_is_made(kind, first, actors):
    kwargs: dict[str, Any] = {"prefetch": {"prefetch": 2}, "shared": {"shared": True}, "asynchronous": {"sync": False}}
    rb = filled(**kwargs.get(kind, {}))
    sample = with_errors(rb)
    before = rb._learners_sampler()._sum_tree[torch.arange(8)].tolist()
    futures = []

    def act() -> None:
        futures.append(update(rb, sample))
        actors.other(rb.sample)
        futures[0].result(TIMEOUT)

    meanwhile(rb, act, first=first)
    twin = pickle.loads(pickle.dumps(rb))
    assert futures[0].result(TIMEOUT).num_updated == 8
    assert (len(twin._pending_update_futures), twin._sample_dependency) == (0, None)
    assert twin._learners_sampler()._sum_tree[torch.arange(8)].tolist() == before
    assert 50.0 in rb._learners_sampler()._sum_tree[torch.arange(8)].tolist()
    assert twin.update_tensordict_priority_if_present(sample).num_updated == 8
    twin.sample()
    rb.shutdown()
    twin.shutdown()


def test_updates_that_never_end_being_submitted_do_not_show_in_a_copy(actors):
    """The queue of updates under way holds locks and changes; no copy has any of it."""
    rb = filled()
    sample = with_errors(rb)

    def submit() -> None:
        for _ in range(300):
            update(rb, sample)

    submitting = actors.start("learner", submit)
    while not submitting.done():
        for way in (lambda: pickle.loads(pickle.dumps(rb)), lambda: copy.deepcopy(rb)):
            assert way()._sample_dependency is None
    submitting.result()
    rb.shutdown()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("change", ["extend", "add", "empty", "set_", "[]", "load"])
def test_a_pickle_that_somebody_writes_to_is_refused(change, first, actors):
    """Records, which are the storage's, would be of another moment than priorities and cursor."""
    rb = filled()
    state = rb.state_dict()
    acts: dict[str, Callable[[], Any]] = {
        "extend": lambda: rb.extend(records(3, 100)),
        "add": lambda: rb.add(records(1, 100)[0]),
        "empty": rb.empty,
        "set_": lambda: rb.set_("x", torch.zeros(8, dtype=torch.int64)),
        "[]": lambda: rb.__setitem__(slice(0, 1), records(1, 100, index=torch.zeros(1, dtype=torch.int64))),
        "load": lambda: rb.load_state_dict(state),
    }
    meanwhile(rb, lambda: actors.other(acts[change]), first=first)
    with pytest.raises(RuntimeError, match=CHANGED):
        pickle.dumps(rb)
    clear(rb)
    twin = pickle.loads(pickle.dumps(rb))
    assert buffer_state(twin) == buffer_state(rb)
    assert buffer_state(pickle.loads(pickle.dumps(copy.deepcopy(rb)))) == buffer_state(rb)


@pytest.mark.parametrize("first", [True, False])
def test_a_deep_copy_keeps_writers_waiting(first, actors):
    rb = filled(prefetch=1)
    before = buffer_state(rb)
    blocked = announce_blocked(rb.storage.lock, "writer")
    writing = []

    def act() -> None:
        writing.append(actors.start("writer", lambda: rb.extend(records(3, 100))))
        until_blocked_or_done(blocked, writing[0])
        assert not writing[0].done()

    meanwhile(rb, act, first=first)
    twin = copy.deepcopy(rb)
    assert buffer_state(twin) == before
    writing[0].result(TIMEOUT)
    assert rb.write_count == 11
    rb.shutdown()


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_a_storage_copied_with_its_buffers_is_of_one_moment_or_refused(way, actors):
    """Its records are copied first, and the buffers on it when their turn comes."""
    rb = filled()
    meanwhile(rb.storage, lambda: actors.other(lambda: rb.extend(records(3, 100))), first=True)
    with pytest.raises(RuntimeError, match=CHANGED):
        pickle.loads(pickle.dumps(rb.storage)) if way == "pickle" else copy.deepcopy(rb.storage)
    clear(rb.storage)
    twin = copy.deepcopy(rb.storage)
    assert twin._storage["x"].tolist() == [100, 101, 102, 3, 4, 5, 6, 7]


def test_siblings_that_are_copied_from_both_sides_at_once_do_not_wait_for_each_other(actors):
    storage = g.GenerationalLazyTensorStorage(8)
    pair = [prioritized(8, storage=storage, prefetch=1) for _ in range(2)]
    pair[0].extend(records(8))

    def work(rb: Any) -> None:
        for _ in range(15):
            rb.sample()
            copy.deepcopy(rb).shutdown()

    futures = [actors.start(str(number), lambda rb=rb: work(rb)) for number, rb in enumerate(pair)]
    for future in futures:
        future.result(TIMEOUT)
    for rb in pair:
        rb.shutdown()


def test_a_max_value_writer_goes_on_in_a_copy_as_in_the_original():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(4),
        writer=g.GenerationalTensorDictMaxValueWriter(rank_key="x"),
        batch_size=2,
    )
    rb.extend(records(4))
    for twin in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        twin.extend(records(2, 100))
        assert twin.writer._storage is twin.storage
        assert sorted(twin[:]["x"].tolist()) == [2, 3, 100, 101]
    assert rb[:]["x"].tolist() == [0, 1, 2, 3]


def test_without_replacement_a_copy_goes_on_where_the_original_was():
    from torchrl.data.replay_buffers import SamplerWithoutReplacement

    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), sampler=SamplerWithoutReplacement(), batch_size=4
    )
    rb.extend(records(8))
    seen = rb.sample()["x"].tolist()
    for twin in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        assert sorted(seen + twin.sample()["x"].tolist()) == list(range(8))
    assert sorted(seen + rb.sample()["x"].tolist()) == list(range(8))


# ------------------------------------------------------------------ ensembles


def ensemble(**kwargs: Any) -> Any:
    members = [filled(batch_size=None) for _ in range(2)]
    return g.GenerationalReplayBufferEnsemble(*members, batch_size=8, sample_from_all=True, **kwargs)


def check_twin(rb: Any, twin: Any) -> None:
    assert [buffer_state(member) for member in twin._rbs] == [buffer_state(member) for member in rb._rbs]
    assert [member.sampler is sampler for member, sampler in zip(twin._rbs, twin.sampler._samplers, strict=True)]
    for member, sampler, writer, storage in zip(
        twin._rbs, twin._sampler._samplers, twin._writer._writers, twin._storage._storages, strict=True
    ):
        assert (member.sampler, member.writer, member.storage) == (sampler, writer, storage)
    sample = twin.sample().set("td_error", torch.ones(2, 4))
    assert twin.update_tensordict_priority_if_present(sample).num_updated == 8
    twin[0].extend(records(8))
    assert twin.update_tensordict_priority_if_present(sample).num_stale == 4


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_an_ensemble_is_copied_while_updates_are_submitted(way, actors):
    rb = ensemble(prefetch=1)
    sample = rb.sample().set("td_error", torch.full((2, 4), 50.0))
    before = [buffer_state(member) for member in rb._rbs]
    futures = []

    def act() -> None:
        futures.append(
            actors.start(
                "learner",
                lambda: rb.submit_update_priority_if_present(
                    index=sample["index"], generation=sample["index_generation"], priority=50.0
                ).result(TIMEOUT),
            )
        )

    meanwhile(rb, act, first=True)
    twin = pickle.loads(pickle.dumps(rb)) if way == "pickle" else copy.deepcopy(rb)
    assert futures[0].result(TIMEOUT).num_updated == 8
    assert (len(twin._pending_update_futures), twin._sample_dependency) == (0, None)
    if way == "deepcopy":
        assert [buffer_state(member) for member in twin._rbs] == before
    clear(rb)
    check_twin(rb, copy.deepcopy(rb))
    check_twin(rb, pickle.loads(pickle.dumps(rb)))
    rb.shutdown()


@pytest.mark.parametrize("first", [True, False])
def test_an_ensemble_is_not_pickled_while_a_member_is_written_to(first, actors):
    rb = ensemble()
    meanwhile(rb, lambda: actors.other(lambda: rb[1].extend(records(3, 100))), first=first)
    with pytest.raises(RuntimeError, match=CHANGED):
        pickle.dumps(rb)
    blocked = announce_blocked(rb[1].storage.lock, "writer")
    writing = []

    def act() -> None:
        writing.append(actors.start("writer", lambda: rb[1].extend(records(3, 200))))
        until_blocked_or_done(blocked, writing[0])
        assert not writing[0].done()

    clear(rb)
    meanwhile(rb, act, first=first)
    before = [buffer_state(member) for member in rb._rbs]
    twin = copy.deepcopy(rb)
    writing[0].result(TIMEOUT)
    assert [buffer_state(member) for member in twin._rbs] == before


# ------------------------------------------------------------------ queues and pipes

SENT = r"of process [0-9]+, came through a queue or a pipe, which carry copies.*args=\(buffer,\).*state_dict"


def shared() -> Any:
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=4, shared=True)
    rb.extend(records(8))
    return rb


@pytest.mark.parametrize("queue", ["multiprocessing", "torch"])
@pytest.mark.parametrize("path", ["queue", "simple queue", "pipe"])
def test_a_shared_buffer_that_comes_through_a_queue_is_refused_where_it_arrives(path, queue):
    """Whoever waits for it gets the error, and the sender nothing: a queue pickles in a thread."""
    rb = shared()
    module: Any = multiprocessing if queue == "multiprocessing" else torch.multiprocessing
    context = module.get_context("fork")
    if path == "pipe":
        receiving, sending = context.Pipe(duplex=False)
        receive, send = receiving.recv, sending.send
    else:
        passing = context.Queue() if path == "queue" else context.SimpleQueue()
        receive, send = passing.get, passing.put

    def look() -> None:
        with pytest.raises(RuntimeError, match=SENT):
            receive()
        assert receive() == "next"

    with forked(look) as child:
        send(rb)
        send("next")
        assert child.exit_code() == 0
    if path == "queue":
        passing.close()
        passing.join_thread()


@pytest.mark.parametrize("what", ["buffer", "prioritized", "storage", "lock", "ensemble", "copy"])
def test_whatever_holds_the_lock_of_a_shared_storage_is_refused(what):
    rb = shared()
    sent: Any = {"buffer": rb, "storage": rb.storage, "lock": rb.storage.lock, "copy": copy.deepcopy(rb)}.get(what)
    if what == "prioritized":
        sent = filled(shared=True)
    elif what == "ensemble":
        sent = g.GenerationalReplayBufferEnsemble(rb, batch_size=4)
    passed = ForkingPickler.dumps({"nested": [sent]})
    with pytest.raises(RuntimeError, match=SENT):
        pickle.loads(passed)


def test_copies_on_purpose_go_on_to_work():
    rb = shared()
    sent = ForkingPickler.loads(ForkingPickler.dumps(pickle.dumps(rb)))
    for twin in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb)), pickle.loads(sent)):
        twin.extend(records(2, 100))
        assert twin[:]["x"].tolist()[:2] == [100, 101]
    assert rb[:]["x"].tolist() == list(range(8))
    private = filled()
    received = ForkingPickler.loads(ForkingPickler.dumps(private))  # a result that a process sends back
    assert buffer_state(received) == buffer_state(private)
