"""Threads that do everything at once, and an auditor who knows which priority belongs to which record."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers.scheduler import LinearScheduler

import torchrl_generational as g
from torchrl_generational.priorities.segment_trees import read_leaves

CAPACITY, BATCH = 512, 32


class Soak:
    """Writers, learners, an emptier, a keeper of checkpoints and a scheduler on two buffers with one storage.

    A record has a number of its own and is born with priority 1; its TD error is 2 plus its number. So whatever the
    threads do, the priority of every slot must be one of these two for the very record that is there.
    """

    def __init__(self, folder: Path, *, prefetch: int | None) -> None:
        storage = g.GenerationalLazyTensorStorage(CAPACITY)
        self.buffers = [self.make(storage, prefetch), self.make(storage, None)]
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self.numbers = itertools.count()
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self.guard = threading.Lock()  # guards counts and errors

    def make(self, storage: Any, prefetch: int | None) -> Any:
        sampler = g.GenerationalPrioritizedSampler(CAPACITY, 0.8, 0.5, eps=0.0, dtype=torch.float64)
        return g.GenerationalTensorDictReplayBuffer(
            storage=storage, sampler=sampler, batch_size=BATCH, prefetch=prefetch
        )

    def count(self, **more: int) -> None:
        with self.guard:
            self.counts.update(more)

    def write(self, chance: random.Random) -> None:
        rb = chance.choice(self.buffers)
        count = chance.choice([1, 1, 7, 64, 600])
        numbers = torch.tensor([next(self.numbers) for _ in range(count)])
        data = TensorDict({"x": numbers, "td_error": torch.ones(count)}, [count])
        with contextlib.nullcontext() if rb is self.buffers[0] else rb.storage.lock:
            index = rb.extend(data) if count > 1 else rb.add(data[0])
            if rb is not self.buffers[0]:  # to which the record is one with the default priority
                self.buffers[0].update_priority(index, 1.0)
        self.count(written=count)

    def learn(self, chance: random.Random) -> None:
        rb = chance.choices(self.buffers, [4, 1])[0]
        try:
            sample = rb.sample()
        except RuntimeError as error:
            if "Cannot sample from an empty storage" not in str(error):
                raise
            self.count(empty=1)
            return
        time.sleep(chance.random() * 0.002)  # the TD errors take their time
        sample["td_error"] = 2.0 + sample["x"].double()
        result = rb.update_tensordict_priority_if_present(sample)
        self.count(sampled=BATCH, updated=result.num_updated, stale=result.num_stale)

    def empty(self, chance: random.Random) -> None:
        time.sleep(chance.random() * 0.2)
        chance.choice(self.buffers).empty()
        self.count(emptied=1)

    def keep(self, chance: random.Random) -> None:
        rb = self.buffers[0]
        state = rb.state_dict()
        if chance.random() < 0.3:
            rb.dumps(self.folder)
        time.sleep(chance.random() * 0.1)
        if (self.folder / "generational.json").exists() and chance.random() < 0.3:
            rb.loads(self.folder)
        else:
            rb.load_state_dict(state)
        self.count(restored=1)

    def anneal(self, chance: random.Random) -> None:
        scheduler = LinearScheduler(self.buffers[0], "alpha", final_value=chance.uniform(0.4, 1.0), num_steps=20)
        for _ in range(20):
            scheduler.step()
            time.sleep(0.001)
        self.buffers[0].sampler.beta = chance.random()
        self.count(annealed=20)

    def audit(self, chance: random.Random | None = None) -> None:
        rb = self.buffers[0]
        with rb.storage.lock:
            length = len(rb)
            if not length:
                return
            owner = rb.storage._storage["x"][:length].double().clone()
            leaf = read_leaves(rb.sampler._sum_tree, torch.arange(length)).clone()
            alpha = rb.sampler.alpha
        priority = leaf ** (1 / alpha)
        right = (priority - 1.0).abs() < 1e-6
        right |= (priority - (owner + 2.0)).abs() < 1e-6 * owner.clamp_min(1)
        self.count(audited=length, misapplied=int((~right).sum()))
        time.sleep(0.01)

    def run(self, seconds: float) -> dict[str, int]:
        actors = [self.write, self.write, self.learn, self.learn, self.empty, self.keep, self.anneal, self.audit]

        def act(step: Any, seed: int) -> None:
            chance = random.Random(seed)
            try:
                while not self.stop.is_set():
                    step(chance)
            except BaseException as error:
                with self.guard:
                    self.errors.append(error)
                self.stop.set()

        threads = [threading.Thread(target=act, args=(step, seed)) for seed, step in enumerate(actors)]
        for thread in threads:
            thread.start()
        self.stop.wait(seconds)
        self.stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        self.audit()
        for rb in self.buffers:
            rb.shutdown()
        if self.errors:
            raise self.errors[0]
        return dict(self.counts)


def check(counts: dict[str, int]) -> None:
    assert counts["misapplied"] == 0
    assert counts["updated"] + counts["stale"] == counts["sampled"]
    for happened in ("updated", "stale", "emptied", "restored", "annealed", "audited", "written"):
        assert counts[happened] > 0


@pytest.mark.parametrize("prefetch", [3, pytest.param(None, marks=pytest.mark.system)])
def test_threads_that_do_everything_at_once_misapply_nothing(prefetch, tmp_path):
    check(Soak(tmp_path, prefetch=prefetch).run(4))


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [None, 3])
def test_threads_that_do_everything_for_a_minute_misapply_nothing(prefetch, tmp_path, capsys):
    counts = Soak(tmp_path, prefetch=prefetch).run(60)
    with capsys.disabled():
        print("\nsoak", json.dumps(counts))
    check(counts)
