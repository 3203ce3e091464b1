"""The one way of a conditional update: what was prepared is applied to the parts that it was prepared for, or anew."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from support import filled, leaves, prioritized, records

import torchrl_generational as g
from torchrl_generational.buffers import priority_updates


def update(rb, sample, priority):
    return rb.update_priority_if_present(
        index=sample["index"], generation=sample["index_generation"], priority=priority
    )


def between(monkeypatch, act):
    """Has ``act`` happen between the preparation of the next update and its section."""
    apply = priority_updates.apply

    def acted(rb, prepared):
        monkeypatch.undo()
        act()
        return apply(rb, prepared)

    monkeypatch.setattr(priority_updates, "apply", acted)


def exchanged_sampler(rb):
    rb.set_sampler(g.GenerationalPrioritizedSampler(8, alpha=1.0, beta=1.0))


def test_an_update_whose_sampler_is_exchanged_before_its_section_writes_to_the_new_one(monkeypatch):
    rb = filled()
    sample, previous = rb.sample(), rb.sampler
    before = leaves(rb).clone()
    between(monkeypatch, lambda: exchanged_sampler(rb))
    assert update(rb, sample, torch.full((len(sample),), 50.0)).num_updated == len(sample)
    assert (leaves(rb)[sample["index"]] == 50 + rb.sampler._eps).all()
    assert torch.equal(previous._sum_tree[torch.arange(8)].float(), before.float())


def test_a_priority_that_a_new_alpha_makes_too_large_is_refused_and_nothing_has_changed(monkeypatch):
    rb = prioritized(8, alpha=1.0)
    rb.extend(records(8))
    sample = rb.sample()

    def raise_alpha():
        rb.sampler.alpha = 4.0

    between(monkeypatch, raise_alpha)
    with pytest.raises(ValueError, match="is too large"):
        update(rb, sample, torch.full((8,), 1e30))
    assert torch.isfinite(leaves(rb)).all()
    assert leaves(rb).max() < 2


def test_a_sampler_with_a_way_of_its_own_is_asked_after_an_exchange():
    calls = []

    class Counting(g.GenerationalPrioritizedSampler):
        def update_priority(self, index, priority, **kwargs):
            calls.append(index.tolist())
            super().update_priority(index, priority, **kwargs)

    rb = filled()
    sample = rb.sample()
    update(rb, sample, torch.ones(len(sample)))  # by arrays, which is settled now
    rb.set_sampler(Counting(8, alpha=1.0, beta=1.0))
    calls.clear()  # those of first priorities
    update(rb, sample, torch.ones(len(sample)))
    assert calls == [sample["index"].tolist()]


def test_a_storage_with_a_way_of_its_own_is_asked_after_an_exchange():
    class Doubling(g.GenerationalLazyTensorStorage):
        def get(self, index):
            found = super().get(index)
            return found.set("x", 2 * found["x"])

    rb = filled()
    rb.sample()  # gathered, which is settled now
    new = Doubling(8)
    new.set(range(8), records(8, 100))
    rb.set_storage(new)
    assert (rb.sample()["x"] >= 200).all()


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))], ids=["deepcopy", "pickle"])
def test_a_copy_updates_its_own_parts_and_holds_none_of_the_original(twin):
    rb = filled()
    sample = rb.sample()
    update(rb, sample, torch.ones(len(sample)))
    before = leaves(rb).clone()
    other = twin(rb)
    assert not {"_settled_for_arrays", "_plain_records"} & set(vars(other))
    assert update(other, sample, torch.full((len(sample),), 9.0)).num_updated == len(sample)
    assert torch.equal(leaves(rb), before)
    other.sample()["x"].add_(1000)
    assert (rb.sample()["x"] < 1000).all()


def test_members_rows_are_prepared_once(monkeypatch):
    members = [filled(), filled()]
    ensemble = g.GenerationalReplayBufferEnsemble(*members, batch_size=8, sample_from_all=True)
    sample = ensemble.sample()
    sample["td_error"] = torch.rand(2, 4)
    asked = []
    prepare = priority_updates.prepare
    monkeypatch.setattr(
        priority_updates, "prepare", lambda *args, **kwargs: asked.append(1) or prepare(*args, **kwargs)
    )
    monkeypatch.setattr(priority_updates, "prepared_arrays", lambda *args: asked.append(1))
    assert ensemble.update_tensordict_priority_if_present(sample).num_updated == 8
    assert not asked


def test_a_buffer_lets_go_of_exchanged_parts():
    rb = filled()
    sample = rb.sample()
    update(rb, sample, torch.ones(8))
    new = g.GenerationalLazyTensorStorage(8)
    new.set(range(8), records(8, 100))
    held, data = weakref.ref(rb.storage), weakref.ref(rb.storage._storage)
    rb.set_storage(new)
    sampler = weakref.ref(rb.set_sampler(g.GenerationalPrioritizedSampler(8, alpha=1.0, beta=1.0)))
    gc.collect()
    assert (held(), data(), sampler()) == (None, None, None)
