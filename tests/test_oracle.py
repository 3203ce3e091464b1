"""A buffer driven at random against a dict of slot -> (record, priority)."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import leaves, prioritized, records, sampler_state
from tensordict import TensorDict

import torchrl_generational as g

ROWS, INNER = 5, 2


class BufferAgainstDict(RuleBasedStateMachine):
    """Slots are rows of the storage; a record of an n-D storage is a row of ``INNER`` cells."""

    ndim = 1

    @initialize()
    def build(self) -> None:
        cells = ROWS * INNER ** (self.ndim - 1)
        storage = g.GenerationalLazyTensorStorage(cells, ndim=self.ndim)
        self.rb = prioritized(cells, storage=storage, batch_size=6)
        self.sibling = prioritized(cells, storage=storage, batch_size=6)
        self.held: dict[int, tuple[int, list[float]]] = {}  # slot -> (record, priority of each of its cells)
        self.cursors = {0: 0, 1: 0}
        self.largest: float | None = None
        self.serial = 0
        self.length = 0
        self.handles: list[tuple[Any, Any, list[int]]] = []  # (index, generation, record behind each row)

    def _data(self, count: int) -> TensorDict:
        data = records(count, self.serial)
        if self.ndim == 2:  # [INNER, count]: rows run along the extended dimension
            data = TensorDict({"x": data["x"].expand(INNER, count).clone()}, [INNER, count])
        return data

    def _wrote(self, slots: list[int]) -> None:
        born = 1.0 if self.largest is None else self.largest
        for slot in slots:
            self.held[slot] = (self.serial, [born] * INNER ** (self.ndim - 1))
            self.serial += 1
        self.largest = born

    @rule(count=st.integers(1, 2 * ROWS + 1), who=st.integers(0, 1))
    def extend(self, count: int, who: int) -> None:
        (self.rb, self.sibling)[who].extend(self._data(count))
        slots = [(self.cursors[who] + step) % ROWS for step in range(count)]
        self.cursors[who] = (self.cursors[who] + count) % ROWS
        self.length = max(self.length, *(slot + 1 for slot in slots))
        self._wrote(slots)

    @rule(who=st.integers(0, 1))
    def add(self, who: int) -> None:
        data = self._data(1)
        (self.rb, self.sibling)[who].add(data[0] if self.ndim == 1 else data[:, 0])
        slot = self.cursors[who]
        self.cursors[who] = (slot + 1) % ROWS
        self.length = max(self.length, slot + 1)
        self._wrote([slot])

    @precondition(lambda self: self.ndim == 1 and self.length == ROWS)
    @rule(slot=st.integers(0, ROWS - 1))
    def put(self, slot: int) -> None:
        data = self._data(1)
        data["index"] = torch.tensor([slot])
        self.rb[slot] = data[0]
        self._wrote([slot])

    @precondition(lambda self: self.length > 0)
    @rule()
    def empty(self) -> None:
        self.rb.empty()
        self.held.clear()
        self.cursors, self.length, self.largest = {0: 0, 1: 0}, 0, None

    @precondition(lambda self: self.length > 0)
    @rule()
    def sample(self) -> None:
        sample = self.rb.sample()
        slots = (sample["index"] if self.ndim == 1 else sample["index"][:, 0]).tolist()
        owners = [self.held[slot][0] for slot in slots]
        assert sample["x"].tolist() == owners  # the handles are those of the records
        self.handles.append((sample["index"], sample["index_generation"], owners))

    @precondition(lambda self: bool(self.handles))
    @rule(pick=st.data(), priority=st.lists(st.integers(0, 40), min_size=6, max_size=6))
    def update_conditionally(self, pick: Any, priority: list[int]) -> None:
        index, generation, owners = pick.draw(st.sampled_from(self.handles))
        present = {record: slot for slot, (record, _) in self.held.items()}
        expected = [owner in present for owner in owners]
        before = sampler_state(self.rb)
        form = pick.draw(st.sampled_from(["as sampled", "tuple", "lists"]))
        if form == "tuple":
            index = tuple(index.unbind(-1)) if self.ndim == 2 else (index,)
        elif form == "lists":
            index, generation = index.tolist(), generation.tolist()
        result = self.rb.update_priority_if_present(index=index, generation=generation, priority=priority)
        assert result.updated_mask.tolist() == expected
        if not any(expected):
            assert sampler_state(self.rb) == before
            return
        lanes = [0] * len(owners)
        if self.ndim == 2:
            lanes = (
                torch.tensor(index)[:, 1]
                if form == "lists"
                else torch.as_tensor(index[1] if form == "tuple" else index[:, 1])
            ).tolist()
        stored: dict[tuple[int, int], float] = {}
        for owner, lane, value in zip(owners, lanes, priority, strict=True):
            if owner in present:
                self.held[present[owner]][1][lane] = value
                stored[present[owner], lane] = value
        self.largest = (
            max([self.largest or 0.0, *stored.values()]) if self.largest is not None else max(stored.values())
        )

    @precondition(lambda self: self.length > 0)
    @rule(
        cells=st.lists(st.integers(0, ROWS * INNER - 1), min_size=1, max_size=4),
        priority=st.integers(0, 40),
    )
    def update_raw(self, cells: list[int], priority: int) -> None:
        width = INNER ** (self.ndim - 1)
        cells = [cell for cell in cells if cell // width < self.length]
        if not cells:
            return
        index = torch.tensor([[cell // width, cell % width] for cell in cells])
        self.rb.update_priority(index if self.ndim == 2 else index[:, 0], float(priority))
        for cell in cells:
            self.held[cell // width][1][cell % width] = float(priority)
        self.largest = float(priority) if self.largest is None else max(self.largest, float(priority))

    @rule()
    def refuse_bad_input(self) -> None:
        if not self.handles:
            return
        index, generation, _ = self.handles[-1]
        before = sampler_state(self.rb)
        with pytest.raises(ValueError, match="must be finite"):
            self.rb.update_priority_if_present(index=index, generation=generation, priority=float("nan"))
        assert sampler_state(self.rb) == before

    @invariant()
    def the_buffer_agrees_with_the_dict(self) -> None:
        if not hasattr(self, "rb"):
            return
        width = INNER ** (self.ndim - 1)
        assert len(self.rb) == self.length * width
        assert set(self.held) == set(range(self.length))  # no slot below the length without a record
        tree = leaves(self.rb)
        for slot, (_, priority) in self.held.items():
            assert tree[slot * width : (slot + 1) * width].tolist() == pytest.approx(priority, abs=1e-6)
        assert self.rb.sampler._sum_tree.query(0, self.rb.sampler.max_size) == pytest.approx(
            float(tree.sum()), rel=1e-5
        )
        if self.largest is not None:
            assert float(self.rb.sampler.default_priority) == pytest.approx(self.largest)


class GridAgainstDict(BufferAgainstDict):
    ndim = 2


MACHINE = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBufferAgainstDict = BufferAgainstDict.TestCase
TestGridAgainstDict = GridAgainstDict.TestCase
TestBufferAgainstDict.settings = TestGridAgainstDict.settings = MACHINE
