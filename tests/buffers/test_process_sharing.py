"""One process makes a buffer, samples and updates; others write to it."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import children
import pytest
import torch
from children import child_says, forked
from support import TIMEOUT, plain_prioritized, prioritized, records
from tensordict import NonTensorData, TensorDict
from torchrl.data import TensorStorage
from torchrl.data.replay_buffers import RandomSampler, SliceSampler

import torchrl_generational as g

STORAGES = [g.GenerationalLazyTensorStorage, g.GenerationalLazyMemmapStorage]


def shared(capacity: int = 8, *, filled: bool = True, **kwargs):
    rb = prioritized(capacity, shared=True, eps=0.0, **kwargs)
    if filled:
        rb.extend(first_records(capacity))
    return rb


def first_records(count: int) -> TensorDict:
    return records(count, td_error=torch.ones(count))


def known(rb) -> list[float]:
    """The learner's priorities, once it has caught up."""
    rb.sample()
    return rb._learners_sampler()._sum_tree[torch.arange(rb.storage.max_size)].tolist()


def in_a_child(work) -> None:
    with forked(work) as child:
        assert child.exit_code() == 0


def write_half(rb, start: int = 100) -> None:
    """What a worker may do: it writes the first half of the ring, with first priorities of its own."""
    half = rb.storage.max_size // 2
    rb.extend(records(half - 1, start, td_error=torch.arange(half - 1) + 2.0))
    rb.add(records(1, start + half - 1, td_error=torch.tensor([7.0]))[0])
    assert len(rb) in (half, 2 * half)


def check_half(rb, sample) -> None:
    """What the learner finds then."""
    half = rb.storage.max_size // 2
    assert known(rb)[:half] == [*(torch.arange(half - 1) + 2.0).tolist(), 7.0]
    assert rb[:]["x"][:half].tolist() == list(range(100, 100 + half))
    if sample is None:
        assert (len(rb), rb.write_count) == (half, half)
        assert rb.storage.generations.tolist() == [0] * half + [-1] * half
        return
    assert rb.write_count == 3 * half
    assert rb.storage.generations.tolist() == [1] * half + [0] * half
    result = rb.update_tensordict_priority_if_present(sample.set("td_error", torch.full((len(sample),), 0.5)))
    assert torch.equal(result.stale_mask, sample["index"] < half)
    updated = sample["index"][result.updated_mask].unique().tolist()
    assert known(rb)[half:] == [0.5 if slot in updated else 1.0 for slot in range(half, 2 * half)]


# ---------------------------------------------------------------- C20: stale in every process


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("filled", [True, False], ids=["initialised", "not initialised"])
@pytest.mark.parametrize("storage", STORAGES, ids=lambda cls: cls.__name__)
def test_what_a_forked_process_writes_the_learner_knows_with_its_first_priority(storage, filled, sync):
    rb = shared(storage=storage(8), filled=filled, sync=sync)
    sample = rb.sample() if filled else None
    in_a_child(lambda: write_half(rb))
    check_half(rb, sample)


def _write_all(buffers) -> None:
    torch.set_num_threads(1)
    for rb in buffers:
        write_half(rb)


def test_what_a_spawned_process_writes_the_learner_knows_with_its_first_priority():
    buffers = [
        shared(capacity, storage=storage(capacity), filled=filled, sync=sync)
        for capacity, storage, filled, sync in [
            (8, STORAGES[0], True, True),
            (8, STORAGES[0], False, False),
            (8, STORAGES[1], True, False),
            (8, STORAGES[1], False, True),
            (2**20 + 2, STORAGES[0], True, True),  # beyond what TorchRL allocates stamps for at once
            (2**20 + 2, STORAGES[0], False, True),
        ]
    ]
    around = shared(
        8, storage=g.GenerationalTensorStorage(first_records(8).set("index", torch.arange(8))), filled=False
    )
    samples = [rb.sample() if len(rb) else None for rb in buffers]
    process = multiprocessing.get_context("spawn").Process(target=_write_all, args=([*buffers, around],))
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode == 0
    for rb, sample in zip(buffers, samples, strict=True):
        check_half(rb, sample)
    assert known(around)[:4] == [2, 3, 4, 7]


def test_a_buffer_that_is_shared_late_keeps_its_priorities():
    rb = prioritized(8, eps=0.0)
    rb.extend(first_records(8))
    rb.update_priority(torch.tensor([2, 6]), torch.tensor([0.25, 0.5]))
    rb.share()
    in_a_child(lambda: rb.extend(records(4, 100)))
    assert known(rb) == [1, 1, 1, 1, 1, 1, 0.5, 1]


def test_a_record_written_anywhere_is_known_whatever_slots_it_went_to():
    rb = shared(1000, batch_size=4)
    slots = torch.tensor([999, 3, 511, 257])

    def scattered() -> None:
        rb[slots] = records(4, 5000, td_error=torch.zeros(4), index=slots)

    rb.update_priority(torch.arange(1000), 0.25)
    in_a_child(scattered)
    found = known(rb)
    assert [slot for slot, priority in enumerate(found) if priority == 1] == sorted(slots.tolist())


def test_catching_up_looks_at_what_was_written_only(monkeypatch):
    rb = shared(100_000, batch_size=4)
    rb.sample()
    in_a_child(lambda: rb.extend(records(300, td_error=torch.ones(300))))
    looked_up = []
    lookup = g.SlotGenerations.lookup

    def counted(self, rows):
        looked_up.append(rows.numel())
        return lookup(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(g.SlotGenerations, "lookup", counted)
        rb.sample()
        assert sum(looked_up) <= 300 + 2 * 256 + 4
        looked_up.clear()
        rb.sample()
        assert looked_up == [4]  # nothing new


def test_records_without_a_first_priority_get_the_default_after_others_had_one():
    rb = shared(8)
    in_a_child(lambda: rb.extend(records(8, 100, td_error=torch.tensor([5.0] * 4 + [3.0] * 4))))
    in_a_child(lambda: rb.extend(records(4, 200, td_error=torch.zeros(4)), update_priority=False))
    assert known(rb) == [3.0] * 8  # the largest that the learner knows: what had 5 is gone


def test_a_first_priority_that_the_tree_can_no_longer_hold_is_cut_to_what_it_can():
    rb = shared(8, alpha=0.5)
    in_a_child(lambda: rb.extend(records(1, 100, td_error=torch.tensor([1e30]))))
    rb.sampler.alpha = 1.5
    assert known(rb)[0] > 1e36
    assert rb.sample()["x"].tolist() == [100] * 8


# ---------------------------------------------------------------- C21 and C22


@pytest.mark.parametrize("sync", [True, False])
def test_between_a_write_and_the_catching_up_no_dead_td_error_and_no_lost_one(sync):
    """C21."""
    rb = shared(8, sync=sync)
    sample = rb.sample()
    in_a_child(lambda: rb.extend(records(4, 100, td_error=torch.ones(4))))
    result = rb.update_tensordict_priority_if_present(sample.set("td_error", torch.full((8,), 0.5)))
    assert torch.equal(result.updated_mask, sample["index"] >= 4)
    in_a_child(lambda: rb.extend(records(1, 200, td_error=torch.ones(1))))
    rb.update_priority(torch.tensor([0]), 0.25)  # of the record before last
    assert known(rb)[:4] == [0.25, 1, 1, 1]


def test_more_than_two_to_the_31_records_count_on():
    """C22."""
    rb = shared(8)
    rb.writer._write_count = 2**31 - 2
    in_a_child(lambda: rb.extend(records(4, 100, td_error=torch.ones(4))))
    assert rb.write_count == 2**31 + 2
    assert known(rb) == [1.0] * 8


# ---------------------------------------------------------------- what a worker may do, and what not


def test_a_worker_may_empty_the_buffer():
    rb = shared(8)
    rb.update_priority(torch.tensor([1]), 9.0)
    sample = rb.sample()

    def empty_and_write() -> None:
        rb.empty()
        assert (len(rb), rb.write_count) == (0, 0)
        rb.extend(records(3, 100, td_error=torch.zeros(3)), update_priority=False)
        assert (len(rb), rb.write_count) == (3, 3)

    in_a_child(empty_and_write)
    assert (len(rb), rb.write_count) == (3, 3)
    assert known(rb)[:3] == [1, 1, 1]  # the running maximum went with the record that had it
    result = rb.update_tensordict_priority_if_present(sample.set("td_error", torch.ones(8)))
    assert result.num_stale == 8


LEARNERS = {
    "sample": lambda rb, sample, path: rb.sample(),
    "update_priority": lambda rb, sample, path: rb.update_priority(torch.tensor([0]), 2.0),
    "update_tensordict_priority": lambda rb, sample, path: rb.update_tensordict_priority(sample),
    "update_priority_if_present": lambda rb, sample, path: rb.update_priority_if_present(
        index=sample["index"], generation=sample["index_generation"], priority=2.0
    ),
    "update_tensordict_priority_if_present": lambda rb, sample, path: rb.update_tensordict_priority_if_present(sample),
    "set_sampler": lambda rb, sample, path: rb.set_sampler(g.GenerationalPrioritizedSampler(8, 0.7, 0.5)),
    "state_dict": lambda rb, sample, path: rb.state_dict(),
    "dumps": lambda rb, sample, path: rb.dumps(path / "new"),
    "load_state_dict": lambda rb, sample, path: rb.load_state_dict(torch.load(path / "state.pt", weights_only=True)),
    "loads": lambda rb, sample, path: rb.loads(path / "before"),
}


def refused(rb, sample, path: Path) -> None:
    torch.set_num_threads(1)
    for name, act in LEARNERS.items():
        with pytest.raises(RuntimeError, match="by the process that made it, and this is another one"):
            act(rb, sample, path)
            raise AssertionError(name)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.system)])
@pytest.mark.parametrize("sync", [True, False])
def test_a_worker_that_samples_updates_or_restores_is_refused_with_the_remedy(sync, method, tmp_path):
    rb = shared(8, sync=sync)
    sample = rb.sample().set("td_error", torch.full((8,), 5.0))
    torch.save(rb.state_dict(), tmp_path / "state.pt")
    rb.dumps(tmp_path / "before")
    process = multiprocessing.get_context(method).Process(target=refused, args=(rb, sample, tmp_path))
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode == 0
    assert known(rb) == [1.0] * 8
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 8


def test_a_uniform_buffer_is_sampled_by_every_process():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), sampler=RandomSampler(), batch_size=64, shared=True
    )

    def write_and_sample() -> None:
        rb.extend(records(8))
        assert set(rb.sample()["x"].tolist()) <= set(range(8))

    in_a_child(write_and_sample)
    assert set(rb.sample()["x"].tolist()) == set(range(8))


# ---------------------------------------------------------------- what cannot be shared


def _objects():
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(4), batch_size=2)
    rb.extend(TensorDict({"x": torch.arange(4), "name": NonTensorData("n", batch_size=[4])}, [4]))
    return rb


def _on_cuda():
    storage = g.GenerationalLazyTensorStorage(8)
    storage.device = torch.device("cuda:0")  # a machine without one cannot make it
    return storage


def _third_party():
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    try:
        from half_storage import HalfStorage
    finally:
        sys.path.pop(0)
    return g.GenerationalTensorDictReplayBuffer(storage=HalfStorage(4), batch_size=2)


UNSHARABLE = {
    "CUDA": (
        lambda: prioritized(8, storage=_on_cuda()),
        ValueError,
        "on device cuda.* cannot be shared between processes. Use device='cpu', and move batches",
    ),
    "prefetch": (lambda: prioritized(8, prefetch=2), ValueError, "Cannot share prefetched replay buffers.*prefetch=0"),
    "compilable storage": (
        lambda: prioritized(8, storage=g.GenerationalLazyTensorStorage(8, compilable=True)),
        ValueError,
        "compilable=True keeps its counters in one process",
    ),
    "compilable writer": (
        lambda: prioritized(8, writer=g.GenerationalTensorDictRoundRobinWriter(compilable=True)),
        ValueError,
        "a writer with compilable=True",
    ),
    "max-value writer": (
        lambda: prioritized(8, writer=g.GenerationalTensorDictMaxValueWriter(rank_key="x")),
        TypeError,
        "cannot share a GenerationalTensorDictMaxValueWriter.*Use a round-robin writer",
    ),
    "several dimensions": (
        lambda: plain_prioritized(8, ndim=2),
        ValueError,
        r"shares priorities only with storages of one dimension, got ndim=2. Write flattened batches",
    ),
    "consumed records": (
        lambda: g.GenerationalReplayBuffer(
            storage=g.GenerationalLazyTensorStorage(8), batch_size=2, consume_after_n_samples=1
        ),
        ValueError,
        "cannot share a buffer that consumes records",
    ),
    "objects": (_objects, TypeError, r"entries that are no tensors, which processes cannot share.*'name'"),
    "another's storage": (_third_party, TypeError, "cannot share a HalfStorage.*or a subclass of one"),
}


@pytest.mark.parametrize("kind", UNSHARABLE)
def test_what_processes_cannot_share_is_refused_with_the_remedy_and_stays_as_it_was(kind):
    build, error, message = UNSHARABLE[kind]
    rb = build()
    with pytest.raises(error, match=message):
        rb.share()
    assert not rb.shared
    assert not rb.storage.lock.is_shared


def test_what_processes_cannot_share_is_refused_at_construction():
    with pytest.raises(ValueError, match="on device cuda"):
        prioritized(8, storage=_on_cuda(), shared=True)
    with pytest.raises(ValueError, match="Cannot share prefetched"):
        prioritized(8, prefetch=2, shared=True)
    with pytest.raises(TypeError, match="cannot share a GenerationalTensorDictMaxValueWriter"):
        prioritized(8, writer=g.GenerationalTensorDictMaxValueWriter(rank_key="x"), shared=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.arange(4), "must be tensordicts, got Tensor"),
        (
            TensorDict({"x": torch.arange(4), "name": NonTensorData("n", batch_size=[4])}, [4]),
            "entries that are no tensors",
        ),
    ],
    ids=["a tensor", "an object"],
)
def test_a_first_write_that_others_could_not_join_is_refused(data, message):
    rb = g.GenerationalReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=2, shared=True)
    with pytest.raises(TypeError, match=message):
        rb.extend(data)
    assert (len(rb), rb.write_count, rb.storage.initialized) == (0, 0, False)
    in_a_child(lambda: rb.extend(records(4)))
    assert rb[:]["x"].tolist() == [0, 1, 2, 3]


def test_parts_are_exchanged_only_while_nobody_shares_them():
    rb = shared(8)
    for exchange in (
        lambda: rb.set_storage(g.GenerationalLazyTensorStorage(8)),
        lambda: rb.set_writer(g.GenerationalTensorDictRoundRobinWriter()),
    ):
        with pytest.raises(RuntimeError, match=r"does not reach the processes that share this buffer.*share\(False\)"):
            exchange()
    rb.share(False)
    rb.set_storage(g.GenerationalLazyTensorStorage(8))
    rb.share()
    in_a_child(lambda: rb.extend(records(3, td_error=torch.tensor([2.0, 3.0, 4.0]))))
    assert known(rb)[:3] == [2, 3, 4]


# ---------------------------------------------------------------- checkpoints, copies, the end


@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")  # TorchRL's advice
@pytest.mark.parametrize("path", ["state dict", "files"])
@pytest.mark.parametrize("filled", [True, False], ids=["over records", "over none"])
@pytest.mark.parametrize("storage", STORAGES, ids=lambda cls: cls.__name__)
def test_what_the_learner_restores_the_others_have(storage, filled, path, tmp_path):
    source = shared(8)
    source.update_priority(torch.tensor([1]), 4.0)
    rb = shared(8, storage=storage(8), filled=filled)

    def look_twice() -> None:
        child_says("ready")
        with rb.storage.lock:
            pass
        while rb.write_count != 8 + 2 * filled:
            pass  # until the learner is done
        assert rb[:]["x"].tolist() == list(range(8))
        rb.extend(records(2, 100, td_error=torch.full((2,), 3.0)))

    source.writer._write_count = 8 + 2 * filled
    with forked(look_twice) as child:
        child.wait_for("ready")
        if path == "files":
            source.dumps(tmp_path / "source")
            rb.loads(tmp_path / "source")
        else:
            rb.load_state_dict(source.state_dict())
        assert child.exit_code() == 0
    assert rb[:]["x"].tolist() == [100, 101, 2, 3, 4, 5, 6, 7]
    assert known(rb) == [3, 3, 1, 1, 1, 1, 1, 1]


def test_records_that_a_loading_puts_elsewhere_come_to_where_the_others_have_theirs(monkeypatch):
    """TorchRL loads in place; a checkpointer need not."""
    source, rb = shared(8), shared(8)
    source.extend(records(8, 50, td_error=torch.ones(8)))
    where = rb.storage._storage["x"].data_ptr()

    def elsewhere(self, state_dict) -> None:
        self._storage = TensorDict({"x": state_dict["_storage"]["x"].clone(), **self._storage.exclude("x")}, [8])

    monkeypatch.setattr(TensorStorage, "load_state_dict", elsewhere)
    with rb.storage.lock:
        rb.storage.load_state_dict(source.storage.state_dict())
    assert rb.storage._storage["x"].data_ptr() == where
    in_a_child(lambda: _is_there(rb))


def _is_there(rb) -> None:
    assert rb[:]["x"].tolist() == list(range(50, 58))


def test_a_catching_up_that_is_interrupted_is_done_again():
    class Interrupted(g.GenerationalPrioritizedSampler):
        interrupts = 0

        def mark_update(self, index, *, storage=None):
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            super().mark_update(index, storage=storage)

    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), sampler=Interrupted(8, 1.0, 1.0), batch_size=4, shared=True
    )
    in_a_child(lambda: rb.extend(records(4)))
    rb.sampler.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        rb.sample()
    assert known(rb) == [1, 1, 1, 1, 0, 0, 0, 0]


def test_a_checkpoint_has_what_workers_wrote_with_their_priorities(tmp_path):
    rb = shared(8)
    in_a_child(lambda: write_half(rb))
    rb.dumps(tmp_path / "saved")
    other = prioritized(8, eps=0.0)
    other.loads(tmp_path / "saved")
    assert known(other) == [2, 3, 4, 7, 1, 1, 1, 1]


def test_a_copy_of_a_shared_buffer_is_a_buffer_of_its_own():
    rb = shared(8)
    rb.update_priority(torch.tensor([5]), 0.5)
    twin = copy.deepcopy(rb)
    in_a_child(lambda: twin.extend(records(4, 100, td_error=torch.full((4,), 2.0))))
    assert known(twin) == [2, 2, 2, 2, 1, 0.5, 1, 1]
    assert known(rb) == [1, 1, 1, 1, 1, 0.5, 1, 1]
    assert rb[:]["x"].tolist() == list(range(8))


def test_siblings_on_a_shared_storage_follow_it_too():
    storage = g.GenerationalLazyTensorStorage(8)
    first, second = prioritized(8, storage=storage, eps=0.0), prioritized(8, storage=storage, eps=0.0)
    first.extend(first_records(8))
    second.update_priority(torch.tensor([7]), 0.5)
    first.share()
    in_a_child(lambda: first.extend(records(2, 100, td_error=torch.full((2,), 3.0))))
    assert known(second) == [3, 3, 1, 1, 1, 1, 1, 0.5]
    third = prioritized(8, storage=storage, eps=0.0)
    assert known(third) == [3] * 8  # it knows of no other priorities


def test_a_new_sampler_of_the_learner_knows_the_records():
    rb = shared(8)
    in_a_child(lambda: rb.extend(records(2, 100, td_error=torch.full((2,), 3.0))))
    rb.set_sampler(g.GenerationalPrioritizedSampler(8, 1.0, 1.0, eps=0.0))
    assert known(rb)[2:] == [1] * 6
    in_a_child(lambda: rb.extend(records(2, 100, td_error=torch.full((2,), 5.0))))
    assert known(rb)[2:4] == [5, 5]


@pytest.mark.system
def test_no_files_are_left_behind_by_processes_that_end(tmp_path):
    program = """
import os, sys, torch
import torchrl_generational as g
from support import prioritized, records
for storage in (g.GenerationalLazyTensorStorage(8), g.GenerationalLazyMemmapStorage(8)):
    rb = prioritized(8, storage=storage, shared=True)
    pid = os.fork()
    if not pid:
        rb.extend(records(3))
        sys.exit()  # runs what Python runs at the end of a process
    os.waitpid(pid, 0)
    assert rb.sample()["x"].max() < 3
    print(*storage._directories)
"""
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(children.__file__).parent)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, env=environment, timeout=TIMEOUT, capture_output=True, text=True)
    folders = done.stdout.split()
    assert len(folders) >= 2
    assert not any(map(os.path.exists, folders))
    assert os.listdir(tmp_path) == []


def test_no_files_are_left_behind_by_a_buffer_that_is_dropped():
    rb = prioritized(8, shared=True)
    folders = rb.storage._directories
    assert all(map(os.path.isdir, folders))
    del rb
    gc.collect()
    assert not any(map(os.path.isdir, folders))


def test_a_first_write_that_was_begun_and_never_ended_is_made_again():
    rb = prioritized(8, shared=True)

    def dies(self, data) -> None:
        Path(self._directories[0], "x.memmap").write_bytes(b"half")
        os._exit(9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(g.GenerationalLazyTensorStorage, "_init_coordinator", dies)
        with forked(lambda: rb.extend(records(3))) as child:
            assert child.exit_code() == 9
    in_a_child(lambda: rb.extend(records(3)))
    assert rb[:]["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["tensor", "object"])
@pytest.mark.parametrize("path", ["state dict", "files"])
def test_a_checkpoint_whose_records_others_could_not_join_is_refused(path, kind, tmp_path):
    records_of = {
        "tensor": torch.arange(8.0),
        "object": TensorDict({"x": torch.arange(8), "name": NonTensorData("n", batch_size=[8])}, [8]),
    }
    source = g.GenerationalReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=2)
    source.extend(records_of[kind])
    rb = g.GenerationalReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=2, shared=True)
    source.dumps(tmp_path / "saved")
    with pytest.raises(
        ValueError, match="must be tensordicts|entries that are no tensors|does not fit: .* pytree-based"
    ):
        rb.load_state_dict(source.state_dict()) if path == "state dict" else rb.loads(tmp_path / "saved")
    assert (len(rb), rb.storage.initialized, rb.storage.generations.tolist()) == (0, False, [-1] * 8)


@pytest.mark.parametrize("sync", [True, False])
def test_writing_no_records_changes_nothing(sync):
    rb = shared(8, sync=sync)
    rb.extend(first_records(3))
    newest = rb.storage._last_cursor_index
    assert rb.extend(first_records(3)[:0]).tolist() == []
    assert (len(rb), rb.write_count, rb.storage._last_cursor_index) == (8, 11, newest)


def test_a_learner_that_saves_leaves_the_newest_record_of_the_workers(tmp_path):
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(20),
        sampler=SliceSampler(slice_len=4, traj_key="trajectory"),
        batch_size=40,
        shared=True,
    )
    in_a_child(lambda: rb.extend(records(30, trajectory=torch.zeros(30, dtype=torch.int64))))
    rb.dumps(tmp_path / "saved")
    assert rb.storage._last_cursor_index == 9
    assert all((rb.sample()["x"].reshape(10, 4).diff() == 1).all() for _ in range(20))


def test_a_sampler_of_another_kind_does_not_come_into_a_shared_buffer():
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=4, shared=True)
    with pytest.raises(RuntimeError, match="set_sampler does not reach the processes"):
        rb.set_sampler(g.GenerationalPrioritizedSampler(8, 1.0, 1.0))
    assert type(rb.sampler) is RandomSampler


def test_a_worker_that_outlives_the_buffer_is_told_so():
    rb = prioritized(8, shared=True)
    for folder in rb.storage._directories:
        os.rmdir(folder)
    with pytest.raises(RuntimeError, match="the process that made this buffer has ended, or has let go of it"):
        rb.extend(records(3))


def test_starting_processes_again_and_again_takes_no_more_descriptors():
    lock = shared(8, filled=False).storage.lock._processes

    class Starting:
        pass

    def passed(times: int) -> list[int]:
        process = Starting()
        return [lock._another_descriptor(process) for _ in range(times)]

    assert len(set(passed(2))) == 2
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert [passed(2) for _ in range(5)] == [passed(2)] * 5
    assert (len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0) == before
