"""Whatever is raised at whatever line of a public method, the buffer can be used afterwards, nothing mixed up."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from children import child_says, forked
from interrupting import Snapshot, faults_after, faults_of_use, free_for_others, interrupted, kernel_locks
from support import TIMEOUT, announce_blocked, records
from tensordict import TensorDict
from test_lock_discipline import ACTS, LATER_ACTS
from torchrl.envs.transforms import UnaryTransform

import torchrl_generational as g
from torchrl_generational.concurrency.deferred_signals import deferral

CAPACITY = 8
NEW = 100  # new records are x = 100, 101, ...


def own_priority(x: torch.Tensor) -> torch.Tensor:
    """The first priority that each record brings along."""
    return (x % 100).float() / 10 + 20


def with_priority(count: int, start: int) -> TensorDict:
    data = records(count, start, y=torch.zeros(count, dtype=torch.int64))
    return data.set("td_error", own_priority(data["x"]))


KINDS: dict[str, dict[str, Any]] = {"plain": {}, "shared": {"shared": True}, "sync=False": {"sync": False}}


def build(kind: str, **kwargs: Any) -> Any:
    """A full ring of records 0 to 7 with leaves 1 to 8, that has wrapped: slot 0 is next."""
    kwargs.setdefault("storage", g.GenerationalLazyTensorStorage(CAPACITY))
    rb = g.GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, batch_size=4, generator=torch.Generator().manual_seed(0), **KINDS[kind], **kwargs
    )
    rb.extend(with_priority(CAPACITY, 0))
    rb.sample()
    rb.update_priority(torch.arange(CAPACITY), torch.arange(1.0, CAPACITY + 1))
    return rb


WRITES: dict[str, Any] = {
    "extend": lambda rb, info, td, path: rb.extend(with_priority(3, NEW)),
    "extend over the seam": lambda rb, info, td, path: (
        rb.extend(with_priority(6, NEW)),
        rb.extend(with_priority(4, NEW + 6)),
    ),
    "extend by more than the ring": lambda rb, info, td, path: rb.extend(with_priority(11, NEW)),
    "add": lambda rb, info, td, path: rb.add(with_priority(1, NEW)[0]),
    "setitem": lambda rb, info, td, path: rb.__setitem__(slice(2, 5), with_priority(3, NEW)),
    "setitem, list": lambda rb, info, td, path: rb.__setitem__(torch.tensor([1, 6]), with_priority(2, NEW)),
    "write_all": lambda rb, info, td, path: rb.write_all(with_priority(CAPACITY, NEW)),
}


def checked(kind: str, act: Any, tmp_path: Any, *, new_leaf: Any, updates: bool = False, **kwargs: Any) -> int:
    """Interrupts an act at each of its lines in turn; returns how many there were."""

    def fresh() -> tuple[Any, Any, Any]:
        rb = build(kind, **kwargs)
        data, info = rb.sample(return_info=True)
        return rb, info, data.set("td_error", torch.full((4,), 50.0))

    fresh()  # a process that shares for the first time takes a lock that it keeps for life
    number, faults = 0, []
    while True:
        number += 1
        with kernel_locks() as held:
            rb, info, td = fresh()
            before = Snapshot(rb)
            where = interrupted(partial(act, rb, info, td, tmp_path), number)
            if where is None:
                break
            found = [] if not any(held.values()) else ["the kernel's lock is taken"]
        if act is REPLACEMENTS["empty"] and not (len(rb) == 0 or Snapshot(rb).slots() == before.slots()):
            found.append("some parts are empty")
        found += faults_after(rb, before, new_leaf(rb), updates=updates)
        if not any("lock" in fault for fault in found):
            found += faults_of_use(rb, with_priority)
        faults += [f"{where}: {fault}" for fault in found]
    assert not faults, f"{len(faults)} faults in {number} lines:\n" + "\n".join(faults[:40])
    return number


def own_leaf(rb: Any) -> Any:
    return lambda x: float(own_priority(torch.tensor(x)))


def any_leaf(rb: Any) -> Any:
    return lambda x: None


def default_leaf(rb: Any) -> Any:
    """New records are born at the running maximum, which no record here had left alone."""
    return lambda x: float(rb._learners_sampler().default_priority)


def handles(info: dict[str, Any]) -> dict[str, Any]:
    return {"index": info["index"], "generation": info["index_generation"]}


UPDATES: dict[str, Any] = {
    "mark_update": lambda rb, info, td, path: rb.mark_update(torch.tensor([1])),
    "update_priority": lambda rb, info, td, path: rb.update_priority(torch.tensor([0, 3]), torch.tensor([50.0, 0.5])),
    "update_priority_if_present": lambda rb, info, td, path: rb.update_priority_if_present(
        **handles(info), priority=50
    ),
    "update_priority_if_present, a list": lambda rb, info, td, path: rb.update_priority_if_present(
        index=info["index"].tolist(), generation=info["index_generation"].tolist(), priority=50
    ),
    "submit_update_priority_if_present": lambda rb, info, td, path: rb.submit_update_priority_if_present(
        **handles(info), priority=torch.ones(4)
    ).result(),
    "update_tensordict_priority": lambda rb, info, td, path: rb.update_tensordict_priority(td),
    "update_tensordict_priority_if_present": lambda rb, info, td, path: rb.update_tensordict_priority_if_present(td),
    "alpha": lambda rb, info, td, path: setattr(rb._learners_sampler(), "alpha", 0.5),
    "beta": lambda rb, info, td, path: setattr(rb._learners_sampler(), "beta", 0.5),
}
FIELDS: dict[str, Any] = {
    "set_": lambda rb, info, td, path: rb.set_("y", torch.arange(8)),
    "set_at_": lambda rb, info, td, path: rb.set_at_("y", torch.tensor([0]), [0]),
    "update_": lambda rb, info, td, path: rb.update_(TensorDict({"y": torch.arange(8)}, [8])),
    "update_if_present": lambda rb, info, td, path: rb.update_if_present(
        **handles(info), patch={"y": torch.zeros(4, dtype=torch.int64)}
    ),
    "submit_update_if_present": lambda rb, info, td, path: rb.submit_update_if_present(
        **handles(info), patch={"y": torch.zeros(4, dtype=torch.int64)}
    ).result(),
}
READS: dict[str, Any] = {
    "dump": lambda rb, info, td, path: rb.dump(path / "there"),
    "dumps": lambda rb, info, td, path: rb.dumps(path / "there"),
    "save": lambda rb, info, td, path: rb.save(path / "there"),
    "next": lambda rb, info, td, path: rb.next(),
    "sample": lambda rb, info, td, path: rb.sample(),
    "state_dict": lambda rb, info, td, path: rb.state_dict(),
    "stats": lambda rb, info, td, path: rb.stats(),
    "__getstate__": lambda rb, info, td, path: rb.__getstate__(),
    "__deepcopy__": lambda rb, info, td, path: copy.deepcopy(rb),
    "__getitem__": lambda rb, info, td, path: rb[2:4],
    "__iter__": lambda rb, info, td, path: next(iter(rb)),
    "can_sample": lambda rb, info, td, path: rb.can_sample(4),
    "query": lambda rb, info, td, path: rb.query(trajectory_key="x"),
    "read_all_in_order": lambda rb, info, td, path: rb.read_all_in_order(),
    "set_rng": lambda rb, info, td, path: rb.set_rng(torch.Generator()),
    "set_writer": lambda rb, info, td, path: rb.set_writer(g.GenerationalTensorDictRoundRobinWriter()),
}
REPLACEMENTS: dict[str, Any] = {
    "empty": lambda rb, info, td, path: rb.empty(),
    "set_sampler": lambda rb, info, td, path: rb.set_sampler(g.GenerationalPrioritizedSampler(8, 1.0, 1.0, eps=0.0)),
    "set_storage": lambda rb, info, td, path: rb.set_storage(g.GenerationalLazyTensorStorage(8)),
}
LOADS = {"load", "loads", "load_state_dict"}  # in buffers/test_restores.py


def test_every_public_method_is_interrupted_somewhere():
    named = WRITES | UPDATES | FIELDS | READS | REPLACEMENTS
    missing = ACTS.keys() - named.keys() - LOADS - {"__setitem__"} - LATER_ACTS.keys()
    assert missing == set()


def possible(kind: str, name: str) -> bool:
    exchange = name in ("set_writer", "set_storage")  # what processes share cannot be exchanged
    return not (kind == "shared" and exchange) and not (kind == "sync=False" and name == "set_sampler")


# one of each sort in the default run, some more in that of whole programs; the others take minutes
QUICK = {"extend", "update_priority_if_present", "sample", "update_if_present", "empty"}
SYSTEM = {"add", "setitem", "set_sampler"}


def marks(kind: str, name: str) -> list[Any]:
    if kind != "plain" or name not in QUICK | SYSTEM:
        return [pytest.mark.slow]
    return [pytest.mark.system] if name in SYSTEM else []


def cases(acts: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(kind, name, marks=marks(kind, name)) for kind in KINDS for name in acts if possible(kind, name)
    ]


@pytest.mark.parametrize(("kind", "name"), cases(WRITES))
def test_a_write_that_is_interrupted_leaves_old_records_or_new_ones_with_their_own_priority(kind, name, tmp_path):
    first = own_leaf if "extend" in name or name == "add" else default_leaf
    checked(kind, WRITES[name], tmp_path, new_leaf=first)


@pytest.mark.parametrize(("kind", "name"), cases(UPDATES))
def test_an_update_that_is_interrupted_leaves_records_and_trees_whole(kind, name, tmp_path):
    checked(kind, UPDATES[name], tmp_path, new_leaf=any_leaf, updates=True)


@pytest.mark.parametrize(("kind", "name"), cases(FIELDS))
def test_a_field_update_that_is_interrupted_touches_nothing_else(kind, name, tmp_path):
    checked(kind, FIELDS[name], tmp_path, new_leaf=any_leaf)


@pytest.mark.parametrize(("kind", "name"), cases(READS))
def test_a_read_that_is_interrupted_changes_nothing(kind, name, tmp_path):
    checked(kind, READS[name], tmp_path, new_leaf=any_leaf)


@pytest.mark.parametrize(("kind", "name"), cases(REPLACEMENTS))
def test_a_replacement_that_is_interrupted_has_happened_or_not(kind, name, tmp_path):
    checked(kind, REPLACEMENTS[name], tmp_path, new_leaf=any_leaf, updates=True)


OPTIONS = ["SIGINT", "SIGINT shared", "SIGALRM", "SIGTERM shared"]


@pytest.mark.parametrize(
    ("options", "signals", "seed"),
    [pytest.param("SIGINT", 200, 0, id="SIGINT-200")]
    + [pytest.param(options, 200, 0, marks=pytest.mark.system, id=f"{options}-200") for options in OPTIONS[1:]]
    + [pytest.param(options, 20_000, None, marks=pytest.mark.slow, id=f"{options}-20,000") for options in OPTIONS],
)
def test_real_signals_at_random_moments_leave_a_buffer_that_threads_and_processes_can_use(options, signals, seed):
    seed = int.from_bytes(os.urandom(4), "big") if seed is None else seed
    print(f"seed {seed}")
    program = Path(__file__).parents[1] / "helpers" / "interrupted_loop.py"
    done = subprocess.run(
        [sys.executable, str(program), str(signals), str(seed), *options.split()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RL_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    came, inside, faults = json.loads(done.stdout.splitlines()[-1])
    print(f"{came} signals, {inside} of them ended a call of the buffer")
    assert (came, faults) == (signals, [])
    assert inside > signals // 10  # else this is no test


def test_ctrl_c_ends_the_wait_for_a_section_that_another_thread_holds(actors):
    rb = build("plain")
    actors.other(rb.storage.lock.acquire)
    blocked = announce_blocked(rb.storage.lock, threading.main_thread().name)

    def interrupt() -> None:
        assert blocked.wait(TIMEOUT)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        rb.extend(with_priority(1, NEW))
    sender.join()
    assert_ctrl_c_is_pythons()
    actors.other(rb.storage.lock.release)
    assert free_for_others(rb.storage.lock._threads)
    assert rb.storage.generations.tolist() == [0] * CAPACITY


def test_ctrl_c_ends_the_wait_for_a_section_that_another_process_holds():
    rb = build("shared")
    with forked(lambda: (rb.storage.lock.acquire(), child_says("held"), time.sleep(TIMEOUT))) as child:
        child.wait_for("held")

        def interrupt() -> None:
            while rb.storage.lock._processes.waiting_since is None:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        sender = threading.Thread(target=interrupt)
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            rb.extend(with_priority(1, NEW))
        sender.join()
        child.kill()
    assert rb.storage.generations.tolist() == [0] * CAPACITY
    rb.extend(with_priority(1, NEW))


def assert_ctrl_c_is_pythons() -> None:
    """Between sections a signal raises, where it comes, what Python raises, and nothing of ours is in the traceback."""
    with pytest.raises(KeyboardInterrupt) as raised:
        signal.raise_signal(signal.SIGINT)
    assert {Path(entry.path).name for entry in raised.traceback} <= {"test_interrupts.py"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_inside_a_section_is_raised_at_its_end():
    rb = interrupted_in_its_next_write(build("plain"))
    with pytest.raises(KeyboardInterrupt):
        rb.extend(with_priority(3, NEW))
    assert rb.storage.generations.tolist() == [1] * 3 + [0] * 5  # it was written, all of it
    assert rb[:3]["x"].tolist() == [NEW, NEW + 1, NEW + 2]
    assert deferral.depth == 0
    assert_ctrl_c_is_pythons()


def interrupted_in_its_next_write(rb: Any, *numbers: int) -> Any:
    reach = rb.storage.reach

    def interrupted_there(rows: Any) -> None:
        for number in numbers or (signal.SIGINT,):
            signal.raise_signal(number)
        reach(rows)

    rb.storage.reach = interrupted_there
    return rb


@contextlib.contextmanager
def handling(handler: Any, number: int = signal.SIGINT) -> Iterator[Any]:
    """That is the process's handler meanwhile, put there as programs do it. Gives the one of before."""
    before = signal.signal(number, handler)
    try:
        yield before
    finally:
        assert signal.getsignal(number) == handler
        signal.signal(number, before)


@pytest.mark.parametrize("used_before", [False, True])
def test_a_handler_of_somebody_is_called_at_the_end_of_a_section_and_is_back_after_it(used_before):
    rb, calls = build("plain"), []
    if used_before:
        rb.extend(with_priority(1, NEW))
    interrupted_in_its_next_write(rb)
    with handling(lambda number, frame: calls.append(rb.storage.lock._depth)):
        rb.extend(with_priority(3, NEW))
        signal.raise_signal(signal.SIGINT)
    assert calls == [0, 0]  # the first waited, the second did not
    rb.sample()
    assert_ctrl_c_is_pythons()
    assert calls == [0, 0]


def test_a_handler_of_somebody_may_call_the_one_of_before():
    rb = build("plain")
    rb.extend(with_priority(1, NEW))
    interrupted_in_its_next_write(rb)
    befores: list[Any] = []
    with handling(lambda number, frame: befores[0](number, frame)) as before:
        befores.append(before)
        with pytest.raises(KeyboardInterrupt):
            rb.extend(with_priority(3, NEW))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert free_for_others(rb.storage.lock._threads)
    assert_ctrl_c_is_pythons()


class StopError(Exception):
    """Of a handler."""


def stop(number: int, frame: Any) -> None:
    raise StopError(number)


SIGNALS = [signal.SIGINT, signal.SIGALRM, signal.SIGTERM]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_that_raises_waits_for_the_end_of_a_section_and_stays(number):
    rb = interrupted_in_its_next_write(build("plain"), number)
    with handling(stop, number):
        for written in (1, 2):
            with pytest.raises(StopError):
                rb.extend(with_priority(3, NEW))
            assert rb.write_count == CAPACITY + 3 * written
    assert free_for_others(rb.storage.lock._threads)
    assert deferral.depth == 0


def test_several_signals_in_one_section_are_all_handled_at_its_end_each_once():
    rb, calls = interrupted_in_its_next_write(build("plain"), *SIGNALS, *SIGNALS), []

    def noted(number: int, frame: Any) -> None:
        calls.append((signal.Signals(number), rb.storage.lock._depth))
        raise StopError(number)

    with contextlib.ExitStack() as handlers:
        for number in SIGNALS:
            handlers.enter_context(handling(noted, number))
        with pytest.raises(StopError):
            rb.extend(with_priority(3, NEW))
        assert sorted(calls) == [(number, 0) for number in sorted(SIGNALS)]
        assert free_for_others(rb.storage.lock._threads)
        for number in SIGNALS:
            with pytest.raises(StopError):
                signal.raise_signal(number)


def test_ctrl_c_inside_a_transform_of_a_sample_is_raised_as_such():
    """In TorchRL it is lost: leaving `unlock_()` raises another error."""
    rb = build("plain")

    def interrupted_there(x: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        return x

    rb.append_transform(UnaryTransform(["x"], ["x"], fn=interrupted_there))
    with pytest.raises(KeyboardInterrupt):
        rb.sample()


def test_asyncio_cancels_its_main_task_at_ctrl_c_after_a_buffer_was_used():
    rb, ended = build("plain"), []
    rb.sample()

    async def interrupted() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            rb.sample()
            ended.append("step")
            await asyncio.sleep(TIMEOUT)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())
    assert ended == ["step", "cancelled"] if sys.version_info >= (3, 11) else ended == []
    assert_ctrl_c_is_pythons()


def test_a_handler_that_is_exchanged_inside_a_section_stays():
    rb, calls = build("plain"), []
    reach = rb.storage.reach

    def exchanged_there(rows: Any) -> None:
        signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
        reach(rows)

    rb.storage.reach = exchanged_there
    before = signal.getsignal(signal.SIGINT)
    try:
        rb.extend(with_priority(3, NEW))
        signal.raise_signal(signal.SIGINT)
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_was_found_inside_a_section_can_be_put_back_later():
    """As TorchRL does, whose memory-mapped storages put a handler of their own before it."""
    rb, calls = build("plain"), []
    reach = rb.storage.reach
    found: list[Any] = []

    def looked_there(rows: Any) -> None:
        found.append(signal.getsignal(signal.SIGINT))
        reach(rows)

    rb.storage.reach = looked_there
    with handling(lambda number, frame: calls.append(rb.storage.lock._depth)):
        rb.extend(with_priority(1, NEW))
        rb.extend(with_priority(1, NEW))
        ours = found[-1]
        with handling(ours):
            signal.raise_signal(signal.SIGINT)
            assert calls == [0]
            interrupted_in_its_next_write(rb)
            rb.extend(with_priority(1, NEW))
            assert calls == [0, 0]
            signal.signal(signal.SIGINT, ours)
    assert_ctrl_c_is_pythons()


def test_a_handler_that_is_no_python_function_is_left_alone():
    rb = build("plain")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        rb.extend(with_priority(3, NEW))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_section_of_another_thread_defers_nothing(actors):
    rb = build("plain")
    with rb._exclusive():
        assert deferral.depth == 1
    actors.other(rb.storage.lock.acquire)
    assert deferral.depth == 0
    actors.other(rb.storage.lock.release)
