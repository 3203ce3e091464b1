"""Ensembles whose batches hold trajectories, or that are reshaped, joined and cut before their update."""

from __future__ import annotations

import pytest
import torch
from support import leaves
from tensordict import TensorDict
from torchrl.data import RandomSampler, SliceSampler

import torchrl_generational as g

SIZE, STEPS = 8, 3


def flat(start=0, **kwargs):
    """A member with records ``x = start, ...``; record and slot are the same."""
    return filled(TensorDict({"x": torch.arange(start, start + SIZE)}, [SIZE]), **kwargs)


def trajectories(start=0, **kwargs):
    """A member whose records are three steps each, with the record in ``x`` at each step."""
    x = torch.arange(start, start + SIZE)[:, None].expand(SIZE, STEPS).clone()
    return filled(TensorDict({"x": x}, [SIZE, STEPS]), **kwargs)


def filled(records, **kwargs):
    rb = g.GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=g.GenerationalLazyTensorStorage(SIZE), **kwargs
    )
    rb.extend(records)
    return rb


def ensemble(*members, batch_size=8, **kwargs):
    generator = torch.Generator().manual_seed(0)
    return g.GenerationalReplayBufferEnsemble(
        *members, batch_size=batch_size, sample_from_all=True, generator=generator, **kwargs
    )


def names(sample):
    """The record that each row's handle names, as ``x`` has it."""
    return sample["index", "index"] + 100 * sample["index", "buffer_ids"]


PARTS = {
    "as it is": lambda sample: sample,
    "flattened": lambda sample: sample.reshape(-1),
    "the last step": lambda sample: sample[..., -1],
    "time before batch": lambda sample: sample.transpose(1, 2),
    "chunks": lambda sample: sample.reshape(-1, 1),
    "shuffled": lambda sample: sample.reshape(-1)[torch.randperm(24, generator=torch.Generator().manual_seed(1))],
    "nothing": lambda sample: sample[..., :0],
}


@pytest.mark.parametrize("part", PARTS)
def test_td_errors_of_parts_of_stored_trajectories_reach_their_records(part):
    members = trajectories(), trajectories(100)
    rb = ensemble(*members)
    for _ in range(5):
        sample = rb.sample()
        for member, start in zip(members, (0, 100), strict=True):
            member.extend(TensorDict({"x": torch.full((2, STEPS), start + 50)}, [2, STEPS]))  # two of eight are gone
        before = [leaves(member).clone() for member in members]
        live = {int(x) for x in sample["x"].unique() if rb_holds(members, int(x))}
        sample["td_error"] = 10 + sample["x"].double() + torch.arange(STEPS)
        batch = PARTS[part](sample)
        result = rb.update_tensordict_priority_if_present(batch)
        assert result.updated_mask.shape == (batch.shape[:2] if part == "as it is" else batch.shape)
        rows = batch["x"][..., 0] if part == "as it is" else batch["x"]
        assert result.updated_mask.reshape(-1).tolist() == [int(x) in live for x in rows.reshape(-1)]
        for number, member in enumerate(members):
            wanted = before[number]
            for x in live:
                errors = batch["td_error"][batch["x"] == x]
                if x // 100 == number and errors.numel():
                    wanted[x % 100] = errors.max()
            assert leaves(member).tolist() == pytest.approx(wanted.tolist())
        for member, start in zip(members, (0, 100), strict=True):  # as they were
            member.empty()
            member.extend(TensorDict({"x": start + torch.arange(SIZE)[:, None].expand(SIZE, STEPS)}, [SIZE, STEPS]))


def rb_holds(members, x):
    return bool((members[x // 100][:]["x"] == x).any())


def test_members_of_records_and_of_trajectories_are_joined_with_their_handles():
    rb = ensemble(
        flat(),
        trajectories(100),
        batch_size=2 * STEPS,
        collate_fn=lambda parts: torch.cat([p.reshape(-1) for p in parts]),
    )
    for _ in range(5):
        sample = rb.sample()
        assert torch.equal(names(sample), sample["x"])
        sample["td_error"] = sample["x"] + 1.0
        assert rb.update_tensordict_priority_if_present(sample).num_updated == len(sample)
        for number in range(2):
            for slot in sample["index", "index"][sample["index", "buffer_ids"] == number].tolist():
                assert leaves(rb[number])[slot] == slot + 100 * number + 1


@pytest.mark.parametrize(
    "transform",
    [
        lambda data: data[:, :, -1],
        lambda data: data.reshape(-1),
        lambda data: data.reshape(-1)[[7, 0, 3]],
        lambda data: TensorDict({"below": data}, data.batch_size),
    ],
    ids=["cut", "flattened", "picked", "nested"],
)
def test_handles_follow_through_steps_that_drop_dimensions(transform):
    rb = ensemble(trajectories(), trajectories(100), transform=transform)
    for _ in range(3):
        sample = rb.sample()
        x = sample["x"] if "x" in sample else sample["below", "x"]
        named = names(sample)
        assert torch.equal(named.reshape(*named.shape, *(1,) * (x.ndim - named.ndim)).expand(x.shape), x)
        assert not any("_position_in_draw" in str(key) for key in sample.keys(True))


def test_an_entry_without_elements_proves_nothing():
    members = [filled(TensorDict({"x": torch.arange(SIZE), "e": torch.zeros(SIZE, 0)}, [SIZE])) for _ in range(2)]
    rb = ensemble(*members, transform=lambda td: TensorDict({"x": td["x"].flip(0), "e": td["e"]}, td.batch_size))
    with pytest.raises(RuntimeError, match="cannot be told where each record went"):
        rb.sample()


@pytest.mark.parametrize(
    "collate", [lambda parts: {"demo": parts[0]}, lambda parts: parts, lambda parts: parts[0]["x"].sum()]
)
def test_a_batch_that_cannot_carry_handles_is_refused(collate):
    with pytest.raises(RuntimeError, match="cannot carry their handles"):
        ensemble(flat(), flat(), collate_fn=collate).sample()


def test_what_only_one_member_says_about_its_records_stays_with_them():
    def member(sampler):
        no = {key: torch.zeros(12, 1, dtype=torch.bool) for key in ("done", "truncated", "terminated")}
        rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(12), sampler=sampler)
        rb.extend(TensorDict({"episode": torch.arange(12) // 6, "next": TensorDict(no, [12])}, [12]))
        return rb

    slices = member(SliceSampler(slice_len=3, traj_key="episode"))
    rb = ensemble(slices, member(RandomSampler()), batch_size=12)
    truncated = rb.sample()["next", "truncated"][..., 0]
    assert truncated.tolist() == [[False, False, True] * 2, [False] * 6]


def test_fields_of_trajectories_are_patched_by_the_handles_of_a_sample():
    rb = ensemble(trajectories(), trajectories(100))
    sample = rb.sample()
    rb[0].extend(TensorDict({"x": torch.full((2, STEPS), 50)}, [2, STEPS]))
    result = rb.update_if_present(
        index=sample["index"], generation=sample["index_generation"], patch={"x": -sample["x"]}
    )
    assert torch.equal(result.updated_mask, sample["x"] > 1)  # and the records 0 and 1 are gone
    for number in range(2):
        drawn = {x for x in sample["x"].unique().tolist() if x // 100 == number and (number or x > 1)}
        held = rb[number][:]["x"][:, 0].tolist()
        assert {-x for x in held if x < 0} == drawn - {0}


def test_the_last_of_two_rows_wins_where_a_buffer_is_two_members():
    a = flat()
    ids = TensorDict({"index": torch.zeros(2, dtype=torch.long), "buffer_ids": torch.tensor([1, 0])}, [2])
    rb = ensemble(a, a)
    rb.update_if_present(index=ids, generation=torch.zeros(2).long(), patch={"x": torch.tensor([111, 222])})
    assert a[0]["x"] == 222
