"""Ensembles: TD errors of a batch from several buffers go back to the records that they were computed for, or nowhere.

The oracle knows which record is in which slot of which member: a dict of (member, slot) -> record, and a dict of
(member, record) -> priority.
"""

from __future__ import annotations

import copy
import io
import multiprocessing as mp
import pickle
import random
import threading

import pytest
import torch
from support import (
    TIMEOUT,
    announce_blocked,
    leaves,
    plain_prioritized,
    prioritized,
    records,
    transfer,
    until_blocked_or_done,
)
from support import buffer_state as state_of
from support import filled as full
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torchrl.data import ReplayBuffer, ReplayBufferEnsemble, SamplerWithoutReplacement, SliceSampler
from torchrl.data.replay_buffers import SamplerEnsemble, StorageEnsemble, WriterEnsemble
from torchrl.envs.transforms import Compose, RenameTransform

import torchrl_generational as g
from torchrl_generational.ensembles import updates

CAPACITY = 8


def ensemble(*members, batch_size=16, seed=0, **kwargs):
    members = members or (full(), full())
    generator = torch.Generator().manual_seed(seed)
    return g.GenerationalReplayBufferEnsemble(*members, batch_size=batch_size, generator=generator, **kwargs)


def uniform(capacity=CAPACITY, start=0, **kwargs):
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(capacity), **kwargs)
    rb.extend(records(capacity, start))
    return rb


def states(rb):
    return [state_of(member) for member in rb._rbs]


class World:
    """An ensemble whose records have ``x`` of their own, and what the oracle knows about them."""

    def __init__(self, members=3, **kwargs):
        self.rb = ensemble(*(prioritized(CAPACITY) for _ in range(members)), batch_size=4 * members, **kwargs)
        self.slots, self.priority, self.serial = {}, {}, 0
        self.cursor, self.largest = [0] * members, [None] * members
        for member in range(members):
            self.write(member, CAPACITY)

    def write(self, member, count):
        self.rb[member].extend(records(count, self.serial))
        for _ in range(count):
            self.slots[member, self.cursor[member]] = self.serial
            self.priority[self.serial] = 1.0 if self.largest[member] is None else self.largest[member]
            self.cursor[member] = (self.cursor[member] + 1) % CAPACITY
            self.serial += 1
        self.largest[member] = self.largest[member] or 1.0

    def empty(self):
        self.rb.empty()
        self.slots.clear()
        self.cursor, self.largest = [0] * len(self.cursor), [None] * len(self.largest)

    def update(self, sample, raw=False):
        """Hands TD errors back, a different one for each record."""
        x, ids, index = sample["x"], sample["index", "buffer_ids"], sample["index", "index"]
        sample["td_error"] = 1.0 + x % 50
        expected = torch.tensor(
            [self.slots.get(row[:2]) == row[2] for row in self.rows(ids, index, x)],
        ).reshape(x.shape)
        if raw:
            self.rb.update_priority(sample["index"], sample["td_error"])
        else:
            result = self.rb.update_tensordict_priority_if_present(sample)
            assert torch.equal(result.updated_mask, expected)
        for member, record, live in self.rows(ids, x, expected):
            if live:
                self.priority[record] = 1.0 + record % 50
                self.largest[member] = max(self.largest[member], self.priority[record])

    @staticmethod
    def rows(*columns):
        return zip(*(column.reshape(-1).tolist() for column in columns), strict=True)

    def check(self):
        for (member, slot), record in self.slots.items():
            assert float(leaves(self.rb[member])[slot]) == pytest.approx(self.priority[record])
            assert int(self.rb[member][slot]["x"]) == record
        for member, largest in enumerate(self.largest):
            assert float(self.rb[member].sampler.default_priority) == pytest.approx(largest or 1.0)


# ------------------------------------------------------------------ the oracle


@pytest.mark.parametrize(
    "how",
    [{}, {"sample_from_all": True}, {"p": [0.5, 0.2, 0.3], "num_buffer_sampled": 6}, {"p": "sampleable"}],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_td_errors_reach_the_records_of_their_members_or_none(how, seed):
    world, steps, held = World(**how, seed=seed), random.Random(seed), []
    torch.manual_seed(seed)
    for _ in range(60):
        step = steps.random()
        if step < 0.4:
            held.append(world.rb.sample())
        elif step < 0.7:
            world.write(steps.randrange(3), steps.randrange(1, 2 * CAPACITY))
        elif held:
            world.update(held.pop(steps.randrange(len(held))))
        if steps.random() < 0.03:
            world.empty()
            for member in range(3):
                world.write(member, CAPACITY)
        world.check()


def test_the_raw_update_reaches_whatever_record_is_there():
    world = World()
    sample = world.rb.sample()
    world.update(sample, raw=True)
    world.check()
    for member in range(3):
        world.write(member, CAPACITY)
    world.update(sample, raw=True)
    with pytest.raises(AssertionError):
        world.check()


def test_torchrls_ensemble_only_warns_when_priorities_are_updated():
    """C26."""
    members = full(), full()
    stock = ReplayBufferEnsemble(*members, batch_size=8)
    sample, before = stock.sample(), [leaves(rb).tolist() for rb in members]
    with pytest.warns(UserWarning, match="not prioritized"):
        stock.update_priority(sample["index"], torch.full((2, 4), 9.0))
    assert [leaves(rb).tolist() for rb in members] == before


def test_a_batch_may_be_cut_flattened_shuffled_moved_and_pickled():
    world = World()
    sample = world.rb.sample()
    world.write(1, 5)
    world.update(pickle.loads(pickle.dumps(sample)).reshape(-1)[torch.randperm(12)][:7].to("cpu"))
    world.update(sample[1])
    world.update(sample[:, :2])
    world.update(torch.cat(sample.unbind(0)))
    world.update(sample[2, 3])
    world.check()


def test_one_update_of_all_members_ends_where_updates_of_each_end():
    one, apart = [full(), full()], [full(), full()]
    rb = ensemble(*one)
    sample = rb.sample()
    sample["td_error"] = torch.rand(sample.batch_size)
    for member in (0, 1):
        one[member].extend(records(3))
        apart[member].extend(records(3))
    result = rb.update_tensordict_priority_if_present(sample)
    flat = sample.reshape(-1)
    for number, member in enumerate(apart):
        rows = flat["index", "buffer_ids"] == number
        alone = member.update_priority_if_present(
            index=flat["index", "index"][rows],
            generation=flat["index_generation"][rows],
            priority=flat["td_error"][rows],
        )
        assert torch.equal(alone.updated_mask, result.updated_mask.reshape(-1)[rows])
        assert state_of(member) == state_of(one[number])


def test_the_last_of_two_rows_for_one_record_wins_also_where_a_buffer_is_two_members():
    member = full()
    rb = ensemble(member, member)
    ids = torch.tensor([1, 1, 0])
    result = rb.update_priority_if_present(
        index=torch.zeros(3).long(), buffer_ids=ids, generation=torch.zeros(3).long(), priority=[9.0, 3.0, 4.0]
    )
    assert result.num_updated == 3
    assert leaves(member)[0] == 4.0
    rb.update_priority({"index": torch.zeros(3).long(), "buffer_ids": ids}, [9.0, 3.0, 5.0])
    assert leaves(member)[0] == 5.0


# ------------------------------------------------------------------ layouts


def handles_fit(rb, data, info):
    """Every row's handle names the record that the row holds."""
    ids, index = info["index", "buffer_ids"].reshape(-1), info["index", "index"]
    x = data if isinstance(data, torch.Tensor) else data["x"]
    stamps = info["index_generation"].reshape(-1)
    rows = index.reshape(-1, index.shape[-1]) if index.ndim > info.ndim else index.reshape(-1)
    for member, row, value, stamp in zip(ids.tolist(), rows, x.reshape(len(ids), -1), stamps.tolist(), strict=True):
        cell = tuple(row.tolist()) if row.ndim else int(row)
        storage = rb[member].storage
        held = storage._storage if isinstance(storage._storage, torch.Tensor) else storage._storage["x"]
        assert torch.equal(held[cell].reshape(-1), value)
        assert int(storage.generations[cell]) == stamp


@pytest.mark.parametrize(
    "collate", [None, torch.cat, torch.stack, lambda parts: torch.cat([part.flip(0) for part in parts[::-1]])]
)
@pytest.mark.parametrize(
    "transform",
    [
        None,
        lambda data: data.reshape(-1).flip(0)[:5],
        lambda data: data.select("x"),
        lambda data: data.set("y", data["x"] * 2).flip(-1),
    ],
)
def test_handles_follow_their_records_through_collation_and_transforms(collate, transform):
    members = [full(storage=g.GenerationalLazyTensorStorage(CAPACITY)), prioritized(CAPACITY)]
    members[1].extend(records(CAPACITY + 3, 100))
    rb = ensemble(*members, collate_fn=collate, transform=transform, sample_from_all=True)
    data, info = rb.sample(return_info=True)
    assert data.batch_size == info.batch_size == data["index_generation"].shape
    assert torch.equal(data["index", "index"], info["index", "index"])
    handles_fit(rb, data, info)
    data["td_error"] = torch.rand(data.batch_size)
    assert rb.update_tensordict_priority_if_present(data).updated_mask.shape == data.batch_size


def test_handles_follow_their_records_through_the_members_own_transforms_and_collation():
    members = [
        prioritized(CAPACITY, transform=Compose(RenameTransform(["y"], ["z"]), lambda data: data.flip(0))),
        prioritized(CAPACITY, collate_fn=lambda data: data[torch.tensor([1, 1, 0, 2])]),
    ]
    for start, member in enumerate(members):
        member.extend(records(CAPACITY, 100 * start, y=torch.zeros(CAPACITY)))
    rb = ensemble(*members, batch_size=8)
    for _ in range(5):
        handles_fit(rb, *rb.sample(return_info=True))
    members[0].append_transform(RenameTransform(["z"], ["w"]))
    members[0].append_transform(lambda data: data[torch.arange(-1, 3)])
    handles_fit(rb, *rb.sample(return_info=True))


def test_transforms_may_be_appended_to_the_ensemble():
    rb = ensemble()
    rb.append_transform(lambda data: data.flip(0))
    handles_fit(rb, *rb.sample(return_info=True))


def test_a_transform_that_cannot_be_followed_is_refused():
    rb = ensemble(transform=lambda data: TensorDict({"x": data["x"] + 1}, data.batch_size))
    with pytest.raises(RuntimeError, match="cannot be told where each record went"):
        rb.sample()


@tensorclass
class Record:
    x: torch.Tensor


@pytest.mark.parametrize(
    "make", [lambda x: x, lambda x: {"x": x, "more": (x,)}, lambda x: Record(x=x, batch_size=x.shape)]
)
@pytest.mark.parametrize("num", [2, 4])
def test_data_that_are_no_tensordict_have_their_handles_in_the_info(make, num):
    members = [plain_prioritized(CAPACITY) for _ in range(2)]
    for start, member in enumerate(members):
        member.extend(make(torch.arange(100 * start, 100 * start + CAPACITY)))
    rb = ensemble(*members, batch_size=8, num_buffer_sampled=num)
    data, info = rb.sample(return_info=True)
    x = data if isinstance(data, torch.Tensor) else data["x"] if isinstance(data, dict) else data.x
    assert torch.equal(x, info["index", "index"] + 100 * info["index", "buffer_ids"])
    result = rb.update_priority_if_present(
        index=info["index"], generation=info["index_generation"], priority=torch.rand(x.shape)
    )
    assert result.updated_mask.shape == x.shape
    assert result.num_updated == 8


def test_a_collation_of_tensors_may_join_the_parts_but_not_lose_records():
    members = [plain_prioritized(CAPACITY) for _ in range(2)]
    for member in members:
        member.extend(torch.arange(CAPACITY))
    data, info = ensemble(*members, collate_fn=torch.cat).sample(return_info=True)
    assert torch.equal(data, info["index", "index"])
    with pytest.raises(RuntimeError, match="cannot carry their handles"):
        ensemble(*members, collate_fn=lambda parts: torch.cat(parts)[:3]).sample()


def test_members_with_other_entries_are_stacked_lazily():
    other = prioritized(CAPACITY)
    other.extend(TensorDict({"y": torch.zeros(CAPACITY, 3)}, [CAPACITY]))
    rb = ensemble(full(), other, sample_from_all=True)
    sample = rb.sample()
    assert isinstance(sample, LazyStackedTensorDict)
    sample["td_error"] = torch.rand(sample.batch_size)
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 16


@pytest.mark.parametrize("form", ["sample", "coordinates", "tuple"])
def test_storages_of_several_dimensions(form):
    members = [
        g.GenerationalTensorDictReplayBuffer(
            storage=g.GenerationalLazyTensorStorage(12, ndim=2),
            sampler=g.GenerationalPrioritizedSampler(12, alpha=1.0, beta=1.0),
        )
        for _ in range(2)
    ]
    for start, member in enumerate(members):
        member.extend(TensorDict({"x": torch.arange(12).reshape(4, 3) + 100 * start}, [4, 3]))
    rb = ensemble(*members, sample_from_all=True)
    sample, info = rb.sample(return_info=True)
    assert sample["index", "index"].shape == (2, 8, 2)
    handles_fit(rb, sample, info)
    members[1].extend(TensorDict({"x": torch.zeros(4, 2).long()}, [4, 2]))
    old = members[1].storage.generations[sample["index", "index"].unbind(-1)] == sample["index_generation"]
    sample["td_error"] = torch.rand(2, 8)
    if form == "sample":
        result = rb.update_tensordict_priority_if_present(sample)
    else:
        index = sample["index", "index"] if form == "coordinates" else sample["index", "index"].unbind(-1)
        result = rb.update_priority_if_present(
            index=index,
            buffer_ids=sample["index", "buffer_ids"],
            generation=sample["index_generation"],
            priority=sample["td_error"],
        )
    assert result.updated_mask[0].all()
    assert torch.equal(result.updated_mask[1], old[1])
    assert result.num_stale
    rb.update_priority(sample["index"], sample["td_error"])


def test_trajectories_stored_as_records_have_one_priority_each():
    members = [prioritized(CAPACITY) for _ in range(2)]
    for member in members:
        member.extend(TensorDict({"x": torch.arange(24).reshape(8, 3)}, [8, 3]))
    rb = ensemble(*members, sample_from_all=True, batch_size=8)
    sample, info = rb.sample(return_info=True)
    assert sample.batch_size == sample["index_generation"].shape == (2, 4, 3)
    assert info["index_generation"].shape == (2, 4)
    assert torch.equal(sample["x"][..., 0], info["index", "index"] * 3)
    sample["td_error"] = torch.arange(24.0).reshape(2, 4, 3)
    result = rb.update_tensordict_priority_if_present(sample)
    assert result.updated_mask.shape == (2, 4)
    last = {slot: 3.0 * row + 2 for row, slot in enumerate(info["index", "index"][0].tolist())}
    assert [float(leaves(members[0])[slot]) for slot in last] == pytest.approx(list(last.values()))
    rb.update_priority_if_present(index=info["index"], generation=info["index_generation"], priority=torch.rand(2, 4))


def test_slices_keep_their_trajectories_and_parts_of_any_length_can_be_joined():
    members = []
    for length in (3, 4):
        sampler = SliceSampler(num_slices=2, strict_length=False, traj_key="t")
        member = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(24), sampler=sampler)
        member.extend(TensorDict({"x": torch.arange(24), "t": torch.arange(24) // length}, [24]))
        members.append(member)
    rb = ensemble(*members, sample_from_all=True, collate_fn=torch.cat)
    data, info = rb.sample(return_info=True)
    assert len(data) == 14
    assert data["next", "truncated"].sum() == 4
    handles_fit(rb, data, info)
    with pytest.raises(RuntimeError, match=r"parts of shapes \[\(6,\), \(8,\)\].*collate_fn=torch.cat"):
        ensemble(*members, sample_from_all=True).sample()


def test_a_member_that_draws_without_replacement_ends_its_epoch_within_a_batch():
    for data in (records(6), torch.arange(6), {"x": torch.arange(6)}):
        member = g.GenerationalReplayBuffer(
            storage=g.GenerationalLazyTensorStorage(6), sampler=SamplerWithoutReplacement()
        )
        member.extend(data)
        rb = ensemble(member, batch_size=8)
        for _ in range(4):  # the second batch takes two of one epoch and six of the next
            found, info = rb.sample(return_info=True)
            x = found if isinstance(found, torch.Tensor) else found["x"]
            assert torch.equal(x.reshape(-1), info["index", "index"].reshape(-1))


# ------------------------------------------------------------------ members


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ReplayBuffer(), TypeError, "got ReplayBuffer as member 1. Use GenerationalReplayBuffer"),
        (lambda: ensemble(), TypeError, "Ensembles do not nest"),
        (lambda: plain_prioritized(ndim=2), ValueError, r"ndim=\[1, 2\]"),
    ],
)
def test_members_that_cannot_keep_the_promise_are_refused_at_construction(make, error, message):
    with pytest.raises(error, match=message):
        ensemble(full(), make())


def test_a_member_with_a_sample_unit_is_refused():
    from torchrl.data.replay_buffers.sample_units import SampleUnit

    class Same(SampleUnit):
        def expand(self, index, info, storage):
            return index, info

    with pytest.raises(TypeError, match="member 0 has a sample_unit"):
        ensemble(prioritized(sample_unit=Same()))


def test_rows_of_a_member_without_priorities_weigh_one_and_cannot_be_updated():
    rb = ensemble(full(), uniform(start=100), sample_from_all=True)
    sample, before = rb.sample(), states_of_priorities(rb)
    assert torch.equal(sample["priority_weight"][1], torch.ones(8))
    handles_fit(rb, sample, sample)
    sample["td_error"] = torch.rand(2, 8)
    message = r"8 rows of the batch are from member 1, which draws without priorities \(RandomSampler\)"
    with pytest.raises(TypeError, match=message):
        rb.update_tensordict_priority_if_present(sample)
    with pytest.raises(TypeError, match=message):
        rb.update_priority(sample["index"], 1.0)
    assert states_of_priorities(rb) == before
    mine = sample[sample["index", "buffer_ids"] == 0]
    assert rb.update_tensordict_priority_if_present(mine).num_updated == 8


def states_of_priorities(rb):
    return state_of(rb[0]), rb[1].storage.generations.tolist(), rb.stats()


def test_two_members_on_one_storage_see_each_others_writes():
    storage = g.GenerationalLazyTensorStorage(CAPACITY)
    first, second = prioritized(CAPACITY, storage=storage), prioritized(CAPACITY, storage=storage)
    first.extend(records(CAPACITY))
    rb = ensemble(first, second, sample_from_all=True)
    sample = rb.sample()
    second.extend(records(3, 100))
    sample["td_error"] = torch.rand(2, 8)
    result = rb.update_tensordict_priority_if_present(sample)
    assert torch.equal(result.stale_mask, sample["index", "index"] < 3)
    rb.empty()
    first.extend(records(CAPACITY))
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 16


def test_an_ensemble_of_parts_is_one_of_buffers_on_them():
    members = full(), full()
    rb = g.GenerationalReplayBufferEnsemble(
        storages=StorageEnsemble(*(rb.storage for rb in members), transforms=[rb._transform for rb in members]),
        samplers=SamplerEnsemble(*(rb.sampler for rb in members), p=[1.0, 0.0], num_buffer_sampled=4),
        writers=WriterEnsemble(*(rb.writer for rb in members)),
        batch_size=8,
    )
    sample = rb.sample()
    assert sample.batch_size == (4, 2)
    assert not sample["index", "buffer_ids"].any()
    members[0].extend(records(2))
    sample["td_error"] = torch.rand(4, 2)
    result = rb.update_tensordict_priority_if_present(sample)
    assert torch.equal(result.stale_mask, sample["index", "index"] < 2)


def test_indexing_gives_members_and_ensembles_of_this_class():
    rb = ensemble(full(), full(), full(), p=[0.2, 0.5, 0.3], batch_size=12, transform=lambda data: data.flip(0))
    assert rb[0] is rb._rbs[0]
    assert rb[:] is rb
    state = rb._rng.get_state()
    for index in (slice(1, 3), [1, 2], torch.tensor([1, 2])):
        part = rb[index]
        assert type(part) is g.GenerationalReplayBufferEnsemble
        assert part._rbs == rb._rbs[1:]
        handles_fit(part, *part.sample(return_info=True))
        assert part.sampler.p.tolist() == pytest.approx([0.625, 0.375])
        rb._rng.set_state(state)
    assert rb[0, :3]["x"].tolist() == [0, 1, 2]
    assert rb[:, :3]["x"].shape == (3, 3)
    assert rb[:2, :3]["x"].shape == (2, 3)
    assert rb[0].sampler._rng is rb._rng


def test_parts_are_exchanged_in_the_members():
    rb = ensemble()
    for exchange in (rb.set_sampler, rb.set_writer, rb.set_storage):
        with pytest.raises(RuntimeError, match="Exchange a member's"):
            exchange(rb.sampler)
    sample = rb.sample()
    rb[0].set_sampler(g.GenerationalPrioritizedSampler(CAPACITY, alpha=1.0, beta=1.0))
    larger = g.GenerationalLazyTensorStorage(CAPACITY)
    rb[1].set_storage(larger)
    rb[1].extend(records(4, 100))
    sample["td_error"] = torch.rand(sample.batch_size)
    result = rb.update_tensordict_priority_if_present(sample)
    assert torch.equal(result.updated_mask, sample["index", "buffer_ids"] == 0)
    assert rb.stats()["size"] == CAPACITY + 4
    assert rb.sampler[0] is rb[0].sampler
    assert rb.storage[1] is larger
    handles_fit(rb, *rb.sample(return_info=True))


def test_a_delayed_ensemble_of_delayed_members_is_made_on_first_use():
    make = [lambda: g.GenerationalLazyTensorStorage(CAPACITY)] * 2
    members = [
        g.GenerationalTensorDictReplayBuffer(storage=each, sampler=sampler, delayed_init=True)
        for each, sampler in zip(make, [lambda: g.GenerationalPrioritizedSampler(CAPACITY, 1.0, 1.0)] * 2, strict=True)
    ]
    rb = ensemble(*members, delayed_init=True, routing_key="to")
    assert not rb.initialized
    assert rb.stats()["conditional_stale"] == 0
    handles = {"index": torch.zeros(1).long(), "generation": torch.zeros(1).long(), "buffer_ids": [0]}
    with pytest.raises(RuntimeError, match="Call add\\(\\) or extend\\(\\) first"):
        rb.update_priority_if_present(**handles, priority=1.0)
    rb.extend(records(16, to=torch.arange(16) % 2))
    assert rb.update_priority_if_present(**handles, priority=1.0).num_updated == 1
    handles_fit(rb, *rb.sample(return_info=True))


# ------------------------------------------------------------------ bad input


BAD = {
    "NaN": ({"priority": [1.0, 1.0, 1.0, float("nan")]}, ValueError, "nan at row 3"),
    "negative": ({"priority": [1.0, 1.0, 1.0, -1.0]}, ValueError, "row 3"),
    "infinite in the tree": ({"priority": torch.tensor([1, 1, 1, 1e300], dtype=torch.float64)}, ValueError, "row 3"),
    "too large for the tree": ({"priority": [1.0, 1.0, 1.0, 2e38]}, ValueError, "too large"),
    "shape": ({"priority": [1.0, 1.0]}, ValueError, r"priority has shape \(2,\)"),
    "no such member": ({"buffer_ids": [0, 0, 1, 2]}, ValueError, r"got 2 \(row 3"),
    "negative member": ({"buffer_ids": [0, 0, 1, -1]}, ValueError, r"got -1 \(row 3"),
    "float members": ({"buffer_ids": [0.0, 0.0, 1.0, 1.0]}, TypeError, "buffer_ids must hold integers"),
    "members of another length": ({"buffer_ids": [0, 1]}, ValueError, r"buffer_ids has shape \(2,\)"),
    "no members": ({"buffer_ids": None}, TypeError, "index=sample\\['index'\\]"),
    "index": ({"index": [0, 1, 2, 64]}, IndexError, r"64 \(row 3"),
    "negative index": ({"index": [0, 1, 2, -1]}, IndexError, r"-1 \(row 3"),
    "index of another length": ({"index": [0, 1]}, ValueError, "describes rows of shape"),
    "float generation": ({"generation": [0.0] * 4}, TypeError, "generation must hold integers"),
    "members twice": ({"index": {"index": [0] * 4, "buffer_ids": [0] * 4}}, TypeError, "once"),
    "half of a handle": ({"index": {"index": [0] * 4}, "buffer_ids": None}, ValueError, r"lacks \['buffer_ids'\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_the_row_of_the_batch_before_any_member_changes(case):
    changed, error, message = BAD[case]
    rb = ensemble()
    before, totals = states(rb), rb.stats()
    good = {"index": [0, 1, 2, 3], "buffer_ids": [0, 0, 1, 1], "generation": [0] * 4, "priority": [1.0] * 4}
    with pytest.raises(error, match=message):
        rb.update_priority_if_present(**good | changed)
    if "generation" not in changed and isinstance(changed.get("index", []), list):
        arguments = good | changed
        with pytest.raises(error):
            if arguments["buffer_ids"] is None:
                rb.update_priority(arguments["index"], 1.0)
            rb.update_priority({key: arguments[key] for key in ("index", "buffer_ids")}, arguments["priority"])
    assert states(rb) == before
    assert rb.stats() == totals
    assert rb.update_priority_if_present(**good).num_updated == 4


@pytest.mark.parametrize("as_index", [list, torch.tensor])
def test_members_may_differ_in_capacity_and_in_what_their_trees_hold(as_index):
    wide = g.GenerationalReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(16),
        sampler=g.GenerationalPrioritizedSampler(16, alpha=1.0, beta=1.0, dtype=torch.float64),
    )
    wide.extend(torch.arange(16))
    rb = ensemble(full(), wide)
    arguments = {
        "buffer_ids": [0, 1, 0],
        "generation": [0] * 3,
        "priority": torch.tensor([1.0, 1e200, 2.0], dtype=torch.float64),
    }
    assert rb.update_priority_if_present(index=as_index([0, 15, 1]), **arguments).num_updated == 3
    assert leaves(rb[1])[15] == 1e200
    before = state_of(rb[0])
    with pytest.raises(IndexError, match=r"index 15 \(row 2"):
        rb.update_priority_if_present(index=as_index([0, 0, 15]), **arguments)
    with pytest.raises(ValueError, match=r"1e\+200 at row 2"):
        rb.update_priority_if_present(index=as_index([0, 15, 1]), **arguments | {"priority": [1.0, 1.0, 1e200]})
    assert state_of(rb[0]) == before


@pytest.mark.parametrize("missing", [("index", "buffer_ids"), ("index", "index"), "index_generation", "td_error"])
def test_a_sample_without_an_entry_is_refused(missing):
    rb = ensemble()
    before, sample = states(rb), rb.sample()
    sample["td_error"] = torch.rand(sample.batch_size)
    del sample[missing]
    with pytest.raises(KeyError, match="reads the entry"):
        rb.update_tensordict_priority_if_present(sample)
    assert states(rb) == before


def test_members_that_read_different_entries_are_updated_by_arguments():
    rb = ensemble(full(), full(priority_key="loss"))
    sample = rb.sample()
    with pytest.raises(ValueError, match="different entries, \\['loss', 'td_error'\\]"):
        rb.update_tensordict_priority_if_present(sample)
    rb.update_priority_if_present(index=sample["index"], generation=sample["index_generation"], priority=1.0)
    assert ensemble(full(priority_key="loss")).priority_key == "loss"
    assert ensemble(uniform()).priority_key == "td_error"


def test_a_member_that_was_never_written_is_refused_before_the_others_change():
    rb = ensemble(full(), prioritized(CAPACITY))
    before = state_of(rb[0])
    with pytest.raises(RuntimeError, match="nothing has been written"):
        rb.update_priority_if_present(index=[0, 0], buffer_ids=[0, 1], generation=[0, 0], priority=5.0)
    assert state_of(rb[0]) == before
    with pytest.raises(RuntimeError, match="Cannot sample"):
        ensemble(full(), prioritized(CAPACITY), sample_from_all=True).sample()
    assert ensemble(full(), prioritized(CAPACITY), p="sampleable").sample()["index", "buffer_ids"].sum() == 0
    assert not ensemble(full(), prioritized(CAPACITY), sample_from_all=True).can_sample()
    assert rb.can_sample()


def test_handles_that_no_record_had_are_stale_wherever_they_point():
    rb = ensemble()
    result = rb.update_priority_if_present(index=[-1, 99, 3], buffer_ids=[0, 1, 1], generation=[-1] * 3, priority=5.0)
    assert result.num_stale == 3
    empty = torch.zeros(0, 2).long()
    assert rb.update_priority_if_present(
        index=empty, buffer_ids=empty, generation=empty, priority=torch.zeros(0, 2)
    ).updated_mask.shape == (0, 2)


# ------------------------------------------------------------------ writes and threads


def test_routed_writes_return_handles_of_what_they_wrote():
    rb = ensemble(prioritized(CAPACITY), prioritized(CAPACITY), routing_key="to")
    handles = rb.extend(records(24, to=torch.tensor([0, 1, 0] * 8)))  # sixteen records into eight slots
    assert sorted(handles["index_generation"].tolist()) == [0] * 16 + [1] * 8
    result = rb.update_priority_if_present(index=handles, generation=handles["index_generation"], priority=7.0)
    assert result.num_updated == 16
    last = rb.add(TensorDict({"x": 99, "to": 1}, []))
    assert rb.update_priority_if_present(index=last, generation=last["index_generation"], priority=2.0).num_updated == 1


def test_fields_are_updated_with_the_same_result_type():
    rb = ensemble(sample_from_all=True)
    sample = rb.sample()
    rb[1].extend(records(CAPACITY, 50))
    arguments = {"index": sample["index"], "generation": sample["index_generation"]}
    result = rb.update_if_present(**arguments, patch={"x": torch.full((2, 8), 9)})
    assert isinstance(result, g.UpdateResult)
    assert (result.num_updated, result.num_stale) == (8, 8)
    assert rb.submit_update_if_present(**arguments, patch={"x": torch.full((2, 8), 9)}).result(TIMEOUT).num_updated == 8
    assert rb.stats()["conditional_updated"] == 16
    rb.shutdown()


def test_totals_are_those_of_the_members():
    world = World()
    world.update(world.rb.sample())
    world.write(0, CAPACITY)
    sample = world.rb[0].sample()
    world.rb[0].update_priority_if_present(
        index=sample["index"], generation=sample["index_generation"] - 1, priority=1.0
    )
    stats = world.rb.stats()
    assert (stats["conditional_updated"], stats["conditional_stale"], stats["num_buffers"]) == (12, 8, 3)


class Gate:
    """Stops the first thread that comes to a call after it, until the test lets it go on."""

    def __init__(self, monkeypatch, owner, name):
        self.reached, self.open, original = threading.Event(), threading.Event(), getattr(owner, name)

        def gated(*args, **kwargs):
            result = original(*args, **kwargs)
            if not self.reached.is_set():
                self.reached.set()
                assert self.open.wait(TIMEOUT)
            return result

        monkeypatch.setattr(owner, name, gated)


@pytest.mark.parametrize("section", ["drawing", "reading", "updating"])
def test_no_write_to_a_member_comes_into_its_section(section, actors, monkeypatch):
    """Between index, stamps and records of a draw; between the comparison and the update."""
    world = World()
    sample = actors.learner(world.rb.sample)
    # the general path, which calls live()
    monkeypatch.setattr("torchrl_generational.buffers.priority_updates.stores_arrays", lambda sampler: False)
    blocked = announce_blocked(world.rb[0].storage.lock, "writer")
    owner, name = {
        "drawing": (world.rb[0].sampler, "sample"),
        "reading": (world.rb[0].storage, "get"),
        "updating": (g.SlotGenerations, "live"),
    }[section]
    gate = Gate(monkeypatch, owner, name)
    world.rb.sampler.p = [1.0, 0.0, 0.0]
    step = actors.start("learner", (lambda: world.update(sample)) if section == "updating" else world.rb.sample)
    assert gate.reached.wait(TIMEOUT)
    write = actors.start("writer", lambda: world.rb[0].extend(records(CAPACITY, 1000)))
    until_blocked_or_done(blocked, write)
    assert not write.done()
    gate.open.set()
    result = step.result(TIMEOUT)
    write.result(TIMEOUT)
    if section != "updating":
        assert (result["x"] == result["index", "index"]).all()
        assert (result["index_generation"] == 0).all()
    else:
        sample["td_error"] = torch.ones(sample.batch_size)
        assert torch.equal(
            world.rb.update_tensordict_priority_if_present(sample).stale_mask, sample["index", "buffer_ids"] == 0
        )


def test_other_members_are_written_to_while_one_is_in_its_section(actors, monkeypatch):
    world = World()
    gate = Gate(monkeypatch, world.rb[0].sampler, "sample")
    world.rb.sampler.p = [1.0, 0.0, 0.0]
    draw = actors.start("learner", world.rb.sample)
    assert gate.reached.wait(TIMEOUT)
    actors.writer(lambda: world.write(1, CAPACITY))
    assert not draw.done()
    gate.open.set()
    draw.result(TIMEOUT)


def test_a_member_written_between_the_checks_and_its_section_has_stale_rows(actors, monkeypatch):
    world = World(sample_from_all=True)
    sample = actors.learner(world.rb.sample)
    sample["td_error"] = torch.full(sample.batch_size, 9.0)
    gate = Gate(monkeypatch, updates, "routes_of")
    update = actors.start("learner", lambda: world.rb.update_tensordict_priority_if_present(sample))
    assert gate.reached.wait(TIMEOUT)
    actors.writer(lambda: world.write(1, CAPACITY))
    gate.open.set()
    assert update.result(TIMEOUT).stale_mask.tolist() == [[False] * 4, [True] * 4, [False] * 4]


def test_no_write_comes_between_a_routed_write_and_its_handles(actors, monkeypatch):
    rb = ensemble(prioritized(CAPACITY), prioritized(CAPACITY), routing_key="to")
    blocked = announce_blocked(rb[0].storage.lock, "writer")
    gate = Gate(monkeypatch, rb[0], "extend")
    routed = actors.start("learner", lambda: rb.extend(records(4, to=torch.zeros(4).long())))
    assert gate.reached.wait(TIMEOUT)
    write = actors.start("writer", lambda: rb[0].storage.lock.acquire() and rb[0].storage.lock.release())
    until_blocked_or_done(blocked, write)
    assert not write.done()
    gate.open.set()
    assert routed.result(TIMEOUT)["index_generation"].tolist() == [0] * 4
    write.result(TIMEOUT)


def test_a_learner_of_the_ensemble_among_writers_of_its_members():
    """Writers and two learners, one over the members in the other order, for a while; handles always fit."""
    world, errors, stop = World(), [], threading.Event()
    other = ensemble(*world.rb._rbs[::-1], batch_size=12)

    def guarded(step):
        def run():
            try:
                while not stop.is_set():
                    step()
            except BaseException as error:
                errors.append(error)
                stop.set()

        return threading.Thread(target=run)

    start = [1000]

    def write(member):
        begin = start[0] = start[0] + 20
        world.rb[member].extend(TensorDict({"x": torch.arange(begin, begin + 3)}, [3]))

    rounds = [0]

    def learn(rb):
        sample = rb.sample()
        sample["td_error"] = torch.rand(sample.batch_size)
        result = rb.update_tensordict_priority_if_present(sample)
        assert result.num_updated + result.num_stale == 12
        rounds[0] += 1
        if rounds[0] % 10 == 0:
            rb.state_dict()
        if rounds[0] > 60:
            stop.set()

    threads = [guarded(lambda n=n: write(n)) for n in (0, 1)]
    threads += [guarded(lambda rb=rb: learn(rb)) for rb in (world.rb, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert not errors, errors


def test_slots_whose_last_write_did_not_end_are_not_drawn():
    rb = ensemble(full(), uniform(start=100), sample_from_all=True)
    for member in rb._rbs:
        member.storage.abandon(torch.arange(5))
    for _ in range(5):
        sample = rb.sample()
        assert (sample["index", "index"] >= 5).all()
        handles_fit(rb, sample, sample)


def test_prefetched_batches_have_the_handles_of_their_draw():
    """C18, C17."""
    world = World(prefetch=3)
    world.rb.sample()
    world.rb.synchronize()
    drawn = dict(world.slots)
    for member in range(3):
        world.write(member, CAPACITY)
    for _ in range(3):
        sample = world.rb.sample()
        ids, index, x = (
            part.reshape(-1).tolist() for part in (*map(sample["index"].get, ("buffer_ids", "index")), sample["x"])
        )
        assert [drawn[pair] for pair in zip(ids, index, strict=True)] == x
        world.update(sample)
    world.check()
    world.empty()
    with pytest.raises(RuntimeError, match="Cannot sample"):
        world.rb.sample()
    for member in range(3):
        world.write(member, CAPACITY)
    world.update(world.rb.sample())
    world.check()
    world.rb.shutdown()


# ------------------------------------------------------------------ processes


def test_the_ensemble_is_not_shared_but_its_members_are():
    with pytest.raises(ValueError, match="Share its members"):
        ensemble(shared=True)
    rb = ensemble(prioritized(CAPACITY), prioritized(CAPACITY))
    with pytest.raises(ValueError, match="Share its members"):
        rb.share()
    for member in rb._rbs:
        member.extend(records(CAPACITY))
        member.share()
    process = mp.get_context("fork").Process(target=write_one, args=(rb[1],))
    sample = rb.sample()
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode == 0
    sample["td_error"] = torch.rand(sample.batch_size)
    result = rb.update_tensordict_priority_if_present(sample)
    overwritten = (sample["index", "buffer_ids"] == 1) & (sample["index", "index"] < 3)
    assert torch.equal(result.stale_mask, overwritten)
    handles_fit(rb, *rb.sample(return_info=True))


def test_what_other_processes_wrote_to_a_member_is_drawn():
    rb = ensemble(prioritized(CAPACITY), batch_size=64)
    rb[0].extend(records(1))
    rb[0].share()
    process = mp.get_context("fork").Process(target=write_one, args=(rb[0],))
    process.start()
    process.join(TIMEOUT)
    assert set(rb.sample()["x"].flatten().tolist()) == {0, 500, 501, 502}


def write_one(member):
    member.extend(records(3, 500))


def test_a_spawned_process_does_not_get_the_ensemble():
    with pytest.raises(ValueError, match="Share its members"):
        mp.get_context("spawn").Process(target=write_one, args=(ensemble(),)).start()


# ------------------------------------------------------------------ copies and checkpoints


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_a_copy_has_a_timeline_of_its_own(twin):
    world = World()
    sample = world.rb.sample()
    other = twin(world.rb)
    sample["td_error"] = torch.full(sample.batch_size, 5.0)
    assert other.update_tensordict_priority_if_present(sample).num_updated == 12
    world.check()
    other[0].extend(records(CAPACITY, 900))
    later = other.sample()
    world.write(0, CAPACITY)
    later["td_error"] = torch.full(later.batch_size, 6.0)
    result = world.rb.update_tensordict_priority_if_present(later)
    assert torch.equal(result.stale_mask, later["index", "buffer_ids"] == 0)
    assert other[0] is not world.rb[0]
    assert other.storage[0] is other[0].storage
    handles_fit(other, *other.sample(return_info=True))


HOW = pytest.mark.parametrize("how", ["state_dict", "dumps"])
memmaps = pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")


@memmaps
@HOW
@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_round_trip_keeps_records_stamps_priorities_and_handles(how, prefetch, tmp_path):
    source = World(prefetch=prefetch)
    source.write(0, 3)
    source.update(source.rb.sample())
    sample = source.rb.sample()
    target = ensemble(*(prioritized(CAPACITY) for _ in range(3)), batch_size=12, prefetch=prefetch)
    transfer(source.rb, target, how, tmp_path)
    assert [state_of(rb)[:4] for rb in target._rbs] == [state_of(rb)[:4] for rb in source.rb._rbs]
    source.rb.shutdown()
    source.rb = target
    source.check()
    source.update(sample)
    source.update(target.sample())
    source.write(2, CAPACITY)
    source.update(sample)
    source.check()
    target.shutdown()


@memmaps
@HOW
def test_handles_of_an_abandoned_timeline_never_match_another_record(how, tmp_path):
    world = World()
    saved = world.rb.state_dict()
    world.rb.dumps(tmp_path)
    slots, cursor, serial = dict(world.slots), list(world.cursor), world.serial
    handles = []
    for _ in range(3):
        for member in range(3):
            world.write(member, 5)
        handles.append(world.rb.sample())
        if how == "state_dict":
            world.rb.load_state_dict(saved)
        else:
            world.rb.loads(tmp_path)
        world.slots, world.cursor = dict(slots), list(cursor)
        world.largest = [float(rb.sampler.default_priority) for rb in world.rb._rbs]
        for sample in handles:
            world.update(sample)
    assert world.serial > serial


def test_a_state_is_tensors_and_numbers_only():
    """C14."""
    rb = ensemble(prefetch=1)
    rb.sample()
    buffer = io.BytesIO()
    torch.save(rb.state_dict(), buffer)
    buffer.seek(0)
    rb.load_state_dict(torch.load(buffer, weights_only=True))
    rb.shutdown()


@memmaps
@HOW
def test_states_of_torchrls_ensembles_load_here(how, tmp_path):
    sources = [
        g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(CAPACITY), batch_size=4)
        for _ in range(2)
    ]
    for member in sources:
        member.extend(records(5))
    stock = ReplayBufferEnsemble(*sources, batch_size=8)
    target = ensemble(*(uniform(start=50) for _ in range(2)))
    old = target.sample()
    transfer(stock, target, how, tmp_path)
    assert [rb[:]["x"].tolist() for rb in target._rbs] == [list(range(5))] * 2
    assert (
        target.update_if_present(
            index=old["index"], generation=old["index_generation"], patch={"x": torch.zeros(2, 8).long()}
        ).num_stale
        == 16
    )
    handles_fit(target, *target.sample(return_info=True))


@memmaps
@HOW
@pytest.mark.parametrize("fault", ["capacity", "members", "shape"])
def test_a_checkpoint_that_does_not_fit_a_member_changes_none(how, fault, tmp_path):
    source = ensemble(full(), prioritized(4 if fault == "capacity" else CAPACITY))
    source[1].extend(records(4) if fault != "shape" else TensorDict({"x": torch.zeros(4, 2).long()}, [4]))
    if fault == "members":
        source = ensemble(*source._rbs, full())
    target = ensemble()
    before = states(target)
    with pytest.raises(ValueError, match="3 members" if fault == "members" else "checkpoint|Saved"):
        transfer(source, target, how, tmp_path)
    assert states(target) == before


@memmaps
@HOW
def test_members_without_records_are_saved_and_loaded_too(how, tmp_path):
    source, target = ensemble(full(), prioritized(CAPACITY)), ensemble()
    old = target.sample()
    transfer(source, target, how, tmp_path)
    assert [len(rb) for rb in target._rbs] == [CAPACITY, 0]
    old["td_error"] = torch.rand(old.batch_size)
    target[1].extend(records(CAPACITY))
    assert not target.update_tensordict_priority_if_present(old).updated_mask[old["index", "buffer_ids"] == 1].any()


def test_a_torn_checkpoint_is_refused(tmp_path):
    source, target = ensemble(), ensemble()
    source.dumps(tmp_path)
    (tmp_path / "generational.json").unlink()
    before = states(target)
    with pytest.raises(FileNotFoundError, match="not a complete checkpoint"):
        target.loads(tmp_path)
    assert states(target) == before


@memmaps
def test_a_member_whose_files_lie_in_the_checkpoint_has_stale_handles_after_loading_it(tmp_path):
    (tmp_path / "storage").mkdir()
    member = prioritized(
        CAPACITY, storage=g.GenerationalLazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "storage" / "0")
    )
    member.extend(records(CAPACITY))
    rb = ensemble(member, full())
    rb.dumps(tmp_path)
    sample = rb.sample()
    sample["td_error"] = torch.rand(sample.batch_size)
    rb.loads(tmp_path)
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 16


def test_streams_are_closed_as_in_torchrl():
    member = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(CAPACITY), sampler=SliceSampler(slice_len=2, end_key=("next", "done"))
    )
    member.extend(TensorDict({("next", "done"): torch.zeros(3, 1, dtype=torch.bool)}, [3]))
    ensemble(member).end_streams()
    assert member[:]["next", "done"].flatten().tolist() == [False, False, True]


# ---------------------------------------------------------------- what a review found


def hold_both(first, second, said, go):
    """Routed writes over two shared members, in a process that makes its own ensemble of them."""
    rb = ensemble(first, second, routing_key="to")
    said.put(first.storage.lock.order < second.storage.lock.order)
    go.wait(TIMEOUT)
    for _ in range(200):
        rb.extend(TensorDict({"x": torch.arange(2), "to": torch.arange(2)}, [2]))
    said.put("done")


@pytest.mark.system
def test_ensembles_of_the_same_members_in_two_processes_take_their_locks_in_one_order():
    members = [uniform() for _ in range(2)]
    for member in members:
        member.set_storage(g.GenerationalLazyTensorStorage(CAPACITY))
        member.extend(TensorDict({"x": torch.arange(2), "to": torch.arange(2)}, [2]))
        member.share()
    spawn = mp.get_context("spawn")
    said, go = spawn.Queue(), spawn.Event()
    other = spawn.Process(target=hold_both, args=(*reversed(members), said, go))
    other.start()
    try:
        assert said.get(timeout=TIMEOUT) == (members[1].storage.lock.order < members[0].storage.lock.order)
        rb = ensemble(*members, routing_key="to")
        go.set()
        for _ in range(200):
            rb.extend(TensorDict({"x": torch.arange(2), "to": torch.arange(2)}, [2]))
        assert said.get(timeout=TIMEOUT) == "done"
        other.join(TIMEOUT)
    finally:
        other.kill()
    assert members[0].write_count == CAPACITY + 2 + 400


@pytest.mark.parametrize("orders", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_the_locks_of_members_are_taken_by_their_order_wherever_they_stand(orders, monkeypatch):
    members = full(), full(), full()
    taken = []
    for member, order in zip(members, orders, strict=True):
        lock = member.storage.lock
        lock.order = order
        exclusive = member._exclusive
        monkeypatch.setattr(
            member, "_exclusive", lambda exclusive=exclusive, order=order: (taken.append(order), exclusive())[1]
        )
    for rb in (ensemble(*members), ensemble(*reversed(members))):
        taken.clear()
        with rb._locked():
            assert taken == [1, 2, 3]


def test_a_copy_of_a_lock_has_an_order_of_its_own():
    lock = full().storage.lock
    assert copy.deepcopy(lock).order != lock.order


@memmaps
def test_a_dump_over_the_files_of_another_member_is_refused(tmp_path):
    (tmp_path / "storage").mkdir()
    first, second = (
        prioritized(
            CAPACITY, storage=g.GenerationalLazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "storage" / name)
        )
        for name in ("0", "1")
    )
    first.extend(records(CAPACITY))
    second.extend(records(CAPACITY, 100))
    ensemble(first, second).dumps(tmp_path)
    for rb, members in ((ensemble(second, first), r"\[0, 1\]"), (ensemble(second), r"\[0\]")):
        for call in (rb.dumps, rb.loads):
            with pytest.raises(ValueError, match=f"members {members} .* Use another directory|holds 2 members"):
                call(tmp_path)
    assert first[:]["x"].tolist() == list(range(CAPACITY))
    assert second[:]["x"].tolist() == list(range(100, 100 + CAPACITY))


def test_a_routed_write_that_a_later_member_would_refuse_writes_to_none():
    members = prioritized(CAPACITY), prioritized(CAPACITY)
    rb = ensemble(*members, routing_key="to")
    batch = records(4).set("to", torch.tensor([0, 0, 1, 1])).set("td_error", torch.tensor([1.0, 1.0, torch.nan, 1.0]))
    with pytest.raises(ValueError, match=r"nan at row 0.* rows \[2, 3\] of the batch.* Nothing was written"):
        rb.extend(batch)
    assert [len(member) for member in members] == [0, 0]
    rb.extend(batch.set("td_error", torch.ones(4)))
    with pytest.raises(RuntimeError, match="Nothing was written to any member"):
        rb.extend(batch.clone().set("x", torch.zeros(4, 2)))
    assert [len(member) for member in members] == [2, 2]


def test_transforms_of_routed_writes_run_before_the_locks_are_taken():
    members = full(), full()
    seen = []

    def another_thread_writes(data):
        thread = threading.Thread(target=members[0].extend, args=(records(1),))
        thread.start()
        thread.join(TIMEOUT)
        seen.append(not thread.is_alive())
        return data

    class Inverse(Compose):
        def inv(self, data):
            return another_thread_writes(data)

    ensemble(*members, routing_key="to", transform=Inverse(RenameTransform(["x"], ["y"]))).extend(
        records(2).set("to", torch.arange(2))
    )
    assert seen == [True]


def test_an_update_that_failed_before_does_not_keep_the_ensemble_from_being_emptied():
    rb = ensemble()
    sample = rb.sample()
    handles = {"index": sample["index"], "generation": sample["index_generation"]}
    failed = rb.submit_update_if_present(**handles, patch={"nope": torch.zeros(sample.batch_size)})
    assert isinstance(failed.exception(TIMEOUT), KeyError)
    rb.empty()
    assert [len(member) for member in rb._rbs] == [0, 0]
    of_member = full()
    rb = ensemble(of_member)
    failed = of_member.submit_update_if_present(index=0, generation=0, patch={"nope": torch.zeros(())})
    rb.state_dict()
    with pytest.raises(KeyError):  # for whoever uses the member
        of_member.synchronize()


def test_an_ensemble_goes_on_with_the_parts_that_it_was_made_of():
    class Mine(SamplerEnsemble):
        drawn = 0

        def sample(self, *args):
            self.drawn += 1
            return super().sample(*args)

    members = full(), full()
    sampler = Mine(*(member.sampler for member in members))
    parts = {
        "storages": StorageEnsemble(*(member.storage for member in members)),
        "samplers": sampler,
        "writers": WriterEnsemble(*(member.writer for member in members)),
    }
    rb = g.GenerationalReplayBufferEnsemble(**parts, batch_size=4)
    assert (rb.sampler, rb.storage, rb.writer) == (sampler, parts["storages"], parts["writers"])
    rb.sample()
    rb.sample()
    assert sampler.drawn == 2
    for wrong in ({}, {"samplers": sampler}):
        with pytest.raises(TypeError, match="is made of buffers, or of storages, samplers and writers together"):
            g.GenerationalReplayBufferEnsemble(**wrong)


def test_the_priority_key_is_that_of_members_with_priorities():
    by_priority = full(priority_key="prio")
    rb = ensemble(by_priority, uniform(), p=[1.0, 0.0])
    assert rb.priority_key == "prio"


@pytest.mark.parametrize("prefetch", [None, 2])
def test_an_update_may_be_submitted_in_order_with_prefetched_batches(prefetch):
    rb = ensemble(prefetch=prefetch)
    sample = rb.sample()
    rb[0].extend(records(3, 100))
    future = rb.submit_update_priority_if_present(
        index=sample["index"], generation=sample["index_generation"], priority=torch.full(sample.batch_size, 5.0)
    )
    overwritten = (sample["index", "buffer_ids"] == 0) & (sample["index", "index"] < 3)
    assert torch.equal(future.result(TIMEOUT).stale_mask, overwritten)
    for number in range(2):
        mine = (sample["index", "buffer_ids"] == number) & ~overwritten
        assert (leaves(rb[number])[sample["index", "index"][mine]] == 5).all()
    rb.shutdown()


def test_members_parts_are_adopted_when_they_were_exchanged():
    generator = torch.Generator().manual_seed(0)
    rb = g.GenerationalReplayBufferEnsemble(full(), full(), generator=generator, sample_from_all=True, batch_size=4)
    rb[0].set_sampler(g.GenerationalPrioritizedSampler(CAPACITY, 1.0, 1.0))
    rb[0].set_storage(g.GenerationalLazyTensorStorage(CAPACITY), collate_fn=lambda data: data.set("x", -data["x"]))
    rb[0].extend(records(CAPACITY, 1))
    sample = rb.sample()
    assert rb[0].sampler._rng is generator
    assert (sample["x"][0] < 0).all()
    assert (sample["x"][1] >= 0).all()


def test_errors_of_an_ensemble_say_what_they_are_about():
    rb = ensemble()
    flat_sample = full().sample().set("td_error", torch.rand(CAPACITY))
    with pytest.raises(KeyError, match="Pass a sample of this ensemble"):
        rb.update_tensordict_priority_if_present(flat_sample)
    sample = rb.sample()
    with pytest.raises(ValueError, match="no TD error for any row"):
        rb.update_tensordict_priority_if_present(sample.clone().set("td_error", torch.rand(*sample.shape, 0)))
    fewer = sample.clone()
    fewer.batch_size = [2]
    fewer["td_error"] = torch.rand(2)
    before = states(rb)
    with pytest.raises(ValueError, match="cannot be told which TD error is of which record"):
        rb.update_tensordict_priority_if_present(fewer)
    for state in (full().state_dict(), {}):
        with pytest.raises(ValueError, match="is not that of an ensemble"):
            rb.load_state_dict(state)
    assert states(rb) == before
