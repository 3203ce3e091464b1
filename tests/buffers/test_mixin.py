"""The buffer's parts, its one lock, and what counts as a new record."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from support import (
    TIMEOUT,
    announce_blocked,
    buffer_state,
    leaves,
    plain_prioritized,
    prioritized,
    records,
    until_blocked_or_done,
)
from tensordict import TensorDict
from torchrl.data import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
)

import torchrl_generational as g

PRIORITIZED = [g.GenerationalPrioritizedReplayBuffer, g.GenerationalTensorDictPrioritizedReplayBuffer]
BUFFERS = [g.GenerationalReplayBuffer, g.GenerationalTensorDictReplayBuffer, *PRIORITIZED]


def build(make, **kwargs):
    if make in PRIORITIZED:
        kwargs = {"alpha": 0.7, "beta": 0.5, **kwargs}
    return make(**kwargs)


# ------------------------------------------------------------------ construction


@pytest.mark.parametrize("make", BUFFERS)
def test_the_default_parts_track_generations(make):
    rb = build(make, batch_size=2)
    assert isinstance(rb.storage, g.GenerationalLazyTensorStorage)
    assert rb.storage.max_size == 1000
    assert rb.writer.tracks_generations
    assert ("TensorDict" in type(rb.writer).__name__) == ("TensorDict" in make.__name__)
    assert isinstance(rb.sampler, g.GenerationalPrioritizedSampler) == (make in PRIORITIZED)


@pytest.mark.parametrize("make", BUFFERS)
@pytest.mark.parametrize("as_factory", [True, False])
def test_every_buffer_takes_a_writer(make, as_factory):
    writer = partial(g.GenerationalRoundRobinWriter) if as_factory else g.GenerationalRoundRobinWriter()
    rb = build(make, writer=writer, batch_size=2)
    assert type(rb.writer) is g.GenerationalRoundRobinWriter
    rb.extend(records(4))
    assert rb.storage.generations[:5].tolist() == [0, 0, 0, 0, -1]


@pytest.mark.parametrize("make", BUFFERS)
@pytest.mark.parametrize("storage", [ListStorage(8), LazyTensorStorage(8)])
def test_a_storage_that_cannot_carry_stamps_is_refused_with_the_class_to_use(make, storage):
    with pytest.raises(
        TypeError, match=f"{make.__name__} needs a storage that carries .* Use GenerationalLazyTensorStorage"
    ):
        build(make, storage=storage)
    assert storage._attached_entities == []


@pytest.mark.parametrize("make", BUFFERS)
@pytest.mark.parametrize(
    "writer",
    [
        RoundRobinWriter(),
        TensorDictRoundRobinWriter(),
        RoundRobinWriter(track_generations=True),  # would stamp a second time
        TensorDictMaxValueWriter(rank_key="x"),
        ImmutableDatasetWriter(),
    ],
    ids=lambda writer: type(writer).__name__,
)
def test_a_writer_that_cannot_track_is_refused_with_the_class_to_use(make, writer):
    storage = g.GenerationalLazyTensorStorage(8)
    with pytest.raises(
        TypeError, match=f"{make.__name__} needs a writer that tracks .* Use GenerationalRoundRobinWriter"
    ):
        build(make, storage=storage, writer=writer)
    assert storage._attached_entities == []


@pytest.mark.parametrize("sampler", [PrioritizedSampler, g.GenerationalPrioritizedSampler])
def test_a_sampler_smaller_than_the_storage_is_refused(sampler):
    """C10: stock writes outside the tree."""
    storage = g.GenerationalLazyTensorStorage(100)
    with pytest.raises(ValueError, match="has max_capacity=8 but the storage holds 100 records"):
        g.GenerationalReplayBuffer(storage=storage, sampler=sampler(8, 1.0, 1.0))
    assert storage._attached_entities == []


def test_half_a_protocol_is_refused():
    class Half(LazyTensorStorage):
        supports_generations = True
        slot_generations = g.SlotGenerations(8)

    with pytest.raises(
        TypeError, match="lacks a part of SupportsGenerations: it needs slot_generations, generations and"
    ):
        g.GenerationalReplayBuffer(storage=Half(8))


def test_parts_may_be_made_on_first_use():
    made = []

    def storage():
        made.append(1)
        return g.GenerationalLazyTensorStorage(8)

    rb = g.GenerationalTensorDictReplayBuffer(
        storage=storage,
        sampler=lambda: g.GenerationalPrioritizedSampler(8, 1.0, 1.0),
        writer=g.GenerationalTensorDictRoundRobinWriter,
        transform_factory=lambda: lambda td: td,
        batch_size=4,
    )
    assert not rb.initialized
    assert rb.stats()["conditional_updated"] == 0
    assert not made
    rb.extend(records(8))
    assert made == [1]
    assert rb.sample()["index_generation"].tolist() == [0] * 4


def test_a_delayed_refusal_leaves_nothing_attached():
    storage = LazyTensorStorage(8)
    rb = g.GenerationalReplayBuffer(storage=storage, delayed_init=True)
    for _ in range(2):
        with pytest.raises(TypeError, match="needs a storage that carries slot generations"):
            rb.extend(torch.arange(3))
    assert storage._attached_entities == []


@pytest.mark.parametrize("make", BUFFERS)
def test_the_buffers_are_the_torchrl_buffers_they_replace(make):
    import torchrl.data as theirs
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler as TheirSampler

    rb = build(make)
    assert isinstance(rb, getattr(theirs, make.__name__.removeprefix("Generational")))
    assert isinstance(rb.storage, theirs.TensorStorage)
    assert isinstance(rb.writer, theirs.RoundRobinWriter)
    if make in PRIORITIZED:
        assert isinstance(rb.sampler, TheirSampler)


# ------------------------------------------------------------------ samples


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_uniform_samples_carry_their_handles_too(sampler):
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), sampler=sampler(), batch_size=8
    )
    rb.extend(records(8))
    rb.extend(records(3))
    sample, info = rb.sample(return_info=True)
    assert torch.equal(sample["index_generation"], rb.storage.generations[sample["index"]])
    assert torch.equal(torch.as_tensor(info["index_generation"]), sample["index_generation"])


def test_a_sample_of_a_plain_buffer_has_its_handles_in_the_info():
    rb = plain_prioritized(8)
    rb.extend(torch.arange(8))
    data, info = rb.sample(return_info=True)
    assert torch.equal(info["index"], data)
    assert info["index_generation"].tolist() == [0] * 8


def test_prefetched_batches_carry_the_stamps_of_their_draw(actors):
    """C18."""
    rb = prioritized(8, prefetch=3)
    rb.extend(records(8))
    rb.sample()
    rb.synchronize()
    before = leaves(rb)
    rb.extend(records(8))
    for _ in range(3):
        sample = rb.sample()
        assert sample["index_generation"].tolist() == [0] * 8
        sample["td_error"] = torch.full((8,), 50.0)
        assert rb.update_tensordict_priority_if_present(sample).num_stale == 8
    assert torch.equal(leaves(rb), before)
    rb.shutdown()


# ------------------------------------------------------------------ what is a new record


def test_only_new_records_advance_the_stamps():
    rb = prioritized(4)
    rb.extend(records(4))
    stamps = rb.storage.generations
    rb.set_at_("x", torch.tensor([9]), [1])
    rb.set_("x", torch.arange(4))
    rb.update_({"x": torch.arange(4)})
    assert stamps.tolist() == [0] * 4
    rb[1] = records(1, index=torch.tensor([1]))[0]
    rb[2:4] = records(2, index=torch.tensor([2, 3]))
    assert stamps.tolist() == [0, 1, 1, 1]
    rb.write_all(records(4, index=torch.arange(4)))
    assert stamps.tolist() == [1, 2, 2, 2]
    rb.write_all(records(2, index=torch.arange(2)), end=2)
    assert stamps.tolist() == [2, 3, 2, 2]
    rb.writer.write_at(torch.tensor([0]), records(1))
    rb.storage[3] = records(1, index=torch.tensor([3]))[0]
    assert stamps.tolist() == [3, 3, 2, 3]


@pytest.mark.parametrize("dim_extend", [0, 1])
@pytest.mark.parametrize(
    ("index", "along_rows", "along_lanes"),
    [
        ((1, 0), [1], [0]),
        ((slice(0, 2), 2), [0, 1], [2]),
        ((Ellipsis, 1), None, None),
        ((torch.tensor([0, 2]), torch.tensor([1, 1])), [0, 2], [1]),
    ],
)
def test_a_record_put_at_coordinates_of_the_buffer_makes_its_row_stale(dim_extend, index, along_rows, along_lanes):
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(9, ndim=2), dim_extend=dim_extend, batch_size=2
    )
    rb.extend(TensorDict({"x": torch.arange(9).reshape(3, 3)}, [3, 3]))
    before = rb.storage._storage["x"].clone()
    rb[index] = rb[index].clone().apply_(lambda leaf: leaf + 100)
    changed = (rb.storage._storage["x"] != before).any(-1)
    stale = rb.storage.generations[:, 0] > 0
    assert changed.any()
    assert (stale | ~changed).all()
    rows = along_rows if dim_extend == 0 else along_lanes
    if rows is not None:
        assert stale.nonzero()[:, 0].tolist() == rows


def test_emptying_makes_every_handle_stale_and_drops_prefetched_batches():
    """C17: before and after refilling."""
    rb = prioritized(8, prefetch=2)
    rb.extend(records(8))
    sample = rb.sample().set("td_error", torch.full((8,), 50.0))
    rb.empty()
    before = buffer_state(rb)
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 8
    assert buffer_state(rb) == before
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        rb.sample()
    rb.extend(records(8, 100))
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 8
    assert rb.sample()["x"].min() >= 100
    assert leaves(rb).tolist() == [1] * 8
    rb.shutdown()


def test_a_slot_that_an_emptied_buffer_reaches_again_without_writing_it_has_no_live_handle():
    rb = prioritized(8)
    rb.extend(records(8))
    sample = rb.sample().set("td_error", torch.full((8,), 50.0))
    rb.empty()
    rb.writer.write_at(torch.tensor([7]), records(1, 100))  # the length reaches over slots that hold nothing now
    assert len(rb) == 8
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 8


# ------------------------------------------------------------------ one lock


def siblings():
    storage = g.GenerationalLazyTensorStorage(8)
    return prioritized(8, storage=storage), prioritized(8, storage=storage)


def test_buffers_on_one_storage_see_each_others_writes():
    first, second = siblings()
    first.extend(records(8))
    sample = second.sample().set("td_error", torch.full((8,), 9.0))
    first.extend(records(8))
    assert second.update_tensordict_priority_if_present(sample).num_stale == 8
    assert leaves(second).tolist() == [1] * 8


def test_buffers_on_one_storage_share_its_lock():
    """C30."""
    first, second = siblings()
    assert first._replay_lock is second._replay_lock is first.storage.lock
    other = prioritized(8)
    assert other._replay_lock is not first._replay_lock
    other.set_storage(first.storage)
    assert other._replay_lock is first._replay_lock


def test_sharing_one_buffer_makes_the_lock_of_all_its_siblings_exclude_processes():
    first, second = siblings()
    assert not first.storage.lock.is_shared
    first.share()
    assert second._replay_lock.is_shared
    assert first._replay_lock is second._replay_lock
    first.extend(records(4))  # the process lock is not reentrant: nested sections must not take it twice
    second.empty()


@pytest.mark.parametrize(
    "act",
    [
        lambda rb, sample: rb.extend(records(2)),
        lambda rb, sample: rb.add(records(1)[0]),
        lambda rb, sample: rb.sample(),
        lambda rb, sample: rb.empty(),
        lambda rb, sample: rb.__setitem__(0, records(1, index=torch.zeros(1, dtype=torch.int64))[0]),
        lambda rb, sample: rb.mark_update(torch.tensor([0])),
        lambda rb, sample: rb.update_priority(torch.tensor([0]), 1.0),
        lambda rb, sample: rb.update_priority_if_present(
            index=sample["index"], generation=sample["index_generation"], priority=1.0
        ),
        lambda rb, sample: rb.update_tensordict_priority_if_present(sample),
        lambda rb, sample: rb.update_if_present(
            index=sample["index"], generation=sample["index_generation"], patch={"x": sample["x"]}
        ),
        lambda rb, sample: rb.set_sampler(rb.sampler),
        lambda rb, sample: rb.set_writer(rb.writer),
        lambda rb, sample: rb.set_storage(rb.storage),
        lambda rb, sample: rb.stats(),
        lambda rb, sample: rb.state_dict(),
        lambda rb, sample: rb.set_at_("x", torch.tensor([0]), [0]),
    ],
    ids=[
        *("extend", "add", "sample", "empty", "setitem", "mark_update", "update_priority", "conditional", "tensordict"),
        *("field", "set_sampler", "set_writer", "set_storage", "stats", "state_dict", "set_at_"),
    ],
)
def test_a_sibling_waits_for_the_holder_of_the_lock(act, actors):
    first, second = siblings()
    first.extend(records(8))
    sample = first.sample().set("td_error", torch.ones(8))
    with first.storage.lock:
        blocked = announce_blocked(first.storage.lock, "sibling")
        future = actors.start("sibling", lambda: act(second, sample))
        until_blocked_or_done(blocked, future)
        assert not future.done()
    future.result(TIMEOUT)


# ------------------------------------------------------------------ exchange of parts


def test_an_exchanged_part_is_checked_before_anything_changes():
    rb = prioritized(8)
    storage, writer, sampler = rb.storage, rb.writer, rb.sampler
    with pytest.raises(TypeError, match="needs a storage that carries slot generations"):
        rb.set_storage(ListStorage(8))
    with pytest.raises(ValueError, match="max_capacity=8 but the storage holds 9 records"):
        rb.set_storage(g.GenerationalLazyTensorStorage(9))
    with pytest.raises(TypeError, match="needs a writer that tracks generations"):
        rb.set_writer(RoundRobinWriter())
    with pytest.raises(ValueError, match="max_capacity=7 but the storage holds 8 records"):
        rb.set_sampler(g.GenerationalPrioritizedSampler(7, 1.0, 1.0))
    assert (rb.storage, rb.writer, rb.sampler) == (storage, writer, sampler)


def test_after_an_exchange_of_storages_the_writer_and_the_marks_follow():
    rb = prioritized(8)
    old, new = rb.storage, g.GenerationalLazyTensorStorage(8)
    assert rb.set_storage(new) is old
    assert new.lock is old.lock  # whoever waits for it finds the new storage behind it
    rb.extend(records(3))
    assert (len(new), len(old)) == (3, 0)
    assert torch.equal(rb.sample()["index_generation"].unique(), new.generations[:3].unique())
    assert rb not in old._attached_entities


# ------------------------------------------------------------------ copies


@pytest.mark.parametrize("make", BUFFERS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_pickled_buffer_keeps_its_stamps_and_its_handles(make, prefetch):
    rb = build(make, storage=g.GenerationalLazyTensorStorage(8), batch_size=8, prefetch=prefetch)
    rb.extend(records(8))
    rb.extend(records(3))
    _, info = rb.sample(return_info=True)
    copy = pickle.loads(pickle.dumps(rb))
    assert copy.storage.generations.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert copy._replay_lock is copy.storage.lock is not rb.storage.lock
    if make in PRIORITIZED:
        handles = {"index": info["index"], "generation": info["index_generation"]}
        assert copy.update_priority_if_present(**handles, priority=2.0).num_stale == 0
    copy.extend(records(8))
    assert rb.storage.generations.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    for buffer in (rb, copy):
        buffer.shutdown()


def test_writing_all_slots_decides_and_writes_in_one_section(monkeypatch):
    """TorchRL looks whether the buffer is full before it takes a lock."""
    rb = prioritized(8)
    rb.extend(records(8))
    held = []
    kind = type(rb)
    original = kind.__setitem__

    def setitem(self, index, value):
        held.append(self.storage.lock._threads._is_owned())
        original(self, index, value)

    monkeypatch.setattr(kind, "__setitem__", setitem)
    rb.write_all(records(8, 100, index=torch.arange(8)))
    assert held == [True]


@pytest.mark.parametrize("count", [3, 8])
def test_assigning_an_entry_changes_the_records_that_are_there(count):
    """Found by the oracle: TorchRL's changes nothing unless the buffer is full, and then shares the caller's tensor."""
    rb = prioritized(8)
    rb.extend(records(count))
    sample = rb.sample().set("td_error", torch.ones(8))
    values = torch.arange(100, 100 + count)
    rb["x"] = values
    assert rb[:]["x"].tolist() == values.tolist()
    rb.extend(records(1))
    assert values.tolist() == list(range(100, 100 + count))
    assert rb.update_tensordict_priority_if_present(sample).num_stale == int((sample["index"] == count % 8).sum())
