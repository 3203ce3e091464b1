"""Storages, trees and batches on the CPU and on a GPU, in every combination. Without a GPU only the first one runs."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support import TIMEOUT, records

import torchrl_generational as g

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")
PLACES = [
    pytest.param(*place, id=" ".join(place), marks=[NEEDS_GPU] if "cuda" in place else [])
    for place in product(("cpu", "cuda"), repeat=3)
]
SIZE = 8


def ring(storage, trees, **kwargs):
    return g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(SIZE, device=storage),
        sampler=g.GenerationalPrioritizedSampler(SIZE, 1.0, 1.0, eps=0.0, device=trees),
        batch_size=SIZE,
        generator=torch.Generator().manual_seed(0) if storage == trees == "cpu" else None,
        **kwargs,
    )


def leaves(rb):
    return rb.sampler._sum_tree[torch.arange(SIZE, device=rb.sampler.device)].tolist()


def lives(rb, start=0):
    """Fills the ring, samples, and writes over the first three slots; the sample, and which of its rows are live."""
    rb.extend(records(SIZE, start))
    sample = rb.sample()
    assert torch.equal(sample["x"] - start, sample["index"].to(sample["x"].device))
    rb.extend(records(3, start + 100))
    return sample, (sample["x"] >= start + 3).tolist()


def expected(before, sample, live, value):
    """The leaves after an update by ``value + slot``, by a dict of slots."""
    leaf = dict(enumerate(before))
    leaf |= {slot: value + slot for slot, there in zip(sample["index"].tolist(), live, strict=True) if there}
    return pytest.approx(list(leaf.values()))


@pytest.mark.parametrize(("storage", "trees", "batches"), PLACES)
def test_updates_reach_the_live_records_wherever_storage_trees_and_batches_are(storage, trees, batches):
    rb = ring(storage, trees)
    for round_ in range(3):
        rb.empty()
        sample, live = lives(rb, 1000 * round_)
        assert sample["x"].device.type == storage
        before, batch = leaves(rb), sample.to(batches)
        batch["td_error"] = 10.0 + batch["index"]
        result = rb.update_tensordict_priority_if_present(batch)
        assert result.updated_mask.tolist() == live
        assert (result.num_updated, result.num_stale) == (sum(live), SIZE - sum(live))
        assert leaves(rb) == expected(before, sample, live, 10)


@pytest.mark.parametrize(("storage", "trees", "batches"), PLACES)
def test_arguments_may_be_anywhere_and_refusals_change_nothing(storage, trees, batches):
    rb = ring(storage, trees)
    sample, live = lives(rb)
    handles = {"index": sample["index"].to(batches), "generation": sample["index_generation"].to(storage)}
    before = leaves(rb)
    with pytest.raises(ValueError, match="priority must be finite and >= 0"):
        rb.update_priority_if_present(**handles, priority=torch.full((SIZE,), torch.nan, device=batches))
    with pytest.raises(IndexError):
        rb.update_priority_if_present(**handles | {"index": handles["index"] + SIZE}, priority=1.0)
    assert leaves(rb) == before
    priority = (20.0 + sample["index"]).to(batches)
    assert rb.update_priority_if_present(**handles, priority=priority).updated_mask.tolist() == live
    assert leaves(rb) == expected(before, sample, live, 20)
    patch = {"x": (sample["x"] + 50).to(batches)}
    assert rb.update_if_present(**handles, patch=patch).updated_mask.tolist() == live


@pytest.mark.parametrize(("storage", "trees", "batches"), PLACES)
def test_a_submitted_update_takes_its_arguments_from_anywhere(storage, trees, batches):
    rb = ring(storage, trees)
    sample, live = lives(rb)
    before, batch = leaves(rb), sample.to(batches)
    future = rb.submit_update_priority_if_present(
        index=batch["index"], generation=batch["index_generation"], priority=30.0 + batch["index"]
    )
    assert future.result(TIMEOUT).updated_mask.tolist() == live
    assert leaves(rb) == expected(before, sample, live, 30)
    rb.shutdown()


@pytest.mark.parametrize(("storage", "trees", "batches"), PLACES)
def test_checkpoints_and_batches_written_from_anywhere_keep_handles(storage, trees, batches, tmp_path):
    rb, twin = ring(storage, trees), ring(storage, trees)
    sample, live = lives(rb)
    for path in ("state_dict", "dumps"):
        if path == "dumps":
            rb.dumps(tmp_path)
            twin.loads(tmp_path)
        else:
            twin.load_state_dict(rb.state_dict())
        handles = {"index": sample["index"], "generation": sample["index_generation"]}
        assert twin.update_priority_if_present(**handles, priority=2.0).updated_mask.tolist() == live
    rb.extend(records(SIZE, 200).to(batches))
    assert rb.update_priority_if_present(**handles, priority=2.0).num_stale == SIZE
    assert rb[:]["x"].tolist() == [205, 206, 207, 200, 201, 202, 203, 204]


@pytest.mark.parametrize(("storage", "trees", "batches"), PLACES)
def test_an_ensemble_routes_from_anywhere(storage, trees, batches):
    rb = g.GenerationalReplayBufferEnsemble(
        *(ring(storage, trees) for _ in range(2)), batch_size=2 * SIZE, sample_from_all=True
    )
    for number, member in enumerate(rb._rbs):
        member.extend(records(SIZE, 100 * number))
    sample = rb.sample().to(batches)
    rb[0].extend(records(3, 1000))
    sample["td_error"] = 10.0 + sample["x"]
    result = rb.update_tensordict_priority_if_present(sample)
    assert torch.equal(result.updated_mask.cpu(), (sample["x"] >= 3).cpu())
    for number, member in enumerate(rb._rbs):
        mine = sample["index", "index"][number].cpu()
        for slot, there in zip(mine.tolist(), result.updated_mask[number].tolist(), strict=True):
            assert not there or leaves(member)[slot] == pytest.approx(10 + slot + 100 * number)


@NEEDS_GPU
def test_pinned_batches_carry_their_handles():
    rb = ring("cpu", "cpu", pin_memory=True)
    rb.extend(records(SIZE))
    sample = rb.sample()
    assert sample["index_generation"].is_pinned()
    moved = sample.to("cuda", non_blocking=True).set("td_error", torch.ones(SIZE, device="cuda"))
    assert rb.update_tensordict_priority_if_present(moved).num_updated == SIZE


@NEEDS_GPU
def test_comparing_stamps_on_the_gpu_does_not_wait_for_it():
    rb = ring("cuda", "cuda")
    rb.extend(records(SIZE))
    sample = rb.sample()
    torch.cuda.set_sync_debug_mode("error")
    try:
        live = rb.storage.slot_generations.live(sample["index"], sample["index_generation"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert live.all()
