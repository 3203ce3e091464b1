"""Checks of what happens to batches: transforms, kinds of records, ways of delivery."""

from __future__ import annotations

import io
import logging
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ledger import (
    BATCH,
    LANES,
    SLICES,
    SLOTS,
    STEPS,
    Ledger,
    agrees,
    buffer,
    ids_of,
    priorities,
    record,
    storage,
    trajectory,
    turns,
    updates_the_live,
)
from support import leaves
from tensordict import NonTensorData, NonTensorStack, TensorDict, tensorclass
from tensordict.nn import TensorDictModule
from torchrl.data import replay_buffers as stock
from torchrl.envs import transforms as tf
from torchrl.envs.transforms.rb_transforms import NextStateReconstructor, PolicyAgeFilter
from torchrl.envs.transforms.transforms import FlattenTensorDict
from where_checks import CHECKS, check
from where_parts import BUFFERS

import torchrl_generational as g

# ---------------------------------------------------------------- transforms

ORDER = [4, 1, 5, 0, 2]


def module(entry: str, out: Any) -> TensorDictModule:
    return TensorDictModule(torch.nn.Linear(2, 2), in_keys=[entry], out_keys=[out])


def burn_in(steps: int) -> tf.BurnInTransform:
    return tf.BurnInTransform([module("observation", ("next", "hidden"))], burn_in=steps, out_keys=["hidden"])


def apply(*steps: Callable[[TensorDict], TensorDict]) -> tf.Compose:
    return tf.Compose(*(step if isinstance(step, tf.Transform) else Step(step) for step in steps))


class Step(tf.Transform):
    """A function as a transform."""

    def __init__(self, function: Callable[[TensorDict], TensorDict]) -> None:
        super().__init__()
        self.function = function

    def forward(self, tensordict: TensorDict) -> TensorDict:
        return self.function(tensordict)


TRANSFORMS: dict[str, dict[str, Callable[[], Any]]] = {
    "FlattenTensorDict": {"reading": lambda: FlattenTensorDict(inverse=False)},
    "CatFrames": {
        "": lambda: tf.CatFrames(2, dim=-1, in_keys=["observation"], out_keys=["frames"]),
        "slices": lambda: apply(
            lambda td: td.reshape(3, 2), tf.CatFrames(2, dim=-1, in_keys=["observation"], out_keys=["frames"])
        ),
    },
    "RenameTransform": {
        "": lambda: tf.RenameTransform(["observation"], ["state"]),
        "index": lambda: tf.RenameTransform(["index"], ["slot"]),
        "index_generation": lambda: tf.RenameTransform(["index_generation"], ["stamp"]),
    },
    "SelectTransform": {"": lambda: tf.SelectTransform("id")},
    "ExcludeTransform": {
        "": lambda: tf.ExcludeTransform("observation"),
        "index_generation": lambda: tf.ExcludeTransform("index", "index_generation"),
    },
    "FlattenObservation": {"": lambda: tf.FlattenObservation(-2, -1, in_keys=["pixels"])},
    "VecNorm": {"": lambda: tf.VecNorm(in_keys=["observation"])},
    "ObservationNorm": {"": lambda: tf.ObservationNorm(0.0, 2.0, in_keys=["observation"])},
    "RewardScaling": {"": lambda: tf.RewardScaling(0.0, 2.0, in_keys=[("next", "reward")])},
    "DTypeCastTransform": {
        "": lambda: tf.DTypeCastTransform(torch.float32, torch.float64, in_keys=["observation"]),
        "all": lambda: tf.DTypeCastTransform(torch.int64, torch.float32),
    },
    "ModuleTransform": {"": lambda: tf.ModuleTransform(module=module("observation", "embedding"), no_grad=True)},
    "NextStateReconstructor": {"": lambda: NextStateReconstructor(traj_key="episode")},
    "a function that reorders, drops or repeats records": {
        "reorder": lambda: lambda td: td[ORDER],
        "flip": lambda: apply(lambda td: td.flip(0)),
        "drop": lambda: lambda td: td[td["id"] % 2 == 0] if (td["id"] % 2 == 0).any() else td,
        "repeat": lambda: lambda td: td[[1, 1, 4]],
        "twice": lambda: apply(lambda td: td[ORDER], lambda td: td[:3].flip(0)),
    },
    "a function that reshapes the batch": {
        "": lambda: lambda td: td.reshape(2, 3),
        "reorder": lambda: lambda td: td[[3, 1, 0, 2]].reshape(2, 2),
        "behind a reorder": lambda: apply(lambda td: td.flip(0), lambda td: td.reshape(3, 2)),
    },
    "a second step that crops what the first reshaped": {
        "": lambda: apply(lambda td: td.reshape(2, 3), lambda td: td[:, 1:]),
        "random": lambda: apply(lambda td: td.reshape(2, 3), tf.RandomCropTensorDict(2)),
        "last": lambda: apply(lambda td: td.reshape(3, 2), lambda td: td[:, -1]),
        "burn-in": lambda: apply(lambda td: td.reshape(2, 3), burn_in(1)),
    },
    "a second step that reorders what the first reshaped": {
        "rows": lambda: apply(lambda td: td.reshape(2, 3), lambda td: td[[1, 0]]),
        "steps": lambda: apply(lambda td: td.reshape(2, 3), lambda td: td[:, [2, 0, 1]]),
        "transpose": lambda: apply(lambda td: td.reshape(2, 3), lambda td: td.transpose(0, 1)),
    },
    "a second step that flattens what the first reshaped": {
        "": lambda: apply(lambda td: td.reshape(2, 3), lambda td: td.reshape(-1)),
        "transposed": lambda: apply(lambda td: td.reshape(2, 3), lambda td: td.transpose(0, 1).reshape(-1)),
    },
    "a function that rebuilds all entries": {
        "": lambda: lambda td: TensorDict({"id": td["id"].flip(0)}, td.batch_size),
    },
}


def transform_check(make: Callable[[], Any]) -> None:
    turns(Ledger(buffer(transform=make())))


for name, makers in TRANSFORMS.items():
    for variant, make in makers.items():
        check("transform", name, variant)(partial(transform_check, make))


@check("transform", "Reward2GoTransform")
def rewards_to_go() -> None:
    def ended(ids: torch.Tensor) -> TensorDict:
        data = record(ids)
        data["next", "done"][-1] = True
        return data

    transform = tf.Reward2GoTransform(0.9, in_keys=[("next", "reward")], out_keys=["reward_to_go"], done_key="done")
    turns(Ledger(buffer(transform=transform), make=ended))


@check("transform", "CatFrames", "of a slice sampler")
def frames_of_slices() -> None:
    sampler = g.GenerationalPrioritizedSliceSampler(SLOTS, 1.0, 1.0, **SLICES)
    turns(Ledger(buffer(sampler, transform=TRANSFORMS["CatFrames"]["slices"]())))


@check("transform", "FlattenTensorDict", "writing")
def rows_are_flattened_when_they_are_written() -> None:
    def square(ids: torch.Tensor) -> TensorDict:
        return record(ids).reshape(-1, 1)

    turns(Ledger(buffer(transform=FlattenTensorDict()), make=square))


@check("transform", "MultiStepTransform", "1d")
@check("transform", "MultiStepTransform", "2d")
def records_are_held_back(ndim: int = 1) -> None:
    cells = SLOTS * (LANES if ndim == 2 else 1)
    rb = buffer(
        g.GenerationalPrioritizedSampler(cells, 1.0, 1.0),
        storage=storage(ndim=ndim),
        transform=tf.MultiStepTransform(n_steps=3, gamma=0.9),
    )
    ledger = Ledger(rb, ndim=ndim)
    time = written = 0
    for count in (2, 8, 8, 3, 7):
        ids = torch.arange(time, time + count)
        ids = ids[None] * LANES + torch.arange(LANES)[:, None] if ndim == 2 else ids
        index = rb.extend(record(ids))
        time += count
        assert (len(index) > 0) == (time > 3)
        for step in range(written, max(time - 3, 0)):  # three steps wait for those that follow
            for lane in range(LANES if ndim == 2 else 1):
                slot = (step % SLOTS, lane) if ndim == 2 else (step % SLOTS,)
                ledger.put(slot, step * LANES + lane if ndim == 2 else step)
        written = max(time - 3, 0)
        if written:
            sample, info = rb.sample(return_info=True)
            agrees(ledger, sample, info)
            updates_the_live(ledger, sample, info)


CHECKS["transform", "MultiStepTransform"]["2d"] = partial(records_are_held_back, 2)


@check("transform", "PolicyAgeFilter")
def old_records_are_dropped() -> None:
    rb = buffer(transform=PolicyAgeFilter(lambda: 5, 3))

    def aged(ids: torch.Tensor) -> TensorDict:
        return record(ids).set("policy_version", torch.full_like(ids, 3))

    ledger = Ledger(rb, make=aged)
    ledger.write(8)
    assert not len(rb.extend(record(torch.arange(100, 104))))  # too old to be written
    turns(ledger)
    rb.storage._storage["policy_version"][::2] = 1  # too old to be read, by now
    sample, info = rb.sample(return_info=True)
    assert (sample["index"] % 2 == 1).all()
    agrees(ledger, sample, info)


def trajectory_check(make: Callable[[], Any]) -> None:
    ledger = Ledger(buffer(Draws(SLOTS, 1.0, 1.0), transform=make()), make=trajectory)
    priorities_of_trajectories(ledger)


for name, make in {
    "BurnInTransform": lambda: burn_in(2),
    "RandomCropTensorDict": lambda: tf.RandomCropTensorDict(3),
    "ActionChunkTransform": lambda: tf.ActionChunkTransform(2, done_key=None),
    "a second step that moves cropped trajectories": lambda: apply(lambda td: td[:, 1:], lambda td: td[[3, 0, 5, 1]]),
}.items():
    check("transform", name, "trajectories")(partial(trajectory_check, make))


@check("transform", "a function that rebuilds all entries but an empty one")
def an_empty_entry_proves_nothing() -> None:
    def rebuild(td: TensorDict) -> TensorDict:
        return TensorDict({"id": td["id"].flip(0), "nothing": td["nothing"]}, td.batch_size)

    rb = buffer(transform=rebuild)
    rb.extend(record(torch.arange(8)).set("nothing", torch.zeros(8, 0)))
    rb.sample()


@check("transform", "a function of tensors that keeps records in place")
def tensors_are_trusted() -> None:
    rb = g.GenerationalPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=storage(), batch_size=BATCH, transform=lambda ids: ids.clone()
    )
    turns(Ledger(rb, make=lambda ids: ids))


@check("transform", "a function of tensors that drops records")
def tensors_carry_no_handles() -> None:
    rb = g.GenerationalReplayBuffer(storage=storage(), batch_size=BATCH, transform=lambda ids: ids[:3])
    rb.extend(torch.arange(8))
    rb.sample()


# ---------------------------------------------------------------- data


def priorities_of_trajectories(ledger: Ledger, part: Callable[[TensorDict], TensorDict] = lambda td: td) -> None:
    """Conditional updates of trajectories stored as records, by a part of a sample or one of another shape."""
    rb = ledger.rb
    for _ in range(2):
        ledger.write(8)
    for _ in range(3):
        ledger.write(3)
        sample, info = rb.sample(return_info=True)
        ids, stamps = ids_of(sample), info["index_generation"]
        firsts = ids[(..., *(0,) * (ids.ndim - stamps.ndim))]  # until records move, the info has one handle for each
        assert ledger.named(info["index"], stamps) == firsts.reshape(-1).tolist()
        assert ledger.named(sample["index"], sample["index_generation"]) == ids.reshape(-1).tolist()
        sample.set("td_error", 5 + torch.rand(sample.shape))
        batch = part(sample)
        ids = ids_of(batch)
        ledger.write(5)
        best: dict[int, float] = {}
        for one, value in zip(ids.reshape(-1).tolist(), batch["td_error"].reshape(-1).tolist(), strict=True):
            best[one] = max(best.get(one, 0.0), value)
        wanted: dict[int, Any] = dict(enumerate(priorities(rb)))
        there = {one: slot[0] for slot, (one, _) in ledger.held.items()}
        wanted |= {there[one]: pytest.approx(best[one]) for one in best if one in there}
        assert any(one in there for one in best)
        assert any(one not in there for one in best)
        result = rb.update_tensordict_priority_if_present(batch)
        assert dict(enumerate(priorities(rb))) == wanted
        mask = result.updated_mask
        mask = mask.reshape(*mask.shape, *[1] * (batch.ndim - mask.ndim)).expand(batch.shape)
        assert mask.reshape(-1).tolist() == [one in there for one in ids.reshape(-1).tolist()]


PARTS: dict[str, dict[str, Callable[[TensorDict], TensorDict]]] = {
    "stored trajectories": {
        "": lambda td: td,
        "cut": lambda td: td[1:, 2:],
        "reshaped": lambda td: td.reshape(2, 3, STEPS),
        "cut to nothing else": lambda td: td[:, :2],
    },
    "stored trajectories, flattened": {
        "": lambda td: td.reshape(-1),
        "by FlattenTensorDict": lambda td: FlattenTensorDict(inverse=False)(td),
        "in chunks": lambda td: td.reshape(-1, 1),
    },
    "stored trajectories, their last step": {"": lambda td: td[:, -1], "kept apart": lambda td: td[:, -1:]},
    "stored trajectories, time first": {"": lambda td: td.transpose(0, 1)},
}


class Draws(stock.PrioritizedSampler):
    """Draws every slot in turn, the old and the new, so that each batch has records that stay and records that go."""

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        return torch.arange(batch_size) * 2 % len(storage), {}


for name, parts in PARTS.items():
    for variant, part in parts.items():
        check("data", name, variant)(
            lambda part=part: priorities_of_trajectories(Ledger(buffer(Draws(SLOTS, 1.0, 1.0)), make=trajectory), part)
        )


@check("data", "stored trajectories, fields patched by one handle for each")
def one_handle_for_each_trajectory() -> None:
    ledger = Ledger(buffer(Draws(SLOTS, 1.0, 1.0)), make=trajectory)
    ledger.write(8)
    ledger.write(8)
    sample = ledger.rb.sample()
    index, generation = sample["index"][:, 0], sample["index_generation"][:, 0]
    ledger.write(5)
    live = ledger.live(index, sample["id"][:, 0].tolist())
    assert set(live) == {True, False}
    result = ledger.rb.update_if_present(index=index, generation=generation, patch={"mark": torch.ones(BATCH, STEPS)})
    assert result.updated_mask.tolist() == live
    marked = (ledger.rb.storage._storage["mark"] == 1).all(-1).nonzero()[:, 0].tolist()
    assert marked == sorted(index[torch.tensor(live)].tolist())
    turned = sample[:STEPS].transpose(0, 1)  # as many trajectories as steps: shapes do not tell the two apart
    with pytest.raises(ValueError, match=r"do not repeat along the last 1 dimension.*Nothing was updated"):
        ledger.rb.update_if_present(
            index=turned["index"], generation=turned["index_generation"], patch={"mark": torch.ones(STEPS, STEPS)}
        )
    assert (ledger.rb.storage._storage["mark"] == 1).all(-1).sum() == sum(live)


@check("data", "stored trajectories, in a storage of 2 dimensions")
def coordinates_of_trajectories() -> None:
    rb = buffer(stock.RandomSampler(), storage=storage(ndim=2))
    try:
        rb.extend(TensorDict({"id": torch.arange(36).reshape(2, 6, 3)}, [2, 6, 3]))
    finally:
        assert not len(rb)


@tensorclass
class Pair:
    id: torch.Tensor
    state: torch.Tensor


def pairs(ids: torch.Tensor) -> Any:
    return Pair(id=ids, state=ids[..., None].float(), batch_size=ids.shape)


for name in ("ReplayBuffer", "PrioritizedReplayBuffer"):
    for kind in ("memory", "memmap"):

        @check("data", "tensorclass", f"{name} {kind}")
        def tensorclasses(name: str = name, kind: str = kind) -> None:
            rb = g.GenerationalPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage(kind), batch_size=BATCH)
            if name == "ReplayBuffer":
                rb = g.GenerationalReplayBuffer(
                    storage=storage(kind), sampler=g.GenerationalPrioritizedSampler(SLOTS, 1.0, 1.0), batch_size=BATCH
                )
            turns(Ledger(rb, make=pairs))


check("data", "tensorclass, extending a tensordict buffer")(lambda: buffer().extend(pairs(torch.arange(8))))


@check("data", "tensorclass, added to a tensordict buffer")
def a_tensorclass_is_added() -> None:
    rb = buffer()
    try:
        rb.add(pairs(torch.tensor(0)))
    finally:
        assert not len(rb)


for variant, form in {"tensors": lambda ids: ids, "dicts": lambda ids: {"id": ids, "x": ids[:, None] * 2}}.items():
    check("data", "tensors and dicts of tensors", variant)(
        lambda form=form: turns(Ledger(BUFFERS["PrioritizedReplayBuffer"](), make=form))
    )


def lazily(ids: torch.Tensor, *, ragged: bool = False) -> Any:
    shapes = [2 + int(number % 2) if ragged else 2 for number in ids.tolist()]
    return TensorDict.lazy_stack(
        [TensorDict({"id": number, "x": torch.zeros(size)}) for number, size in zip(ids, shapes, strict=True)]
    )


for kind in ("memory", "memmap"):
    check("data", "LazyStackedTensorDict", kind)(
        lambda kind=kind: turns(Ledger(buffer(storage=storage(kind)), make=lazily))
    )
    check("data", "LazyStackedTensorDict, records of several shapes", kind)(
        lambda kind=kind: buffer(storage=storage(kind)).extend(lazily(torch.arange(8), ragged=True))
    )


def texts(ids: torch.Tensor) -> TensorDict:
    return TensorDict({"id": ids, "text": NonTensorStack(*map(str, ids.tolist()))}, ids.shape)


@check("data", "entries that are no tensors")
def texts_belong_to_their_records() -> None:
    def see(sample: TensorDict) -> None:
        assert list(map(int, sample["text"])) == sample["id"].tolist()

    turns(Ledger(buffer(), make=texts), see=see)
    turns(Ledger(buffer(transform=lambda td: td[ORDER]), make=texts), see=see)


@check("data", "entries that are no tensors, in memory-mapped files")
def a_text_that_all_records_share() -> None:
    def named(ids: torch.Tensor) -> TensorDict:
        return TensorDict({"id": ids, "task": "pendulum"}, ids.shape)

    def see(sample: TensorDict) -> None:
        assert set(sample.get("task").tolist()) == {"pendulum"}

    turns(Ledger(buffer(storage=storage("memmap")), make=named), see=see)


def in_files(*records: Any) -> None:
    rb = buffer(storage=storage("memmap"))
    for number, data in enumerate(records):
        try:
            rb.add(data) if not data.ndim else rb.extend(data)
        except TypeError:
            assert len(rb) == number  # nothing of the last one was written
            raise


check("data", "entries that are no tensors and differ, in memory-mapped files", "extend")(
    lambda: in_files(texts(torch.arange(4)))
)
check("data", "entries that are no tensors and differ, in memory-mapped files", "add")(
    lambda: in_files(*(TensorDict({"id": torch.tensor(number), "text": str(number)}) for number in range(2)))
)
check("data", "entries that are no tensors and differ, in memory-mapped files", "nested")(
    lambda: in_files(TensorDict({"inner": texts(torch.arange(4))}, [4]))
)


class Config:
    """An object that is made anew for each batch and has no equality of its own."""

    def __init__(self) -> None:
        self.scale = 2


def kept_alike(make: Callable[[], Any], *, checkpoint: bool) -> None:
    """Values that are equal are the same for all records, also once they have been to a checkpoint and back."""

    def told() -> TensorDict:
        return TensorDict({"id": torch.arange(2), "told": NonTensorData(make(), batch_size=[2])}, [2])

    rb = buffer(storage=storage("memmap"))
    rb.extend(told())
    if checkpoint:
        with tempfile.TemporaryDirectory() as folder:
            rb.dumps(folder)
            rb = buffer(storage=storage("memmap"))
            rb.loads(folder)
            rb.extend(told())
    rb.extend(told())
    assert len(rb) == 4 + 2 * checkpoint


VALUES: dict[str, tuple[Callable[[], Any], bool]] = {
    "an array": (lambda: np.array([1, 2]), False),
    "arrays in a dict": (lambda: {"a": np.ones(2)}, False),
    "NaN": (lambda: float("nan"), False),
    "a tuple": (lambda: (1, 2), False),
    "a tuple in a dict": (lambda: {"a": (1, 2)}, False),
    "an object": (Config, False),
}
for variant, (make, checkpoint) in VALUES.items():
    check("data", "entries that are no tensors, in memory-mapped files", variant)(
        partial(kept_alike, make, checkpoint=checkpoint)
    )


@check("data", "nested priority keys")
def a_priority_below_another_entry() -> None:
    rb = buffer(priority_key=("loss", "td"))
    for _ in range(2):
        rb.extend(record(torch.arange(8)).set(("loss", "td"), torch.arange(2.0, 10.0)))
    assert leaves(rb)[:SLOTS].tolist() == [6.0, 7, 8, 9, 6, 7, 8, 9, 2, 3, 4, 5]
    sample = rb.sample()
    rb.extend(record(torch.arange(3)))  # slots 4 to 6
    live = ~torch.isin(sample["index"], torch.tensor([4, 5, 6]))
    assert live.any()
    assert not live.all()
    sample["loss", "td"] = torch.full((BATCH,), 30.0)
    assert torch.equal(rb.update_tensordict_priority_if_present(sample).updated_mask, live)
    assert set((leaves(rb) == 30).nonzero()[:, 0].tolist()) == set(sample["index"][live].tolist())


# ---------------------------------------------------------------- delivery


@check("delivery", "return_info")
def the_info_says_what_the_sample_says() -> None:
    rb = buffer()
    ledger = Ledger(rb)
    ledger.write(8)
    ledger.write(8)
    sample, info = rb.sample(return_info=True)
    for key in ("index", "index_generation", "priority_weight"):
        assert torch.equal(info[key], sample[key])
    agrees(ledger, sample, info)


@check("delivery", "iteration", "for")
@check("delivery", "iteration", "prefetch")
def batches_of_an_epoch(prefetch: int | None = None) -> None:
    for sampler in (
        stock.SamplerWithoutReplacement(),
        stock.SamplerWithoutReplacement(drop_last=True),
        stock.SliceSamplerWithoutReplacement(**SLICES, strict_length=False),
    ):
        rb = buffer(sampler, prefetch=prefetch)
        ledger = Ledger(rb)
        ledger.write(8)
        ledger.write(8)
        for _ in range(2):
            batches = list(rb)
            assert batches
            for batch in batches:
                assert ledger.named(batch["index"], batch["index_generation"]) == batch["id"].tolist()
        rb.shutdown()


CHECKS["delivery", "iteration"]["prefetch"] = partial(batches_of_an_epoch, 2)


@check("delivery", "iteration", "next")
def the_next_batch_and_the_next() -> None:
    rb = buffer(stock.SamplerWithoutReplacement(), batch_size=5)
    ledger = Ledger(rb)
    ledger.write(8)
    ledger.write(8)
    seen: list[int] = []
    while (batch := rb.next()) is not None:
        seen += ledger.named(batch["index"], batch["index_generation"])
        assert seen[-len(batch) :] == batch["id"].tolist()
    assert sorted(seen) == list(range(4, 16))


@check("delivery", "prefetch")
def batches_drawn_ahead() -> None:
    rb = buffer(prefetch=2, transform=lambda td: td[ORDER])
    ledger = Ledger(rb)
    ledger.write(8)
    ledger.write(8)
    rb.sample()
    rb.synchronize()  # the batches to come are drawn
    then = dict(ledger.held)
    ledger.write(5)
    for _ in range(2):
        sample = rb.sample()
        rb.synchronize()
        slots, stamps = sample["index"].tolist(), sample["index_generation"].tolist()
        assert [then[slot,] for slot in slots] == list(zip(sample["id"].tolist(), stamps, strict=True))
        live = ledger.live(sample["index"], sample["id"].tolist())
        sample.set("td_error", torch.ones(len(ORDER)))
        assert rb.update_tensordict_priority_if_present(sample).updated_mask.tolist() == live
    rb.shutdown()


def by_file(sample: TensorDict) -> TensorDict:
    file = io.BytesIO()
    torch.save(sample, file)
    file.seek(0)
    loaded: TensorDict = torch.load(file, weights_only=False)
    return loaded


def by_plain_file(sample: TensorDict) -> TensorDict:
    file = io.BytesIO()
    torch.save(sample.to_dict(), file)
    file.seek(0)
    return TensorDict(torch.load(file, weights_only=True), sample.batch_size)


COPIES: dict[str, Callable[[TensorDict], TensorDict]] = {
    "pickle": lambda sample: pickle.loads(pickle.dumps(sample)),
    "torch.save": by_file,
    "weights only": by_plain_file,
    "numpy": lambda sample: TensorDict(
        {key: torch.as_tensor(sample[key].numpy()) for key in ("id", "index", "index_generation")}, sample.batch_size
    ),
    "memmap": lambda sample: sample.memmap().clone(),
    "consolidated": lambda sample: pickle.loads(pickle.dumps(sample.consolidate())).clone(),
    "lazy": lambda sample: TensorDict.lazy_stack(list(sample.unbind(0))),
    "reordered": lambda sample: torch.cat([sample[3:], sample[:3]]).reshape(2, 3),
    "int32 index": lambda sample: sample.set("index", sample["index"].int()),
}


def copy_check(copy: Callable[[TensorDict], TensorDict]) -> None:
    ledger = Ledger(buffer())
    ledger.write(8)
    ledger.write(8)
    batch = copy(ledger.rb.sample())
    ledger.write(5)
    live = ledger.live(batch["index"], batch["id"].reshape(-1).tolist())
    assert set(live) == {True, False}
    batch.set("td_error", torch.full(batch.batch_size, 9.0))
    assert ledger.rb.update_tensordict_priority_if_present(batch).updated_mask.reshape(-1).tolist() == live
    touched = set((leaves(ledger.rb) == 9).nonzero()[:, 0].tolist())
    assert touched == {cell for cell, there in zip(ledger.cells(batch["index"]), live, strict=True) if there}


for variant, copy in COPIES.items():
    check("delivery", "pickle, torch.save, memmap, numpy", variant)(partial(copy_check, copy))


def with_errors(change: Callable[[TensorDict], TensorDict]) -> None:
    rb = buffer()
    Ledger(rb).write(8)
    rb.update_tensordict_priority_if_present(change(rb.sample()).set("td_error", torch.ones(BATCH)))


for dtype in (torch.float64, torch.float32, torch.int32, torch.uint64):
    check("delivery", "a cast of the handles to another dtype", str(dtype))(
        lambda dtype=dtype: with_errors(lambda sample: sample.to(dtype))
    )
check("delivery", "a sample without its generations")(
    lambda: with_errors(lambda sample: sample.exclude("index_generation"))
)


@check("delivery", "pin_memory, without a GPU", "memory")
@check("delivery", "pin_memory, without a GPU", "info")
def pinned(cls: type = g.GenerationalTensorDictReplayBuffer) -> None:
    if torch.cuda.is_available():
        pytest.skip("this is about machines without a GPU")
    rb = cls(storage=storage(), batch_size=BATCH, pin_memory=True)
    Ledger(rb).write(8)
    rb.sample()


CHECKS["delivery", "pin_memory, without a GPU"]["info"] = partial(pinned, g.GenerationalReplayBuffer)


@check("delivery", "delayed_init, transform_factory")
def parts_made_on_first_use() -> None:
    for late in ({"delayed_init": True}, {"transform_factory": lambda: Step(lambda td: td[ORDER])}):
        rb = g.GenerationalTensorDictReplayBuffer(
            storage=storage, sampler=lambda: g.GenerationalPrioritizedSampler(SLOTS, 1.0, 1.0), batch_size=BATCH, **late
        )
        assert not rb.initialized
        turns(Ledger(rb))


def traced(compilable: bool, cls: type) -> None:
    def plain(ids: torch.Tensor) -> TensorDict:
        return TensorDict({"id": ids}, ids.shape)

    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)  # says where a graph ends
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    try:
        rb = cls(
            storage=g.GenerationalLazyTensorStorage(SLOTS, compilable=compilable),
            sampler=g.GenerationalPrioritizedSampler(SLOTS, 1.0, 1.0),
            batch_size=BATCH,
            compilable=compilable,
        )
        ledger = Ledger(rb, make=plain)
        ledger.write(8)
        rb.extend = torch.compile(rb.extend, backend="eager")
        sample = torch.compile(lambda: rb.sample(return_info=True), backend="eager")
        graphs = []
        for _ in range(4):
            ledger.write(5)
            agrees(ledger, *sample())
            graphs.append(counters["stats"]["unique_graphs"])
        assert len(rb) == SLOTS
        assert graphs[1] == graphs[2] == graphs[3] > 0
        updates_the_live(ledger, *sample())
    finally:
        torch._dynamo.reset()
        logger.setLevel(level)


check("delivery", "torch.compile, compilable=True")(partial(traced, True, g.GenerationalTensorDictReplayBuffer))
check("delivery", "torch.compile, compilable=False")(partial(traced, False, g.GenerationalReplayBuffer))
