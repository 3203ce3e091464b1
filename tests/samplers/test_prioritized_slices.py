"""The prioritized slice sampler, against an oracle that walks from record to record in plain Python."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support import TIMEOUT, leaves, sampler_state
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler, SliceSampler, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSliceSampler

import torchrl_generational as g
from torchrl_generational.priorities import proportional_draw as draws
from torchrl_generational.samplers import prioritized_slices as slices
from torchrl_generational.samplers import slice_starts as starts
from torchrl_generational.samplers import trajectory_ends as boundaries

DONE = ("next", "done")
# How many candidates may be rejected before all records are looked at: none, some, any number.
PATHS = {"exact": 0, "mixed": 1, "rejection": 10**7}


def take_path(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(starts, "_tries", lambda num_cells, steps: PATHS[path])


class Ring:
    """A buffer, and what its slots hold according to nothing but the writes that were made."""

    def __init__(
        self,
        capacity: int,
        *,
        lanes: int | None = None,
        rb: Any = None,
        mean: float = 4.0,
        seed: int = 0,
        **sampler: Any,
    ) -> None:
        self.lanes, self.mean, self.rng = lanes, mean, np.random.default_rng(seed)
        cells = capacity * (lanes or 1)
        if rb is None:
            rb = g.GenerationalTensorDictReplayBuffer(
                storage=g.GenerationalLazyTensorStorage(cells, ndim=2 if lanes else 1),
                sampler=g.GenerationalPrioritizedSliceSampler(cells, 1.0, 1.0, eps=0.0, **sampler),
                generator=torch.Generator().manual_seed(seed),
            )
        self.rb, self.capacity, self.cells = rb, capacity, cells
        self.slots: list[list[tuple[int, bool, int, int]]] = []  # per row and lane: episode, done, number, generation
        self.cursor = -1
        self.running = [(lane, True) for lane in range(lanes or 1)]
        self.number = 0

    def write(self, rows: int) -> None:
        """Writes so many rows of running episodes."""
        fresh = []
        for _ in range(rows):
            row = []
            for lane in range(self.lanes or 1):
                episode, over = self.running[lane]
                if over:
                    episode += 100
                done = bool(self.rng.random() < 1 / self.mean)
                self.running[lane] = (episode, done)
                row.append((episode, done, self.number, 0))
                self.number += 1
            self.cursor = (self.cursor + 1) % self.capacity
            if self.cursor < len(self.slots):
                age = self.slots[self.cursor][0][3] + 1
                row = [(*cell[:3], age) for cell in row]
                self.slots[self.cursor] = row
            else:
                self.slots.append(row)
            fresh.append(row)
        columns = np.array([[cell[:3] for cell in row] for row in fresh])  # [rows, lanes, 3]
        columns = columns[:, 0] if self.lanes is None else columns.transpose(1, 0, 2)
        data = TensorDict({}, columns.shape[:-1])
        data["episode"] = torch.from_numpy(columns[..., 0])
        data[DONE] = torch.from_numpy(columns[..., 1] != 0).unsqueeze(-1)
        data["next", "terminated"] = data[DONE] & (torch.from_numpy(columns[..., 2:]) % 2 == 0)
        data["x"] = torch.from_numpy(columns[..., 2])
        self.rb.extend(data)

    def prioritize(self) -> np.ndarray[Any, Any]:
        """Gives all records priorities between 0.5 and 2, some of them zero; returns the leaves ``[rows, lanes]``."""
        priority = self.rng.uniform(0.5, 2.0, (len(self.slots), self.lanes or 1)).astype(np.float32)
        priority[self.rng.random(priority.shape) < 0.1] = 0
        self.rb.sampler.update_priority(torch.arange(priority.size), torch.from_numpy(priority.reshape(-1)))
        return priority.astype(np.float64)

    def ends(self, lane: int, key: str) -> list[bool]:
        column = [row[lane] for row in self.slots]
        full = len(column) == self.capacity
        if key == "episode":
            ends = [cell[0] != column[(t + 1) % len(column)][0] for t, cell in enumerate(column)]
        else:
            ends = [cell[1] for cell in column]
        if full:
            ends[self.cursor] = True
        else:
            ends[-1] = True
        return ends

    def possible(self, key: str, steps: int, *, strict: bool, least: int) -> dict[tuple[int, int], list[int]]:
        """Every start ``(row, lane)`` of a slice, with the rows that the slice consists of."""
        found = {}
        for lane in range(self.lanes or 1):
            ends = self.ends(lane, key)
            for row in range(len(ends)):
                path = [row]
                while len(path) < steps and not ends[path[-1]]:
                    path.append((path[-1] + 1) % len(ends))
                if len(path) >= least or (not strict and ends[row - 1]):
                    found[row, lane] = path
        return found

    def drawn(self, batch_size: int) -> tuple[list[tuple[int, list[int]]], dict[Any, Any]]:
        """Slices drawn, as lanes and rows, with the info; split where the info says that one is over."""
        index, info = self.rb.sampler.sample(self.rb.storage, batch_size)
        coordinates = np.stack([part.numpy() for part in index], -1)
        last = np.flatnonzero(info["next", "truncated"][:, 0].numpy())
        assert last[-1] == len(coordinates) - 1
        parts = np.split(coordinates, last[:-1] + 1)
        for part in parts:
            assert self.lanes is None or len(set(part[:, 1].tolist())) == 1
        return [(int(part[0, 1]) if self.lanes else 0, part[:, 0].tolist()) for part in parts], info


def assert_proportional(counts: dict[Any, int], weights: dict[Any, float]) -> None:
    """A chi-square test that fails by chance about once in a million times."""
    drawn, total = sum(counts.values()), sum(weights.values())
    expected = {start: drawn * weight / total for start, weight in weights.items()}
    statistic = sum((counts.get(start, 0) - mean) ** 2 / mean for start, mean in expected.items())
    freedom = max(len(weights) - 1, 1)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 12


def random_ring(seed: int, *, lanes: int | None, **sampler: Any) -> Ring:
    """A ring that is partly filled, just full, or has gone round once or often; written in batches of any size."""
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(6, 24))
    ring = Ring(capacity, lanes=lanes, mean=float(rng.choice([2.0, 5.0, 12.0])), seed=seed, **sampler)
    left = [capacity // 2, capacity, capacity + int(rng.integers(1, capacity)), 4 * capacity + 3][seed % 4]
    while left > 0:
        rows = min(int(rng.integers(1, capacity)), left)
        ring.write(rows)
        left -= rows
    return ring


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["episode", "done"])
@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("strict", [True, False])
def test_every_possible_slice_is_drawn_in_proportion_to_the_leaf_of_its_start_and_no_other(
    monkeypatch, path, key, lanes, strict
):
    take_path(monkeypatch, path)
    tried = refused = 0
    keys = {"traj_key": "episode"} if key == "episode" else {"end_key": DONE}
    for seed in range(8):
        rng = np.random.default_rng(seed)
        steps = int(rng.integers(1, 7))
        span = [False, (0, int(rng.integers(0, steps))), (False, True)][int(rng.integers(3))]
        least = steps if span is False else min(2, steps) if span[1] is True else steps - span[1]
        ring = random_ring(seed, lanes=lanes, slice_len=steps, strict_length=strict, span=span, **keys)
        leaf = ring.prioritize()
        possible = ring.possible(key, steps, strict=strict, least=least)
        weights = {start: leaf[start] for start in possible if leaf[start] > 0}
        if not weights:
            refused += 1
            if path != "rejection":
                with pytest.raises(RuntimeError, match="Cannot sample slices"):
                    ring.drawn(steps)
            continue
        tried += 1
        found, info = ring.drawn(2000 * steps)
        counts: dict[tuple[int, int], int] = {}
        for lane, path in found:
            assert path == possible[path[0], lane]
            counts[path[0], lane] = counts.get((path[0], lane), 0) + 1
        assert sum(counts.values()) == 2000
        assert counts.keys() == weights.keys()
        assert_proportional(counts, weights)
        cells = [ring.slots[row][lane] for lane, path in found for row in path]
        assert info["index_generation"].tolist() == [cell[3] for cell in cells]
        last = [row == path[-1] for _, path in found for row in path]
        done = [cell[1] or over for cell, over in zip(cells, last, strict=True)]
        assert info[DONE][:, 0].tolist() == [bool(value) for value in done]
        terminated = [cell[1] and cell[2] % 2 == 0 for cell in cells]
        assert info["next", "terminated"][:, 0].tolist() == terminated
        assert ring.rb.sampler.can_sample(ring.rb.storage, steps)
        assert ring.rb.sampler._sampleable_count(ring.rb.storage, steps) == len(weights)
    assert tried >= 4


def starts_of(rb: Any, batch_size: int) -> tuple[set[Any], set[int]]:
    """All starts, and all lengths, of one large sample of any slice sampler."""
    index, info = rb.sampler.sample(rb.storage, batch_size)
    last = info["next", "truncated"][:, 0].numpy()
    first = np.concatenate([[True], last[:-1]])
    rows = list(zip(*(part.numpy()[first].tolist() for part in index), strict=True))
    ends = np.flatnonzero(last)
    return set(rows), set(np.diff(np.concatenate([[-1], ends])).tolist())


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("seed", range(8))
def test_slices_start_where_those_of_stock_start(lanes, seed):
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(2, 5))
    span = [False, (0, int(rng.integers(0, steps - 1))), (False, True)][seed % 3]
    arguments = {
        "slice_len": steps,
        "strict_length": bool(seed % 2),
        "span": span,
        **([{"traj_key": "episode"}, {"end_key": DONE}][int(rng.integers(2))]),
    }
    capacity = 16
    rows = [10, 16, 23, 70][seed % 4]
    if lanes and rows > 10:
        rows = 12  # stock mixes up the lanes of a full ring
    cells = capacity * (lanes or 1)
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(cells, ndim=2 if lanes else 1),
        sampler=PrioritizedSliceSampler(cells, 1.0, 1.0, **arguments),
    )
    rings = [Ring(capacity, lanes=lanes, rb=rb, seed=seed, **arguments) for rb in (None, theirs)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # stock's way of numbering cells
        for ring in rings:
            while rows - ring.number // (lanes or 1):
                ring.write(min(5, rows - ring.number // (lanes or 1)))
            ring.rb.sampler.update_priority(torch.arange(len(ring.rb)), torch.ones(len(ring.rb)))
        ours, stock = (starts_of(ring.rb, 1200 * steps) for ring in rings)
    assert ours[0] == stock[0]
    if arguments["strict_length"] and span is False:
        assert ours[1] == stock[1]


def full_ring(**sampler: Any) -> Ring:
    """40 slots gone round twice, in episodes of about 8 steps."""
    sampler.setdefault("end_key", DONE)
    if "num_slices" not in sampler:
        sampler.setdefault("slice_len", 4)
    ring = Ring(40, mean=8.0, **sampler)
    ring.write(40)
    ring.write(50)
    ring.prioritize()
    return ring


def test_candidates_are_kept_in_the_order_in_which_they_are_drawn():
    ring = full_ring()
    possible = ring.possible("done", 4, strict=True, least=4)
    ring.rb.sampler._rng = torch.Generator().manual_seed(5)
    found, _ = ring.drawn(4 * 20)
    ring.rb.sampler._rng = torch.Generator().manual_seed(5)
    kept: list[int] = []
    size = 28  # 20 and 8 to spare, then twice as many
    while len(kept) < 20:
        cells = draws.draw(ring.rb.sampler, 40, size)[0].tolist()
        kept += [cell for cell in cells if (cell, 0) in possible]
        size *= 2
    assert [path[0] for _, path in found] == kept[:20]


def test_every_step_has_the_importance_weight_of_its_slices_start(monkeypatch):
    for path in PATHS:
        take_path(monkeypatch, path)
        ring = full_ring(span=(0, 2))
        ring.rb.sampler.beta = 0.5
        found, info = ring.drawn(200)
        leaf = leaves(ring.rb).numpy()
        expected = np.where(leaf > 0, leaf, 1) / leaf[leaf > 0].min()
        expected **= -0.5
        per_step = np.concatenate([np.full(len(path), expected[path[0]]) for _, path in found])
        assert info["priority_weight"].dtype == torch.float32
        np.testing.assert_allclose(info["priority_weight"].numpy(), per_step, rtol=1e-6)


def test_sampling_reads_no_whole_records_and_no_more_than_it_needs(monkeypatch):
    ring = Ring(2000, mean=200.0, slice_len=4)
    ring.write(2000)
    refuse = property(lambda self: pytest.fail("looked at all records"))
    monkeypatch.setattr(boundaries.TrajectoryEnds, "everywhere", refuse)
    monkeypatch.setattr(g.GenerationalLazyTensorStorage, "get", lambda self, index: pytest.fail("read records"))
    assert len(ring.drawn(64)[0]) == 16


# ------------------------------------------------------------------ handles, leaves, threads


def test_updates_reach_the_records_of_slices_that_are_still_there_and_no_others():
    ring = full_ring(num_slices=16)
    rb = ring.rb
    sample = rb.sample(64)
    assert sample["index_generation"].tolist() == [ring.slots[row][0][3] for row in sample["index"][:, 0]]
    assert sample["x"].tolist() == [ring.slots[row][0][2] for row in sample["index"][:, 0]]
    ring.write(15)
    gone = {(ring.cursor - back) % 40 for back in range(15)}
    stale = torch.tensor([row in gone for row in sample["index"][:, 0].tolist()])
    assert 0 < int(stale.sum()) < 64
    before = leaves(rb).clone()
    sample["td_error"] = torch.arange(64) + 10.0
    result = rb.update_tensordict_priority_if_present(sample)
    assert torch.equal(result.stale_mask, stale)
    after = leaves(rb)
    last = {row: 10.0 + place for place, row in enumerate(sample["index"][:, 0].tolist()) if row not in gone}
    assert {row: float(after[row]) for row in last} == last
    others = [row for row in range(40) if row not in last]
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("path", PATHS)
def test_sampling_leaves_the_priorities_as_they_are(monkeypatch, path):
    take_path(monkeypatch, path)
    ring = full_ring()
    before = sampler_state(ring.rb)
    ring.drawn(400)
    assert sampler_state(ring.rb) == before


@pytest.mark.parametrize("path", ["exact", "rejection"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (slices, "values_at"),
        (slices, "_index_of"),
        (starts, "draw"),
        (starts.StartRule, "judge"),
        (starts.StartRule, "judge_all"),
        (g.SlotGenerations, "lookup"),
        (torch, "rand"),
        (torch, "pow"),
    ],
)
def test_a_sample_that_raises_midway_leaves_the_priorities_as_they_are(monkeypatch, path, owner, name):
    """C28: stock leaves zeros behind."""
    take_path(monkeypatch, path)
    ring = full_ring()
    before = sampler_state(ring.rb)

    def broken(*arguments: Any, **named: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        if name not in {"exact": ("judge", "draw"), "rejection": ("judge_all",)}[path]:
            with pytest.raises(ZeroDivisionError):
                ring.drawn(80)
        elif path == "rejection":
            ring.drawn(80)
    assert sampler_state(ring.rb) == before


def test_stock_leaves_zeros_behind_where_a_sample_raises(monkeypatch):
    """What the test above guards against, so that it does not pass for want of a danger."""
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40), sampler=PrioritizedSliceSampler(40, 1.0, 1.0, slice_len=4, end_key=DONE)
    )
    Ring(40, mean=8.0, rb=rb).write(40)
    monkeypatch.setattr(torch, "pow", lambda *arguments: pytest.fail("midway"))
    with pytest.raises(pytest.fail.Exception):
        rb.sampler.sample(rb.storage, 8)
    assert (torch.as_tensor(rb.sampler._sum_tree[torch.arange(40)]) == 0).any()


def test_prefetched_slices_stay_within_trajectories_while_priorities_change_and_records_are_written(actors):
    """C28."""
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(60),
        sampler=g.GenerationalPrioritizedSliceSampler(60, 1.0, 0.5, slice_len=4, end_key=DONE),
        batch_size=32,
        prefetch=2,
    )
    ring = Ring(60, mean=9.0, rb=rb)
    ring.write(60)

    def write() -> None:
        for _ in range(40):
            ring.write(7)

    writer = actors.start("writer", write)
    for _ in range(150):
        sample = rb.sample()
        parts = [sample["episode"].reshape(-1, 4), sample["x"].reshape(-1, 4)]
        assert (parts[0] == parts[0][:, :1]).all()
        assert (parts[1].diff(dim=1) == 1).all()  # numbered in the order of the writes: never across the newest record
        sample["td_error"] = torch.rand(32) + 0.5
        rb.update_tensordict_priority_if_present(sample)
    writer.result(TIMEOUT)
    rb.shutdown()
    assert (leaves(rb) > 0).all()


def test_no_slice_holds_a_record_whose_last_write_did_not_end(monkeypatch):
    for path in PATHS:
        take_path(monkeypatch, path)
        for strict, span in ((True, False), (False, False), (True, (0, 3))):
            ring = full_ring(strict_length=strict, span=span)
            least = 1 if span else 4
            possible = ring.possible("done", 4, strict=strict, least=least)
            torn = [3, 4, 20, 39]
            ring.rb.storage.abandon(torch.tensor(torn))
            leaf = leaves(ring.rb)
            whole = {start for start, path in possible.items() if leaf[start[0]] > 0 and not set(path) & set(torn)}
            found, info = ring.drawn(4000)
            assert {(path[0], lane) for lane, path in found} == whole
            assert all(path == possible[path[0], lane] for lane, path in found)
            assert (info["index_generation"] >= 0).all()


# ------------------------------------------------------------------ where trajectories end


def static_data(**fields: Any) -> TensorDict:
    """Twelve records in trajectories of 4, 3 and 5 steps; ``fields`` take the place of their marks."""
    done = torch.zeros(12, 1, dtype=torch.bool)
    done[[3, 6, 11]] = True
    return TensorDict({"x": torch.arange(12), **(fields or {"next": {"done": done}})}, [12])


def started(sampler: Any, storage: Any, steps: int = 3) -> set[int]:
    """All rows at which slices of ``steps`` start, after giving all records the same priority."""
    sampler.update_priority(torch.arange(12), torch.ones(12))
    index, _ = sampler.sample(storage, 300 * steps)
    return set(index[0].reshape(-1, steps)[:, 0].tolist())


IDS = torch.tensor([7] * 4 + [2] * 3 + [9] * 5)
ENDS = torch.tensor([0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
EXPECTED = {0, 1, 4, 7, 8, 9}


@pytest.mark.parametrize("kind", ["tensor", "lazy", "memmap"])
@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"next": {"done": ENDS[:, None]}}, {}),
        ({"next": {"done": ENDS}}, {}),
        ({"episode": IDS}, {}),
        ({"collector": {"traj_ids": IDS}, "episode": torch.arange(12)}, {}),
        ({"deep": {"er": ENDS}}, {"end_key": ("deep", "er")}),
        ({"deep": {"id": IDS.int()}}, {"traj_key": ("deep", "id")}),
        ({"next": {"done": ENDS}}, {"traj_key": "missing"}),
        ({"a": ENDS & (IDS == 7), "b": ENDS & (IDS != 7)}, {"end_keys": ["a", "b", "missing"]}),
        ({"episode": IDS}, {"end_keys": ["missing", "too"]}),
        ({"done": ENDS, "episode": IDS * 0}, {"end_key": "done"}),
        ({"y": IDS}, {"ends": ENDS, "cache_values": True}),
        ({"y": IDS}, {"trajectories": IDS, "cache_values": True}),
    ],
)
def test_trajectories_are_told_apart_by_every_mark_that_stock_knows(kind, fields, arguments, tmp_path):
    data = static_data(**fields)
    storage: Any
    if kind == "tensor":
        storage = g.GenerationalTensorStorage(data)
    else:
        cls = g.GenerationalLazyTensorStorage if kind == "lazy" else g.GenerationalLazyMemmapStorage
        storage = cls(12)
        storage.set(range(12), data)
    ours = g.GenerationalPrioritizedSliceSampler(12, 1.0, 1.0, slice_len=3, **arguments)
    stock = PrioritizedSliceSampler(12, 1.0, 1.0, slice_len=3, **arguments)
    assert started(ours, storage) == started(stock, storage) == EXPECTED
    assert ours.traj_key == stock.traj_key


def test_trailing_dimensions_of_marks_do_not_matter():
    for fields in ({"episode": IDS[:, None]}, {"next": {"done": ENDS[:, None, None]}}):
        assert started(made(), g.GenerationalTensorStorage(static_data(**fields))) == EXPECTED


@pytest.mark.parametrize("ends", [[], [11], [4], [4, 11], [0]])
@pytest.mark.parametrize("by", ["done", "ids", "ends", "trajectories"])
@pytest.mark.parametrize("path", ["exact", "rejection"])
def test_a_full_ring_that_was_never_written_here_is_read_as_stock_reads_it(monkeypatch, ends, by, path):
    take_path(monkeypatch, path)
    done = torch.zeros(12, dtype=torch.bool)
    done[ends] = True
    ids = torch.cat([torch.zeros(1, dtype=torch.int64), done.cumsum(0)[:-1]]) % max(len(ends), 1)
    storage = g.GenerationalTensorStorage(static_data(done=done, ids=ids))
    assert storage._last_cursor_index is None
    arguments = {
        "done": {"end_key": "done"},
        "ids": {"traj_key": "ids"},
        "ends": {"ends": done, "cache_values": True},
        "trajectories": {"trajectories": ids, "cache_values": True},
    }[by]
    ours, stock = (
        cls(12, 1.0, 1.0, slice_len=3, **arguments)
        for cls in (g.GenerationalPrioritizedSliceSampler, PrioritizedSliceSampler)
    )
    assert started(ours, storage) == started(stock, storage)


@pytest.mark.parametrize("path", ["exact", "rejection"])
def test_lanes_without_any_end_are_judged_on_their_own(monkeypatch, path):
    take_path(monkeypatch, path)
    done = torch.zeros(6, 2, dtype=torch.bool)
    done[2, 1] = True
    storage = g.GenerationalLazyTensorStorage(12, ndim=2)
    storage.set(range(6), TensorDict({"done": done[..., None]}, [6, 2]))
    storage._set_last_cursor(range(0))
    assert storage._last_cursor_index is None
    sampler = g.GenerationalPrioritizedSliceSampler(12, 1.0, 1.0, slice_len=3, end_key="done")
    sampler.update_priority(torch.arange(12), torch.ones(12))
    index, _ = sampler.sample(storage, 900)
    rows, lanes = (part.reshape(-1, 3)[:, 0].tolist() for part in index)
    assert {row for row, lane in zip(rows, lanes, strict=True) if lane == 0} == {0, 1, 2, 3}
    assert {row for row, lane in zip(rows, lanes, strict=True) if lane == 1} == {3, 4, 5, 0}


@pytest.mark.parametrize(("steps", "span"), [(1, False), (1, (0, 0)), (1, (0, True)), (4, (0, 3)), (4, (False, True))])
@pytest.mark.parametrize("strict", [True, False])
def test_slices_of_one_step_can_start_anywhere(steps, span, strict):
    """Stock masks every start, or all but the first of each trajectory."""
    storage = g.GenerationalTensorStorage(static_data())
    sampler = g.GenerationalPrioritizedSliceSampler(12, 1.0, 1.0, slice_len=steps, span=span, strict_length=strict)
    sampler.update_priority(torch.arange(12), torch.ones(12))
    index, info = sampler.sample(storage, 400 * steps)
    first = np.concatenate([[True], info["next", "truncated"][:-1, 0].numpy()])
    expected = set(range(12)) - ({3, 6, 11} if steps > 1 and span == (False, True) else set())
    assert set(index[0].numpy()[first].tolist()) == expected


def test_boundaries_that_were_handed_in_are_not_used_for_records_written_later():
    storage = g.GenerationalTensorStorage(static_data())
    rb = g.GenerationalTensorDictReplayBuffer(storage=storage, batch_size=6)
    rb.set_sampler(g.GenerationalPrioritizedSliceSampler(12, 1.0, 1.0, slice_len=3, ends=ENDS, cache_values=True))
    assert rb.sample()["x"].shape == (6,)
    copy = pickle.loads(pickle.dumps(rb.sampler))
    assert copy.sample(storage, 6)[0][0].shape == (6,)
    rb.extend(static_data()[:2])
    with pytest.raises(RuntimeError, match="have been written over since"):
        rb.sample()


def test_flags_of_recurrent_models_are_set_at_the_first_step_of_every_slice():
    flags = torch.zeros(12, 1, dtype=torch.bool)
    flags[[0, 4, 7, 9]] = True
    storage = g.GenerationalTensorStorage(static_data(is_init=flags, episode=IDS))
    for key, expected in (("is_init", True), (None, False)):
        sampler = g.GenerationalPrioritizedSliceSampler(12, 1.0, 1.0, slice_len=3, init_key=key)
        sampler.update_priority(torch.arange(12), torch.ones(12))
        index, info = sampler.sample(storage, 60)
        assert ("is_init" in info) == expected
        if expected:
            first = torch.arange(60) % 3 == 0
            assert torch.equal(info["is_init"][:, 0], flags[index[0]][:, 0] | first)
    assert torch.equal(storage[:]["is_init"], flags)


def test_records_that_name_only_some_of_the_marks_get_the_others():
    storage = g.GenerationalTensorStorage(static_data(episode=IDS))
    sampler = g.GenerationalPrioritizedSliceSampler(12, 1.0, 1.0, slice_len=3, truncated_key=("a", "truncated"))
    sampler.update_priority(torch.arange(12), torch.ones(12))
    _, info = sampler.sample(storage, 6)
    assert info["a", "truncated"].shape == (6, 1)
    assert torch.equal(info["a", "done"], info["a", "truncated"])
    assert not info["a", "terminated"].any()
    bare = g.GenerationalPrioritizedSliceSampler(12, 1.0, 1.0, slice_len=3, truncated_key=None)
    bare.update_priority(torch.arange(12), torch.ones(12))
    assert bare.sample(storage, 6)[1].keys() == {"priority_weight", "index_generation"}


def test_flags_within_a_slice_stay_and_its_last_step_gets_one():
    storage = g.GenerationalTensorStorage(static_data(episode=IDS, next={"done": ENDS.roll(-1), "terminated": ENDS}))
    sampler = made()
    sampler.update_priority(torch.arange(12), torch.ones(12))
    index, info = sampler.sample(storage, 300)
    last = torch.arange(300) % 3 == 2
    assert torch.equal(info["next", "truncated"], last[:, None])
    assert torch.equal(info[DONE], ENDS.roll(-1)[index[0]] | last)
    assert torch.equal(info["next", "terminated"], ENDS[index[0]])


# ------------------------------------------------------------------ configuration, copies, checkpoints

CONFIGURATION = {
    "slice_len": 4,
    "end_keys": [DONE, ("next", "terminated")],
    "truncated_key": ("next", "cut"),
    "init_key": "begins",
    "strict_length": False,
    "span": (False, 2),
    "cache_values": True,
    "max_priority_within_buffer": True,
}
NAMES = [*CONFIGURATION, "num_slices", "end_key", "traj_key", "_fetch_traj", "_traj_key_auto", "compile", "_device"]
NAMES += ["_alpha", "_beta", "_eps", "dtype", "reduction", "_max_capacity"]
NAMES[NAMES.index("max_priority_within_buffer")] = "_max_priority_within_buffer"


def configured() -> g.GenerationalPrioritizedSliceSampler:
    return g.GenerationalPrioritizedSliceSampler(8, 0.6, 0.4, 1e-3, torch.float64, "mean", **CONFIGURATION)


def configuration_of(sampler: Any) -> dict[str, Any]:
    return {name: getattr(sampler, name) for name in NAMES}


def test_the_arguments_are_those_of_stock_in_their_order():
    ours, theirs = (
        inspect.signature(cls.__init__).parameters
        for cls in (g.GenerationalPrioritizedSliceSampler, PrioritizedSliceSampler)
    )
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_it_is_every_sampler_that_it_stands_for():
    sampler = configured()
    for cls in (g.GenerationalPrioritizedSampler, PrioritizedSliceSampler, SliceSampler, PrioritizedSampler):
        assert isinstance(sampler, cls)
    assert type(g.GenerationalPrioritizedSliceSampler(8, 1.0, 1.0, slice_len=2, compile=True).compile) is bool


def test_a_sampler_like_another_has_its_configuration():
    theirs = PrioritizedSliceSampler(8, 0.6, 0.4, 1e-3, torch.float64, "mean", **CONFIGURATION)
    made = g.GenerationalPrioritizedSliceSampler.like(theirs)
    assert type(made) is g.GenerationalPrioritizedSliceSampler
    assert configuration_of(made) == configuration_of(theirs) | {"_device": torch.device("cpu")}
    assert configuration_of(g.GenerationalPrioritizedSliceSampler.like(made)) == configuration_of(made)
    storage = g.GenerationalTensorStorage(static_data(y=IDS))
    for arguments in ({"ends": ENDS}, {"trajectories": IDS}):
        static = PrioritizedSliceSampler(12, 1.0, 1.0, slice_len=3, cache_values=True, **arguments)
        made = g.GenerationalPrioritizedSliceSampler.like(static)
        assert started(g.GenerationalPrioritizedSliceSampler.like(made), storage) == EXPECTED
    storage = g.GenerationalTensorStorage(static_data(episode=IDS))
    found = PrioritizedSliceSampler(12, 1.0, 1.0, slice_len=3)
    started(found, storage)
    assert found.traj_key == "episode"
    assert started(g.GenerationalPrioritizedSliceSampler.like(found), storage) == EXPECTED


def test_it_says_what_it_is():
    shown = repr(configured())
    assert shown.startswith("GenerationalPrioritizedSliceSampler(num_slices=None, slice_len=4, ")
    assert "span=(False, 2)" in shown
    assert shown.endswith("alpha=0.6, beta=0.4, eps=0.001)")


def test_copies_have_configuration_priorities_and_a_lock_of_their_own():
    ring = full_ring()
    copy = pickle.loads(pickle.dumps(ring.rb))
    assert sampler_state(copy) == sampler_state(ring.rb)
    assert copy.sampler.lock is copy.storage.lock
    assert copy.sampler.lock is not ring.rb.storage.lock
    sampler = pickle.loads(pickle.dumps(configured()))
    assert configuration_of(sampler) == configuration_of(configured())
    assert sampler._rng is None
    lent = pickle.loads(pickle.dumps(ring.rb.sampler)).lock
    assert isinstance(lent, contextlib.nullcontext)
    ring.rb = copy
    possible = ring.possible("done", 4, strict=True, least=4)
    assert all(path == possible[path[0], 0] for _, path in ring.drawn(400)[0])


@pytest.mark.parametrize("path", ["state_dict", "dumps", "stock dumps", "stock state_dict"])
def test_checkpoints_bring_priorities_back(path, tmp_path):
    ring = full_ring()
    saved: Any = ring.rb.sampler
    if path.startswith("stock"):
        saved = PrioritizedSliceSampler(40, 1.0, 1.0, slice_len=4)
        saved.update_priority(torch.arange(40), leaves(ring.rb) + 1)
    target = full_ring()
    target.rb.update_priority(torch.arange(40), torch.rand(40))
    if path.endswith("dumps"):
        saved.dumps(tmp_path)
        target.rb.sampler.loads(tmp_path)
    else:
        target.rb.sampler.load_state_dict(saved.state_dict())
    cells = torch.arange(40)
    assert torch.equal(leaves(target.rb), torch.as_tensor(saved._sum_tree[cells]).float())
    assert float(target.rb.sampler.default_priority) == float(saved.default_priority)


def test_checkpoints_are_checked_and_portable_as_those_of_the_prioritized_sampler(tmp_path):
    sampler = made()
    sampler.dumps(tmp_path)  # without a priority yet
    other = made(max_capacity=8)
    other.update_priority(torch.arange(8), torch.arange(8))
    held = other._sum_tree.query(0, 8)
    for load in (lambda: other.loads(tmp_path), lambda: other.load_state_dict(sampler.state_dict())):
        with pytest.raises(ValueError, match="priorities of 12 slots but this sampler has max_capacity=8"):
            load()
        assert other._sum_tree.query(0, 8) == held
    torch.save(other.state_dict(), tmp_path / "state")
    assert torch.load(tmp_path / "state", weights_only=True)["_sum_tree"].tolist() == list(range(8))


def test_new_records_are_born_at_the_largest_priority_among_those_that_stay():
    sampler = made(max_priority_within_buffer=True)
    sampler.update_priority(torch.arange(12), torch.arange(12))
    sampler.mark_update(torch.tensor([11]))
    assert float(sampler.default_priority) == 10.0
    assert sampler._sum_tree[11] == 10.0


def test_checkpoints_of_the_whole_buffer_bring_slices_back(tmp_path):
    ring = full_ring()
    ring.rb.dumps(tmp_path / "saved")
    restored = full_ring(seed=1)
    restored.rb.loads(tmp_path / "saved")
    assert sampler_state(restored.rb) == sampler_state(ring.rb)
    by_state = full_ring(seed=2)
    by_state.rb.load_state_dict(ring.rb.state_dict())
    assert sampler_state(by_state.rb) == sampler_state(ring.rb)
    possible = ring.possible("done", 4, strict=True, least=4)
    for rb in (restored.rb, by_state.rb):
        ring.rb = rb
        assert all(path == possible[path[0], 0] for _, path in ring.drawn(400)[0])


def test_emptied_and_annealed_it_is_the_prioritized_sampler_that_it_was():
    ring = full_ring()
    sampler = ring.rb.sampler
    before = leaves(ring.rb)
    sampler.alpha = 0.5
    assert torch.allclose(leaves(ring.rb), before**0.5)
    sampler.mark_update(torch.tensor([3]), storage=ring.rb.storage)
    assert float(leaves(ring.rb)[3]) == pytest.approx(float(sampler.default_priority) ** 0.5)
    ring.rb.empty()
    assert sampler._sum_tree.query(0, 40) == 0
    assert not sampler.can_sample(ring.rb.storage, 4)
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        ring.rb.sample(4)
    with pytest.raises(ValueError, match="alpha must be greater or equal to 0"):
        sampler.alpha = -1


def test_the_trees_grow_where_a_storage_rounds_its_capacity_up_to_whole_rows():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8, ndim=2),
        sampler=g.GenerationalPrioritizedSliceSampler(8, 1.0, 1.0, slice_len=2, traj_key="x"),
        batch_size=8,
    )
    rb.extend(TensorDict({"x": torch.zeros(3, 6, dtype=torch.int64)}, [3, 6]))
    assert rb.sampler.max_size == rb.storage.generations.numel() == 9
    sample = rb.sample()
    assert sample["index"].shape == (8, 2)
    sample["td_error"] = torch.ones(8)
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 0
    late = made(max_capacity=8, slice_len=2, traj_key="x")
    late.update_priority(torch.arange(8), 1.0)  # as a buffer does that does not know of the storage yet
    late.sample(rb.storage, 8)
    assert late.max_size == 9


# ------------------------------------------------------------------ refusals


def made(**arguments: Any) -> g.GenerationalPrioritizedSliceSampler:
    arguments.setdefault("max_capacity", 12)
    if "num_slices" not in arguments:
        arguments.setdefault("slice_len", 3)
    return g.GenerationalPrioritizedSliceSampler(alpha=1.0, beta=1.0, eps=0.0, **arguments)


def sampled(batch_size: int = 6, *, storage: Any = None, priority: Any = 1.0, **arguments: Any) -> Any:
    sampler = made(**arguments)
    sampler.update_priority(torch.arange(12), priority)
    return sampler.sample(g.GenerationalTensorStorage(static_data()) if storage is None else storage, batch_size)


ONLY_LATE = torch.tensor([0.0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sampled(7), RuntimeError, "batch-size must be divisible by the slice length"),
        (lambda: sampled(7, num_slices=2), RuntimeError, "batch-size must be divisible by the number of slices"),
        (lambda: sampled(0), ValueError, "batch_size must be at least 1, got 0"),
        (lambda: sampled(0, num_slices=2), ValueError, "batch_size must be at least 1, got 0"),
        (
            lambda: sampled(slice_len=6),
            RuntimeError,
            "Cannot sample slices: the longest trajectory among the 12 records has 5 steps, and a slice needs 6.*"
            "strict_length=False",
        ),
        (lambda: sampled(num_slices=1), RuntimeError, "Cannot sample slices: the longest trajectory"),
        (
            lambda: sampled(priority=ONLY_LATE),
            RuntimeError,
            "Cannot sample slices: the priorities of all 6 records that one could start at are zero.*eps > 0",
        ),
        (lambda: sampled(priority=0.0), RuntimeError, "Cannot sample by priority: those of all 12 records are zero"),
        (
            lambda: sampled(storage=g.GenerationalLazyTensorStorage(12)),
            RuntimeError,
            "Cannot sample from an empty storage",
        ),
        (lambda: sampled(storage=LazyTensorStorage(12)), TypeError, "SliceSampler needs a storage that carries"),
        (
            lambda: sampled(storage=g.GenerationalTensorStorage(TensorDict({"x": torch.arange(20)}, [20]))),
            ValueError,
            "max_capacity=12 but the storage holds 20 records",
        ),
        (
            lambda: sampled(storage=g.GenerationalTensorStorage(torch.arange(12))),
            RuntimeError,
            "records with named entries",
        ),
        (lambda: sampled(end_key="over"), RuntimeError, "neither trajectories .* nor their ends .'over'"),
        (
            lambda: sampled(storage=g.GenerationalTensorStorage(static_data(done=torch.zeros(12, 2))), end_key="done"),
            RuntimeError,
            r"signal 'done' has shape \(12, 2\).*one value per record",
        ),
        (
            lambda: sampled(ends=ENDS[:8], cache_values=True),
            RuntimeError,
            "describe 8 records and the storage holds 12",
        ),
        (lambda: made(span=(0, 3)), ValueError, "span on the right must be at least 0 and shorter than a slice, got 3"),
        (lambda: made(span=(0, -1)), ValueError, "span on the right"),
        (lambda: sampled(num_slices=2, span=(0, 3)), ValueError, "got 3 for slices of 3 steps"),
        (lambda: made(slice_len=0), ValueError, "slice_len must be at least 1"),
        (lambda: made(num_slices=2, slice_len=2), TypeError, "Either num_slices or slice_len"),
        (lambda: made(end_key="a", end_keys=["b"]), RuntimeError, "exclusive"),
        (lambda: made(ends=ENDS), RuntimeError, "cache_values"),
        (lambda: g.GenerationalPrioritizedSliceSampler(8, -1.0, 1.0, slice_len=2), ValueError, "alpha must be"),
        (
            lambda: g.GenerationalPrioritizedSliceSampler.like(PrioritizedSampler(8, 1.0, 1.0)),
            TypeError,
            "like needs a PrioritizedSliceSampler",
        ),
        (
            lambda: g.GenerationalTensorDictReplayBuffer(
                storage=g.GenerationalLazyTensorStorage(20), sampler=made(), batch_size=6
            ),
            ValueError,
            "max_capacity=12 but the storage holds 20 records",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_remedy(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_left_span_is_turned_off_with_the_warning_of_stock():
    messages = []
    for cls in (PrioritizedSliceSampler, g.GenerationalPrioritizedSliceSampler):
        with pytest.warns(UserWarning, match="Left spanning is disabled") as caught:
            sampler = cls(12, 1.0, 1.0, slice_len=3, span=2)
        messages.append(str(caught[0].message).replace("Generational", ""))
        assert tuple(sampler.span) == (0, 2)
    assert messages[0] == messages[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(span=[False, 2])
