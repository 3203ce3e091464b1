"""The fast paths of the CPU and the general ones lead to the same place, bit for bit.

Every program of random calls runs twice: as it is, and with all fast paths closed.
"""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from support import announce_blocked, leaves, records, sampler_state, until_blocked_or_done
from tensordict import TensorDict
from torchrl.data import PrioritizedSampler, RandomSampler, TensorStorage
from torchrl.envs.transforms import Compose

import torchrl_generational as g
from torchrl_generational.buffers import priority_updates, tensordict_mixin
from torchrl_generational.priorities import proportional_draw as draws
from torchrl_generational.records import record_io as fast
from torchrl_generational.samplers import prioritized as samplers
from torchrl_generational.storages import round_robin_writers as writers
from torchrl_generational.storages import tensor_storages as storages

SLOTS = 12


def close_short_paths(monkeypatch):
    def closed(*args, **kwargs):
        return None

    for module in (priority_updates, samplers, storages):
        monkeypatch.setattr(module, "index_array", closed)
    monkeypatch.setattr(priority_updates, "stores_arrays", lambda sampler: False)
    monkeypatch.setattr(fast, "matched", closed)
    monkeypatch.setattr(fast, "select", closed)
    monkeypatch.setattr(writers.GenerationalWriterMixin, "_is_contiguous", lambda self, data, ndim=1: False)
    monkeypatch.setattr(samplers.GenerationalPrioritizedSampler, "_takes_defaults", lambda self, storage: False)
    monkeypatch.setattr(
        tensordict_mixin.GenerationalTensorDictReplayBufferMixin, "_samples_are_plain", lambda self: False
    )


def sampler_of(kind: str):
    kinds = {
        "usual": lambda: g.GenerationalPrioritizedSampler(SLOTS, 0.7, 0.5),
        "float64": lambda: g.GenerationalPrioritizedSampler(SLOTS, 0.7, 0.5, dtype=torch.float64),
        "no eps": lambda: g.GenerationalPrioritizedSampler(SLOTS, 1.0, 1.0, eps=0.0),
        "steep": lambda: g.GenerationalPrioritizedSampler(SLOTS, 5.0, 0.5),  # eps ** alpha is no float32
        "flat": lambda: g.GenerationalPrioritizedSampler(SLOTS, 0.0, 0.5),
        "maximum within": lambda: g.GenerationalPrioritizedSampler(SLOTS, 0.7, 0.5, max_priority_within_buffer=True),
        "of TorchRL": lambda: PrioritizedSampler(SLOTS, 0.7, 0.5),
    }
    return kinds[kind]()


KINDS = ["usual", "float64", "no eps", "steep", "flat", "maximum within", "of TorchRL"]


class Program:
    """A random program for one buffer; the same seed gives the same calls."""

    def __init__(self, seed: int, kind: str) -> None:
        self.random = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.written = 0
        self.gives_priorities = seed % 2 == 1
        self.rb = g.GenerationalTensorDictReplayBuffer(
            storage=g.GenerationalLazyTensorStorage(SLOTS),
            sampler=sampler_of(kind),
            batch_size=6,
            generator=torch.Generator().manual_seed(seed),
        )
        self.handles = []  # of all samples so far

    def records(self, count: int) -> TensorDict:
        data = records(count, self.written, y=torch.rand(count, 2, generator=self.numbers))
        self.written += count
        if self.gives_priorities:
            data["td_error"] = self.priorities((count,))
        return data

    def priorities(self, shape) -> torch.Tensor:
        values = torch.rand(shape, generator=self.numbers) * self.random.choice([1.0, 10.0])
        if self.random.random() < 0.3:
            values = values * (values > 0.5)  # some are zero, and must not be drawn without eps
        return values

    def extend(self):
        return self.rb.extend(self.records(self.random.randint(1, SLOTS + 3))).tolist()

    def add(self):
        return int(self.rb.add(self.records(1)[0]))

    def sample(self):
        if not self.rb.sampler._sum_tree.query(0, len(self.rb)) > 0:
            return None
        info = None
        if self.random.random() < 0.5:
            sample, info = self.rb.sample(6, return_info=True)
        else:
            sample = self.rb.sample()
        self.handles.append((sample["index"], sample["index_generation"]))
        return [
            {key: value.tolist() for key, value in sorted(part.items())} for part in (sample, info) if part is not None
        ]

    def update(self):
        count = self.random.randint(1, 9)
        index = torch.randint(len(self.rb), (count,), generator=self.numbers)
        self.rb.update_priority(index, self.priorities((count,)))

    def update_if_present(self):
        index, generation = self.random.choice(self.handles)
        shape = self.random.choice([(6,), (3, 2), (6, 1), "strided"])
        if shape == "strided":
            index, generation = (torch.stack([part, part], -1)[:, 0] for part in (index, generation))
            shape = (6,)
        elif shape == (3, 2):
            index, generation = index.reshape(shape), generation.reshape(shape)
        result = self.rb.update_priority_if_present(
            index=index, generation=generation, priority=self.priorities(shape).to(self.rb.sampler.dtype)
        )
        return result.updated_mask.tolist()

    def update_sample_if_present(self):
        index, generation = self.random.choice(self.handles)
        entries = {"index": index, "index_generation": generation, "td_error": self.priorities((6, 1))}
        return self.rb.update_tensordict_priority_if_present(TensorDict(entries, [6])).updated_mask.tolist()

    def mark(self):
        self.rb.mark_update(torch.randint(len(self.rb), (3,), generator=self.numbers))

    def put(self):
        self.rb[self.random.randrange(len(self.rb))] = self.records(1)[0].set("index", 0)

    def state(self):
        rb = self.rb
        shown = {key: value.tolist() for key, value in rb[:].items()}  # beyond the length lies anything
        counts = len(rb), rb.write_count, rb.writer._cursor, rb.stats()["conditional_stale"]
        return sampler_state(rb), rb.storage.generations.tolist(), shown, counts

    def run(self, calls: int):
        """What every call returns, and the buffer after it."""
        self.extend()
        steps = [self.extend, self.add, self.sample, self.update, self.mark, self.put]
        told = []
        for _ in range(calls):
            conditional_steps = [self.update_if_present, self.update_sample_if_present] * 2 if self.handles else []
            step = self.random.choice(steps + conditional_steps)
            told.append((step.__name__, step(), self.state()))
        return told


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_program_ends_the_same_with_the_fast_paths_open_and_closed(seed, kind, monkeypatch):
    short = Program(seed, kind).run(40)
    with monkeypatch.context() as patch:
        close_short_paths(patch)
        general = Program(seed, kind).run(40)
    for number, (one, other) in enumerate(zip(short, general, strict=True)):
        assert one == other, f"call {number}"


def test_the_fast_paths_are_taken_by_what_a_training_loop_does(monkeypatch):
    """Else the test above compares the general paths with themselves."""
    taken = set()

    def watched(module, name):
        original = getattr(module, name)

        def call(*args, **kwargs):
            result = original(*args, **kwargs)
            if result is not None and result is not False:
                taken.add(name)
            return result

        monkeypatch.setattr(module, name, call)

    watched(priority_updates, "prepared_arrays")
    watched(tensordict_mixin.GenerationalTensorDictReplayBufferMixin, "_prepared_entries")
    watched(tensordict_mixin.GenerationalTensorDictReplayBufferMixin, "_sample_plainly")
    watched(writers.GenerationalWriterMixin, "_is_contiguous")
    watched(samplers.GenerationalPrioritizedSampler, "_takes_defaults")
    watched(fast, "matched")
    rb = Program(0, "usual").rb
    for start in (0, 10, 20):
        rb.extend(records(10, start))
    rb.add(records(1)[0])
    sample = rb.sample()
    rb.update_priority_if_present(index=sample["index"], generation=sample["index_generation"], priority=torch.rand(6))
    sample["td_error"] = torch.rand(6)
    rb.update_tensordict_priority_if_present(sample)
    assert taken == {
        "prepared_arrays",
        "_prepared_entries",
        "_sample_plainly",
        "_is_contiguous",
        "_takes_defaults",
        "matched",
    }


def test_the_place_of_the_maximum_is_no_view_of_the_callers_index():
    rb = Program(0, "usual").rb
    rb.extend(records(SLOTS))
    index = torch.arange(4)
    rb.update_priority(index, torch.tensor([1.0, 2.0, 9.0, 1.0]))
    index.zero_()
    assert int(rb.sampler._max_priority[1]) == 2


@pytest.mark.parametrize("closed", [False, True])
def test_what_is_no_record_is_stale_whatever_stamp_comes_with_it(closed, monkeypatch):
    rb = Program(0, "usual").rb
    rb.extend(records(8))
    rb.storage.abandon(torch.tensor([2]))  # its last write did not end
    torn = torch.tensor([2])
    if closed:
        close_short_paths(monkeypatch)

    def updated(index):
        return rb.update_priority_if_present(
            index=index, generation=rb.storage.generations[index].clone(), priority=torch.full(index.shape, 5.0)
        ).num_updated

    assert updated(torn) == 0
    assert updated(torch.tensor([10])) == 0  # never written
    assert updated(torch.tensor([1, 2, 3])) == 2
    rb.empty()
    rb.extend(records(3))
    assert updated(torch.tensor([1, 5])) == 1  # 5 held a record once, and its stamp is one that a record can have


@pytest.mark.parametrize("wrong", [[SLOTS], [4], [SLOTS, 4]], ids=["beyond", "zero", "both"])
def test_a_mass_that_rounding_carries_onto_no_record_is_drawn_again(wrong, monkeypatch):
    rb = Program(0, "no eps").rb
    rb.extend(records(SLOTS))
    rb.update_priority(torch.tensor([4]), torch.tensor([0.0]))
    landing, landings = draws._landing, []

    def beyond(sums, total, generator, count):
        landings.append(count)
        cells = landing(sums, total, generator, count)
        if len(landings) < 3:
            cells[: len(wrong)] = wrong
        return cells

    monkeypatch.setattr(draws, "_landing", beyond)
    sample = rb.sample()
    assert landings == [6, len(wrong), len(wrong)]
    assert set(sample["index"].tolist()) <= set(range(SLOTS)) - {4}


@pytest.mark.parametrize("rows", [3, slice(2, 5)])
@pytest.mark.parametrize("restored", [False, True])
def test_runs_are_stamped_like_single_rows(rows, restored):
    one, other = g.SlotGenerations(6), g.SlotGenerations(6)
    for generations in (one, other):
        generations.advance(torch.tensor([2, 2, 3]))
        if restored:
            generations._state[-1] = 5 << 32  # a later incarnation
    one.advance(rows)
    other.advance(torch.arange(6)[rows].reshape(-1))
    assert one.values.tolist() == other.values.tolist()


def test_arrays_refuse_what_takes_a_conversion():
    from torchrl_generational.tensors.arrays import index_array, priority_array

    assert index_array(torch.tensor([0, 4]), 5).tolist() == [0, 4]
    for index in (torch.tensor([5]), torch.tensor([-1]), torch.tensor([1], dtype=torch.int32), torch.tensor(1), [1], 1):
        assert index_array(index, 5) is None
    assert index_array(torch.tensor([], dtype=torch.int64), 5) is None
    values, highest = priority_array(torch.tensor([0.0, 2.0]), np.float32, 3.0)
    assert (values.tolist(), highest) == ([0.0, 2.0], 2.0)
    assert priority_array(torch.tensor([-0.0]), np.float32, 3.0) is None  # looks negative; the general path knows
    for bad in (-1.0, np.nan, np.inf, 4.0):
        assert priority_array(torch.tensor([1.0, bad]), np.float32, 3.0) is None
    assert priority_array(torch.tensor([np.inf]), np.float32, np.inf) is None
    for other in (torch.tensor([1.0], dtype=torch.float64), torch.tensor([1]), [1.0], torch.tensor([])):
        assert priority_array(other, np.float32, 3.0) is None


def test_a_class_that_overrides_the_update_is_asked_by_the_update_of_samples():
    asked = []

    class Watching(g.GenerationalTensorDictReplayBuffer):
        def update_priority_if_present(self, **handles):
            asked.append(sorted(handles))
            return super().update_priority_if_present(**handles)

    rb = Watching(storage=g.GenerationalLazyTensorStorage(SLOTS), sampler=sampler_of("usual"), batch_size=6)
    rb.extend(records(SLOTS))
    sample = rb.sample()
    sample["td_error"] = torch.rand(6)
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 6
    assert asked == [["generation", "index", "priority"]]


# ------------------------------------------------------------------ what a fast path must not pass by


def prioritized_ring(cls=g.GenerationalTensorDictReplayBuffer, storage=None, sampler=None, **kwargs):
    return cls(
        storage=g.GenerationalLazyTensorStorage(SLOTS) if storage is None else storage,
        sampler=g.GenerationalPrioritizedSampler(SLOTS, 1.0, 1.0, eps=0.0) if sampler is None else sampler,
        batch_size=4,
        **kwargs,
    )


@pytest.mark.parametrize("change", ["sampler", "storage", "transform"])
def test_what_is_exchanged_while_a_sample_waits_for_the_lock_counts(change, actors):
    rb = prioritized_ring()
    rb.extend(records(8))
    two_dimensional = TensorDict({"x": torch.arange(8).reshape(2, 4)}, [2, 4])
    exchange = {
        "sampler": lambda: rb.set_sampler(RandomSampler()),
        "storage": lambda: rb.set_storage(g.GenerationalTensorStorage(two_dimensional, ndim=2)),
        "transform": lambda: rb.append_transform(lambda data: data.set("seen", torch.ones(data.shape))),
    }[change]
    blocked = announce_blocked(rb.storage.lock, "sampling")
    with rb._exclusive():
        sampling = actors.start("sampling", rb.sample)
        until_blocked_or_done(blocked, sampling)
        exchange()
    sample = sampling.result(60)
    assert {"index", "index_generation", "x"} <= set(sample.keys())
    assert ("seen" in sample) == (change == "transform")
    assert sample["index"].ndim == (2 if change == "storage" else 1)


def test_a_storage_that_reads_in_its_own_way_is_asked_for_the_records_of_a_sample():
    class Decoding(g.GenerationalLazyTensorStorage):
        def get(self, index):
            return super().get(index).apply(torch.zeros_like)

    rb = prioritized_ring(storage=Decoding(SLOTS))
    rb.extend(records(8, 5))
    assert rb.sample()["x"].tolist() == [0] * 4


def test_a_buffer_that_draws_in_its_own_way_is_asked():
    class First(g.GenerationalTensorDictReplayBuffer):
        def _draw(self, sampler, batch_size):
            index, info = super()._draw(sampler, batch_size)
            return index.zero_(), info | {"index_generation": torch.zeros_like(index)}

    rb = prioritized_ring(First)
    rb.extend(records(8, 5))
    assert rb.sample()["x"].tolist() == [5] * 4


def test_a_default_priority_of_a_subclass_is_given_to_new_records():
    class Modest(g.GenerationalPrioritizedSampler):
        @property
        def default_priority(self):
            return 0.25

    rb = prioritized_ring(sampler=Modest(SLOTS, 1.0, 1.0, eps=0.0))
    rb.extend(records(5))
    rb.update_priority(torch.tensor([0]), torch.tensor([5.0]))
    rb.extend(records(3))
    rb.add(records(1)[0])
    assert leaves(rb)[:9].tolist() == [5.0, *[0.25] * 8]


def test_a_priority_that_a_subclass_finds_for_a_record_is_given_to_it():
    class Finding(g.GenerationalTensorDictReplayBuffer):
        def _get_priority_item(self, tensordict):
            return 9.0

    class Setting(g.GenerationalTensorDictReplayBuffer):
        def update_tensordict_priority(self, data):
            super().update_tensordict_priority(data.set("td_error", torch.tensor(7.0)))

    for kind, expected in ((Finding, 9.0), (Setting, 7.0)):
        rb = prioritized_ring(kind)
        rb.add(records(1)[0])
        assert leaves(rb)[0] == expected


def test_a_tuple_of_tuples_names_rows_as_with_torchrl():
    data = torch.arange(12).reshape(3, 4)
    ours, stock = g.GenerationalTensorStorage(data), TensorStorage(data)
    for index in (((0, 1),), ((torch.tensor([0]), torch.tensor([1])),), (torch.tensor([0, 2]),)):
        assert torch.equal(ours.get(index), stock.get(index))


@pytest.mark.parametrize("write", ["add", "extend"])
@pytest.mark.parametrize("kind", ["tensordict", "tensor"])
def test_a_write_whose_priorities_fail_leaves_the_cursor_where_it_was(kind, write):
    class Failing(g.GenerationalPrioritizedSampler):
        fails = False

        def mark_update(self, index, *, storage=None):
            if self.fails:
                raise OSError("no priority")
            super().mark_update(index, storage=storage)

    tensors = kind == "tensor"
    cls = g.GenerationalReplayBuffer if tensors else g.GenerationalTensorDictReplayBuffer
    rb = prioritized_ring(cls, sampler=Failing(SLOTS, 1.0, 1.0))
    rb.extend(torch.arange(3) if tensors else records(3))
    rb.sampler.fails = True
    data = torch.arange(2) if tensors else records(2)
    with pytest.raises(OSError, match="no priority"):
        rb.extend(data) if write == "extend" else rb.add(data[0])
    assert (rb.writer._cursor, rb.write_count) == (3, 3)


def test_records_with_names_of_dimensions_are_drawn_once_per_sample(monkeypatch):
    data = TensorDict({"x": torch.arange(8), "deeper": TensorDict({"y": torch.arange(8)}, [8], names=["t"])}, [8])
    rb = prioritized_ring(
        storage=g.GenerationalTensorStorage(data), sampler=g.GenerationalPrioritizedSampler(8, 1.0, 1.0)
    )
    drawn = []
    monkeypatch.setattr(samplers, "draw", lambda *a, original=samplers.draw: (drawn.append(1), original(*a))[1])
    rb.sample()
    assert len(drawn) == 1


def test_a_buffer_that_another_thread_is_initialising_is_waited_for(actors):
    started, go_on = threading.Event(), threading.Event()

    def slow_transform():
        started.set()
        assert go_on.wait(60)
        return

    rb = prioritized_ring(
        storage=g.GenerationalTensorStorage(records(8)),
        sampler=g.GenerationalPrioritizedSampler(8, 1.0, 1.0),
        delayed_init=True,
        transform_factory=lambda: slow_transform() or Compose(),
    )
    using = actors.start("first", lambda: len(rb.storage))
    assert started.wait(60)
    handles = {"index": torch.arange(2), "generation": torch.zeros(2, dtype=torch.int64), "priority": torch.ones(2)}
    others = [
        actors.start("second", rb.sample),
        actors.start("third", lambda: rb.update_priority_if_present(**handles)),
    ]
    assert not any(other.done() for other in others)
    go_on.set()
    using.result(60)
    assert others[0].result(60)["x"].shape == (4,)
    assert others[1].result(60).num_updated == 2


def test_a_damaged_checkpoint_is_refused_whatever_its_leaves_look_like():
    rb = prioritized_ring()
    rb.extend(records(8))
    state = rb.sampler.state_dict()
    for damage in (
        lambda leaf: leaf.bfloat16().fill_(-1.0),
        lambda leaf: leaf.clone().fill_(-1.0).requires_grad_(),
        lambda leaf: torch.tensor(-1.0),
    ):
        bad = state | {"_sum_tree": damage(state["_sum_tree"]), "_min_tree": damage(state["_min_tree"])}
        with pytest.raises(ValueError, match="checkpoint"):
            rb.sampler.load_state_dict(bad)
