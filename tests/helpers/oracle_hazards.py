"""What comes to a buffer from outside, for the machine in ``oracle.py``: interrupts, forks, compiles, other states."""

from __future__ import annotations

import threading
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from children import forked
from compiling import another_thread_compiles
from hypothesis.stateful import precondition, rule
from interrupting import free_for_others, interrupted
from support import sampler_state
from tensordict import TensorDict
from torchrl.data import RandomSampler

import torchrl_generational as g

WHO = st.integers(0, 1)
# about how many lines of the package each of them runs through
LINES = {
    "extend": 440,
    "add": 420,
    "update": 270,
    "raw update": 180,
    "field": 170,
    "empty": 100,
    "alpha": 70,
    "load": 870,
}
FOREIGN = [
    *("capacity", "uniform sampler", "ranking writer", "stock sampler without trees", "damaged tree"),
    *("more stamps", "no stamps", "other entries", "dimensions"),
]


class Hazards:
    """Rules. After an interrupt the machine looks at what is there, and empties the buffer."""

    buffers: list[Any]
    model: Any
    handles: list[Any]
    ndim: int
    prefetch: int
    capacity: int

    @precondition(lambda self: not self.prefetch and self.ndim == 1 and self.model.length > 0)
    @rule(who=WHO, act=st.sampled_from(sorted(LINES)), count=st.integers(1, 5), share=st.integers(0, 999))
    def interrupt(self: Any, who: int, act: str, count: int, share: int) -> None:
        rb, other = self.buffers[who], self.buffers[1 - who]
        data, _ = self.data(count)
        self.fitting(data)
        handles = self.handles[-1] if self.handles else None
        state = rb.state_dict()
        every = torch.arange(self.model.length)
        acts = {
            "extend": lambda: rb.extend(data),
            "add": lambda: rb.add(data[0]),
            "update": lambda: (
                handles
                and rb.update_priority_if_present(index=handles.index, generation=handles.generation, priority=7.0)
            ),
            "raw update": lambda: rb.update_priority(every, 7.0),
            "field": lambda: rb.set_("y", torch.full((self.model.length,), 9)),
            "empty": lambda: rb.empty(),
            "alpha": lambda: setattr(rb.sampler, "alpha", 1.25),
            "load": lambda: rb.load_state_dict(state),
        }
        slots = [(self.model.cursor[who] + step) % self.capacity for step in range(count)]
        possible = {(slot, x) for slot, x in self.content.items()}
        possible |= set(zip(slots, data["x"].tolist(), strict=True))
        stamps = rb.storage.generations.clone()
        interrupted(acts[act], 1 + share * LINES[act] // 1000)
        assert free_for_others(rb.storage.lock._threads, rb._futures_lock)
        now = rb.storage.generations
        assert ((now >= stamps) | (now < -1)).all()  # later, or of a slot that holds no record
        for buffer in (rb, other):
            tree, cells = buffer.sampler, torch.arange(self.capacity)
            sums, minima = tree._sum_tree[cells], tree._min_tree[cells]
            assert ((sums == minima) | (sums == 0)).all()
            if handles is not None:
                result = buffer.update_priority_if_present(
                    index=handles.index, generation=handles.generation, priority=5.0
                )
                held = rb.storage._storage["x"][handles.index]
                assert (held == handles.sample["x"])[result.updated_mask].all()
            if len(buffer) and float(sums.sum()):
                sample = buffer.sample()
                assert set(zip(sample["index"].tolist(), sample["x"].tolist(), strict=True)) <= possible
        for buffer in (rb, other):
            buffer.sampler.alpha = 1.0
        self.model.alpha = [1.0, 1.0]
        rb.empty()
        self.model.held.clear()
        self.model.field.clear()
        for buffer in range(2):
            self.restarted(buffer)
        self.model.written[who] = 0

    @precondition(lambda self: not self.prefetch)
    @rule(who=WHO, now=st.sampled_from([True, False, False, False]))
    def write_in_a_fork(self: Any, who: int, now: bool) -> None:
        if not now:  # a fork takes long
            return
        rb, serial = self.buffers[who], self.serial
        data, _ = self.data(2)
        self.serial = serial
        self.fitting(data)

        def write() -> None:
            for act in (lambda: rb.extend(data), rb.empty, lambda: rb.update_priority(torch.tensor([0]), 3.0)):
                with pytest.raises(RuntimeError, match="was forked from the one that made the buffer"):
                    act()

        with forked(write) as child:
            assert child.exit_code() == 0

    @rule(who=WHO, count=st.integers(1, 5), now=st.sampled_from([True] + 19 * [False]))
    def write_beside_a_compile(self: Any, who: int, count: int, now: bool) -> None:
        if not now:  # a compile takes long
            return
        storage = self.buffers[who].storage
        held, reach = [], storage.reach

        def looked(rows: Any) -> None:
            held.append(storage.lock._owner == threading.get_ident())
            reach(rows)

        storage.reach = looked
        try:
            with another_thread_compiles():
                self.extend(count=count, who=who, priority=None, use=False)
                self.sample(who=who, path="sample")
        finally:
            del storage.reach
        assert held
        assert all(held)

    @rule(who=WHO, kind=st.sampled_from(FOREIGN))
    def refuse_foreign_states(self: Any, who: int, kind: str) -> None:
        rb = self.buffers[who]
        state = self.foreign(rb, kind)
        if state is None:
            return
        before = [sampler_state(buffer) for buffer in self.buffers], rb.storage.generations.clone()
        with pytest.raises(ValueError, match=r"\."):
            rb.load_state_dict(state)
        assert [sampler_state(buffer) for buffer in self.buffers] == before[0]
        assert torch.equal(rb.storage.generations, before[1])

    def foreign(self: Any, rb: Any, kind: str) -> Any:
        """A state that does not fit this buffer; ``None`` if there is none yet."""
        capacity, ndim = self.capacity, self.ndim
        sampler: Any = g.GenerationalPrioritizedSampler(capacity, 1.0, 1.0, eps=0.0)
        writer: Any = g.GenerationalTensorDictRoundRobinWriter()
        if kind == "capacity":
            capacity += 2
            sampler = g.GenerationalPrioritizedSampler(capacity, 1.0, 1.0, eps=0.0)
        elif kind == "uniform sampler":
            sampler = RandomSampler()
        elif kind == "ranking writer":
            writer = g.GenerationalTensorDictMaxValueWriter(rank_key="x")
            if ndim == 2:
                return None
        elif kind == "dimensions":
            ndim, capacity = 3 - ndim, capacity - capacity % 2
        elif kind != "other entries":
            return self.damaged(rb.state_dict(), kind)
        other = g.GenerationalTensorDictReplayBuffer(
            storage=g.GenerationalLazyTensorStorage(capacity, ndim=ndim), sampler=sampler, writer=writer, batch_size=2
        )
        shape = [2] * ndim
        x = torch.arange(2).expand(shape).clone()
        entry = {"z": x} if kind == "other entries" else {}
        other.extend(TensorDict({"x": x, "y": torch.zeros_like(x), **entry}, shape))
        if kind == "other entries" and not rb.storage.initialized:
            return None
        return other.state_dict()

    def damaged(self: Any, state: dict[str, Any], kind: str) -> Any:
        if kind == "stock sampler without trees":
            del state["_sampler"]["_sum_tree"]
        elif kind == "damaged tree":
            state["_sampler"]["_sum_tree"] = torch.full_like(state["_sampler"]["_sum_tree"], float("nan"))
        elif kind == "more stamps":
            state["_writer"]["_generation"] = torch.zeros(self.capacity + 3, dtype=torch.int64)
        elif kind == "no stamps":
            state["_writer"]["_generation"] = "none"
        return state
