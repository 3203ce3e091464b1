"""Kills processes while they dump a buffer, and looks at what the directory then loads as.

Run by ``persistence/test_killed_dumps.py``.

    python tests/helpers/killed_dumps.py random 200 DIRECTORY   SIGKILL at a random moment of each dump
    python tests/helpers/killed_dumps.py every 1 DIRECTORY      ends at every operation on the file system, in turn
    python tests/helpers/killed_dumps.py every 8 DIRECTORY      at every eighth
    ... in-place                                                  the storage itself lies in the directory

Prints a JSON object: how many of the directories held the ``old`` checkpoint, the ``new`` one, were ``refused``, or
were a mixture (``mixed``).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import torchrl_generational as g

CAPACITY = 64
OPERATIONS = ("open", "os.", "shutil.", "mmap.", "pathlib.")


def make(storage: Any = None, *, generator: bool = True) -> g.GenerationalTensorDictPrioritizedReplayBuffer:
    return g.GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        eps=0.0,
        batch_size=4,
        storage=g.GenerationalLazyTensorStorage(CAPACITY) if storage is None else storage,
        generator=torch.Generator().manual_seed(0) if generator else None,
    )


def bring_to(rb: Any, state: int) -> Any:
    """Every part of a buffer tells which state it is of."""
    records = TensorDict(
        {"x": torch.full((CAPACITY,), state), "payload": torch.full((CAPACITY, 256), state)}, [CAPACITY]
    )
    for _ in range(state - rb.write_count // CAPACITY):
        rb.extend(records)
    rb.update_priority(torch.arange(CAPACITY), float(state))
    return rb


def state_in(path: Path) -> set[int]:
    """The states that the parts of a checkpoint are of, each found by itself."""
    rb = make()
    rb.loads(path)
    held = rb.storage._storage
    stamps = rb.storage.generations
    found = {*held["x"].tolist(), *held["payload"].flatten().tolist()}
    found |= {int(leaf) for leaf in rb.sampler._sum_tree[torch.arange(CAPACITY)]}
    found |= {rb.write_count // CAPACITY}
    if rb.storage.slot_generations.incarnation == 0 or int(stamps.max()) < 2**32:
        found |= {int(stamp) + 1 for stamp in stamps}
    odd = (path / "rng_state").exists()
    return found if int(odd) in {state % 2 for state in found} else {*found, -1}


def fork(dump: Any, *, stop_at: int | None = None) -> int:
    """Runs ``dump`` in a child, which ends at its operation number ``stop_at`` if there is one. Returns its pid.

    The child stands for the process that made the buffer, which goes on as if it had been started again.
    """
    pid = os.fork()
    if pid:
        return pid
    seen = 0

    def count(event: str, _: Any) -> None:
        nonlocal seen
        if event.startswith(OPERATIONS):
            seen += 1
            if seen == stop_at:
                os._exit(9)

    if stop_at is not None:
        sys.addaudithook(count)
    dump()
    os._exit(0)


def dump_as_maker(rb: Any, path: Path) -> None:
    rb.storage.lock.elsewhere = False
    rb.dumps(path)


def run(mode: str, number: int, path: Path, in_place: bool) -> dict[str, int]:
    torch.set_num_threads(1)  # a forked child has no team of threads
    chance = random.Random(0)
    outcomes: Counter[str] = Counter()
    lengths: list[float] = []
    state, attempt = 1, 0
    path.mkdir()

    def storage() -> Any:
        if not in_place:
            return None
        return g.GenerationalLazyMemmapStorage(CAPACITY, scratch_dir=path / "storage", existsok=True)

    rb = bring_to(make(storage()), state)
    rb.dumps(path)
    while True:
        attempt += 1
        bring_to(rb, state + 1)
        rb.set_rng(torch.Generator().manual_seed(0) if (state + 1) % 2 else None)
        start = time.perf_counter()
        whole = mode == "random" and attempt <= 5  # to learn how long a dump takes
        pid = fork(lambda: dump_as_maker(rb, path), stop_at=attempt * number if mode == "every" else None)
        if mode == "random" and not whole:
            time.sleep(chance.random() * sorted(lengths)[2])
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if whole:
            lengths.append(time.perf_counter() - start)
        try:
            found = state_in(path)
        except (ValueError, FileNotFoundError):
            outcome = "refused"
        else:
            if in_place:
                found.discard(state + 1)  # the records themselves are the new ones: they are not a copy
            outcome = "old" if found == {state} else "new" if found in ({state + 1}, set()) else "mixed"
        outcomes[outcome] += not whole
        if outcome in ("old", "refused"):  # as a user would: try again
            rb.dumps(path)
            if state_in(path) != {state + 1}:
                outcomes["mixed"] += 1
        state += 1
        if mode == "every" and os.waitstatus_to_exitcode(status) == 0:
            return outcomes | {"operations": attempt}
        if mode == "random" and attempt == number + 5:
            return dict(outcomes)


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), "in-place" in sys.argv)))
