from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import prioritized, records
from tensordict import TensorDict, tensorclass
from torchrl.envs.transforms import (
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    ExcludeTransform,
    RenameTransform,
    SelectTransform,
    Transform,
)

import torchrl_generational as g
from torchrl_generational.records.row_tracking import CARRIER_KEY

ORDER = torch.tensor([5, 2, 7, 0, 3, 1, 6, 4])

REARRANGING: dict[str, Callable[[TensorDict], TensorDict]] = {
    "reorder": lambda td: td[ORDER],
    "subset": lambda td: td[:3],
    "one record": lambda td: td[4:5],
    "mask": lambda td: td[td["x"] % 2 == 0],
    "repeat": lambda td: td[torch.tensor([1, 1, 6])],
    "reshape": lambda td: td.reshape(2, 4),
    "reorder and reshape": lambda td: td[ORDER].reshape(4, 2),
    "flatten after reshape": lambda td: td.reshape(2, 4).transpose(0, 1).reshape(-1),
    "concatenate": lambda td: torch.cat([td[4:], td[:2]]),
    "stack": lambda td: torch.stack([td[6], td[1]]),
    "nonlinear after a reorder": lambda td: td[ORDER].set("x", td[ORDER]["x"].sqrt()),
    "lazy stack": lambda td: TensorDict.lazy_stack([td[6], td[1]]),
    "reorder and clamp": lambda td: td[ORDER].apply(lambda leaf: leaf.clamp(-5, 5)).set("id", td["id"][ORDER]),
    "reorder and negate": lambda td: td[ORDER].apply(lambda leaf: -leaf.double()).set("id", td["id"][ORDER]),
    "reorder and cast": lambda td: td[ORDER].to(torch.float32),
    "reorder, shift and scale": lambda td: td[ORDER].apply(lambda leaf: leaf.double() / 255 + 3),
}
IN_PLACE: dict[str, Callable[[TensorDict], TensorDict]] = {
    "identity": lambda td: td,
    "new entry": lambda td: td.set("y", td["x"] + 1),
    "cast": lambda td: td.to(torch.float32),
    "cast to half": lambda td: td.to(torch.bfloat16),
    "shift": lambda td: td.apply(lambda leaf: leaf + 1),
    "shift in place": lambda td: td.apply_(lambda leaf: leaf.add_(1)),
    "scale": lambda td: td.apply(lambda leaf: leaf / 255),
    "increasing function": lambda td: td.apply(lambda leaf: leaf.double().log1p()),
    "select": lambda td: td.select("x", "id"),
    "one entry replaced": lambda td: td.select("id").set("x", td["x"] * 2),
}


def sampled(transform, **kwargs):
    rb = prioritized(8, transform=transform, **kwargs)
    for _ in range(3):  # generations 2 everywhere, 3 for the first five
        rb.extend(records(8, id=torch.arange(8)))
    rb.extend(records(5, id=torch.arange(5)))
    return rb, *rb.sample(return_info=True)


def check_aligned(rb, sample, info, ids):
    """``ids`` is what identifies the records of the sample: its handles must be theirs."""
    assert torch.equal(sample["index"], ids)
    assert sample["index"].dtype == sample["index_generation"].dtype == torch.int64
    assert torch.equal(sample["index_generation"], rb.storage.generations[ids])
    assert set(sample["index_generation"].flatten().tolist()) <= {2, 3}
    for key in ("index", "index_generation", "priority_weight"):
        assert torch.equal(torch.as_tensor(info[key]), sample[key])
    assert CARRIER_KEY not in sample


@pytest.mark.parametrize("name", REARRANGING)
def test_handles_follow_records_that_a_transform_moves(name):
    untouched: list[torch.Tensor] = []

    def transform(td):
        untouched.append(REARRANGING[name](td.clone())["id"])
        return REARRANGING[name](td)

    rb, sample, info = sampled(transform)
    ids = untouched[-1]
    if ids.is_floating_point():
        ids = ids.round() if "scale" not in name else ((ids - 3) * 255).round()
    check_aligned(rb, sample, info, ids.long())
    sample["td_error"] = torch.rand(sample.shape)
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 0


@pytest.mark.parametrize("name", IN_PLACE)
def test_handles_stay_with_records_that_a_transform_leaves_in_place(name):
    drawn: list[torch.Tensor] = []

    def transform(td):
        drawn.append(td["id"].clone())
        return IN_PLACE[name](td)

    rb, sample, info = sampled(transform)
    check_aligned(rb, sample, info, drawn[-1])


@pytest.mark.parametrize(
    "transform",
    [
        SelectTransform("x"),
        ExcludeTransform("x"),
        RenameTransform(in_keys=["x"], out_keys=["z"]),
        DTypeCastTransform(torch.int64, torch.float32, in_keys=["x"]),
        DoubleToFloat(in_keys=["w"]),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_torchrl_transforms_that_change_entries_keep_the_handles(transform):
    rb = prioritized(8, transform=transform)
    rb.extend(records(8, id=torch.arange(8), w=torch.rand(8, dtype=torch.float64)))
    sample = rb.sample()
    assert {"index", "index_generation", "priority_weight"} <= set(sample.keys())
    assert sample["index_generation"].tolist() == [0] * 8


def test_a_transform_finds_the_handles_in_the_batch():
    seen = []

    def transform(td):
        seen.append((td["index"].clone(), td["index_generation"].clone()))
        return td

    _, sample, _ = sampled(transform)
    assert torch.equal(seen[-1][0], sample["index"])
    assert torch.equal(seen[-1][1], sample["index_generation"])


def test_the_importance_weights_follow_as_well():
    rb = prioritized(8, transform=lambda td: td[ORDER])
    rb.extend(records(8, td_error=torch.arange(1.0, 9.0)))
    sample = rb.sample()
    assert torch.allclose(sample["priority_weight"], 1.0 / (sample["x"] + 1))


def test_records_that_cannot_be_followed_are_refused():
    def transform(td):
        return TensorDict({"x": td["x"].flip(0).clone()}, td.batch_size)

    rb = prioritized(8, transform=transform)
    rb.extend(records(8))
    with pytest.raises(
        RuntimeError,
        match="rebuilt every entry .* '_position_in_draw', so that it cannot be told where each record went",
    ):
        rb.sample()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda bits: bits * 0,
        lambda bits: bits[..., :2],
        lambda bits: bits / 0,
        lambda bits: bits.clamp(2, 3),
        lambda bits: bits + torch.rand_like(bits),
        lambda bits: bits.softmax(-1) * torch.arange(bits.shape[-1]),
        lambda bits: 1 - bits.cumsum(-1),
    ],
)
def test_a_spoilt_position_is_noticed(spoil):
    def transform(td):
        moved = td[ORDER].apply(lambda leaf: leaf.clone())
        return moved.set((CARRIER_KEY, "bits"), spoil(moved[CARRIER_KEY, "bits"]))

    rb = prioritized(8, transform=transform)
    rb.extend(records(8))
    with pytest.raises(RuntimeError, match="rebuilt every entry"):
        rb.sample()


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.7319])
def test_a_blend_of_records_has_no_handle(share):
    def mixup(td):
        return td.float() * share + td[ORDER].float() * (1 - share)

    rb = prioritized(8, transform=mixup)
    rb.extend(records(8))
    with pytest.raises(RuntimeError, match="rebuilt every entry"):
        rb.sample()


@pytest.mark.parametrize("batch_size", [1, 2, 127, 128, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int16, torch.float64])
def test_positions_survive_a_cast_at_every_batch_size(batch_size, dtype):
    rb = prioritized(1000, batch_size=batch_size, transform=lambda td: td.flip(0).to(dtype).set("id", td["id"].flip(0)))
    rb.extend(records(1000, id=torch.arange(1000)))
    sample = rb.sample()
    assert torch.equal(sample["index"], sample["id"])


def test_an_entry_that_concatenates_all_others_is_not_silently_wider():
    rb = g.GenerationalReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8),
        batch_size=4,
        transform=lambda td: td.set("all", torch.cat(list(td.values()), -1)),
    )
    rb.extend(TensorDict({"a": torch.rand(8, 2), "b": torch.rand(8, 3)}, [8]))
    with pytest.raises(Exception, match=r"."):
        rb.sample()


@pytest.mark.parametrize("with_priorities", [True, False])
def test_handles_follow_records_through_the_collation(with_priorities):
    def collate(td):
        return td[td["x"].argsort(descending=True)][:5]

    storage = g.GenerationalLazyTensorStorage(8)
    if with_priorities:
        rb = prioritized(8, storage=storage, collate_fn=collate)
    else:
        rb = g.GenerationalReplayBuffer(storage=storage, collate_fn=collate, batch_size=8)
    rb.extend(records(8))
    sample, info = rb.sample(return_info=True)
    assert torch.equal(info["index"], sample["x"])
    assert info["index_generation"].shape == sample.shape == (5,)


class Reversing(Transform):
    def forward(self, tensordict):
        return tensordict.flip(0)


def test_each_member_of_a_chain_is_followed_by_itself():
    chain = [SelectTransform("x"), DTypeCastTransform(torch.int64, torch.float32, in_keys=["x"]), Reversing()]
    rb = prioritized(8, transform=Compose(*chain))
    rb.extend(records(8))
    sample = rb.sample()
    assert torch.equal(sample["index"], sample["x"].long())


def test_handles_are_cut_with_the_steps_of_stored_trajectories():
    rb = prioritized(8, transform=lambda td: td[ORDER[:5], 2:])  # as TorchRL's burn-in does
    rb.extend(TensorDict({"x": torch.arange(40).reshape(8, 5)}, [8, 5]))
    sample = rb.sample()
    assert sample.shape == sample["index"].shape == sample["index_generation"].shape == (5, 3)
    assert torch.equal(sample["index"], sample["x"] // 5)


def test_the_info_of_a_plain_buffer_follows_tensordict_records():
    rb = g.GenerationalReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), batch_size=8, transform=lambda td: td[ORDER][:5]
    )
    rb.extend(records(8))
    sample, info = rb.sample(return_info=True)
    assert set(sample.keys()) == {"x"}
    assert torch.equal(info["index"], sample["x"])
    assert info["index_generation"].tolist() == [0] * 5


def test_coordinates_follow_their_records():
    rb = prioritized(12, storage=g.GenerationalLazyTensorStorage(12, ndim=2), transform=lambda td: td[ORDER])
    rb.extend(TensorDict({"x": torch.arange(12).reshape(3, 4)}, [3, 4]))
    sample, info = rb.sample(return_info=True)
    row, lane = sample["index"].unbind(-1)
    assert torch.equal(rb.storage._storage["x"][row, lane], sample["x"])
    assert torch.equal(torch.stack(info["index"], -1), sample["index"])


def test_data_that_takes_no_entry_is_transformed_in_place_or_refused():
    @tensorclass
    class Record:
        x: torch.Tensor

    for data in (torch.arange(8), {"x": torch.arange(8)}, Record(x=torch.arange(8), batch_size=[8])):
        rb = g.GenerationalReplayBuffer(
            storage=g.GenerationalLazyTensorStorage(8), batch_size=8, transform=lambda batch: batch
        )
        rb.extend(data)
        sample, info = rb.sample(return_info=True)
        x = sample if isinstance(sample, torch.Tensor) else sample["x"] if isinstance(sample, dict) else sample.x
        assert torch.equal(info["index"], x)

    rb = g.GenerationalReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), batch_size=8, transform=lambda batch: batch[:3]
    )
    rb.extend(torch.arange(8))
    with pytest.raises(
        RuntimeError, match="turned 8 records into 3, and in a Tensor records cannot carry their handles"
    ):
        rb.sample()


def test_records_that_become_a_tensor_keep_their_number():
    rb = g.GenerationalReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), batch_size=8, transform=lambda batch: batch["x"][:3]
    )
    rb.extend(records(8))
    with pytest.raises(RuntimeError, match="turned 8 records into 3, and in a Tensor records cannot carry"):
        rb.sample()


def test_a_step_that_puts_the_batch_below_an_entry_leaves_no_trace_of_what_was_followed():
    def below(data):
        return TensorDict({"below": data.flip(0)}, data.batch_size)

    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=8, transform=below)
    rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
    sample = rb.sample()
    assert torch.equal(sample["below", "x"], sample["index"])
    assert not any("_position_in_draw" in str(key) for key in sample.keys(True))


class Doubling(Compose):
    """Does something besides what its transforms do."""

    def forward(self, tensordict):
        data = super().forward(tensordict)
        return data.set("x", 2 * data["x"])


def test_a_compose_that_does_more_than_its_transforms_is_called_itself():
    def ring():
        rb = g.GenerationalTensorDictReplayBuffer(
            storage=g.GenerationalLazyTensorStorage(8),
            batch_size=8,
            transform=Doubling(RenameTransform(["y"], ["z"])),
        )
        rb.extend(TensorDict({"x": torch.arange(8), "y": torch.arange(8)}, [8]))
        return rb

    rb = ring()
    members = g.GenerationalReplayBufferEnsemble(ring(), batch_size=8)
    for sample, index in ((rb.sample(), None), (members.sample(), "index")):
        slots = sample["index"] if index is None else sample["index", index]
        assert torch.equal(sample["x"], 2 * slots)
        assert torch.equal(sample["z"], slots)
    called = []
    rb._transform.register_forward_hook(lambda *_: called.append(1))
    rb.sample()
    assert called
