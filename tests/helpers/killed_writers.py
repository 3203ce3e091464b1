"""Kills processes while they write to a shared buffer, and audits what the learner then finds.

Used by ``system/test_killed_writers.py``, and

    python tests/killed_writers.py KIND tensors|memmap DIRECTORY    SIGKILL at every line of one kind of write
    python tests/killed_writers.py KILLS tensors|memmap DIRECTORY   SIGKILL at that many random moments

print a JSON object that says what happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from children import Child, child_says, forked
from support import TIMEOUT, leaves
from tensordict import TensorDict

import torchrl_generational as g

CAPACITY = 32
PACKAGE = Path(g.__file__).parent
# modules of which every line changes what processes share, or is next to one that does
CHANGING = {"change_log", "shared_counter", "slot_generations", "record_io", "write_protocol"}
# and those around them
AROUND = CHANGING | {"process_lock", "round_robin_writers"}


def make(storage: str, folder: Path, *, capacity: int = CAPACITY, batch_size: int = 16) -> Any:
    """A buffer that processes share, never written to."""
    if storage == "tensors":
        made: Any = g.GenerationalLazyTensorStorage(capacity)
    else:
        folder.mkdir(parents=True)
        made = g.GenerationalLazyMemmapStorage(capacity, scratch_dir=folder, existsok=True)
    return g.GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        eps=0.0,
        storage=made,
        batch_size=batch_size,
        shared=True,
        generator=torch.Generator().manual_seed(0),
    )


def batch(count: int, start: int, *, width: int = 8, first: bool = False) -> TensorDict:
    """``count`` records that all consist of one number each; an odd one, where they bring their first priorities."""
    x = 2 * torch.arange(start, start + count) + first
    data = TensorDict({"x": x, "payload": x.double()[:, None].repeat(1, width)}, [count])
    return data.set("td_error", first_priority(x)) if first else data


def first_priority(x: torch.Tensor) -> torch.Tensor:
    return 0.25 + (x % 64).float() / 128


# ------------------------------------------------------------------ the learner


class Auditor:
    """A learner that knows which records there may be, and which priority each of them has.

    All numbers of records are below those that ``issued`` says, by author (a record's number above 32 bits).
    """

    def __init__(self, rb: Any, issued: torch.Tensor, *, seed: int = 0) -> None:
        self.rb, self.issued = rb, issued
        self.chance = torch.Generator().manual_seed(seed)
        capacity = rb.storage.max_size
        self.stamps = torch.full((capacity,), -1)
        self.x = torch.zeros(capacity, dtype=torch.int64)
        self.leaf = torch.zeros(capacity)
        self.killed = torch.zeros(0, dtype=torch.int64)  # numbers of records whose writer was killed
        self.half_emptied = False
        self.taken: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # handles, and what they named
        self.counts: Counter[str] = Counter()

    def knows(self, x: torch.Tensor) -> bool:
        """Whether all records of these numbers were begun by someone."""
        number = x // 2
        return bool((number % 2**32 < self.issued[number // 2**32]).all())

    def whole(self, x: torch.Tensor, payload: torch.Tensor) -> bool:
        return bool((payload == x[:, None]).all()) and self.knows(x)

    def sample(self) -> bool:
        """Draws a batch, and keeps its handles. Returns whether there was anything to draw."""
        try:
            sample = self.rb.sample()
        except RuntimeError as error:
            if "Cannot sample" in str(error):
                return False
            raise
        assert self.whole(sample["x"], sample["payload"]), sample
        assert (sample["index_generation"] >= 0).all()
        self._take(sample["index"], sample["index_generation"], sample["x"])
        self.counts["sampled"] += len(sample)
        return True

    def _take(self, index: torch.Tensor, generation: torch.Tensor, x: torch.Tensor) -> None:
        self.taken = [*self.taken[-3:], (index, generation, x)]

    def look(self) -> torch.Tensor:
        """Samples, and checks all slots and all priorities. Returns the stamps."""
        rb = self.rb
        with rb.storage.lock:
            drew = self.sample()
            stamps, length = rb.storage.generations.clone(), len(rb)
            rows = torch.arange(len(stamps))
            live = (stamps >= 0) & (rows < length)
            assert drew == bool(live.any())
            if not rb.storage.initialized:
                return stamps
            held = rb.storage._storage
            x = held["x"].clone()
            assert self.whole(x[live], held["payload"][live])
            if drew:
                index, generation, drawn = self.taken[-1]
                assert torch.equal(stamps[index], generation)
                assert torch.equal(x[index], drawn)
            self._check_stamps(stamps, x)
            leaf = leaves(rb)
            assert not leaf[~live].any()
            self._check_leaves(stamps, live, x, leaf)
        self.stamps, self.x, self.leaf = stamps, x, leaf
        self._take(rows[live], stamps[live], x[live])
        self.counts["looked"] += 1
        return stamps

    def _check_stamps(self, stamps: torch.Tensor, x: torch.Tensor) -> None:
        """A stamp never comes back, and never means another record."""
        before, now = (torch.where(each < -1, -2 - each, each) for each in (self.stamps, stamps))
        assert (now >= before).all()
        same = now == before
        assert (stamps[same] <= self.stamps[same]).all()  # what was interrupted is not completed by others
        same &= stamps >= 0
        assert torch.equal(x[same], self.x[same])

    def _check_leaves(self, stamps: torch.Tensor, live: torch.Tensor, x: torch.Tensor, leaf: torch.Tensor) -> None:
        """A record has the priority last set, or at first its writer's, or the default one."""
        right = (stamps == self.stamps) & (leaf == self.leaf)
        new = stamps != self.stamps
        if self.half_emptied:
            new |= True
        brought = (x % 2).bool()
        default = leaf == float(self.rb.sampler.default_priority)
        right |= new & brought & (leaf == first_priority(x))
        right |= new & ~brought & default
        right |= new & brought & torch.isin(x, self.killed) & default
        if self.half_emptied:
            right |= new & default
        self.half_emptied = False
        wrong = (live & ~right).nonzero()[:5, 0]
        assert not len(wrong), (wrong, stamps[wrong], x[wrong], leaf[wrong])

    def update(self) -> None:
        """Uses all handles taken lately, and looks at what that did."""
        rb = self.rb
        with rb.storage.lock:
            taken, self.taken = self.taken, []
            stamps = self.look()
            for index, generation, x in taken:
                priority = torch.randint(1, 1024, index.shape, generator=self.chance).float() / 1024
                result = rb.update_priority_if_present(index=index, generation=generation, priority=priority)
                mask = result.updated_mask
                named = index[mask]
                assert torch.equal(mask, (stamps[index] == generation) & (index < len(rb)))
                assert torch.equal(rb.storage._storage["x"][named], x[mask])
                self.leaf.numpy()[named.numpy()] = priority[mask].numpy()  # of several the last
                self.counts.update(updated=result.num_updated, stale=result.num_stale)

    def was_killed(self, numbers: torch.Tensor) -> None:
        self.killed = torch.cat([self.killed[-8192:], numbers])

    def draws_every_slot(self) -> None:
        """All slots hold records and are drawn."""
        stamps = self.look()
        assert (stamps >= 0).all()
        assert (self.leaf > 0).all()
        self.rb.update_priority(torch.arange(len(stamps)), 0.5)
        self.leaf[:] = 0.5
        drawn: set[int] = set()
        for _ in range(200):
            assert self.sample()
            drawn |= set(self.taken[-1][0].tolist())
        assert len(drawn) == len(stamps)


# ------------------------------------------------------------------ killed at every line


class Neighbour:
    """Another process that writes when told to, as long as it lives."""

    def __init__(self, rb: Any, child: Child, commands: int) -> None:
        self.child, self._commands, self._asked = child, commands, 0

    def asked(self, count: int, start: int, *, first: bool = False) -> None:
        """Returns when it has written so many records; for 0 when it has had the lock."""
        self._asked += 1
        os.write(self._commands, f"{self._asked} {count} {start} {first:d}\n".encode())
        self.child.wait_for(f"did {self._asked}")


@contextlib.contextmanager
def neighbour(rb: Any) -> Iterator[Neighbour]:
    reading, writing = os.pipe()

    def work() -> None:
        os.close(writing)
        for line in open(reading):  # noqa: SIM115
            number, count, start, first = map(int, line.split())
            if count:
                rb.extend(batch(count, start, first=bool(first)))
            else:
                with rb.storage.lock:
                    pass
            child_says(f"did {number}")

    with forked(work) as child:
        os.close(reading)
        yield Neighbour(rb, child, writing)
    os.close(writing)


class Points:
    """Where a process can be killed: lines, or instructions, of Python code that it runs.

    Args:
        modules: of the package, by name; ``None`` for all of them.
        foreign: every so many lines of all other code as well; 0 for none.
        again: whether a line counts each time it runs, or only the first. Those that copy records always do.
        instructions: whether single instructions count, not lines.
    """

    def __init__(
        self,
        modules: set[str] | None = None,
        *,
        foreign: int = 0,
        again: bool = True,
        instructions: bool = False,
    ) -> None:
        assert {path.stem for path in PACKAGE.rglob("*.py")} >= (modules or set())
        self.modules, self.foreign, self.again, self.instructions = modules, foreign, again, instructions

    def die_at(self, number: int, write: Callable[[], Any], moment: torch.Tensor) -> None:
        """Runs ``write`` up to the point of that number, and notes when it got there."""
        met: set[Any] = set()
        passed = elsewhere = 0
        kinds: dict[str, str] = {}
        event_wanted = "opcode" if self.instructions else "line"

        def kind_of(file: str) -> str:
            path = Path(file)
            if PACKAGE in path.parents and path.parent.name != "testing":
                wanted = self.modules is None or path.stem in self.modules
                return "records" if wanted and path.stem == "record_io" else "own" if wanted else "foreign"
            return "none" if file == __file__ else "foreign"

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal passed, elsewhere
            file = frame.f_code.co_filename
            kind = kinds.get(file)
            if kind is None:
                kind = kinds[file] = kind_of(file)
            if kind == "none" or (kind == "foreign" and not self.foreign):
                return None
            if event == "call":
                frame.f_trace_opcodes = self.instructions
            if event != event_wanted:
                return trace
            if kind == "foreign":
                elsewhere += 1
                if elsewhere % self.foreign:
                    return trace
            elif not self.again and not (kind == "records" and frame.f_code.co_name == "copy"):
                point = (frame.f_code, frame.f_lasti if self.instructions else frame.f_lineno)
                if point in met:
                    return trace
                met.add(point)
            passed += 1
            if passed == number:
                moment[0] = time.monotonic()
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        try:
            write()
        finally:
            sys.settrace(None)


#: How many records a write of each kind has.
KINDS = {
    "extend": 8,
    "extend that wraps": 12,
    "extend longer than the ring": 80,
    "extend with td_error": 12,
    "extend over records not seen yet": 8,
    "extend of a ring not full": 8,
    "add": 1,
    "assignment": 5,
    "empty": 0,
}


def writes(kind: str, rb: Any, start: int) -> tuple[Callable[[], Any], torch.Tensor]:
    """A write of that kind, and the numbers of its records."""
    data = batch(KINDS.get(kind, 8), start, first=kind in ("add", "extend with td_error"))
    numbers = data["x"].clone()
    if kind == "empty":
        return rb.empty, numbers
    if kind == "assignment":
        return lambda: rb.__setitem__(torch.tensor([30, 5, 7, 5, 0]), data), numbers
    if kind == "add":
        record = data[0]
        return lambda: rb.add(record), numbers
    return lambda: rb.extend(data), numbers


class Lines:
    """One buffer, a learner, another writer, and a write that is killed at each of its points in turn."""

    def __init__(self, rb: Any, other: Neighbour) -> None:
        self.rb, self.other = rb, other
        self.issued, self.moment = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
        self.moment.share_memory_()
        self.auditor = Auditor(rb, self.issued)
        self.worst = 0.0

    def issue(self, count: int) -> int:
        start = int(self.issued[0])
        self.issued[0] += count
        return start

    def extend(self, count: int, *, here: bool) -> None:
        if here:
            self.rb.extend(batch(count, self.issue(count)))
        elif count:
            self.other.asked(count, self.issue(count))

    def prepare(self, kind: str, *, here: bool) -> None:
        """Brings the ring to where a write of that kind begins."""
        capacity, cursor = self.rb.storage.max_size, self.rb.writer._cursor
        if kind == "extend of a ring not full":
            self.rb.empty()
            self.extend(8, here=here)
        elif len(self.rb) < capacity:
            self.extend(capacity, here=here)
        if kind == "extend":
            assert cursor + KINDS[kind] <= capacity
        if kind == "extend that wraps":
            short = (capacity - 5 - self.rb.writer._cursor) % capacity
            if short:
                self.extend(short, here=here)

    def kill(self, kind: str, number: int, points: Points) -> bool:
        """Kills a write at a point of it, and checks everything. Returns whether it had as many points."""
        count = KINDS.get(kind, 8)
        write, numbers = writes(kind, self.rb, self.issue(count))
        with forked(lambda: points.die_at(number, write, self.moment)) as victim:
            code = victim.exit_code()
        assert code in (0, -signal.SIGKILL)
        self.auditor.was_killed(numbers)
        self.auditor.half_emptied = kind == "empty"
        self.other.asked(0, 0)
        if code:
            self.worst = max(self.worst, time.monotonic() - float(self.moment[0]))
        return code != 0

    def check(self, kind: str, number: int) -> None:
        """What the learner finds after a kill, and after the next write of this process or another."""
        auditor, capacity = self.auditor, self.rb.storage.max_size
        auditor.update()
        torn = int((auditor.stamps < -1).sum())
        auditor.counts["interrupted"] += torn > 0
        auditor.counts["all interrupted"] += torn == capacity
        start = time.monotonic()
        count = capacity if kind in ("assignment", "empty") else KINDS.get(kind, 8)
        self.extend(count, here=bool(number % 2))
        self.worst = max(self.worst, time.monotonic() - start)
        # the next write goes over the slots of the one that was killed
        auditor.update()
        assert not (auditor.stamps < -1).any()

    def lap(self) -> None:
        self.extend(self.rb.storage.max_size, here=False)
        self.auditor.draws_every_slot()

    def report(self, kills: int) -> dict[str, Any]:
        return {"kills": kills, "worst": round(self.worst, 3), **self.auditor.counts}


def killed_at_every_line(kind: str, storage: str, folder: Path, points: Points) -> dict[str, Any]:
    """Kills a write at each of its points in turn, on one buffer, which goes on in between."""
    rb = make(storage, folder)
    with neighbour(rb) as other:
        lines = Lines(rb, other)
        lines.extend(CAPACITY, here=False)
        for number in range(1, 10**6):
            lines.prepare(kind, here=bool(number % 3))
            lines.auditor.look()  # takes handles
            if kind == "extend over records not seen yet":
                other.asked(CAPACITY, lines.issue(CAPACITY), first=True)
            killed = lines.kill(kind, number, points)
            lines.check(kind, number)
            if not killed:
                break
        lines.lap()
    return lines.report(number - 1)


def killed_at_every_line_of_a_first_write(storage: str, folder: Path, points: Points) -> dict[str, Any]:
    """Kills a writer at each point of a first write, or two in a row where the first has left nothing."""
    found: Counter[str] = Counter()
    worst = 0.0
    for number in range(1, 10**6):
        rb = make(storage, folder / str(number))
        with neighbour(rb) as other:
            lines = Lines(rb, other)
            killed = lines.kill("first", number, points)
            with rb.storage.lock:
                nothing = not rb.storage.join()
            found["before the records were there"] += nothing
            if nothing and number % 3 == 0:
                lines.kill("first", number, points)
            lines.check("first", number)
            lines.extend(CAPACITY, here=False)
            lines.auditor.update()
            assert (lines.auditor.stamps >= 0).all()
            assert (lines.auditor.leaf > 0).all()
        found.update(lines.auditor.counts)
        worst = max(worst, lines.worst)
        if not killed:
            return {"kills": number - 1, "worst": round(worst, 3), **found}
    raise AssertionError


# ------------------------------------------------------------------ killed at random moments


class Writers:
    """Processes that write large batches without pause."""

    WIDTH, LONGEST = 1024, 384

    def __init__(self, rb: Any, *, most: int) -> None:
        self.rb = rb
        self.issued = torch.zeros(most, dtype=torch.int64).share_memory_()  # records, by author; before they are there
        self.done = torch.zeros(most, dtype=torch.int64).share_memory_()  # writes that are complete, by author
        self._authors = 1  # 0 is the learner
        self._stack = contextlib.ExitStack()
        self.running: dict[int, Child] = {}

    def fill(self) -> None:
        """Has the learner write a lap."""
        count = self.rb.storage.max_size
        self.issued[0] += count
        self.rb.extend(batch(count, int(self.issued[0]) - count, width=self.WIDTH))

    def start(self) -> None:
        author = self._authors
        self._authors += 1
        self.running[author] = self._stack.enter_context(forked(lambda: self._write(author)))

    def _write(self, author: int) -> None:
        chance = random.Random(author)
        prepared = {(count, first): batch(count, 0, width=self.WIDTH, first=first)
                    for count in (40, 200, self.LONGEST) for first in (False, True)}  # fmt: skip
        while os.getppid() != 1:
            count, first = chance.choice(sorted(prepared))
            start = author * 2**32 + int(self.issued[author])
            data = prepared[count, first].copy()
            x = 2 * torch.arange(start, start + count) + first
            data["x"] = x
            data["payload"].copy_(x[:, None])
            if first:
                data["td_error"] = first_priority(x)
            self.issued[author] += count
            self.rb.extend(data)
            self.done[author] += 1

    def last_of(self, author: int) -> torch.Tensor:
        """Numbers of the records that this author may have been writing, if they bring first priorities."""
        issued = int(self.issued[author])  # by an author who may be about to issue more
        return 2 * (author * 2**32 + torch.arange(max(issued - self.LONGEST, 0), issued + self.LONGEST)) + 1

    def close(self) -> None:
        for child in self.running.values():
            child.kill()
        self._stack.close()


def killed_at_random_moments(kills: int, storage: str, folder: Path, *, writers: int = 3) -> dict[str, Any]:
    """Kills one of several writers at a random moment, and starts another, while the learner goes on."""
    capacity = 1024
    rb = make(storage, folder, capacity=capacity, batch_size=64)
    chance = random.Random(0)
    crowd = Writers(rb, most=1 + writers + kills)
    auditor = Auditor(rb, crowd.issued)
    recovery: dict[str, list[float]] = {"learner": [], "writer": []}

    def learn() -> None:
        auditor.look()
        auditor.sample()
        auditor.update()

    try:
        crowd.fill()
        auditor.look()
        rb.update_priority(torch.tensor([0]), 1.0)  # the default from now on
        auditor.leaf[0] = 1.0
        for _ in range(writers):
            crowd.start()
        for _ in range(kills):
            wait = time.monotonic() + 0.03 * chance.random()
            while time.monotonic() < wait:
                learn()
            time.sleep(0.003 * chance.random())  # the learner leaves the lock to the writers
            author = chance.choice(sorted(crowd.running))
            victim = crowd.running.pop(author)
            before = crowd.done.clone()
            start = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            others = torch.tensor(sorted(crowd.running))
            auditor.was_killed(crowd.last_of(author))
            learn()
            recovery["learner"].append(time.monotonic() - start)
            until(lambda: bool((crowd.done[others] >= before[others] + 2).any()))  # noqa: B023
            recovery["writer"].append(time.monotonic() - start)
            assert victim.exit_code() == -signal.SIGKILL
            crowd.start()
        learn()
    finally:
        crowd.close()
    for author in crowd.running:
        auditor.was_killed(crowd.last_of(author))
    learn()
    numbers = rb.storage.slot_generations.log._numbers
    crowd.fill()
    auditor.draws_every_slot()
    return {
        "kills": kills,
        "inside a write": int(numbers[2] - numbers[3]),
        "writes": int(crowd.done.sum()),
        **{f"worst recovery of {name}": round(max(times), 3) for name, times in recovery.items()},
        **auditor.counts,
    }


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT
    while not happened():
        assert time.monotonic() < end
        select.select([], [], [], 0.0005)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, where, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if what.isdecimal():
        print(json.dumps(killed_at_random_moments(int(what), where, directory)))
    elif what == "first":
        print(json.dumps(killed_at_every_line_of_a_first_write(where, directory, Points(AROUND, again=False))))
    else:
        print(json.dumps(killed_at_every_line(what, where, directory, Points(AROUND, again=False))))
