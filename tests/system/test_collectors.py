"""TorchRL's multi-process collectors write straight into a prioritized buffer, and the learner's handles stay right.

What arrives from a worker is ``[T]`` where its environment has no batch dimension: one transition per slot. It is
``[num_envs, T]`` where the environment is batched, which a storage of one dimension takes for ``num_envs``
trajectories, one per slot; a ``postproc``, which runs in the worker, flattens it.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support import TIMEOUT
from tensordict import TensorDictBase
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import RandomPolicy

import torchrl_generational as g

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # about a class of its own, when this module is imported first
    from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

CAPACITY = 160  # neither a multiple nor a divisor of what a worker writes at once
FRAMES = 64  # per batch: of both workers where they are in step, of each where they are not
WORKERS = 2

cartpole = partial(GymEnv, "CartPole-v1")


def randomly() -> RandomPolicy:
    return RandomPolicy(cartpole().action_spec)


def transitions_with_errors(batch: TensorDictBase) -> TensorDictBase:
    """A postproc: ``[num_envs, T]`` to ``[num_envs * T]``, with a TD error of 3 for every record."""
    batch = batch.reshape(-1)
    return batch.set("td_error", torch.full(batch.shape, 3.0))


def example() -> TensorDictBase:
    """What a worker with one environment would send: two steps, ``[2]``."""
    steps = cartpole().rollout(2, randomly())
    steps.names = None
    return steps.set(("collector", "traj_ids"), torch.zeros(2, dtype=torch.int64))


def shared_by_collectors(storage: type, **kwargs: Any) -> g.GenerationalTensorDictPrioritizedReplayBuffer:
    return g.GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=storage(CAPACITY), batch_size=32, **kwargs
    )


@pytest.fixture
def collect() -> Iterator[Callable[..., Any]]:
    """Makes collectors with two workers, started as TorchRL does, and leaves none of them behind."""
    made = []
    # which collectors set for good
    threads, start_method = torch.get_num_threads(), multiprocessing.get_start_method(allow_none=True)

    def collector(kind: type, rb: Any, *, env: Any = cartpole, policy: Any = None, **kwargs: Any) -> Any:
        made.append(kind([env] * WORKERS, policy, replay_buffer=rb, frames_per_batch=FRAMES, **kwargs))
        return made[-1]

    yield collector
    for one in made:
        one.shutdown(TIMEOUT)
    torch.set_num_threads(threads)
    multiprocessing.set_start_method(start_method, force=True)


def ended(collector: Any) -> list[int]:
    """How the workers ended that were asked to."""
    collector.shutdown(TIMEOUT)
    return [process.exitcode for process in collector.procs]


def learn(rb: Any) -> tuple[TensorDictBase, g.UpdateResult]:
    """One step of a learner: its sample, and what the update of it did."""
    sample = rb.sample()
    sample["td_error"] = torch.rand(sample.shape)
    return sample, rb.update_tensordict_priority_if_present(sample)


def priorities(rb: Any) -> torch.Tensor:
    sampler = rb._learners_sampler()
    return sampler._sum_tree[torch.arange(sampler.max_size)]


def given(rb: Any, error: torch.Tensor) -> torch.Tensor:
    """What the tree holds for a record with that error."""
    sampler = rb._learners_sampler()
    return (error.float() + sampler._eps).pow(sampler._alpha).double()


def stamps_after(writes: int) -> torch.Tensor:
    """Of a ring to which so many records were written, one after another."""
    return (writes - 1 - torch.arange(CAPACITY)).div(CAPACITY, rounding_mode="floor")


def assert_transitions(records: TensorDictBase) -> None:
    """Every record is one whole step of CartPole: its position moves by its velocity, of the same record."""
    now, then = records["observation"], records["next", "observation"]
    assert now.shape == (*records.shape, 4)
    torch.testing.assert_close(then[..., 0], now[..., 0] + 0.02 * now[..., 1])
    assert (records["next", "reward"] == 1).all()


def assert_sampled(sample: TensorDictBase) -> None:
    assert sample.shape == (32,)
    for entry in ("index", "index_generation", "priority_weight"):
        assert sample[entry].shape == (32,)
    assert (sample["priority_weight"] > 0).all()
    assert_transitions(sample)


def assert_learner_has_all(rb: Any) -> None:
    rb.sample()
    held = priorities(rb)
    assert (held[: len(rb)] > 0).all()
    assert (held[len(rb) :] == 0).all()


def assert_all_stale(rb: Any, sample: TensorDictBase) -> None:
    before = priorities(rb)
    result = rb.update_tensordict_priority_if_present(sample.set("td_error", torch.full(sample.shape, 1000.0)))
    assert (result.num_updated, result.num_stale) == (0, 32)
    assert torch.equal(priorities(rb), before)


def assert_applied(rb: Any) -> None:
    """A sample taken now is live, and its priorities are where they belong."""
    sample = rb.sample()
    sample["td_error"] = 1 + sample["index"] / CAPACITY  # one value per record, however often it was drawn
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 32
    torch.testing.assert_close(priorities(rb)[sample["index"]], given(rb, sample["td_error"]), rtol=1e-5, atol=0)


def test_workers_in_step_make_an_unwritten_storage_and_wrap_its_ring(collect):
    rb = shared_by_collectors(g.GenerationalLazyTensorStorage, shared=True)
    collector = collect(MultiSyncCollector, rb, policy=randomly(), total_frames=5 * FRAMES)
    assert not rb.storage.initialized  # the first record of a worker makes it
    samples = []
    for step, batch in enumerate(collector, 1):
        assert batch is None  # it is in the buffer
        assert rb.write_count == step * FRAMES
        assert len(rb) == min(step * FRAMES, CAPACITY)
        assert torch.equal(rb.storage.generations, stamps_after(step * FRAMES))
        assert_learner_has_all(rb)
        sample, result = learn(rb)
        assert_sampled(sample)
        assert result.num_updated == 32
        samples.append(sample)
    assert rb.write_count == 5 * FRAMES
    for early in samples[:2]:  # drawn among the first 128 records, of which the last 160 left none
        assert_all_stale(rb, early)
    assert_applied(rb)
    assert_transitions(rb[:])
    assert ended(collector) == [0, 0]
    assert rb.write_count == 5 * FRAMES


@pytest.mark.system
def test_workers_out_of_step_write_to_a_buffer_that_the_collector_shared_and_emptied(collect):
    rb = shared_by_collectors(g.GenerationalLazyMemmapStorage, sync=False)
    collector = collect(MultiAsyncCollector, rb, policy=randomly(), total_frames=-1)
    # TorchRL wrote a made-up record into slot 0 and emptied the buffer, before it shared it.
    assert rb.shared
    assert rb.storage.initialized
    assert (len(rb), rb.write_count) == (0, 0)
    made_up = torch.zeros(CAPACITY, dtype=torch.int64)
    made_up[0] = 2
    first, enough = None, 0
    for step, batch in enumerate(collector, 1):
        assert batch is None
        written = rb.write_count
        assert written % FRAMES == 0
        assert written >= step * FRAMES  # a worker goes on while its batch is looked at
        sample, _ = learn(rb)
        assert_sampled(sample)
        if first is None:
            first, enough = sample, rb.write_count + CAPACITY
        if step >= 4 and written >= enough:
            break
    assert ended(collector) == [0, 0]
    assert torch.equal(rb.storage.generations, stamps_after(rb.write_count) + made_up)
    assert_learner_has_all(rb)
    assert_all_stale(rb, first)
    assert_applied(rb)
    assert_transitions(rb[:])


@pytest.mark.system
def test_a_learner_keeps_sampling_and_updating_while_workers_run_free_and_add_one_record_at_a_time(collect):
    rb = shared_by_collectors(g.GenerationalLazyMemmapStorage)
    collector = collect(MultiAsyncCollector, rb, policy_factory=randomly, total_frames=-1, extend_buffer=False)
    assert rb.shared
    assert not rb.storage.initialized  # TorchRL leaves it to workers that make their policies themselves
    collector.start()
    end = time.monotonic() + TIMEOUT
    late: deque[TensorDictBase] = deque()  # samples of which the learner does not have the errors yet
    updated, stale = 0, 0
    while rb.write_count < 4 * CAPACITY or not (updated and stale):
        assert time.monotonic() < end
        if not len(rb):
            time.sleep(0.001)
            continue
        late.append(rb.sample())
        assert_sampled(late[-1])
        if len(late) < 40:
            continue
        sample = late.popleft()
        sample["td_error"] = torch.rand(32)
        place = sample["index_generation"] * CAPACITY + sample["index"]  # of the record among all that were written
        before = rb.write_count
        result = rb.update_tensordict_priority_if_present(sample)
        after = rb.write_count
        assert result.stale_mask[place + CAPACITY < before].all()  # the slot's next record had been written
        assert result.updated_mask[place + CAPACITY >= after].all()  # it had not
        updated, stale = updated + result.num_updated, stale + result.num_stale
    with collector.pause():
        total = rb.write_count
        assert total % FRAMES == 0
        assert torch.equal(rb.storage.generations, stamps_after(total))
        assert_learner_has_all(rb)
        assert_applied(rb)
        assert_transitions(rb[:])
        assert rb.write_count == total  # nobody wrote meanwhile
    assert ended(collector) == [0, 0]
    assert torch.equal(rb.storage.generations, stamps_after(rb.write_count))


@pytest.mark.system
def test_workers_with_batched_environments_flatten_their_batches_and_give_the_first_priorities(collect):
    rb = shared_by_collectors(g.GenerationalLazyTensorStorage, shared=True)
    rb.extend(transitions_with_errors(example()))
    assert rb.storage.initialized
    collector = collect(
        MultiSyncCollector,
        rb,
        env=partial(SerialEnv, 2, cartpole),
        policy=RandomPolicy(SerialEnv(2, cartpole).action_spec),
        postproc=transitions_with_errors,
        init_random_frames=FRAMES,  # which goes by the buffer's count
        total_frames=3 * FRAMES,
    )
    for step, batch in enumerate(collector, 1):
        assert batch is None
        assert rb.write_count == 2 + step * FRAMES
        assert torch.equal(rb.storage.generations, stamps_after(2 + step * FRAMES))
        assert_sampled(rb.sample())
        assert_learner_has_all(rb)
        # no update has been made: what is there are the workers' priorities
        held = priorities(rb)[: len(rb)]
        torch.testing.assert_close(held, given(rb, torch.full(held.shape, 3.0)), rtol=1e-5, atol=0)
    assert_applied(rb)
    assert_transitions(rb[:])
    assert ended(collector) == [0, 0]
