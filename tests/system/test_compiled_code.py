"""Buffers that compiled or exported code calls, and a collector beside a learner that compiles again and again."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import TIMEOUT, announce_blocked, filled, prioritized, records, until_blocked_or_done
from tensordict import TensorDict
from test_beside_compile import effects, state
from test_lock_discipline import ACTS, CALLS, prepared
from torchrl.envs import GymEnv
from torchrl.modules import RandomPolicy

import torchrl_generational as g

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # about a class of its own, when this module is imported first
    from torchrl.collectors import Collector

OFTEN = ("add", "extend", "sample", "update_tensordict_priority_if_present", "update_if_present", "empty")


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    logger = logging.getLogger("torch._dynamo")  # says where a graph ends
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
    torch._dynamo.reset()


def compiled_does_the_same(kind: str, name: str, tmp_path: Any, actors: Any) -> None:
    twin, info, td = prepared(kind, tmp_path)
    expected = effects(twin, lambda: ACTS[name](twin, info, td, tmp_path))
    (tmp_path / "other").mkdir()
    rb, info, td = prepared(kind, tmp_path / "other")
    act = ACTS[name]
    function = torch.compile(lambda: act(rb, info, td, tmp_path / "other"), backend="eager")
    with rb.storage.lock:
        blocked = announce_blocked(rb.storage.lock, "")
        future = actors.start("caller", lambda: effects(rb, function))
        until_blocked_or_done(blocked, future)
        assert not future.done()
    assert future.result(TIMEOUT) == expected
    rb.shutdown()


@pytest.mark.parametrize("name", OFTEN)
def test_a_method_that_compiled_code_calls_waits_for_the_lock_and_does_the_same(name, tmp_path, actors):
    compiled_does_the_same("tensordict prioritized", name, tmp_path, actors)


# Dynamo says of parts of TorchRL, of locks and of caches that it runs them as they are.
@pytest.mark.filterwarnings(
    "ignore:Dynamo (does not know how to trace|detected a call to a .functools.lru_cache):UserWarning"
)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, name in CALLS if name != "submit_update_if_present"])
def test_so_does_every_other_method_of_every_buffer(kind, name, tmp_path, actors):
    compiled_does_the_same(kind, name, tmp_path, actors)


def test_a_learners_compiled_step_meets_a_writer_between_its_graphs(actors):
    rb = filled()

    @torch.compile(backend="eager")
    def step(target: torch.Tensor) -> tuple[TensorDict, g.UpdateResult]:
        sample = rb.sample()
        sample["td_error"] = (sample["x"] - target).abs() + 1.0
        actors.writer(lambda: rb.extend(records(4, 100)))
        return sample, rb.update_tensordict_priority_if_present(sample)

    sample, result = step(torch.zeros(8))
    assert result.updated_mask.tolist() == (sample["index"] >= 4).tolist()
    assert len(rb) == 8


class Step(torch.nn.Module):
    """Lets another thread write while it is exported."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.write = torch.compiler.assume_constant_result(write)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.write()


@pytest.mark.parametrize("strict", [True, False])
def test_another_thread_writes_while_a_function_is_exported(strict, actors):
    rb, ledger_ = prioritized(), []

    def write() -> int:
        ledger_.append(actors.writer(lambda: (torch.compiler.is_compiling(), rb.extend(records(3)).tolist())))
        return 1

    program = torch.export.export(Step(write), (torch.zeros(2),), strict=strict)
    assert program.module()(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert [compiling for compiling, _ in ledger_] == [True] * len(ledger_)
    assert len(rb) == min(8, 3 * len(ledger_)) > 0
    assert rb.storage.generations.max() >= 0
    assert type(rb.sample()["index"]) is torch.Tensor


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["sample", "extend"])
def test_an_export_that_cannot_take_a_buffer_leaves_it_usable(name, strict):
    rb = filled()
    before = state(rb)
    call = {"sample": lambda: rb.sample()["x"].sum(), "extend": lambda: rb.extend(records(2)).sum()}[name]

    class Uses(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + call()

    with pytest.raises(Exception):  # noqa: B017  whatever torch says
        torch.export.export(Uses(), (torch.zeros(2),), strict=strict)
    assert not rb.storage.lock._threads._is_owned()
    if name == "sample":
        assert state(rb) == before
    rb.extend(records(8, 50))
    assert sorted(rb[:]["x"].tolist()) == list(range(50, 58))
    assert rb.sample().shape == (8,)


# ------------------------------------------------------------------ a collector beside a learner that compiles


CAPACITY = 64


class Audited(g.GenerationalTensorDictReplayBuffer):
    """Gives every record a number, in the order of the writes, and the priority 1."""

    written = 0

    def extend(self, tensordicts: Any, **kwargs: Any) -> Any:
        tensordicts = tensordicts.reshape(-1)
        with self.storage.lock:
            tensordicts["number"] = torch.arange(self.written, self.written + len(tensordicts), dtype=torch.float64)
            tensordicts["td_error"] = torch.ones(len(tensordicts))
            self.written += len(tensordicts)
            return super().extend(tensordicts, **kwargs)


def misapplied(rb: Any) -> int:
    """How many leaves hold neither the priority of a new record nor that of the one which is there."""
    with rb.storage.lock:
        numbers = rb.storage._storage["number"][: len(rb)].clone()
        leaf = torch.as_tensor(rb.sampler._sum_tree[torch.arange(len(rb))])
    wrong = (leaf != 1.0) & ((leaf - (numbers + 2)).abs() > 0.01)
    return int(wrong.sum())


def soak(seconds: float, backend: str) -> dict[str, int]:
    sampler = g.GenerationalPrioritizedSampler(CAPACITY, 1.0, 1.0, eps=0.0, dtype=torch.float64)
    rb = Audited(storage=g.GenerationalLazyTensorStorage(CAPACITY), sampler=sampler, batch_size=32)
    env = GymEnv("CartPole-v1")
    collector = Collector(env, RandomPolicy(env.action_spec), replay_buffer=rb, frames_per_batch=16, total_frames=-1)
    counts = dict.fromkeys(["compiled", "updated", "stale", "misapplied"], 0)
    collector.start()
    try:
        end = time.monotonic() + TIMEOUT
        while len(rb) < CAPACITY:
            assert time.monotonic() < end
        end = time.monotonic() + seconds
        while time.monotonic() < end or not counts["updated"] or not counts["stale"]:
            sample = rb.sample()
            assert (rb.storage.slot_generations.values >= 0).all()
            torch._dynamo.reset()
            loss = torch.compile(lambda number, state: number + 2 + 0 * state.sum().detach(), backend=backend)
            state_ = sample["observation"].requires_grad_(backend == "aot_eager")
            sample["td_error"] = loss(sample["number"], state_).detach()
            result = rb.update_tensordict_priority_if_present(sample)
            counts["compiled"] += 1
            counts["updated"] += result.num_updated
            counts["stale"] += result.num_stale
            counts["misapplied"] += misapplied(rb)
        assert collector._thread.is_alive()
        before = rb.write_count
        end = time.monotonic() + TIMEOUT
        while rb.write_count == before:
            assert time.monotonic() < end
    finally:
        collector.async_shutdown()
    return counts


def test_a_collector_goes_on_beside_a_loss_that_is_compiled_again_and_again():
    counts = soak(2, "eager")
    assert counts["misapplied"] == 0
    assert min(counts["compiled"], counts["updated"], counts["stale"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_collector_goes_on_beside_it_for_a_minute(backend, capsys):
    counts = soak(60, backend)
    with capsys.disabled():
        print("\nsoak", counts)
    assert counts["misapplied"] == 0
