"""Plain round trips: stamps, priorities and handles survive, and TorchRL's own checkpoints load."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from support import buffer_state, leaves, plain_prioritized, prioritized, records, sampler_state, transfer
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

import torchrl_generational as g

STORAGES = [g.GenerationalLazyTensorStorage, g.GenerationalLazyMemmapStorage]

pytestmark = pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("make", STORAGES)
@pytest.mark.parametrize("written", [3, 8, 11])
def test_a_round_trip_into_a_new_buffer_keeps_stamps_priorities_and_handles(how, make, written, tmp_path):
    """R8."""
    rb, target = (prioritized(8, storage=make(8)) for _ in range(2))
    rb.extend(records(written, td_error=torch.arange(1.0, written + 1)))
    sample = rb.sample()
    stamps, held = rb.storage.generations.clone(), leaves(rb)
    transfer(rb, target, how, tmp_path)
    assert torch.equal(target.storage.generations, stamps)
    assert torch.equal(leaves(target), held)
    assert len(target) == len(rb)
    assert torch.equal(target[:]["x"], rb[:]["x"])
    sample["td_error"] = torch.full((8,), 0.25)
    assert target.update_tensordict_priority_if_present(sample).num_stale == 0
    target.extend(records(8))
    assert target.update_tensordict_priority_if_present(sample).num_stale == 8
    assert torch.equal(rb.storage.generations, stamps)


class Timeline:
    """A buffer and all handles that were ever taken from it, with the records (by ``x``) that they were taken for."""

    def __init__(self, make=g.GenerationalLazyTensorStorage):
        self.rb, self.handles, self.next = prioritized(8, storage=make(8)), [], 0

    def write(self, count):
        self.rb.extend(records(count, self.next))
        self.next += count

    def take(self):
        sample = self.rb.sample()
        self.handles += zip(
            sample["index"].tolist(), sample["index_generation"].tolist(), sample["x"].tolist(), strict=True
        )

    def check(self, rb=None):
        """A handle is live exactly where its record is."""
        rb = self.rb if rb is None else rb
        assert self.handles
        index, generation, x = (torch.tensor(column) for column in zip(*self.handles, strict=True))
        result = rb.update_priority_if_present(index=index, generation=generation, priority=1.0)
        there = torch.where(index < len(rb), rb.storage._storage["x"][index], -1) == x
        assert torch.equal(result.updated_mask, there)


@pytest.mark.parametrize("make", STORAGES)
@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("before", [3, 8, 13])
@pytest.mark.parametrize("after", [2, 8, 20])
def test_no_handle_of_an_abandoned_timeline_is_live_after_a_restore(make, how, before, after, tmp_path):
    """C12, C33: what was written after the checkpoint is forgotten, and written again differently."""
    line = Timeline(make)
    line.write(before)
    line.take()
    if how == "state_dict":
        saved = line.rb.state_dict()
    else:
        line.rb.dumps(tmp_path)
    for _ in range(3):
        line.write(after)
        line.take()
        if how == "state_dict":
            line.rb.load_state_dict(saved)
        else:
            line.rb.loads(tmp_path)
        line.check()
        line.take()
        line.write(after)
        line.take()
        line.check()


def test_two_restores_of_one_checkpoint_know_their_handles_apart():
    line, other = Timeline(), Timeline()
    line.write(8)
    line.take()
    saved = line.rb.state_dict()
    for each in (line, other):
        each.rb.load_state_dict(saved)
    other.next = 1000
    for each in (line, other):
        each.write(5)
        each.take()
    both = Timeline()
    both.handles = line.handles + other.handles
    both.check(line.rb)
    both.check(other.rb)


def test_a_restore_of_a_restore_goes_on():
    line = Timeline()
    line.write(8)
    for _ in range(5):
        saved = line.rb.state_dict()
        line.write(6)
        line.take()
        line.rb.load_state_dict(saved)
        line.write(3)
        line.take()
        line.check()


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_the_checkpoint_of_another_buffer_makes_every_handle_stale_in_a_used_one(how, tmp_path):
    """Both started at generation 0: their stamps cannot be told apart."""
    line, other = Timeline(), Timeline()
    other.next = 1000
    for each in (line, other):
        each.write(11)
        each.take()
    transfer(other.rb, line.rb, how, tmp_path)
    for each in (line, other):
        index, generation, _ = (torch.tensor(column) for column in zip(*each.handles, strict=True))
        assert line.rb.update_priority_if_present(index=index, generation=generation, priority=1.0).num_updated == 0
    line.handles.clear()
    line.take()
    line.check()


def test_a_pickled_copy_keeps_handles_and_goes_its_own_way():
    line = Timeline()
    line.write(11)
    line.take()
    copy = pickle.loads(pickle.dumps(line.rb))
    line.check(copy)
    line.write(8)
    line.take()
    copy.extend(records(8, 1000))
    line.check(copy)
    line.check()


@pytest.mark.parametrize("exchanged", ["empty", "filled"])
def test_a_handle_of_the_previous_storage_is_stale_after_an_exchange(exchanged):
    line = Timeline()
    line.write(11)
    line.take()
    new = g.GenerationalLazyTensorStorage(8)
    if exchanged == "filled":
        for _ in range(2):
            new.set(range(8), records(8, 1000))
    line.rb.set_storage(new)
    line.rb.extend(records(8, 2000))
    line.check()
    line.rb.sampler.mark_update(torch.arange(8), storage=new)
    line.take()
    line.check()


def test_a_state_dict_is_one_consistent_snapshot():
    """C33: in stock it aliases the data and copies the stamps."""
    rb = prioritized(8)
    rb.extend(records(8))
    state = rb.state_dict()
    rb.extend(records(8, 100))
    target = prioritized(8)
    target.load_state_dict(state)
    assert target[:]["x"].tolist() == list(range(8))
    assert target.storage.generations.tolist() == [0] * 8


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_a_round_trip_of_several_dimensions(how, tmp_path):
    rb, target = (prioritized(12, storage=g.GenerationalLazyTensorStorage(12, ndim=2)) for _ in range(2))
    for start in (0, 100):
        rb.extend(TensorDict({"x": torch.arange(start, start + 9).reshape(3, 3)}, [3, 3]))
    transfer(rb, target, how, tmp_path)
    assert torch.equal(target.storage.generations, rb.storage.generations)
    sample = rb.sample().set("td_error", torch.ones(8))
    assert target.update_tensordict_priority_if_present(sample).num_stale == 0


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("fresh", [True, False])
def test_checkpoints_of_stock_buffers_load(how, tracked, fresh, tmp_path):
    """C13: without stamps in the checkpoint, every handle from before is stale."""
    stock = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=PrioritizedSampler(8, 1.0, 1.0),
        writer=TensorDictRoundRobinWriter(track_generations=tracked),
        batch_size=8,
    )
    stock.extend(records(11, td_error=torch.arange(1.0, 12.0)))
    rb = prioritized(8)
    old = None
    if not fresh:
        rb.extend(records(8, 500, td_error=torch.full((8,), 0.5)))
        old = rb.sample().set("td_error", torch.full((8,), 99.0))
    transfer(stock, rb, how, tmp_path)
    assert leaves(rb).tolist() == [9, 10, 11, 4, 5, 6, 7, 8]
    assert rb[:]["x"].tolist() == stock[:]["x"].tolist()
    if tracked and fresh:
        assert rb.storage.generations.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    if old is not None:
        assert rb.update_tensordict_priority_if_present(old).num_stale == 8
    sample = rb.sample()
    assert (sample["index_generation"] >= 0).all()
    sample["td_error"] = torch.full((8,), 2.0)
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 0


def stock_buffer():
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=PrioritizedSampler(8, 1.0, 1.0),
        writer=TensorDictRoundRobinWriter(track_generations=True),
        batch_size=8,
    )


def test_our_checkpoints_load_in_stock(tmp_path):
    rb, stock = prioritized(8), stock_buffer()
    rb.extend(records(11, td_error=torch.arange(1.0, 12.0)))
    transfer(rb, stock, "dumps", tmp_path)
    assert stock[:]["x"].tolist() == rb[:]["x"].tolist()
    assert stock.writer.generations_of(torch.arange(8)).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert torch.equal(leaves(stock), leaves(rb))


def test_records_and_stamps_of_our_state_dicts_load_in_stock():
    """Not the priorities: stock knows only pickled trees, which no safe load reads."""
    rb, stock = prioritized(8), stock_buffer()
    rb.extend(records(11))
    state = rb.state_dict()
    stock.storage.load_state_dict(state["_storage"])
    stock.writer.load_state_dict(state["_writer"])
    assert stock[:]["x"].tolist() == rb[:]["x"].tolist()
    assert stock.writer.generations_of(torch.arange(8)).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    stock.sampler.load_state_dict(state["_sampler"])
    with pytest.raises(AttributeError, match="query"):
        stock.sample()


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_dict_is_read_by_a_safe_load(ndim, dtype):
    """C14: tensors and numbers only."""

    def make():
        return g.GenerationalTensorDictReplayBuffer(
            storage=g.GenerationalLazyTensorStorage(10, ndim=ndim),
            sampler=g.GenerationalPrioritizedSampler(10, 0.7, 0.5, dtype=dtype),
            batch_size=8,
        )

    rb, target = make(), make()
    shape = (7,) if ndim == 1 else (3, 4)
    rb.extend(TensorDict({"x": torch.rand(shape), "td_error": torch.rand(shape)}, shape))
    stream = io.BytesIO()
    torch.save(rb.state_dict(), stream)
    stream.seek(0)
    target.load_state_dict(torch.load(stream, weights_only=True))
    assert sampler_state(target) == sampler_state(rb)
    sample = rb.sample().set("td_error", torch.ones(8))
    assert target.update_tensordict_priority_if_present(sample).num_stale == 0


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_the_sampler_is_bit_for_bit_the_same_after_a_round_trip(how, within, alpha, tmp_path):
    """C15: also right after the record with the largest priority was overwritten."""
    rb, target = (plain_prioritized(8, alpha=alpha, max_priority_within_buffer=within) for _ in range(2))
    rb.extend(torch.arange(8))
    rb.update_priority(torch.tensor([2]), torch.tensor([9.0]))
    rb.extend(torch.arange(3))
    target.extend(torch.arange(8))
    transfer(rb, target, how, tmp_path)
    assert sampler_state(target) == sampler_state(rb)


def test_the_state_of_a_sampler_that_was_never_used_round_trips(tmp_path):
    source, target = (g.GenerationalPrioritizedSampler(8, 0.7, 0.5) for _ in range(2))
    target.update_priority(torch.arange(8), 5.0)
    source.dumps(tmp_path / "sampler")
    target.loads(tmp_path / "sampler")
    assert target._max_priority == (None, None)
    assert target._sum_tree.query(0, 8) == 0
    assert target._min_tree.query(0, 8) == source._min_tree.query(0, 8)


def test_a_sampler_of_one_slot_round_trips():
    source, target = (g.GenerationalPrioritizedSampler(1, 1.0, 1.0) for _ in range(2))
    source.update_priority([0], 5.0)
    target.load_state_dict(source.state_dict())
    assert target._sum_tree[0] == source._sum_tree[0]


# ------------------------------------------------------------------ what does not fit


def misfits():
    """Name -> (a checkpoint's buffer, what the error says)."""
    other_shape = prioritized(8)
    other_shape.extend(TensorDict({"x": torch.zeros(8, 3, dtype=torch.int64)}, [8]))
    small, large = prioritized(4), prioritized(64)
    small.extend(records(3))
    large.extend(records(20))
    more, fewer = prioritized(8), prioritized(8)
    more.extend(records(8, y=torch.zeros(8)))
    fewer.extend(TensorDict({"y": torch.zeros(8)}, [8]))
    return {"smaller": small, "larger": large, "another shape": other_shape, "more": more, "other entries": fewer}


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize(
    ("kind", "fresh"),
    [
        ("smaller", True),
        ("smaller", False),
        ("larger", True),
        ("larger", False),
        ("another shape", False),
        ("more", False),
        ("other entries", False),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_replaced(how, kind, fresh, tmp_path):
    """C11: stock takes a smaller one, and its tree shrinks."""
    source, rb = misfits()[kind], prioritized(8)
    line = Timeline()
    line.rb = rb
    if not fresh:
        line.write(11)
        line.take()
    before = buffer_state(rb)
    with pytest.raises(ValueError, match="Load it into a buffer"):
        transfer(source, rb, how, tmp_path)
    assert buffer_state(rb) == before
    if not fresh:
        line.check()


@pytest.mark.parametrize("part", ["buffer_metadata.json", "writer/metadata.json", "storage/storage_metadata.json"])
def test_a_directory_that_lacks_a_part_is_refused_before_anything_is_replaced(part, tmp_path):
    source, rb = prioritized(8), prioritized(8)
    source.extend(records(8))
    source.dumps(tmp_path)
    (tmp_path / part).unlink()
    rb.extend(records(5, 100))
    before = buffer_state(rb)
    with pytest.raises(FileNotFoundError, match="not a complete checkpoint"):
        rb.loads(tmp_path)
    assert buffer_state(rb) == before


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("_alpha", -1.0, "alpha, beta and eps"),
        ("_beta", float("nan"), "alpha, beta and eps"),
        ("_sum_tree", torch.full((8,), float("nan")), "it is damaged"),
        ("_sum_tree", torch.full((8,), -1.0), "it is damaged"),
        ("_min_tree", torch.full((8,), 0.5), "do not belong together: it is damaged"),
        ("_sum_tree", torch.ones(9), "priorities of 9 slots but this sampler has max_capacity=8"),
    ],
)
def test_a_damaged_sampler_state_is_refused_before_anything_is_replaced(key, value, message):
    rb = prioritized(8)
    rb.extend(records(8))
    state = rb.state_dict()
    rb.extend(records(3, 100))
    before = buffer_state(rb)
    state["_sampler"][key] = value
    with pytest.raises(ValueError, match=message):
        rb.load_state_dict(state)
    assert buffer_state(rb) == before


def test_loading_waits_for_prefetched_work():
    rb = prioritized(8, prefetch=3)
    rb.extend(records(8))
    for _ in range(20):
        rb.sample()
        state = rb.state_dict()
        rb.load_state_dict(state)
    rb.shutdown()


def test_the_layout_of_a_checkpoint_is_that_of_torchrl(tmp_path):
    rb = prioritized(8)
    rb.extend(records(5))
    assert {"_cursor", "_write_count", "_generation"} < set(rb.state_dict()["_writer"])
    rb.dumps(tmp_path)
    assert (tmp_path / "writer" / "generation.memmap").stat().st_size == 8 * 8


def test_prefetched_batches_in_a_checkpoint_keep_their_handles():
    rb = prioritized(8, prefetch=2)
    rb.extend(records(8))
    rb.sample()
    state = rb.state_dict()
    target = prioritized(8, prefetch=2)
    target.load_state_dict(state)
    target.extend(records(5))
    for _ in range(2):
        sample = target.sample().set("td_error", torch.full((8,), 2.0))
        result = target.update_tensordict_priority_if_present(sample)
        assert torch.equal(result.stale_mask, sample["index"] < 5)
    for buffer in (rb, target):
        buffer.shutdown()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", ["tensors", "nested", "objects", "plain"])
def test_a_state_dict_is_tensors_and_numbers_whatever_it_carries(prefetch, kind):
    """C14, prefetched batches included."""
    if kind == "plain":
        rb, target = plain_prioritized(8, prefetch=prefetch), plain_prioritized(8, prefetch=prefetch)
        rb.extend(torch.arange(8))
    else:
        rb, target = prioritized(8, prefetch=prefetch), prioritized(8, prefetch=prefetch)
        data = records(8)
        if kind == "nested":
            data["inner"] = TensorDict({"y": torch.rand(8, 2)}, [8, 2])
        if kind == "objects":
            data["text"] = NonTensorStack(*"abcdefgh")
        rb.extend(data)
    rb.sample()
    file = io.BytesIO()
    torch.save(rb.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(prefetch + 1):
        (theirs, theirs_info), (ours, ours_info) = (buffer.sample(return_info=True) for buffer in (rb, target))
        assert torch.equal(theirs_info["index"], ours_info["index"])
        if kind == "plain":
            assert torch.equal(theirs, ours)
        else:
            assert (
                theirs.select("x", "index", "index_generation") == ours.select("x", "index", "index_generation")
            ).all()
            assert theirs.batch_size == ours.batch_size
            assert theirs.is_locked == ours.is_locked
        if kind == "nested":
            assert ours["inner"].batch_size == (8, 2)
        if kind == "objects":
            assert list(theirs["text"]) == list(ours["text"])
    for buffer in (rb, target):
        buffer.shutdown()


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("count", [5, 11])
def test_the_newest_record_is_known_after_a_restore(how, count, tmp_path):
    """TorchRL keeps the place of the newest record of the abandoned timeline, where slices would be cut."""
    rb, target = prioritized(8), prioritized(8)
    rb.extend(records(count))
    target.extend(records(3))
    transfer(rb, target, how, tmp_path)
    newest = target.storage._last_cursor_index
    assert int(target.storage._storage["x"][newest]) == count - 1
    target.dumps(tmp_path / "again")  # without TorchRL's warning that the place is unknown


@pytest.mark.parametrize(("priority", "eps"), [(1e100, 1e-8), (1e-60, 0.0)])
def test_priorities_that_another_dtype_cannot_hold_are_refused(priority, eps):
    source = plain_prioritized(4, dtype=torch.float64, eps=eps)
    target = plain_prioritized(4, eps=eps)
    for rb in (source, target):
        rb.extend(torch.arange(4))
    source.update_priority(torch.tensor([0]), priority)
    before = sampler_state(target)
    with pytest.raises(ValueError, match="priorities that torch.float32 cannot hold"):
        target.load_state_dict(source.state_dict())
    assert sampler_state(target) == before


def test_a_damaged_largest_priority_is_refused():
    rb = prioritized(8)
    rb.extend(records(8))
    state = rb.state_dict()
    state["_sampler"]["_max_priority"] = [float("nan"), 0]
    with pytest.raises(ValueError, match="cannot hold: it is damaged"):
        rb.load_state_dict(state)


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@pytest.mark.parametrize("way", ["deepcopy", "state_dict"])
def test_prefetched_samples_of_any_container_survive(way):
    def collate(data):
        return Pair(data, OrderedDict(b=data + 1))

    rb, target = (plain_prioritized(8, prefetch=1, collate_fn=collate) for _ in range(2))
    rb.extend(torch.arange(8))
    rb.sample()
    if way == "deepcopy":
        target = copy.deepcopy(rb)
    else:
        target.load_state_dict(rb.state_dict())
    theirs, ours = rb.sample(), target.sample()
    assert type(ours) is Pair
    assert torch.equal(ours.a, theirs.a)
    assert torch.equal(ours.b["b"], theirs.b["b"])
    for buffer in (rb, target):
        buffer.shutdown()


@pytest.mark.parametrize(
    "objects", [[[1], [2], [3, 4], [5]], [{"k": 1}, {"k": 2}, {}, {"z": [1]}], ["a", "b", "c", "d"]]
)
def test_stored_objects_of_any_kind_survive_and_go_on(objects):
    data = records(4)
    data["o"] = NonTensorStack(*(NonTensorData(item) for item in objects))
    rb, target = prioritized(4), prioritized(4)
    rb.extend(data.clone())
    target.load_state_dict(rb.state_dict())
    held = [target.storage[slot].get("o").data for slot in range(4)]
    assert held == objects
    target.extend(data.clone())
    assert [target.storage[slot].get("o").data for slot in range(4)] == objects


def test_one_object_for_a_whole_prefetched_batch_survives():
    rb, target = (
        prioritized(
            4, prefetch=1, transform=lambda td: td.set("tag", NonTensorData({"k": 1}, batch_size=td.batch_size))
        )
        for _ in range(2)
    )
    rb.extend(records(4))
    rb.sample()
    target.load_state_dict(rb.state_dict())
    assert target.sample().get("tag").data == {"k": 1}
    for buffer in (rb, target):
        buffer.shutdown()
