"""A naive oracle of handles: which record each slot holds and the how manieth it is there, by the order of writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, is_tensorclass
from torchrl.data import replay_buffers as stock

import torchrl_generational as g

SLOTS, LANES, STEPS = 12, 2, 5  # rows of a ring, cells of a row where it has two dimensions, steps of a trajectory
BATCH = 6
SLICES = {"slice_len": 2, "traj_key": "episode"}  # of the entries of `record`


class Ledger:
    """Which record each slot holds, and the how manieth of the slot it is: the order of writes says both."""

    def __init__(self, rb: Any, *, ndim: int = 1, make: Callable[[torch.Tensor], Any] | None = None) -> None:
        self.rb, self.ndim = rb, ndim
        self.make = make or record
        self.held: dict[tuple[int, ...], tuple[int, int]] = {}
        self.cursor = self.time = 0

    def write(self, steps: int, *, told: bool = False) -> None:
        """Writes ``steps`` rows; to the next slots of the ring, or where the buffer says that it put them."""
        time = torch.arange(self.time, self.time + steps)
        ids = time[None] * LANES + torch.arange(LANES)[:, None] if self.ndim == 2 else time
        index = self.rb.extend(self.make(ids.clone()))
        rows = index.tolist() if told else [(self.cursor + step) % SLOTS for step in range(steps)]
        for row, step in zip(rows, range(steps), strict=True):
            if row < 0:  # not stored
                continue
            for lane in range(LANES if self.ndim == 2 else 1):
                slot = (row, lane) if self.ndim == 2 else (row,)
                self.put(slot, int(ids[lane, step] if self.ndim == 2 else ids[step]))
        self.cursor, self.time = (self.cursor + steps) % SLOTS, self.time + steps

    def put(self, slot: tuple[int, ...], record: int) -> None:
        self.held[slot] = (record, self.held.get(slot, (None, -1))[1] + 1)

    def slots(self, index: Any) -> list[tuple[int, ...]]:
        index = torch.stack(index, -1) if isinstance(index, tuple) else index
        return [tuple(slot) for slot in index.reshape(-1, self.ndim).tolist()]

    def named(self, index: Any, generation: torch.Tensor) -> list[int]:
        """The records that handles name."""
        slots, stamps = self.slots(index), generation.reshape(-1).tolist()
        assert len(slots) == len(stamps)
        assert generation.dtype == torch.int64
        assert [self.held[slot][1] for slot in slots] == stamps
        return [self.held[slot][0] for slot in slots]

    def live(self, index: Any, records: list[int]) -> list[bool]:
        """Whether each slot holds the record still."""
        return [self.held[slot][0] == record for slot, record in zip(self.slots(index), records, strict=True)]

    def cells(self, index: Any) -> list[int]:
        return [slot[0] * LANES + slot[1] if self.ndim == 2 else slot[0] for slot in self.slots(index)]


def record(ids: torch.Tensor) -> TensorDict:
    """Records that every sampler and transform finds its entries in. ``ids`` is ``[steps]`` or ``[lanes, steps]``."""
    time = ids // LANES if ids.ndim == 2 else ids
    lane = ids % LANES if ids.ndim == 2 else 0
    done = (time % 4 == 3)[..., None]
    state = ids[..., None].float().expand(*ids.shape, 2).clone()
    reached = {"observation": state + 1, "reward": state[..., :1].clone(), "done": done, "terminated": done.clone()}
    return TensorDict(
        {
            "id": ids,
            "episode": time // 4 * LANES + lane,
            "policy_version": torch.zeros_like(ids),
            "query": ids % 3,
            "mark": torch.zeros(ids.shape),
            "observation": state,
            "hidden": state.clone(),
            "action": state.clone(),
            "pixels": state[..., None].clone(),
            "next": TensorDict(reached | {"truncated": torch.zeros_like(done)}, ids.shape),
        },
        ids.shape,
    )


def trajectory(ids: torch.Tensor) -> TensorDict:
    """Trajectories of several steps, each stored as one record; ``id`` is that of the record."""
    steps = record(ids[:, None] * STEPS + torch.arange(STEPS))
    return steps.set("id", ids[:, None].expand(-1, STEPS).clone()).exclude("episode")


def ids_of(sample: Any) -> torch.Tensor:
    if isinstance(sample, torch.Tensor):
        return sample.long()
    return (sample.id if is_tensorclass(sample) else sample["id"]).long()


def agrees(ledger: Ledger, sample: Any, info: dict[str, Any]) -> None:
    """Every row's handle names the record in that row, in the info and in the sample."""
    ids = ids_of(sample).reshape(-1).tolist()
    assert ids
    assert ledger.named(info["index"], info["index_generation"]) == ids
    if isinstance(ledger.rb, stock.TensorDictReplayBuffer) and not is_tensorclass(sample):
        assert ledger.named(sample["index"], sample["index_generation"]) == ids
        assert sample["index_generation"].shape == sample.batch_size


def priorities(rb: Any) -> list[float]:
    return rb.sampler._sum_tree[torch.arange(rb.sampler._max_capacity)].tolist()


def updates_the_live(ledger: Ledger, sample: Any, info: dict[str, Any]) -> None:
    """A conditional update, some records of the sample being gone, reaches the others and nothing else."""
    rb, index, generation = ledger.rb, info["index"], info["index_generation"]
    ids = ids_of(sample).reshape(-1).tolist()
    live = ledger.live(index, ids)
    if not isinstance(rb.sampler, stock.PrioritizedSampler):
        fields_of_the_live(ledger, index, generation, live)
        return
    before, priority = priorities(rb), 5 + torch.rand(generation.shape)
    if isinstance(rb, stock.TensorDictReplayBuffer):
        sample.set("td_error", priority)
        result = rb.update_tensordict_priority_if_present(sample)
    else:
        result = rb.update_priority_if_present(index=index, generation=generation, priority=priority)
    assert result.updated_mask.reshape(-1).tolist() == live
    wanted = dict(enumerate(before))
    for cell, there, value in zip(ledger.cells(index), live, priority.reshape(-1).tolist(), strict=True):
        if there:
            wanted[cell] = pytest.approx(value)
    assert dict(enumerate(priorities(rb))) == wanted


def fields_of_the_live(ledger: Ledger, index: Any, generation: torch.Tensor, live: list[bool]) -> None:
    """The same for fields, which every sampler has."""
    rb, mark = ledger.rb, float(torch.rand(()) + 1)
    patch = {"mark": torch.full((generation.numel(),), mark)}
    result = rb.update_if_present(index=index, generation=generation, patch=patch)
    assert result.updated_mask.reshape(-1).tolist() == live
    marked = rb.storage._storage["mark"].reshape(-1)
    touched = {cell for cell, there in zip(ledger.cells(index), live, strict=True) if there}
    assert set((marked == mark).nonzero()[:, 0].tolist()) == touched


def turns(ledger: Ledger, *, rounds: int = 6, told: bool = False, see: Callable[[Any], Any] | None = None) -> None:
    """Samples and updates while the ring turns: half of the slots are written over between the two."""
    for count in (8, SLOTS + 3):  # more than the ring holds
        ledger.write(count, told=told)
    stale = 0
    for _ in range(rounds):
        ledger.write(3, told=told)
        sample, info = ledger.rb.sample(return_info=True)
        agrees(ledger, sample, info)
        if see is not None:
            see(sample)
        ledger.write(5, told=told)
        stale += ledger.live(info["index"], ids_of(sample).reshape(-1).tolist()).count(False)
        updates_the_live(ledger, sample, info)
    assert stale  # otherwise nothing was put to the test


def storage(kind: str = "memory", ndim: int = 1) -> Any:
    cells = SLOTS * (LANES if ndim == 2 else 1)
    cls = {"memory": g.GenerationalLazyTensorStorage, "memmap": g.GenerationalLazyMemmapStorage}[kind]
    return cls(cells, ndim=ndim)


def buffer(sampler: Any = None, **kwargs: Any) -> Any:
    """A tensordict buffer of 12 slots, by priority unless said otherwise."""
    kwargs.setdefault("storage", storage())
    kwargs.setdefault("batch_size", BATCH)
    return g.GenerationalTensorDictReplayBuffer(
        sampler=g.GenerationalPrioritizedSampler(SLOTS, 1.0, 1.0) if sampler is None else sampler,
        generator=torch.Generator().manual_seed(0),
        **kwargs,
    )
