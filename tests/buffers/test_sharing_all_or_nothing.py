"""A buffer is shared as a whole or not at all, whatever fails in between."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from children import forked
from support import filled, prioritized, records
from tensordict import TensorDict

import torchrl_generational as g
from torchrl_generational.concurrency import storage_lock as locks
from torchrl_generational.storages import first_write
from torchrl_generational.storages import shared_storage as sharing

SCARCE = (
    r"cannot be shared: that takes [0-9,]+ bytes of shared memory, and /dev/shm has 1,000 left.*Nothing was changed"
)


def scarce(monkeypatch: Any, free: int = 1000) -> None:
    monkeypatch.setattr(sharing.os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))
    monkeypatch.setattr(sharing.os.path, "isdir", lambda path, isdir=os.path.isdir: path == "/dev/shm" or isdir(path))


def nested(count: int) -> TensorDict:
    return records(count, next=TensorDict({"reward": torch.zeros(count)}, [count]), td_error=torch.ones(count))


def state_of(rb: Any) -> Any:
    storage = rb.storage
    held = (
        {str(key): leaf.tolist() for key, leaf in storage._storage.items(True, True)} if storage.initialized else None
    )
    leaves = rb._learners_sampler()._sum_tree[torch.arange(storage.max_size)].tolist()
    return held, storage.generations.tolist(), leaves, len(rb), rb.write_count, rb.writer._cursor, storage.shared_init


def private(rb: Any) -> None:
    """Nothing of a buffer is shared, and it works; a child that is forked is refused."""
    storage = rb.storage
    shared = [rb.shared, storage.lock.is_shared, storage.slot_generations.is_shared]
    assert shared == [False] * 3
    assert storage.slot_generations.log is None
    assert not rb._follows
    assert storage.lock.maker is None
    if storage.initialized:
        sample = rb.sample().set("td_error", torch.ones(8))
        rb.extend(nested(3))
        result = rb.update_tensordict_priority_if_present(sample)
        assert torch.equal(result.stale_mask, sample["index"] < 3)

    def write() -> None:
        with pytest.raises(RuntimeError, match="was forked from the one that made the buffer"):
            rb.extend(nested(3))

    with forked(write) as child:
        assert child.exit_code() == 0


def works_shared(rb: Any) -> None:
    rb.share()
    with forked(lambda: rb.extend(nested(8))) as child:
        assert child.exit_code() == 0
    assert len(rb) == 8
    rb.sample()


@pytest.mark.parametrize("written", [False, True])
def test_too_little_shared_memory_is_refused_before_anything_moves(written, monkeypatch):
    rb = prioritized(64)
    if written:
        rb.extend(nested(64))
    before = state_of(rb)
    with monkeypatch.context() as patch:
        scarce(patch)
        with pytest.raises(RuntimeError, match=SCARCE):
            rb.share()
    assert state_of(rb) == before
    assert not rb.storage._storage["x"].is_shared() if written else not rb.storage.shared_init
    assert rb.storage.slot_generations.log is None
    assert rb.share().storage.lock.is_shared


def test_the_refusal_says_how_much_it_takes(monkeypatch):
    rb = filled(8)
    scarce(monkeypatch, 10)
    with pytest.raises(RuntimeError) as refusal:
        rb.share()
    stamps, log, records_and_index = 9 * 8, (5 + 1 + 8) * 8, 2 * 8 * 8
    assert f"takes {stamps + log + records_and_index:,} bytes" in str(refusal.value)


def test_a_construction_without_room_attaches_nothing(monkeypatch):
    storage = g.GenerationalLazyTensorStorage(1000)
    scarce(monkeypatch)
    with pytest.raises(RuntimeError, match=SCARCE):
        prioritized(1000, storage=storage, shared=True)
    assert storage._attached_entities == []
    assert not storage.lock.is_shared
    monkeypatch.undo()
    prioritized(1000, storage=storage, shared=True).extend(records(8))


def test_records_on_the_disk_take_no_shared_memory(monkeypatch):
    rb = prioritized(8, storage=g.GenerationalLazyMemmapStorage(8))
    rb.extend(TensorDict({"x": torch.arange(8), "payload": torch.zeros(8, 1000)}, [8]))
    scarce(monkeypatch)
    rb.share()
    assert rb.storage.lock.is_shared


def test_a_buffer_that_is_shared_already_needs_no_room(monkeypatch):
    rb = filled(shared=True)
    scarce(monkeypatch, 0)
    rb.share()


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("written", [False, True])
def test_memory_that_runs_out_at_any_tensor_leaves_everything_private(written, sync, monkeypatch):
    """Stamps, first priorities, change times, and each entry of the records."""
    moved = 0
    number = 0
    while number <= moved:
        rb = prioritized(8, sync=sync)
        if written:
            rb.extend(nested(8))
        log = rb.storage.slot_generations.log
        before = state_of(rb)
        moved = 0
        with monkeypatch.context() as patch:
            share_memory = torch.Tensor.share_memory_

            def fails(tensor: torch.Tensor, at: int = number, share: Any = share_memory) -> Any:
                nonlocal moved
                moved += 1
                if moved == at + 1:
                    raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")
                return share(tensor)

            patch.setattr(torch.Tensor, "share_memory_", fails)
            if number < (7 if written else 3):
                with pytest.raises(RuntimeError, match="No space left on device"):
                    rb.share()
            else:
                rb.share()
                assert moved == number
                break
        assert state_of(rb) == before
        assert rb.storage.slot_generations.log is log
        if sync:
            private(rb)
        elif written:
            rb.sample()
        works_shared(rb)
        number += 1
    assert moved == (7 if written else 3)


@pytest.mark.parametrize("what", ["directory", "lock", "transform"])
def test_whatever_else_fails_leaves_everything_private(what, monkeypatch):
    rb = prioritized(8)
    if what == "transform":
        rb.extend(nested(8))

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if what == "directory":
            patch.setattr(first_write.tempfile, "mkdtemp", fails)
        elif what == "lock":
            patch.setattr(locks, "make_process_lock", fails)
        else:
            patch.setattr(rb, "_share_replay_buffer_transform", fails)
        with pytest.raises(OSError, match="No space left"):
            rb.share()
    if what == "lock":
        rb.extend(nested(8))
    private(rb)
    assert not rb.storage.shared_init
    works_shared(rb)
