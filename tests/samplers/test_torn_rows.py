"""A slot whose last write did not end holds no record: it is not drawn, and the next write goes over it."""

from __future__ import annotations

import pytest
import torch
from support import leaves, prioritized, records
from tensordict import TensorDict
from torchrl.data.replay_buffers import RandomSampler, SamplerWithoutReplacement, SliceSampler

import torchrl_generational as g
from torchrl_generational.records import record_io as stored_records


def fail_in_the_middle(rb, count: int, start: int = 100, **fields) -> None:
    """A write that changes some of its data, and raises."""

    def half(pairs, rows):
        original(pairs[:1], rows)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        original = stored_records.copy
        patch.setattr(stored_records, "copy", half)
        with pytest.raises(KeyboardInterrupt):
            rb.extend(records(count, start, **fields))


def two_entries(count: int, start: int = 0) -> TensorDict:
    return records(count, start, twin=torch.arange(start, start + count))


def buffer(sampler, **kwargs):
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(32), sampler=sampler, batch_size=16, **kwargs
    )
    rb.extend(two_entries(32))
    fail_in_the_middle(rb, 3, twin=torch.arange(100, 103))
    return rb


@pytest.mark.parametrize(
    "sampler",
    [RandomSampler, SamplerWithoutReplacement, lambda: g.GenerationalPrioritizedSampler(32, 1.0, 1.0)],
    ids=["uniform", "without replacement", "by priority"],
)
def test_a_torn_record_is_not_drawn(sampler):
    rb = buffer(sampler())
    drawn = set()
    for _ in range(60):
        sample = rb.sample()
        assert torch.equal(sample["x"], sample["twin"])
        assert len(sample) == 16 or sampler is SamplerWithoutReplacement
        assert (sample["index_generation"] == rb.writer.generations_of(sample["index"])).all()
        drawn |= set(sample["index"].tolist())
    assert drawn == set(range(3, 32))
    rb.extend(two_entries(3, 200))  # goes over them
    assert rb.storage.generations.tolist() == [2, 2, 2] + [0] * 29
    assert set(torch.cat([rb.sample()["index"] for _ in range(60)]).tolist()) == set(range(32))


def test_a_slice_with_a_torn_record_is_drawn_again():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(32),
        sampler=SliceSampler(slice_len=4, traj_key="trajectory"),
        batch_size=8,
    )
    trajectory = torch.arange(32) // 8
    rb.extend(two_entries(32).set("trajectory", trajectory))
    fail_in_the_middle(rb, 3, twin=torch.arange(100, 103), trajectory=torch.full((3,), 9))
    for _ in range(30):
        sample = rb.sample()
        assert torch.equal(sample["x"], sample["twin"])
        assert (sample["x"].reshape(2, 4).diff() == 1).all()


def test_an_epoch_without_replacement_has_every_whole_record_once():
    rb = buffer(SamplerWithoutReplacement())
    for _ in range(5):
        epoch = torch.cat([batch["x"] for batch in rb])
        assert sorted(epoch.tolist()) == list(range(3, 32))


def test_a_large_batch_of_slices_is_drawn_around_a_torn_record():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(200),
        sampler=SliceSampler(slice_len=16, traj_key="trajectory"),
        batch_size=1024,
    )
    rb.extend(two_entries(200).set("trajectory", torch.arange(200) // 50))
    fail_in_the_middle(rb, 1, twin=torch.zeros(1, dtype=torch.int64), trajectory=torch.full((1,), 9))
    sample = rb.sample()
    assert torch.equal(sample["x"], sample["twin"])
    assert (sample["x"].reshape(64, 16).diff() == 1).all()


def test_where_everything_is_torn_sampling_says_what_to_do():
    rb = buffer(RandomSampler())
    fail_in_the_middle(rb, 32, twin=torch.arange(32))
    with pytest.raises(RuntimeError, match="Cannot sample: 1000 draws.*Write new records over them"):
        rb.sample()


def test_a_torn_record_survives_a_checkpoint_as_one_that_is_not_drawn(tmp_path):
    source = prioritized(8)
    source.extend(two_entries(8))
    fail_in_the_middle(source, 3, twin=torch.arange(3))
    source.dumps(tmp_path / "saved")
    for path in ("state", "files"):
        rb = prioritized(8)
        if path == "state":
            rb.extend(two_entries(8))
            rb.load_state_dict(source.state_dict())
        else:
            rb.loads(tmp_path / "saved")
        assert leaves(rb).tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
        before = rb.storage.generations.clone()
        assert (before[:3] < -1).all()
        rb.set_sampler(g.GenerationalPrioritizedSampler(8, 1.0, 1.0))
        assert leaves(rb).tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
        rb.extend(two_entries(8, 50))
        assert (rb.storage.generations[:3] > -2 - before[:3]).all()  # later than any that was there


def test_the_largest_priority_is_looked_for_again_when_its_record_is_torn():
    rb = g.GenerationalReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8),
        sampler=g.GenerationalPrioritizedSampler(8, 1.0, 1.0, eps=0.0, max_priority_within_buffer=True),
        batch_size=4,
    )
    rb.extend(two_entries(8))
    rb.update_priority(torch.arange(8), torch.tensor([9.0, 2, 1, 1, 1, 1, 1, 1]))
    fail_in_the_middle(rb, 1, twin=torch.zeros(1, dtype=torch.int64))
    assert float(rb.sampler.default_priority) == 2


def test_a_patch_that_fails_half_way_in_a_shared_buffer_leaves_no_record():
    rb = prioritized(8, shared=True)
    rb.extend(two_entries(8))
    sample = rb.sample()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__setitem__", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rb.update_if_present(
                index=sample["index"], generation=sample["index_generation"], patch={"x": torch.zeros(8).long()}
            )
    assert (rb.writer.generations_of(sample["index"]) < -1).all()
    result = rb.update_tensordict_priority_if_present(sample.set("td_error", torch.ones(8)))
    assert result.num_stale == 8
