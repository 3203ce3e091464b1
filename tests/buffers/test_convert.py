"""A buffer that TorchRL made and filled becomes the generational one: what it keeps, what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import TIMEOUT, Actors, announce_blocked, records, sampler_state, until_blocked_or_done
from tensordict import MemoryMappedTensor, TensorDict, is_tensor_collection
from torch.utils._pytree import tree_leaves
from torchrl.data import (
    CompressedListStorage,
    ConsumingSampler,
    HERReplayBuffer,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StreamingSliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from torchrl.data.replay_buffers.scheduler import LinearScheduler
from torchrl.envs.transforms import RenameTransform

import torchrl_generational as g
from torchrl_generational import convert

CAPACITY = 8


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tracking() -> TensorDictRoundRobinWriter:
    return TensorDictRoundRobinWriter(track_generations=True)


def stock(**kwargs: Any) -> TensorDictReplayBuffer:
    """TorchRL's buffer that draws by priority and whose writer can track generations."""
    kwargs.setdefault("storage", LazyTensorStorage(CAPACITY))
    kwargs.setdefault("sampler", PrioritizedSampler(CAPACITY, 0.7, 0.5))
    kwargs.setdefault("generator", rng())
    return TensorDictReplayBuffer(batch_size=4, **kwargs)


def learn(rb: Any, steps: int = 3) -> None:
    """A few steps of what training does with TorchRL's interface, through a ring that turns."""
    for step in range(steps):
        rb.extend(records(3, 3 * step))
        priority = torch.arange(len(rb)) + 0.25 * step
        rb.update_priority(torch.arange(len(rb)), priority)


def tensors_of(storage: Any) -> list[torch.Tensor]:
    held = storage._storage
    return list(held.values(True, True)) if is_tensor_collection(held) else tree_leaves(held)


def trees_of(sampler: Any) -> tuple[Any, ...]:
    cells = torch.arange(sampler.max_size)
    value, cell = sampler._max_priority
    return (
        sampler._sum_tree[cells].tolist(),
        sampler._min_tree[cells[: int((sampler._sum_tree[cells] > 0).sum())]].tolist(),
        None if value is None else float(value),
        None if cell is None else int(cell),
        float(sampler.default_priority),
        sampler.alpha,
        sampler.beta,
        sampler._eps,
    )


# ---------------------------------------------------------------- what is kept

STORAGES: dict[str, Callable[[Any], Any]] = {
    "lazy": lambda path: LazyTensorStorage(CAPACITY),
    "consolidated": lambda path: LazyTensorStorage(CAPACITY, consolidated=True),
    "device of the data": lambda path: LazyTensorStorage(CAPACITY, device="auto"),
    "files of its own": lambda path: LazyMemmapStorage(CAPACITY),
    "files elsewhere": lambda path: LazyMemmapStorage(CAPACITY, scratch_dir=path / "scratch"),
    "given tensors": lambda path: TensorStorage(records(CAPACITY, index=torch.arange(CAPACITY))),
}


@pytest.mark.parametrize("kind", STORAGES)
def test_records_stay_where_they_are_and_counters_go_on(kind, tmp_path):
    old = stock(storage=STORAGES[kind](tmp_path), generator=None)
    learn(old)
    places = [tensor.data_ptr() for tensor in tensors_of(old.storage)]
    before = old[:].clone(), len(old), old.write_count, old.writer._cursor, old.storage._last_cursor_index
    rb = convert(old)
    assert type(rb) is g.GenerationalTensorDictReplayBuffer
    assert [tensor.data_ptr() for tensor in tensors_of(rb.storage)] == places
    assert (rb[:] == before[0]).all()
    assert (len(rb), rb.write_count, rb.writer._cursor, rb.storage._last_cursor_index) == before[1:]
    rb.extend(records(2, 70))  # cursor 9 % 8
    assert rb[:]["x"].tolist()[1:3] == [70, 71]
    assert [tensor.data_ptr() for tensor in tensors_of(rb.storage)] == places


@pytest.mark.parametrize(
    ("kind", "data"),
    [("tensors", torch.arange(5)), ("pytrees", {"a": torch.arange(5), "b": (torch.ones(5, 2),)})],
)
def test_a_plain_buffer_of_tensors_and_of_pytrees_is_converted(kind, data):
    old = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4, generator=rng())
    old.extend(data)
    places = [tensor.data_ptr() for tensor in tensors_of(old.storage)]
    rb = convert(old)
    assert type(rb) is g.GenerationalReplayBuffer
    assert [tensor.data_ptr() for tensor in tensors_of(rb.storage)] == places
    _, info = rb.sample(return_info=True)
    assert info["index_generation"].tolist() == [0] * 4
    rb.extend(data)
    assert rb.storage.generations.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("alpha", [0.7, 0.0])
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_priorities_are_those_of_before_bit_for_bit(alpha, within, dtype):
    sampler = PrioritizedSampler(CAPACITY, alpha, 0.4, 1e-3, dtype, "mean", within)
    old = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4)
    old.extend(torch.arange(5))
    old.set_sampler(sampler)
    sampler.update_priority(torch.arange(5), torch.tensor([0.3, 9.1, 0.0, 1e-4, 2.0], dtype=dtype))
    sampler.update_priority(torch.tensor([1]), torch.tensor([0.1], dtype=dtype))
    before = trees_of(sampler)
    rb = convert(old)
    assert type(rb.sampler) is g.GenerationalPrioritizedSampler
    assert trees_of(rb.sampler) == before
    assert rb.sampler.dtype == dtype
    assert (rb.sampler.reduction, rb.sampler._max_priority_within_buffer) == ("mean", within)


def test_without_stamps_every_record_counts_as_the_first_of_its_slot():
    old = stock()
    old.extend(records(6))
    rb = convert(old)
    assert rb.storage.generations.tolist() == [0] * 6 + [-1] * 2
    sample = rb.sample()
    rb.extend(records(3, 6))  # slots 6, 7, 0
    assert rb.storage.generations.tolist() == [1] + [0] * 7
    result = rb.update_priority_if_present(index=sample["index"], generation=sample["index_generation"], priority=3.0)
    assert result.stale_mask.tolist() == (sample["index"] == 0).tolist()


def test_handles_taken_before_stay_good_until_their_record_is_gone():
    old = stock(writer=tracking())
    learn(old)
    sample = old.sample()
    stamps = old.storage._slot_generations.tolist()
    rb = convert(old)
    assert rb.storage.generations.tolist() == stamps == [1] + [0] * 7
    index, generation = torch.arange(CAPACITY), torch.tensor(stamps)
    sample["td_error"] = torch.ones(4)
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 4
    rb.extend(records(2, 50))  # slots 1 and 2
    result = rb.update_priority_if_present(index=index, generation=generation, priority=2.0)
    assert result.stale_mask.nonzero().flatten().tolist() == [1, 2]


def test_stamps_that_cover_a_part_of_the_ring_and_records_without_a_stamp_are_taken_over():
    old = stock(writer=TensorDictRoundRobinWriter())
    old.extend(records(4))
    old.set_writer(tracking())
    old.writer._cursor = 4
    old.extend(records(2, 4))
    old.storage._slot_generations = old.storage._slot_generations[:6]  # as in rings beyond 2**20
    assert old.storage._slot_generations.tolist() == [-1] * 4 + [0] * 2
    rb = convert(old)
    stamps = rb.storage.generations
    assert stamps[4:].tolist() == [0, 0, -1, -1]
    assert (stamps[:4] >= 0).all()
    assert rb.sample()["index_generation"].min() >= 0


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # TorchRL's
def test_a_storage_of_several_dimensions_keeps_rows_and_stamps_and_cells_beyond_the_trees_get_priorities(tracked):
    old = stock(
        storage=LazyTensorStorage(10, ndim=2),
        sampler=PrioritizedSampler(10, 1.0, 1.0, eps=0.0),
        writer=TensorDictRoundRobinWriter(track_generations=tracked),
    )
    for start in (0, 8):
        old.extend(TensorDict({"x": torch.arange(start, start + 8).reshape(4, 2)}, [4, 2]))  # two of three rows
    old.sampler.update_priority(torch.arange(10), torch.arange(1.0, 11.0))
    rb = convert(old)
    assert rb.storage.generations.shape == (3, 4)
    assert rb.storage.generations[:, 0].tolist() == ([1, 0, 0] if tracked else [0, 0, 0])
    assert rb.sampler._sum_tree[torch.arange(12)].tolist() == [*map(float, range(1, 11)), 10.0, 10.0]
    sample = rb.sample()
    assert torch.equal(rb.storage._storage["x"][tuple(sample["index"].unbind(-1))], sample["x"])
    rb.extend(TensorDict({"x": torch.zeros(4, 1, dtype=torch.int64)}, [4, 1]))
    result = rb.update_priority_if_present(index=sample["index"], generation=sample["index_generation"], priority=1.0)
    assert torch.equal(result.stale_mask, sample["index"][:, 0] == 1)


def test_a_learner_that_lags_behind_its_writers_catches_up_first():
    old = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, sync=False, storage=LazyTensorStorage(CAPACITY), batch_size=4
    )
    old.extend(records(4))
    old.sample()
    old.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    old.extend(records(2, 4))  # which its sampler does not know yet
    rb = convert(old)
    leaves = [1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 0.0, 0.0]
    assert rb.prioritized_sampler._sum_tree[torch.arange(CAPACITY)].tolist() == leaves
    assert type(rb.sampler) is RandomSampler
    assert type(rb.prioritized_sampler) is g.GenerationalPrioritizedSampler
    with pytest.raises(RuntimeError, match="was converted"):
        old.prioritized_sampler.beta = 0.5
    sample = rb.sample()
    assert rb.prioritized_sampler._sum_tree[torch.arange(CAPACITY)].tolist() == leaves
    rb.extend(records(4, 6))  # slots 6, 7, 0, 1
    sample["td_error"] = torch.full((4,), 3.0)
    result = rb.update_tensordict_priority_if_present(sample)
    assert torch.equal(result.stale_mask, sample["index"] < 2)
    now = rb.prioritized_sampler._sum_tree[torch.arange(CAPACITY)]
    assert now[[0, 1, 6, 7]].tolist() == [4.0] * 4
    assert now[sample["index"][result.updated_mask]].tolist() == [3.0] * result.num_updated


def test_configuration_is_kept():
    generator = rng(5)
    old = PrioritizedReplayBuffer(
        alpha=0.6,
        beta=0.4,
        storage=LazyTensorStorage(CAPACITY),
        batch_size=4,
        collate_fn=lambda data: data + 100,
        transform=lambda data: data * 2,
    )
    old.set_rng(generator)
    old.extend(torch.arange(5))
    rb = convert(old)
    assert type(rb) is g.GenerationalPrioritizedReplayBuffer
    data, info = rb.sample(return_info=True)
    assert torch.equal(data, (info["index"] + 100) * 2)
    assert info["index_generation"].tolist() == [0] * 4
    for part in (rb, rb.storage, rb.sampler, rb.writer):
        assert part._rng is generator


def test_priority_key_and_transforms_of_a_tensordict_buffer_are_kept():
    old = TensorDictPrioritizedReplayBuffer(
        alpha=0.7,
        beta=0.5,
        storage=LazyTensorStorage(CAPACITY),
        batch_size=4,
        priority_key="error",
        transform=RenameTransform(["x"], ["y"]),
    )
    old.extend(TensorDict({"x": torch.arange(5)}, [5]))
    rb = convert(old)
    assert type(rb) is g.GenerationalTensorDictPrioritizedReplayBuffer
    sample = rb.sample()
    assert torch.equal(sample["y"], sample["index"])
    sample["error"] = torch.full((4,), 5.0)
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 4
    assert float(rb.sampler._max_priority[0]) == 5.0


def test_handles_follow_records_through_the_collation_of_before():
    old = stock(collate_fn=lambda data: data.flip(0)[:3])
    old.extend(records(6))
    rb = convert(old)
    sample = rb.sample()
    assert sample.shape == sample["index_generation"].shape == (3,)
    assert torch.equal(sample["x"], sample["index"])


def test_a_buffer_that_was_never_written_is_converted():
    rb = convert(stock())
    assert (len(rb), rb.write_count, rb.storage.generations.tolist()) == (0, 0, [-1] * CAPACITY)
    learn(rb)
    assert sampler_state(rb) == sampler_state(grown_up())


def test_a_buffer_that_is_initialised_late_is_converted():
    old = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4, delayed_init=True)
    rb = convert(old)
    rb.extend(records(4))
    assert rb.sample()["index_generation"].tolist() == [0] * 4


# ---------------------------------------------------------------- going on


def grown_up(steps: int = 3) -> Any:
    """A buffer that was generational from the start, after the same history as ``stock`` after ``learn``."""
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(CAPACITY),
        sampler=g.GenerationalPrioritizedSampler(CAPACITY, 0.7, 0.5),
        batch_size=4,
        generator=rng(),
    )
    learn(rb, steps)
    return rb


def test_training_goes_on_as_in_a_buffer_that_was_generational_from_the_start():
    old = stock(writer=tracking())
    learn(old)
    rb, other = convert(old), grown_up()
    for step in range(6):
        drawn = [buffer.sample() for buffer in (rb, other)]
        assert torch.equal(drawn[0]["x"], drawn[1]["x"])
        assert torch.equal(drawn[0]["priority_weight"], drawn[1]["priority_weight"])
        results = []
        for buffer, sample in zip((rb, other), drawn, strict=True):
            buffer.extend(records(3, 20 + 3 * step))  # some of the sample's slots are reused
            sample["td_error"] = torch.rand(4, generator=rng(step))
            results.append(buffer.update_tensordict_priority_if_present(sample).updated_mask)
        assert torch.equal(*results)
        assert sampler_state(rb) == sampler_state(other)


EPISODES = {"episode": torch.arange(CAPACITY) // 4}

UNIFORM: dict[str, Callable[[], Any]] = {
    "uniform": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=2, traj_key="episode"),
    "epochs of slices": lambda: SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode"),
}


@pytest.mark.parametrize("kind", UNIFORM)
def test_samplers_without_priorities_draw_what_they_would_have_drawn(kind):
    made = [stock(sampler=UNIFORM[kind](), generator=rng(3)) for _ in range(2)]
    for old in made:
        old.extend(records(CAPACITY, episode=torch.arange(CAPACITY) // 4))
        old.extend(records(2, CAPACITY, episode=torch.tensor([2, 2])))  # the newest record is at slot 1
        old.sample()  # in the middle of an epoch
    sampler = made[0].sampler
    rb, other = convert(made[0]), made[1]
    assert rb.sampler is sampler
    for _ in range(4):
        sample = rb.sample()
        assert torch.equal(sample["x"], other.sample()["x"])
        assert (sample["index_generation"] == 0).all()


def test_a_prioritized_sampler_of_slices_keeps_priorities_and_boundaries():
    sampler = PrioritizedSliceSampler(CAPACITY, 1.0, 1.0, eps=0.0, slice_len=2, traj_key="episode")
    old = stock(sampler=sampler)
    old.extend(records(CAPACITY, episode=torch.arange(CAPACITY) // 4))
    old.update_priority(torch.arange(CAPACITY), torch.tensor([0.0, 0.0, 5.0, 9.0, 0.0, 0.0, 0.0, 9.0]))
    before = trees_of(sampler)
    rb = convert(old)
    assert type(rb.sampler) is g.GenerationalPrioritizedSliceSampler
    assert trees_of(rb.sampler)[:1] == before[:1]
    assert rb.sample()["x"].tolist() == [2, 3, 2, 3]


def test_a_schedule_made_before_goes_on_to_anneal():
    old = stock()
    old.extend(records(4))
    schedule = LinearScheduler(old, "beta", final_value=1.0, num_steps=5)
    rb = convert(old)
    for _ in range(5):
        schedule.step()
    assert rb.sampler.beta == 1.0
    assert rb.sampler.lock is rb.storage.lock


def test_a_converted_buffer_saves_and_loads_like_any_other(tmp_path):
    old = stock(writer=tracking())
    learn(old)
    rb = convert(old)
    sample = rb.sample()
    rb.dumps(tmp_path / "saved")
    torch.save(rb.state_dict(), tmp_path / "state.pt")
    loaded = [grown_up(0), grown_up(0)]
    loaded[0].loads(tmp_path / "saved")
    loaded[1].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    rb.extend(records(CAPACITY))
    for buffer in loaded:
        assert (buffer[:]["x"] == torch.tensor([8, 1, 2, 3, 4, 5, 6, 7])).all()
        result = buffer.update_priority_if_present(
            index=sample["index"], generation=sample["index_generation"], priority=1.0
        )
        assert result.num_updated == 4
    rb.loads(tmp_path / "saved")
    assert rb[:]["x"].tolist() == [8, 1, 2, 3, 4, 5, 6, 7]
    copied = pickle.loads(pickle.dumps(rb))
    assert sampler_state(copied) == sampler_state(rb)


def test_a_converted_buffer_can_be_shared_and_exchanges_its_parts():
    old = stock()
    old.extend(records(4))
    rb = convert(old)
    rb.set_sampler(g.GenerationalPrioritizedSampler(CAPACITY, 1.0, 1.0))
    assert rb.sampler._sum_tree.query(0, CAPACITY) == pytest.approx(4.0)
    rb.share()
    rb.storage._len = 2**31  # TorchRL's numbers have 32 bits, and locks that a killed process keeps
    assert len(rb) == 2**31
    rb.storage._len = 4
    rb.extend(records(2, 4))
    assert rb.storage.slot_generations.is_shared
    assert rb.sample()["index_generation"].tolist() == [0] * 4


def test_a_write_that_fails_leaves_no_handle_live_on_a_torn_record():
    old = stock(writer=tracking())
    learn(old)
    sample = old.sample()
    rb = convert(old)
    with pytest.raises(RuntimeError):
        rb.extend(TensorDict({"x": torch.zeros(3, 2)}, [3]))
    rb.extend(records(CAPACITY))
    result = rb.update_priority_if_present(index=sample["index"], generation=sample["index_generation"], priority=1.0)
    assert result.num_stale == 4


# ---------------------------------------------------------------- files


def files_of(storage: Any) -> list[Path]:
    return [Path(tensor.filename) for tensor in tensors_of(storage) if isinstance(tensor, MemoryMappedTensor)]


def test_files_outlive_the_old_buffer_and_go_with_the_new_one(tmp_path):
    old = stock(storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "scratch", auto_cleanup=True))
    old.extend(records(CAPACITY))
    files = files_of(old.storage)
    rb = convert(old)
    del old
    gc.collect()
    assert files
    assert files_of(rb.storage) == files
    assert all(file.exists() for file in files)
    rb.extend(records(3, 50))
    assert torch.equal(torch.from_numpy(np.fromfile(sorted(files)[-1], np.int64)), rb[:]["x"])
    assert rb.storage.cleanup()
    assert not any(file.exists() for file in files)


def test_files_in_a_folder_of_the_user_stay(tmp_path):
    old = stock(storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "mine"))
    old.extend(records(CAPACITY))
    rb = convert(old)
    files = files_of(rb.storage)
    del old, rb
    gc.collect()
    assert files
    assert all(file.exists() for file in files)


# ---------------------------------------------------------------- the old buffer

USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda rb: rb.add(records(1)[0]),
    "append_transform": lambda rb: rb.append_transform(RenameTransform(["x"], ["y"])),
    "can_sample": lambda rb: rb.can_sample(2),
    "copy": copy.deepcopy,
    "dumps": lambda rb: rb.dumps("never"),
    "empty": lambda rb: rb.empty(),
    "extend": lambda rb: rb.extend(records(3)),
    "get": lambda rb: rb[:],
    "iterate": lambda rb: next(iter(rb)),
    "len": len,
    "load_state_dict": lambda rb: rb.load_state_dict({}),
    "pickle": pickle.dumps,
    "sample": lambda rb: rb.sample(),
    "sampler": lambda rb: rb.sampler.beta,
    "set": lambda rb: rb.__setitem__(0, records(1)[0]),
    "set_rng": lambda rb: rb.set_rng(rng()),
    "state_dict": lambda rb: rb.state_dict(),
    "stats": lambda rb: rb.stats(),
    "storage": lambda rb: rb.storage.get(0),
    "update_priority": lambda rb: rb.update_priority(0, 1.0),
    "update_tensordict_priority": lambda rb: rb.update_tensordict_priority(
        records(1, index=torch.tensor([0]), td_error=torch.ones(1))
    ),
    "write_count": lambda rb: rb.write_count,
    "convert": convert,
}


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("use", USES)
def test_the_old_buffer_says_that_it_was_converted_whatever_it_is_used_for(use, prefetch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old = stock(prefetch=prefetch)
    learn(old)
    old.sample()
    rb = convert(old)
    before = rb[:].clone(), sampler_state(rb), len(rb), rb.write_count
    with pytest.raises(RuntimeError, match="was converted.*GenerationalTensorDictReplayBuffer.*Use that one"):
        USES[use](old)
    assert (rb[:] == before[0]).all()
    assert (sampler_state(rb), len(rb), rb.write_count) == before[1:]
    rb.shutdown()


def test_the_old_buffer_can_be_shown_and_shut_down_and_its_writer_refuses():
    old = stock(prefetch=2)
    learn(old)
    writer = old.writer
    rb = convert(old)
    assert "<converted>" in repr(old)
    old.shutdown()
    assert rb.sample()["x"].shape == (4,)
    with pytest.raises(RuntimeError, match="was converted"):
        writer.extend(records(2))
    rb.shutdown()


def test_a_thread_that_waits_to_write_to_the_old_buffer_writes_nowhere(actors: Actors, monkeypatch):
    old = stock()
    learn(old)
    from torchrl_generational.buffers import convert as conversion

    lock = g.StorageLock()
    old._replay_lock = lock  # one that announces who waits for it
    writes: list[Any] = []
    plain = conversion._emerging

    def emerging(rb: Any) -> Any:
        blocked = announce_blocked(lock, "writer")
        writes.append(actors.start("writer", lambda: rb.extend(records(3, 90))))
        until_blocked_or_done(blocked, writes[0])
        return plain(rb)

    monkeypatch.setattr(conversion, "_emerging", emerging)
    rb = convert(old)
    with pytest.raises(RuntimeError, match="was converted"):
        writes[0].result(TIMEOUT)
    assert 90 not in rb[:]["x"]
    assert rb.write_count == 9


# ---------------------------------------------------------------- prefetching


def test_prefetched_batches_are_dropped_and_prefetching_goes_on():
    old = stock(prefetch=2)
    old.extend(records(CAPACITY))
    old.sample()
    executor = old._prefetch_executor
    rb = convert(old)
    assert not rb._prefetch_queue
    assert not old._prefetch_queue
    rb.set_("x", torch.arange(100, 100 + CAPACITY))
    for _ in range(3):
        sample = rb.sample()
        assert (sample["x"] >= 100).all()
        assert sample["index_generation"].tolist() == [0] * 4
    assert len(rb._prefetch_queue) == 2
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(int)
    rb.shutdown()


def test_work_in_flight_is_done_before_anything_changes(actors: Actors):
    gate, inside = threading.Event(), threading.Semaphore(0)

    class Gate(torch.nn.Module):
        held = False

        def forward(self, data: Any) -> Any:
            if self.held:
                inside.release()
                assert gate.wait(TIMEOUT)
            return data

    module = Gate()
    old = stock(prefetch=1, writer=tracking(), transform=lambda data: module(data))
    old.extend(records(CAPACITY))
    old.sample()
    old._prefetch_queue[0].result(TIMEOUT)
    module.held = True
    old.sample()  # hands out the batch that was ready; the next one stops at the gate
    assert inside.acquire(timeout=TIMEOUT)
    update = old.submit_update_if_present(
        index=torch.tensor([2]), generation=torch.tensor([0]), patch={"x": torch.tensor([77])}
    )
    converted = actors.start("converter", lambda: convert(old))
    try:
        assert not update.done()
        assert not converted.done()
    finally:
        module.held = False
        gate.set()
    rb = converted.result(TIMEOUT)
    assert update.result(TIMEOUT).updated_count == 1
    assert rb[:]["x"].tolist() == [0, 1, 77, 3, 4, 5, 6, 7]
    rb.shutdown()


def test_an_update_that_failed_is_reported_by_its_future_alone():
    old = stock(writer=tracking())
    old.extend(records(CAPACITY))
    update = old.submit_update_if_present(
        index=torch.tensor([2]), generation=torch.tensor([0]), patch={"unknown": torch.tensor([77])}
    )
    rb = convert(old)
    assert rb.sample()["x"].shape == (4,)
    with pytest.raises(KeyError, match="unknown"):
        update.result(TIMEOUT)


def test_a_loop_by_next_goes_on_in_the_new_buffer():
    old = stock(sampler=SamplerWithoutReplacement())
    old.extend(records(CAPACITY))
    first = old.next()
    rb = convert(old)
    assert sorted([*first["x"].tolist(), *rb.next()["x"].tolist()]) == list(range(CAPACITY))


def test_a_draw_ahead_that_failed_does_not_stop_the_conversion():
    old = stock(prefetch=1)
    old.extend(records(CAPACITY))
    old.sample()
    old._prefetch_queue.clear()
    old.empty()
    old._prefetch_queue.append(old._prefetch_executor.submit(old._sample, 4))
    rb = convert(old)
    rb.extend(records(4))
    assert rb.sample()["index_generation"].tolist() == [0] * 4
    rb.shutdown()


# ---------------------------------------------------------------- what is refused


class OwnBuffer(TensorDictReplayBuffer):
    pass


class OwnStorage(LazyTensorStorage):
    pass


class OwnSampler(PrioritizedSampler):
    pass


def shut_down() -> Any:
    old = stock()
    old.shutdown()
    return old


def serving() -> Any:
    old = stock()
    old._distributed_service = object()
    return old


def beside_another() -> Any:
    old = stock()
    ReplayBuffer(storage=old.storage)
    return old


def astray() -> Any:
    old = stock()
    old.set_storage(LazyTensorStorage(CAPACITY))
    return old


def damaged() -> Any:
    old = stock()
    old.extend(records(4))
    old.update_priority(1, float("nan"))
    return old


def ensemble() -> Any:
    return ReplayBufferEnsemble(stock(), stock(), batch_size=4)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a buffer of one's own": (
        lambda: OwnBuffer(storage=LazyTensorStorage(CAPACITY)),
        TypeError,
        "rb should be one of ReplayBuffer.*got OwnBuffer.*GenerationalReplayBufferMixin",
    ),
    "a hindsight buffer": (
        lambda: HERReplayBuffer(lambda data: data["x"], storage=LazyTensorStorage(CAPACITY)),
        TypeError,
        "got HERReplayBuffer",
    ),
    "an ensemble": (ensemble, TypeError, "got ReplayBufferEnsemble.*Convert its members"),
    "a generational buffer": (lambda: grown_up(), TypeError, "is generational already"),
    "something else": (lambda: 3, TypeError, "got int"),
    "a shared buffer": (lambda: stock(shared=True), ValueError, r"shared between processes.*rb\.share\(False\)"),
    "a buffer that was shut down": (shut_down, ValueError, "was shut down"),
    "a buffer that serves others": (serving, ValueError, "serves clients"),
    "a list storage": (lambda: stock(storage=ListStorage(CAPACITY)), TypeError, "storage.*got ListStorage.*extend"),
    "a lazy stack": (lambda: stock(storage=LazyStackStorage(CAPACITY)), TypeError, "got LazyStackStorage"),
    "a compressed list": (
        lambda: stock(storage=CompressedListStorage(CAPACITY)),
        TypeError,
        "got CompressedListStorage",
    ),
    "a storage of one's own": (lambda: stock(storage=OwnStorage(CAPACITY)), TypeError, "got OwnStorage"),
    "a storage that others look for": (
        lambda: stock(storage=LazyTensorStorage(CAPACITY, shared_init=True)),
        ValueError,
        "shared_init=True",
    ),
    "a storage for torch.compile": (
        lambda: stock(storage=LazyTensorStorage(CAPACITY, compilable=True)),
        ValueError,
        "the storage of rb was made with compilable=True",
    ),
    "a writer for torch.compile": (
        lambda: stock(writer=TensorDictRoundRobinWriter(compilable=True)),
        ValueError,
        "the writer of rb was made with compilable=True",
    ),
    "a storage with more buffers": (beside_another, ValueError, r"also that of 1 more buffer\(s\)"),
    "a writer to another storage": (astray, ValueError, r"rb\.set_writer\(rb\.writer\)"),
    "a max-value writer": (
        lambda: stock(writer=TensorDictMaxValueWriter(rank_key="x")),
        TypeError,
        "writer.*got TensorDictMaxValueWriter",
    ),
    "a writer that does not write": (
        lambda: stock(storage=TensorStorage(records(CAPACITY)), writer=ImmutableDatasetWriter()),
        TypeError,
        "got ImmutableDatasetWriter",
    ),
    "a consuming sampler": (lambda: stock(sampler=ConsumingSampler()), TypeError, "ConsumingSampler.*set_sampler"),
    "a consuming buffer": (
        lambda: stock(sampler=RandomSampler(), consume_after_n_samples=2),
        TypeError,
        "ConsumingSampler",
    ),
    "a streaming sampler": (
        lambda: stock(sampler=StreamingSliceSampler(slice_len=2)),
        TypeError,
        "StreamingSliceSampler",
    ),
    "a prioritized sampler of one's own": (
        lambda: stock(sampler=OwnSampler(CAPACITY, 1.0, 1.0)),
        TypeError,
        "got OwnSampler.*GenerationalPrioritizedSampler",
    ),
    "a sampler that is too small": (
        lambda: stock(sampler=PrioritizedSampler(CAPACITY - 1, 1.0, 1.0)),
        ValueError,
        "max_capacity=7.*holds 8",
    ),
    "priorities that are no numbers": (damaged, ValueError, "priorities of rb cannot be taken over.*NaN"),
}


def picture(part: Any) -> tuple[Any, ...]:
    """Class and attributes of an object and of the parts of a buffer, by identity."""
    parts = [part, *(vars(part).get(name) for name in ("_storage", "_sampler", "_writer") if hasattr(part, "__dict__"))]
    return tuple(
        (type(each), {name: id(value) for name, value in vars(each).items()})
        for each in parts
        if hasattr(each, "__dict__")
    )


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_by_name_and_stays_as_it_is(case):
    make, error, message = REFUSED[case]
    old = make()
    before = picture(old) if hasattr(old, "__dict__") else ()
    with pytest.raises(error, match=message):
        convert(old)
    if before:
        assert picture(old) == before


def test_a_refused_buffer_keeps_its_prefetched_batches():
    old = stock(prefetch=2)
    old.extend(records(CAPACITY))
    old.sample()
    queue = list(old._prefetch_queue)
    assert len(queue) == 2
    old.update_priority(1, float("nan"))
    with pytest.raises(ValueError, match="cannot be taken over"):
        convert(old)
    assert list(old._prefetch_queue) == queue
    old.update_priority(1, 1.0)
    assert torch.equal(old.sample()["x"], queue[0].result(TIMEOUT)[0]["x"])
    old.shutdown()
