"""Buffers driven at random against a dict of slot -> record, and one of cell -> priority for each of them.

Slots are rows of the storage. A record of a storage with two dimensions is a row of ``INNER`` cells. Every record ever
written has a number of its own (its entry ``x``), so that a handle taken with it is live exactly while that very record
is in that slot.
"""

from __future__ import annotations

import copy
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle_hazards import WHO, Hazards
from support import leaves, sampler_state
from tensordict import TensorDict

import torchrl_generational as g

ROWS, INNER, BATCH = 5, 2, 6
FORMS = ["sampled", "tuple", "lists", "sample", "rebuilt", "folded"]
PRIORITIES = st.lists(st.integers(0, 40), min_size=BATCH, max_size=BATCH)


class Handles:
    """What a learner keeps of a sample, and the records that were in it."""

    def __init__(self, sample: TensorDict, owners: list[int]) -> None:
        self.index, self.generation, self.owners = sample["index"], sample["index_generation"], owners
        self.sample = sample


class Model:
    """What two buffers on one storage should hold."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}  # slot -> record
        self.field: dict[int, int] = {}  # slot -> its entry y
        self.priority: list[dict[int, float]] = [{}, {}]  # of each buffer: cell -> priority
        self.largest: list[float | None] = [None, None]
        self.cursor = [0, 0]
        self.written = [0, 0]
        self.alpha = [1.0, 1.0]
        self.family = 0  # of stamps: two storages that both began at 0 do not know each other's handles
        self.issued = False  # whether this storage has given out stamps

    @property
    def length(self) -> int:
        return max(self.held, default=-1) + 1


class BufferAgainstDict(Hazards, RuleBasedStateMachine):
    """Two buffers on one storage of one dimension, whose default priority is the largest ever stored."""

    ndim = 1
    within = False
    prefetch = 0

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.width = INNER ** (self.ndim - 1)
        self.capacity = ROWS * self.width

    def teardown(self) -> None:
        for rb in getattr(self, "buffers", ()):
            rb.shutdown()
        shutil.rmtree(self.folder)

    def make(self, storage: Any) -> Any:
        sampler = g.GenerationalPrioritizedSampler(
            self.capacity, 1.0, 1.0, eps=0.0, max_priority_within_buffer=self.within
        )
        rb = g.GenerationalTensorDictReplayBuffer(
            storage=storage, sampler=sampler, batch_size=BATCH, prefetch=self.prefetch or None, priority_key="td_error"
        )
        rb.set_rng(torch.Generator().manual_seed(0))
        return rb

    @initialize()
    def build(self) -> None:
        storage = g.GenerationalLazyTensorStorage(self.capacity, ndim=self.ndim)
        self.buffers = [self.make(storage), self.make(storage)]
        self.model = Model()
        self.serial = 0
        self.handles: list[Handles] = []
        self.checkpoints: list[tuple[str, Any, Model, int, set[str]]] = []

    # -------------------------------------------------------------- what the model does

    def cells_of(self, slots: list[int]) -> list[int]:
        return [slot * self.width + lane for slot in slots for lane in range(self.width)]

    def wrote(self, slots: list[int], records: list[int]) -> None:
        """New records in slots, one after the other: born at the default priority of each buffer."""
        model = self.model
        for who in range(2):
            priority = model.priority[who]
            cells = self.cells_of(slots)
            born = model.largest[who]
            if self.within:  # the largest of the other records; a priority of zero is none
                born = max((value for cell, value in priority.items() if cell not in cells and value), default=None)
            born = 1.0 if born is None else born
            priority.update(dict.fromkeys(cells, born))
            model.largest[who] = born
        model.issued = True
        for slot, record in zip(slots, records, strict=True):
            model.held[slot], model.field[slot] = record, 0

    def stored(self, who: int, values: dict[int, float]) -> None:
        """Priorities stored by a call, the last one of each cell."""
        if not values:
            return
        model = self.model
        model.priority[who].update(values)
        largest = model.largest[who]
        model.largest[who] = max(values.values()) if largest is None else max(largest, *values.values())
        if self.within:
            model.largest[who] = max((value for value in model.priority[who].values() if value), default=None)

    def replaced(self) -> None:
        """The records are new to the handles: each gets another number in the model."""
        for slot in self.model.held:
            self.model.held[slot] = self.next_record()

    def restarted(self, who: int) -> None:
        """A buffer that finds new records in its storage."""
        model = self.model
        model.priority[who] = dict.fromkeys(self.cells_of(list(model.held)), 1.0)
        model.largest[who] = 1.0 if model.held else None
        model.cursor[who] = min(model.cursor[who], model.length) % ROWS

    def next_record(self) -> int:
        self.serial += 1
        return self.serial - 1

    def data(self, count: int) -> tuple[TensorDict, list[int]]:
        records = [self.next_record() for _ in range(count)]
        x = torch.tensor(records)
        shape: list[int] = [count]
        if self.ndim == 2:  # [INNER, count]: rows run along the extended dimension
            x, shape = x.expand(INNER, count).clone(), [INNER, count]
        return TensorDict({"x": x, "y": torch.zeros_like(x)}, shape), records

    def advance(self, who: int, count: int) -> list[int]:
        model = self.model
        slots = [(model.cursor[who] + step) % ROWS for step in range(count)]
        model.cursor[who] = (model.cursor[who] + count) % ROWS
        model.written[who] += count
        return slots

    # -------------------------------------------------------------- writing

    @rule(count=st.integers(1, 2 * ROWS + 1), who=WHO, priority=st.none() | st.integers(0, 40), use=st.booleans())
    def extend(self, count: int, who: int, priority: int | None, use: bool) -> None:
        data, records = self.data(count)
        if priority is not None:
            data["td_error"] = (torch.arange(count) + priority).float().expand(data.batch_size).clone()
        elif len(self.buffers[who]) and "td_error" in self.buffers[who].storage._storage:
            data["td_error"] = torch.zeros(data.batch_size)
            use = False
        self.fitting(data)
        self.buffers[who].extend(data, update_priority=use)
        slots = self.advance(who, count)
        self.wrote(slots, records)
        if use and "td_error" in data:
            values = data["td_error"] if self.ndim == 1 else data["td_error"][0]
            self.stored(who, {c: float(v) for s, v in zip(slots, values, strict=True) for c in self.cells_of([s])})

    def fitting(self, data: TensorDict) -> None:
        """Leaves out or adds the priority entry, as the first record of the storage had it or not."""
        storage = self.buffers[0].storage
        if storage.initialized and "td_error" not in storage._storage and "td_error" in data:
            del data["td_error"]
        if storage.initialized and "td_error" in storage._storage and "td_error" not in data:
            data["td_error"] = torch.zeros(data.batch_size)

    @rule(who=WHO)
    def add(self, who: int) -> None:
        data, records = self.data(1)
        self.fitting(data)
        one = data[0] if self.ndim == 1 else data[:, 0]
        self.buffers[who].add(one)
        slots = self.advance(who, 1)
        self.wrote(slots, records)
        if "td_error" in data:
            self.stored(who, dict.fromkeys(self.cells_of(slots), 0.0))

    @precondition(lambda self: self.ndim == 1 and self.model.length == ROWS)
    @rule(slots=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=3, unique=True), who=WHO, whole=st.booleans())
    def put(self, slots: list[int], who: int, whole: bool) -> None:
        slots = list(range(ROWS)) if whole else slots
        data, records = self.data(len(slots))
        data["index"] = torch.tensor(slots)
        self.fitting(data)
        if whole:
            self.buffers[who].write_all(data)
        else:
            self.buffers[who][torch.tensor(slots)] = data
        self.wrote(slots, records)

    @precondition(lambda self: self.ndim == 1 and self.model.length > 0)
    @rule(value=st.integers(0, 9), who=WHO, path=st.sampled_from(["set_", "set_at_", "update_", "item"]))
    def set_field(self, value: int, who: int, path: str) -> None:
        rb, count = self.buffers[who], self.model.length
        values = torch.full((count,), value)
        if path == "set_":
            rb.set_("y", values)
        elif path == "update_":
            rb.update_(TensorDict({"y": values}, [count]))
        elif path == "item":
            rb["y"] = values
        else:
            rb.set_at_("y", values[:1], [count - 1])
            self.model.field[count - 1] = value
            return
        self.model.field = dict.fromkeys(self.model.held, value)

    @precondition(lambda self: self.model.length > 0)
    @rule(who=WHO, count_too=st.booleans())
    def empty(self, who: int, count_too: bool) -> None:
        self.buffers[who].empty(empty_write_count=count_too)
        self.model.held.clear()
        self.model.field.clear()
        for buffer in range(2):
            self.restarted(buffer)
        if count_too:
            self.model.written[who] = 0

    # -------------------------------------------------------------- sampling and updating

    @precondition(lambda self: self.model.length > 0)
    @rule(who=WHO, path=st.sampled_from(["sample", "iterate"]))
    def sample(self, who: int, path: str) -> None:
        model, rb = self.model, self.buffers[who]
        if not any(value > 0 or not model.alpha[who] for value in model.priority[who].values()):
            if not self.prefetch:
                with pytest.raises(RuntimeError, match="are zero"):
                    rb.sample()
            return
        if self.prefetch and any(not any(priority.values()) for priority in model.priority):
            return  # a prefetched draw would raise at some later call
        sample = rb.sample() if path == "sample" else next(iter(rb))
        slots = (sample["index"] if self.ndim == 1 else sample["index"][:, 0]).tolist()
        owners = sample["x"].tolist()
        if not self.prefetch:
            assert owners == [self.content[slot] for slot in slots]
            assert sample["y"].tolist() == [model.field[slot] for slot in slots]
            owners = [model.held[slot] for slot in slots]
            if model.alpha[who]:
                cells = slots if self.ndim == 1 else (sample["index"] * torch.tensor([INNER, 1])).sum(-1).tolist()
                assert all(model.priority[who][cell] > 0 for cell in cells)
        self.handles.append(Handles(sample, owners))

    @property
    def content(self) -> dict[int, int]:
        """Slot -> entry x, which survives a change of a record's number."""
        rows = self.buffers[0].storage._storage["x"]
        return {slot: int(rows[slot] if self.ndim == 1 else rows[slot, 0]) for slot in self.model.held}

    @precondition(lambda self: bool(self.handles))
    @rule(pick=st.data(), priority=PRIORITIES, who=WHO, form=st.sampled_from(FORMS))
    def update_conditionally(self, pick: Any, priority: list[int], who: int, form: str) -> None:
        model, rb = self.model, self.buffers[who]
        handles = pick.draw(st.sampled_from(self.handles))
        present = {record: slot for slot, record in model.held.items()}
        expected = [owner in present for owner in handles.owners]
        before = [sampler_state(buffer) for buffer in self.buffers]
        index, generation = handles.index, handles.generation
        if not rb.storage.initialized:
            with pytest.raises(RuntimeError, match="require an initialized storage"):
                rb.update_priority_if_present(index=index, generation=generation, priority=1.0)
            return
        if form in ("sample", "rebuilt", "folded"):
            handles.sample["td_error"] = torch.tensor(priority, dtype=torch.float32)
            sample = handles.sample
            if form == "rebuilt":  # as one that has been a dict: without a batch size
                sample = TensorDict(dict(sample.items()), [])
            elif form == "folded":
                sample = sample.reshape(2, BATCH // 2)
                sample.batch_size = [2]
            result = rb.update_tensordict_priority_if_present(sample)
        else:
            given: Any = index
            if form == "tuple":
                given = tuple(index.unbind(-1)) if self.ndim == 2 else (index,)
            elif form == "lists":
                given, generation = index.tolist(), generation.tolist()
            result = rb.update_priority_if_present(index=given, generation=generation, priority=priority)
        assert result.updated_mask.flatten().tolist() == expected
        assert (result.num_updated, result.num_stale) == (sum(expected), BATCH - sum(expected))
        assert sampler_state(self.buffers[1 - who]) == before[1 - who]
        if not any(expected):
            assert sampler_state(rb) == before[who]
            return
        lanes = [0] * BATCH if self.ndim == 1 else index[:, 1].tolist()
        rows = zip(handles.owners, lanes, priority, expected, strict=True)
        self.stored(who, {present[o] * self.width + lane: float(p) for o, lane, p, live in rows if live})

    @precondition(lambda self: bool(self.handles))
    @rule(pick=st.data(), value=st.integers(1, 9), who=WHO, later=st.booleans())
    def update_fields(self, pick: Any, value: int, who: int, later: bool) -> None:
        if self.ndim == 2:
            return  # whole rows; buffers/test_conditional_updates.py
        handles = pick.draw(st.sampled_from(self.handles))
        if not self.buffers[who].storage.initialized:
            return
        rb, patch = self.buffers[who], {"y": torch.full((BATCH,), value)}
        call = rb.submit_update_if_present if later else rb.update_if_present
        result = call(index=handles.index, generation=handles.generation, patch=patch)
        result = result.result(60) if later else result
        present = {record: slot for slot, record in self.model.held.items()}
        assert result.updated_mask.tolist() == [owner in present for owner in handles.owners]
        self.model.field.update({present[owner]: value for owner in handles.owners if owner in present})

    @precondition(lambda self: self.model.length > 0)
    @rule(
        cells=st.lists(st.integers(0, ROWS * INNER - 1), min_size=1, max_size=4),
        priority=st.integers(0, 40),
        who=WHO,
        by_entry=st.booleans(),
    )
    def update_raw(self, cells: list[int], priority: int, who: int, by_entry: bool) -> None:
        cells = [cell for cell in cells if cell // self.width < self.model.length]
        if not cells:
            return
        index = torch.tensor([[cell // self.width, cell % self.width] for cell in cells])
        index = index if self.ndim == 2 else index[:, 0]
        if by_entry and self.ndim == 1:
            values = torch.full((len(cells),), float(priority))
            self.buffers[who].update_tensordict_priority(TensorDict({"index": index, "td_error": values}, [len(cells)]))
        else:
            self.buffers[who].update_priority(index, float(priority))
        self.stored(who, dict.fromkeys(cells, float(priority)))

    @precondition(lambda self: self.model.length > 0)
    @rule(slot=st.integers(0, ROWS - 1), who=WHO)
    def mark(self, slot: int, who: int) -> None:
        if slot >= self.model.length or self.ndim == 2:
            return
        self.buffers[who].mark_update(torch.tensor([slot]))
        other = (self.model.priority[1 - who].copy(), self.model.largest[1 - who])
        self.wrote([slot], [self.model.held[slot]])
        self.model.field[slot] = int(self.buffers[0].storage._storage["y"][slot])
        self.model.priority[1 - who], self.model.largest[1 - who] = other

    @rule(alpha=st.sampled_from([0.5, 1.0, 1.5]), beta=st.floats(0, 1), who=WHO)
    def anneal(self, alpha: float, beta: float, who: int) -> None:
        self.buffers[who].sampler.alpha = alpha
        self.buffers[who].sampler.beta = beta
        self.model.alpha[who] = alpha

    @precondition(lambda self: bool(self.handles))
    @rule(bad=st.sampled_from([float("nan"), float("inf"), -1.0]), who=WHO)
    def refuse_bad_input(self, bad: float, who: int) -> None:
        handles, rb = self.handles[-1], self.buffers[who]
        if not rb.storage.initialized:
            return
        before = sampler_state(rb)
        with pytest.raises(ValueError, match="must be finite"):
            rb.update_priority_if_present(index=handles.index, generation=handles.generation, priority=bad)
        with pytest.raises(
            ValueError if self.model.length else IndexError, match="must be finite|number of records|written part"
        ):
            rb.update_priority(index=torch.tensor([[0, 0]]) if self.ndim == 2 else torch.tensor([0]), priority=bad)
        assert sampler_state(rb) == before

    @precondition(lambda self: self.model.length > 0)
    @rule(
        who=WHO,
        fault=st.sampled_from(["missing", "shape", "dtype", "extra dimension"]),
        path=st.sampled_from(["extend", "add", "item", "slice", "mask", "stepped"]),
    )
    def refuse_records_that_do_not_fit(self, who: int, fault: str, path: str) -> None:
        """Whatever is refused changes nothing: the invariant looks."""
        rb, count = self.buffers[who], {"slice": self.model.length, "mask": self.model.length}.get(path, 2)
        if self.ndim == 2 and path != "extend":
            return
        if fault == "dtype" and path in ("add", "slice", "stepped"):
            return  # torch converts numbers where places are not named by a tensor
        if fault == "extra dimension" and path == "add":
            return  # and leaves out dimensions of one
        if path == "stepped":
            count = len(range(0, self.model.length, 2))
        serial = self.serial
        data, _ = self.data(count)
        self.serial = serial
        self.fitting(data)
        x = data["x"]
        if fault == "missing":
            del data["y"]
        else:
            changed = {
                "shape": x[..., None].expand(*x.shape, 3),
                "dtype": x.double(),
                "extra dimension": x[..., None, None],
            }
            data["x"] = changed[fault]
        before = [sampler_state(buffer) for buffer in self.buffers]
        every = torch.ones(self.model.length, dtype=torch.bool)
        with pytest.raises((RuntimeError, ValueError, LookupError, TypeError)):
            if path == "extend":
                rb.extend(data)
            elif path == "add":
                rb.add(data[0])
            else:
                index = {"item": [0, 0], "slice": slice(None), "mask": every, "stepped": slice(0, None, 2)}[path]
                rb[index if path != "item" else torch.arange(min(2, ROWS))] = data
        assert [sampler_state(buffer) for buffer in self.buffers] == before

    @precondition(lambda self: bool(self.handles))
    @rule(who=WHO, dtype=st.sampled_from([torch.int32, torch.int16, torch.float32, torch.float64]))
    def refuse_narrow_generations(self, who: int, dtype: torch.dtype) -> None:
        handles, rb = self.handles[-1], self.buffers[who]
        if not rb.storage.initialized:
            return
        before = sampler_state(rb)
        with pytest.raises(TypeError, match="int64"):
            rb.update_priority_if_present(index=handles.index, generation=handles.generation.to(dtype), priority=1.0)
        assert sampler_state(rb) == before

    # -------------------------------------------------------------- parts

    @rule(who=WHO)
    def set_sampler(self, who: int) -> None:
        self.buffers[who].set_sampler(
            g.GenerationalPrioritizedSampler(self.capacity, 1.0, 1.0, eps=0.0, max_priority_within_buffer=self.within)
        )
        self.buffers[who].set_rng(torch.Generator().manual_seed(1))
        cursor = self.model.cursor[who]
        self.restarted(who)
        self.model.cursor[who], self.model.alpha[who] = cursor, 1.0

    @rule(who=WHO)
    def set_writer(self, who: int) -> None:
        self.buffers[who].set_writer(g.GenerationalTensorDictRoundRobinWriter())
        self.model.written[who] = 0

    @rule()
    def move_to_a_new_storage(self) -> None:
        storage = g.GenerationalLazyTensorStorage(self.capacity, ndim=self.ndim)
        for rb in self.buffers:
            rb.set_storage(storage)
        self.model.held.clear()
        self.model.field.clear()
        self.model.family, self.model.issued = self.next_record(), False
        for who in range(2):
            self.restarted(who)

    # -------------------------------------------------------------- checkpoints

    @rule(who=WHO, how=st.sampled_from(["state_dict", "dumps"]))
    def save(self, who: int, how: str) -> None:
        if len(self.checkpoints) == 4:
            return
        saved: Any = self.folder / str(len(self.checkpoints))
        if how == "dumps":
            self.buffers[who].dumps(saved)
        else:
            saved = self.buffers[who].state_dict()
        storage = self.buffers[who].storage
        entries = set(storage._storage.keys()) if storage.initialized else set()
        self.checkpoints.append((how, saved, copy.deepcopy(self.model), who, entries))

    @precondition(lambda self: bool(self.checkpoints))
    @rule(pick=st.data())
    def restore(self, pick: Any) -> None:
        how, saved, model, who, entries = pick.draw(st.sampled_from(self.checkpoints))
        rb = self.buffers[who]
        load = rb.loads if how == "dumps" else rb.load_state_dict
        storage = rb.storage
        now_held = set(storage._storage.keys()) if storage.initialized else set()
        if entries and now_held and entries != now_held:
            with pytest.raises(ValueError, match="holds the entries"):
                load(saved)
            return
        load(saved)
        now = self.model
        now.held, now.field = dict(model.held), dict(model.field)
        if now.family != model.family and now.issued:
            self.replaced()  # the checkpoint of another storage: its stamps may stand for other records here
        else:
            now.family = model.family
        now.issued = model.issued
        for name in ("priority", "largest", "cursor", "written", "alpha"):
            getattr(now, name)[who] = copy.deepcopy(getattr(model, name)[who])
        self.restarted(1 - who)

    @precondition(lambda self: self.model.length > 0)
    @rule(who=WHO, count=st.integers(0, ROWS))
    def go_on_in_a_copy(self, who: int, count: int) -> None:
        """A copy is a timeline of its own: its new handles are good there, and only there."""
        twin = pickle.loads(pickle.dumps(self.buffers[who]))
        if self.handles and twin.storage.initialized:
            handles = self.handles[-1]
            present = set(self.model.held.values())
            result = twin.update_priority_if_present(index=handles.index, generation=handles.generation, priority=1.0)
            assert result.updated_mask.tolist() == [owner in present for owner in handles.owners]
        if count:
            data, _ = self.data(count)
            self.fitting(data)
            index = twin.extend(data)
            rows = index if self.ndim == 1 else index[:, 0]
            stamps = twin.writer.generations_of(rows if self.ndim == 1 else index)
            before = sampler_state(self.buffers[who])
            result = self.buffers[who].update_priority_if_present(index=index, generation=stamps, priority=9.0)
            assert result.num_updated == 0
            assert sampler_state(self.buffers[who]) == before
        twin.shutdown()

    # -------------------------------------------------------------- invariants

    @invariant()
    def the_buffers_agree_with_the_dicts(self) -> None:
        if not hasattr(self, "buffers"):
            return
        model = self.model
        assert set(model.held) == set(range(model.length))  # no slot below the length without a record
        for who, rb in enumerate(self.buffers):
            assert len(rb) == model.length * self.width
            assert rb.writer._cursor == model.cursor[who]
            assert rb.write_count == model.written[who]
            tree, alpha = leaves(rb), model.alpha[who]
            expected = [model.priority[who][cell] ** alpha for cell in range(len(rb))]
            assert tree[: len(rb)].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6)
            total = rb.sampler._sum_tree.query(0, rb.sampler.max_size)
            assert total == pytest.approx(float(tree.double().sum()), rel=1e-12)
            positive = tree[: len(rb)][tree[: len(rb)] > 0]
            if positive.numel():
                assert rb.sampler._min_tree.query(0, len(rb)) == float(positive.min())
            largest = model.largest[who]
            default = 1.0 if largest is None else largest
            assert float(rb.sampler.default_priority) == pytest.approx(default, rel=1e-3, abs=1e-6)


class GridAgainstDict(BufferAgainstDict):
    """The same on a storage of two dimensions."""

    ndim = 2


class WithinAgainstDict(BufferAgainstDict):
    """The same where the default priority is the largest in the buffer."""

    within = True


class PrefetchAgainstDict(BufferAgainstDict):
    """The same with batches drawn ahead: a sample may be of an earlier state, and says so by its stamps."""

    prefetch = 2
