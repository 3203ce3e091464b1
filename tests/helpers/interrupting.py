"""Exceptions at any line of the package, and what a buffer has to look like after one."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

import torchrl_generational as g
from torchrl_generational.concurrency import process_lock as process_locks
from torchrl_generational.concurrency.deferred_signals import deferral

_HOME = str(Path(g.__file__).parent)
#: Once these have begun, nothing of Python's can stop them half-way: Ctrl-C is deferred in them, and they allocate
#: nothing. An exception made up at one of their lines would leave a lock taken, as it would in ``threading.RLock``.
_UNSTOPPABLE = {
    "StorageLock.release",
    "StorageLock.__exit__",
    "_ProcessLock.release",
    "KernelLock._give",
    "Section.__exit__",
    "_Sections.__exit__",
    "_Sections._leave",
    "Interruptible.__exit__",
    "Deferral.end",
    "Deferral.back_to",
    "Deferral.waiting",
    "Deferral.let_through",
    "Deferral.__exit__",
    "Deferral.renew",
    "_remove",  # the finalizer of some earlier storage
}


def _name_of(code: Any) -> str:
    if hasattr(code, "co_qualname"):
        return str(code.co_qualname)
    alike = [name for name in _UNSTOPPABLE if name.rpartition(".")[2] == code.co_name]  # Python 3.10 knows no more
    return alike[0] if alike else str(code.co_name)


class Interrupted(BaseException):
    """Raised at a line, as ``KeyboardInterrupt`` would be."""


class Stopper:
    """Raises at the ``number``-th line event of this thread inside the package; counts them where that is 0."""

    def __init__(self, number: int = 0) -> None:
        self.number, self.seen, self.where = number, 0, ""
        self._last: dict[Any, int] = {}  # line by frame

    def __enter__(self) -> Stopper:
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self.before)
        self._last.clear()  # frames keep alive what they hold

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_HOME) or _name_of(code) in _UNSTOPPABLE:
            return None
        return self._line

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and not self._leaves_block(frame):
            self.seen += 1
            if self.seen == self.number:
                sys.settrace(None)
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {_name_of(frame.f_code)}"
                raise Interrupted(self.where)
        return self._line

    def _leaves_block(self, frame: Any) -> bool:
        """Whether a frame is at the end of a ``with`` block, about to call ``__exit__``, or at a bare ``try``.

        Python runs no handler of a signal there and allocates nothing; and an exception made up at either is outside of
        the block that would clean up after it.
        """
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        before, self._last[frame] = self._last.get(frame, 0), frame.f_lineno
        return line == "try:" or (line.startswith("with ") and before > frame.f_lineno)


def lines_of(act: Callable[[], Any]) -> int:
    """How many lines of the package a call runs through."""
    with Stopper() as stopper:
        act()
    return stopper.seen


def interrupted(act: Callable[[], Any], number: int) -> str | None:
    """Where a call was interrupted; ``None`` if it was through before."""
    stopper = Stopper(number)
    try:
        with stopper:
            act()
    except Interrupted:
        return stopper.where
    except BaseException as error:
        if stopper.where:  # turned into another error on its way, as TorchRL does here and there
            return stopper.where
        raise error
    return stopper.where or None


@contextlib.contextmanager
def kernel_locks() -> Iterator[Counter[int]]:
    """How often each file of a lock is locked, as the kernel sees it: 0 or 1."""
    held: Counter[int] = Counter()
    lockf = process_locks.fcntl.lockf

    def noted(file: int, how: int, *rest: Any) -> Any:
        answer = lockf(file, how, *rest)
        held[file] = 0 if how & process_locks.fcntl.LOCK_UN else 1
        return answer

    process_locks.fcntl.lockf = noted
    try:
        yield held
    finally:
        process_locks.fcntl.lockf = lockf


_other = ThreadPoolExecutor(1, thread_name_prefix="other")


def free_for_others(*locks: Any) -> bool:
    """Whether another thread gets these locks at once."""

    def take(lock: Any) -> bool:
        taken = lock.acquire(blocking=False)
        if taken:
            lock.release()
        return bool(taken)

    return all(_other.submit(take, lock).result() for lock in locks)


class Snapshot:
    """The slots of a tensordict buffer: stamp, record and leaf of each, in a form that compares."""

    def __init__(self, rb: Any) -> None:
        self.storage = storage = rb.storage
        self.length = len(rb)
        values = storage.slot_generations.values.tolist()
        self.stamps = [-2 - stamp if stamp < -1 else stamp for stamp in values]
        self.marked = [stamp < -1 for stamp in values]
        self.records = storage._storage["x"].tolist() if storage.initialized else []
        sampler = rb._learners_sampler()
        self.leaves: list[float] = []
        if hasattr(sampler, "_sum_tree"):
            cells = torch.arange(sampler._max_capacity)
            self.leaves = torch.as_tensor(sampler._sum_tree[cells]).reshape(-1).float().tolist()
            self.minima = torch.as_tensor(sampler._min_tree[cells]).reshape(-1).float().tolist()
            self.maximum = sampler._max_priority[0]

    def slots(self) -> list[tuple[int, int, float]]:
        return [
            (self.stamps[slot], self.records[slot], self.leaves[slot] if self.leaves else 0.0)
            for slot in range(self.length)
        ]


def faults_after(
    rb: Any, before: Snapshot, new_leaf: Callable[[int], float | None], *, updates: bool = False
) -> list[str]:
    """What is wrong with a buffer in which a call was interrupted.

    Args:
        rb: the buffer.
        before: what it was like before the call.
        new_leaf: the leaf that a new record has to have, by its ``x``; ``None`` for any.
        updates: whether the call may have changed priorities of records that are there.
    """
    faults = []
    if deferral.depth:
        deferral.back_to(0)
        return ["signals stay deferred"]
    wait(rb._pending_update_futures)  # what was submitted goes on, whoever was interrupted
    lock = rb.storage.lock
    if lock._depth or not free_for_others(lock._threads, rb._futures_lock):
        return ["a lock is taken"]
    if rb.storage.slot_generations.opened is not None:
        faults.append("a section is open")
    rb._catch_up()
    now = Snapshot(rb)
    if rb.storage is not before.storage:
        return faults
    for slot, (old, new) in enumerate(zip(before.stamps, now.stamps, strict=True)):
        if new < old:
            faults.append(f"the stamp of slot {slot} went from {old} back to {new}")
    for slot in range(now.length):
        leaf = now.leaves[slot] if now.leaves else None
        if leaf is not None and leaf > 0 and now.minima[slot] != leaf:
            faults.append(f"the trees differ in slot {slot}: {leaf} and {now.minima[slot]}")
        if now.marked[slot]:
            if leaf and not rb.storage.slot_generations.interrupted:
                faults.append(f"slot {slot} holds no record and is drawn")
            continue
        if slot < before.length and now.stamps[slot] == before.stamps[slot] and not before.marked[slot]:
            if now.records[slot] != before.records[slot]:
                faults.append(f"slot {slot} holds another record under its old stamp")
            if leaf is not None and not updates and leaf != before.leaves[slot]:
                faults.append(f"slot {slot} holds its old record with another leaf, {leaf}")
        elif now.stamps[slot] >= 0:
            wanted = new_leaf(now.records[slot])
            if wanted is not None and leaf is not None and abs(leaf - wanted) > 1e-6:
                faults.append(f"slot {slot} holds record {now.records[slot]} with leaf {leaf} instead of {wanted}")
        else:
            faults.append(f"slot {slot} was never written and lies below the length")
    return faults


def faults_of_use(rb: Any, records: Callable[[int, int], Any]) -> list[str]:
    """What is wrong with a buffer that is used after all: drawn from, written all over, updated."""
    faults = []
    capacity = rb.storage.max_size
    rb.extend(records(3, 500))
    for _ in range(3):
        data, info = rb.sample(return_info=True)
        x = (data["x"] if hasattr(data, "keys") else data).reshape(-1)
        slots = info["index"] if not isinstance(info["index"], tuple) else info["index"][0]
        slots = slots.reshape(-1)
        if bool((info["index_generation"] < 0).any()):
            faults.append("a slot without a record was drawn")
        held = rb.storage._storage["x"][slots]
        if not torch.equal(held, x):
            faults.append("a sample is not what its slots hold")
    rb.extend(records(capacity, 600))
    if sorted(rb.storage._storage["x"].tolist()) != list(range(600, 600 + capacity)):
        faults.append("one turn of the ring does not replace all records")
    if len(rb) != capacity or bool((rb.storage.slot_generations.values < 0).any()):
        faults.append("one turn of the ring does not fill all slots")
    data, info = rb.sample(return_info=True)
    result = rb.update_priority_if_present(index=info["index"], generation=info["index_generation"], priority=2.0)
    if result.num_stale:
        faults.append("fresh handles are stale")
    leaves = Snapshot(rb).leaves
    if leaves and abs(sum(leaves[:capacity]) - rb._learners_sampler()._sum_tree.query(0, capacity)) > 1e-3:
        faults.append("the root is not the sum of the leaves")
    return faults
