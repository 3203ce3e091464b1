"""Checks of samplers, sample units, storages, writers and buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ledger import BATCH, LANES, SLICES, SLOTS, Ledger, agrees, buffer, priorities, record, storage, turns
from tensordict import TensorDict
from torchrl.data import replay_buffers as stock
from torchrl.data.replay_buffers.replay_buffers import InPlaceSampler
from where_checks import CHECKS, check

import torchrl_generational as g

# ---------------------------------------------------------------- samplers


class OwnSampler(stock.Sampler):
    """Draws flat indices, which are places only where the storage has one dimension."""

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        return torch.randint(storage.shape[0], (batch_size,)), {}

    def _empty(self) -> None: ...

    def dumps(self, path: Any) -> None: ...

    def loads(self, path: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


SAMPLERS: dict[str, tuple[tuple[int, ...], dict[str, Callable[[int], Any]]]] = {
    "Sampler, a subclass of one's own": ((1,), {"": lambda cells: OwnSampler()}),
    "RandomSampler": ((1, 2), {"": lambda cells: stock.RandomSampler()}),
    "SamplerWithoutReplacement": (
        (1, 2),
        {
            "": lambda cells: stock.SamplerWithoutReplacement(),
            "drop_last": lambda cells: stock.RandomSampler(replacement=False, drop_last=True),
            "in order": lambda cells: stock.SamplerWithoutReplacement(shuffle=False),
        },
    ),
    "SliceSampler": (
        (1, 2),
        {
            "": lambda cells: stock.SliceSampler(**SLICES),
            "by ends": lambda cells: stock.SliceSampler(num_slices=3, end_key=("next", "done")),
            "cached": lambda cells: stock.SliceSampler(**SLICES, cache_values=True),
            "short": lambda cells: stock.SliceSampler(slice_len=3, traj_key="episode", strict_length=False),
            "padded": lambda cells: stock.SliceSampler(
                slice_len=3, traj_key="episode", strict_length=False, pad_output=True
            ),
            "span": lambda cells: stock.SliceSampler(slice_len=3, traj_key="episode", span=(True, True)),
        },
    ),
    "SliceSamplerWithoutReplacement": (
        (1, 2),
        {"": lambda cells: stock.SliceSamplerWithoutReplacement(**SLICES, strict_length=False)},
    ),
    "PrioritizedSampler": ((1, 2), {"": lambda cells: stock.PrioritizedSampler(cells, 1.0, 1.0)}),
    "GenerationalPrioritizedSampler": ((1, 2), {"": lambda cells: g.GenerationalPrioritizedSampler(cells, 1.0, 1.0)}),
    "PrioritizedSliceSampler": ((1, 2), {"": lambda cells: stock.PrioritizedSliceSampler(cells, 1.0, 1.0, **SLICES)}),
    "GenerationalPrioritizedSliceSampler": (
        (1, 2),
        {"": lambda cells: g.GenerationalPrioritizedSliceSampler(cells, 1.0, 1.0, **SLICES)},
    ),
    "StreamingSliceSampler": ((1,), {"": lambda cells: stock.StreamingSliceSampler(**SLICES)}),
    "StalenessAwareSampler": ((1,), {"": lambda cells: stock.StalenessAwareSampler()}),
    "PromptGroupSampler": (
        (1,),
        {
            strategy: lambda cells, strategy=strategy: stock.PromptGroupSampler(
                num_groups=2, strategy=strategy, reward_key=("next", "reward")
            )
            for strategy in ("random", "recency", "reward", "variance")
        },
    ),
}


def sampler_check(make: Callable[[int], Any], kind: str, ndim: int, in_sample: bool) -> None:
    cls = g.GenerationalTensorDictReplayBuffer if in_sample else g.GenerationalReplayBuffer
    cells = SLOTS * (LANES if ndim == 2 else 1)
    sampler = make(cells)
    rb = cls(storage=storage(kind, ndim), sampler=sampler, batch_size=BATCH, generator=torch.Generator().manual_seed(0))

    def slices_are_runs(sample: Any) -> None:
        if getattr(sampler, "slice_len", None) == 2 and getattr(sampler, "strict_length", False):
            runs = sample["id"].reshape(-1, 2)
            assert (runs[:, 1] - runs[:, 0] == (LANES if ndim == 2 else 1)).all()
            assert (sample["episode"].reshape(-1, 2).diff() == 0).all()

    turns(Ledger(rb, ndim=ndim), see=slices_are_runs)


for name, (dimensions, makers) in SAMPLERS.items():
    for variant, make in makers.items():
        for ndim in dimensions:
            for kind in ("memory", "memmap"):
                for in_sample in (True, False) if not variant and kind == "memory" else (True,):
                    path = f"{variant} {ndim}d {kind}{'' if in_sample else ' info'}".strip()
                    check("sampler", name, path)(partial(sampler_check, make, kind, ndim, in_sample))


@check("sampler", "SamplerWithoutReplacement", "epochs")
def each_epoch_has_every_record_once() -> None:
    rb = buffer(stock.SamplerWithoutReplacement(), batch_size=5)
    ledger = Ledger(rb)
    for count in (8, 8, 5):
        ledger.write(count)
        if len(rb) < SLOTS:
            continue
        seen: list[int] = []
        for batch in rb:
            seen += ledger.named(batch["index"], batch["index_generation"])
            assert seen[-len(batch) :] == batch["id"].tolist()
        assert sorted(seen) == sorted(record for record, _ in ledger.held.values())


@check("sampler", "ConsumingSampler", "memory")
@check("sampler", "ConsumingSampler", "memmap")
def consumed_slots_are_written_out_of_turn(kind: str = "memory") -> None:
    turns(Ledger(buffer(stock.ConsumingSampler(2), storage=storage(kind))), told=True)


CHECKS["sampler", "ConsumingSampler"]["memmap"] = partial(consumed_slots_are_written_out_of_turn, "memmap")


@check("sampler", "ConsumingSampler", "consume_after_n_samples")
def samples_are_consumed() -> None:
    turns(Ledger(buffer(stock.RandomSampler(), consume_after_n_samples=2)), told=True)


def two_dimensions(sampler: Any) -> None:
    rb = buffer(sampler, storage=storage(ndim=2), batch_size=1)
    Ledger(rb, ndim=2).write(8)
    rb.sample()


check("sampler", "Sampler, a flat index into 2 dimensions")(lambda: two_dimensions(OwnSampler()))
check("sampler", "ConsumingSampler, 2 dimensions")(lambda: two_dimensions(stock.ConsumingSampler()))
check("sampler", "StreamingSliceSampler, 2 dimensions")(lambda: two_dimensions(stock.StreamingSliceSampler(**SLICES)))
check("sampler", "StalenessAwareSampler, 2 dimensions")(lambda: two_dimensions(stock.StalenessAwareSampler()))
check("sampler", "PromptGroupSampler, 2 dimensions")(lambda: two_dimensions(stock.PromptGroupSampler(num_groups=1)))


@check("sampler", "SamplerEnsemble, in one buffer")
def an_ensemble_of_samplers_needs_one_of_storages() -> None:
    rb = buffer(stock.SamplerEnsemble(stock.RandomSampler()))
    Ledger(rb).write(8)
    rb.sample()


@check("sampler", "RandomSampler, priorities updated")
def priorities_are_asked_of_a_sampler_without_any() -> None:
    rb = buffer(stock.RandomSampler())
    Ledger(rb).write(8)
    sample = rb.sample()
    rb.update_tensordict_priority_if_present(sample.set("td_error", torch.ones(BATCH)))


def tree_check(sampler: Any, tree: str, name: str) -> None:
    rb = buffer(sampler)
    assert type(getattr(rb.sampler, tree)).__name__ == name
    turns(Ledger(rb))


for name, tree, make in (
    ("SumSegmentTreeFp32", "_sum_tree", partial(stock.PrioritizedSampler, SLOTS, 1.0, 1.0)),
    ("MinSegmentTreeFp32", "_min_tree", partial(stock.PrioritizedSampler, SLOTS, 1.0, 1.0)),
    ("SumSegmentTreeFp64", "_sum_tree", partial(g.GenerationalPrioritizedSampler, SLOTS, 1.0, 1.0)),
    (
        "MinSegmentTreeFp64",
        "_min_tree",
        partial(g.GenerationalPrioritizedSampler, SLOTS, 1.0, 1.0, dtype=torch.float64),
    ),
):
    check("sampler", name)(lambda tree=tree, make=make, name=name: tree_check(make(), tree, name))


# ---------------------------------------------------------------- sample units


class Neighbours(stock.SampleUnit):
    """Each anchor and the record behind it, with nothing said about anchors."""

    def expand(self, index: Any, info: dict[str, Any], storage: Any) -> tuple[Any, dict[str, Any]]:
        pairs = torch.stack([index, (index + 1) % len(storage)], -1).reshape(-1)
        return pairs, {key: torch.as_tensor(value).repeat_interleave(2, 0) for key, value in info.items()}


def unit_check(unit: Any, make: Callable[[int], Any], kind: str, ndim: int) -> None:
    cells = SLOTS * (LANES if ndim == 2 else 1)
    rb = buffer(make(cells), storage=storage(kind, ndim), sample_unit=unit)
    ledger = Ledger(rb, ndim=ndim)
    if not isinstance(unit, stock.Sequence):
        turns(ledger)
        return
    for _ in range(2):
        ledger.write(8)
    stale = 0
    for _ in range(3):
        ledger.write(3)
        sample, info = rb.sample(return_info=True)
        agrees(ledger, sample, info)
        anchors = ledger.named(info["anchor_index"], info["anchor_generation"])
        ledger.write(5)
        live = ledger.live(info["anchor_index"], anchors)
        stale += live.count(False)
        priority, before = 5 + torch.rand(len(live)), priorities(rb)
        result = rb.update_tensordict_priority_if_present(sample.set("td_error", priority))
        assert result.updated_mask.tolist() == live
        wanted: dict[int, Any] = {}
        rows = zip(ledger.cells(info["anchor_index"]), live, sample["validity_mask"].tolist(), priority, strict=True)
        for cell, there, valid, value in rows:
            if there and valid:
                wanted[cell] = max(wanted.get(cell, 0.0), float(value))
        expected = dict(enumerate(before)) | {cell: pytest.approx(value) for cell, value in wanted.items()}
        assert dict(enumerate(priorities(rb))) == expected
    assert stale


UNITS = {
    "pad": lambda: stock.Sequence(length=3),
    "burn-in": lambda: stock.Sequence(length=2, burn_in=1, bootstrap=1),
    "stop": lambda: stock.Sequence(length=3, episode_boundary="stop"),
    "reset": lambda: stock.Sequence(length=3, episode_boundary="include_reset", burn_in=1),
    "dilated": lambda: stock.Sequence(length=2, dilation=2),
    "one trajectory": lambda: stock.Sequence(length=2, done_key=None),
}
ANCHORS = {
    "": lambda cells: g.GenerationalPrioritizedSampler(cells, 1.0, 1.0),
    "stock": lambda cells: stock.PrioritizedSampler(cells, 1.0, 1.0),
}
for ndim in (1, 2):
    for path, anchors in ANCHORS.items():
        for variant, unit in UNITS.items():
            check("sample unit", "Sequence", f"{variant} {path} {ndim}d")(
                lambda unit=unit, anchors=anchors, ndim=ndim: unit_check(unit(), anchors, "memory", ndim)
            )
        check("sample unit", "Transition", f"{path} {ndim}d".strip())(
            partial(unit_check, stock.Transition(), anchors, "memory", ndim)
        )
check("sample unit", "Sequence", "memmap")(lambda: unit_check(UNITS["pad"](), ANCHORS[""], "memmap", 1))
check("sample unit", "SampleUnit, a subclass of one's own")(partial(unit_check, Neighbours(), ANCHORS[""], "memory", 1))


@check("sample unit", "Sequence, of the slices of a slice sampler")
def slices_as_anchors() -> None:
    unit_check(
        stock.Sequence(length=3),
        lambda cells: g.GenerationalPrioritizedSliceSampler(cells, 1.0, 1.0, **SLICES),
        "memory",
        1,
    )


# ---------------------------------------------------------------- storages and writers


class OwnStorage(stock.Storage):
    """One without generations."""

    ndim = 1

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None: ...

    def get(self, index: Any) -> Any: ...

    def __len__(self) -> int:
        return 0

    def _empty(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def contains(self, item: Any) -> bool:
        return False


class OwnWriter(stock.Writer):
    """One that does not track generations."""

    def add(self, data: Any) -> int:
        return 0

    def extend(self, data: Any) -> torch.Tensor:
        return torch.zeros(0)

    def _empty(self, empty_write_count: bool = True) -> None: ...

    def dumps(self, path: Any) -> None: ...

    def loads(self, path: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


STORAGES: dict[str, Callable[[], Any]] = {
    "GenerationalLazyTensorStorage": lambda: g.GenerationalLazyTensorStorage(SLOTS),
    "GenerationalLazyMemmapStorage": lambda: g.GenerationalLazyMemmapStorage(SLOTS),
    "GenerationalTensorStorage": lambda: g.GenerationalTensorStorage(record(torch.arange(-SLOTS, 0))),
    "TensorStorage": lambda: stock.TensorStorage(torch.zeros(SLOTS)),
    "LazyTensorStorage": lambda: stock.LazyTensorStorage(SLOTS),
    "LazyMemmapStorage": lambda: stock.LazyMemmapStorage(SLOTS),
    "ListStorage": lambda: stock.ListStorage(SLOTS),
    "LazyStackStorage": lambda: stock.LazyStackStorage(SLOTS),
    "CompressedListStorage": lambda: stock.CompressedListStorage(SLOTS),
    "StorageEnsemble": lambda: stock.StorageEnsemble(stock.LazyTensorStorage(SLOTS)),
    "Storage, a subclass of one's own": lambda: OwnStorage(SLOTS),
}


def storage_check(make: Callable[[], Any], cls: type) -> None:
    made = make()
    rb = cls(storage=made, batch_size=BATCH, alpha=1.0, beta=1.0)
    ledger = Ledger(rb)
    for row in range(len(made)):  # records that a storage was built around
        ledger.put((row,), row - SLOTS)
    turns(ledger)


for name, make in STORAGES.items():
    for cls in (g.GenerationalPrioritizedReplayBuffer, g.GenerationalTensorDictPrioritizedReplayBuffer):
        check("storage", name, cls.__name__)(partial(storage_check, make, cls))

WRITERS: dict[str, Callable[[], Any]] = {
    "GenerationalRoundRobinWriter": g.GenerationalRoundRobinWriter,
    "GenerationalTensorDictRoundRobinWriter": g.GenerationalTensorDictRoundRobinWriter,
    "GenerationalTensorDictMaxValueWriter": lambda: g.GenerationalTensorDictMaxValueWriter(rank_key="rank"),
    "RoundRobinWriter": partial(stock.RoundRobinWriter, track_generations=True),
    "TensorDictRoundRobinWriter": partial(stock.TensorDictRoundRobinWriter, track_generations=True),
    "TensorDictMaxValueWriter": stock.TensorDictMaxValueWriter,
    "ImmutableDatasetWriter": stock.ImmutableDatasetWriter,
    "WriterEnsemble": lambda: stock.WriterEnsemble(stock.RoundRobinWriter()),
    "Writer, a subclass of one's own": OwnWriter,
}


def writer_check(make: Callable[[], Any], kind: str, ndim: int) -> None:
    cells = SLOTS * (LANES if ndim == 2 else 1)
    rb = buffer(g.GenerationalPrioritizedSampler(cells, 1.0, 1.0), writer=make(), storage=storage(kind, ndim))
    ranks = isinstance(rb.writer, stock.TensorDictMaxValueWriter)

    def ranked(ids: torch.Tensor) -> TensorDict:
        return record(ids).set("rank", (ids * 7 % 5 + ids // 2).float())  # not in the order in which they come

    turns(Ledger(rb, ndim=ndim, make=ranked), told=ranks)


for name, make in WRITERS.items():
    for ndim in (1,) if "MaxValue" in name or not name.startswith("Generational") else (1, 2):
        check("writer", name, f"{ndim}d")(partial(writer_check, make, "memory", ndim))
check("writer", "GenerationalTensorDictMaxValueWriter", "memmap")(
    partial(writer_check, WRITERS["GenerationalTensorDictMaxValueWriter"], "memmap", 1)
)


# ---------------------------------------------------------------- buffers

BUFFERS: dict[str, Callable[[], Any]] = {
    "ReplayBuffer": lambda: g.GenerationalReplayBuffer(
        storage=storage(), sampler=g.GenerationalPrioritizedSampler(SLOTS, 1.0, 1.0), batch_size=BATCH
    ),
    "TensorDictReplayBuffer": buffer,
    "PrioritizedReplayBuffer": lambda: g.GenerationalPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=storage(), batch_size=BATCH
    ),
    "TensorDictPrioritizedReplayBuffer": lambda: g.GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=storage(), batch_size=BATCH
    ),
}
for name, make in BUFFERS.items():
    check("buffer", name)(lambda make=make: turns(Ledger(make())))


@check("buffer", "ConditionalUpdateResult")
def our_result_has_all_that_torchrls_has() -> None:
    rb = buffer()
    Ledger(rb).write(8)
    sample = rb.sample().set("td_error", torch.ones(BATCH))
    result = rb.update_tensordict_priority_if_present(sample)
    theirs = stock.ConditionalUpdateResult(updated=result.updated_mask, version_rejected=None, batch_size=[BATCH])
    assert torch.equal(result.updated, theirs.updated)
    assert result.version_rejected is theirs.version_rejected is None
    for name in ("updated_count", "stale_count", "version_rejected_count"):
        assert getattr(result, name) == getattr(theirs, name)


def goals(ids: torch.Tensor) -> TensorDict:
    return record(ids).update({"achieved_goal": ids[:, None].float(), "desired_goal": torch.full((len(ids), 1), -1.0)})


@check("buffer", "HERReplayBuffer")
def relabelled_records_keep_their_handles() -> None:
    class Hindsight(stock.HERReplayBuffer, g.GenerationalTensorDictReplayBuffer):
        pass

    for strategy in stock.HindsightStrategy:
        relabelled: list[int] = []
        rb = Hindsight(
            lambda batch, seen=relabelled: seen.append(len(batch)) or batch["desired_goal"],
            strategy=strategy,
            her_ratio=0.5,
            sampler=g.GenerationalPrioritizedSampler(SLOTS, 1.0, 1.0),
            storage=storage(),
            batch_size=BATCH,
        )
        turns(Ledger(rb, make=goals))
        assert relabelled == [BATCH // 2] * 6


@check("buffer", "HERReplayBuffer, behind the mixin")
def a_sample_that_would_be_skipped() -> None:
    class Hindsight(g.GenerationalTensorDictReplayBufferMixin, stock.HERReplayBuffer):
        pass


@check("buffer", "RemoteTensorDictReplayBuffer, behind the mixin")
def methods_that_would_not_be_forwarded() -> None:
    class Remote(g.GenerationalTensorDictReplayBufferMixin, stock.RemoteTensorDictReplayBuffer):
        pass


@check("buffer", "OfflineToOnlineReplayBuffer")
def an_online_buffer_of_torchrl() -> None:
    offline = g.GenerationalReplayBuffer(storage=storage())
    Ledger(offline).write(8)
    rb = stock.OfflineToOnlineReplayBuffer(offline, online_storage=storage(), batch_size=BATCH)
    rb.extend(record(torch.arange(8)))
    assert "index" not in rb.sample()  # nothing that could be mistaken for a handle
    rb.online_buffer.update_priority_if_present(index=0, generation=0, priority=1.0)


@check("buffer", "prefill_replay_buffer")
def copies_of_samples_are_records_of_their_own() -> None:
    dataset, rb = buffer(batch_size=None), buffer()
    source, ledger = Ledger(dataset), Ledger(rb)
    source.write(8)
    source.write(8)
    stock.prefill_replay_buffer(rb, dataset, 10, chunk_size=5)
    for row in range(10):
        ledger.put((row,), int(rb.storage._storage["id"][row]))
    assert "index_generation" not in rb.storage._storage
    sample, info = rb.sample(return_info=True)
    agrees(ledger, sample, info)


check("buffer", "InPlaceSampler")(InPlaceSampler)
