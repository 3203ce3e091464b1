"""A program whose main thread is interrupted by real signals, again and again, while it uses a buffer."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
from children import forked
from interrupting import Snapshot, faults_after, faults_of_use
from tensordict import TensorDict

import torchrl_generational as g

CAPACITY = 64
_HOME = str(Path(g.__file__).parent)


def own_priority(x: torch.Tensor) -> torch.Tensor:
    return (x % 97).float() + 1


def batch(count: int, start: int) -> TensorDict:
    x = torch.arange(start, start + count)
    return TensorDict({"x": x, "td_error": own_priority(x)}, [count])


class Senders:
    """A process that sends a signal to this one at random moments, as long as it is told that one is welcome."""

    def __init__(self, seed: int, number: int) -> None:
        code = (
            "import os, random, signal, sys, time\n"
            f"rng = random.Random({seed})\n"
            "while os.read(0, 1):\n"
            "    time.sleep(rng.random() * 0.002)\n"
            f"    os.kill({os.getpid()}, {int(number)})\n"
        )
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, bufsize=0)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()

    def ask(self) -> None:
        """One signal, at a random moment of the next milliseconds."""
        os.write(self._pipe, b"x")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def interrupt(number: int, frame: Any) -> None:
    """A handler that raises, of signals for which Python has none."""
    raise KeyboardInterrupt


def run(signals: int, seed: int, number: int, **kwargs: Any) -> tuple[int, int, list[str]]:
    """Returns how many signals came, how many of them ended a call of the buffer, and the faults found."""
    rng = random.Random(seed)
    rb = g.GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, batch_size=16, storage=g.GenerationalLazyTensorStorage(CAPACITY), **kwargs
    )
    rb.extend(batch(CAPACITY, 0))
    written, faults, inside, came = CAPACITY, [], 0, 0
    # a shell starts what goes on in the background with SIGINT ignored
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else interrupt)
    senders = Senders(seed, number)
    try:
        while came < signals and not faults:
            rb._catch_up()
            before = Snapshot(rb)
            handles = rb.sample()
            try:
                senders.ask()
                while True:  # until the signal comes
                    what = rng.randrange(5)
                    if what == 0:
                        written += 5
                        rb.extend(batch(5, written - 5))
                    elif what == 1:
                        written += 1
                        rb.add(batch(1, written - 1)[0])
                    elif what == 2:
                        rb.sample()
                    elif what == 3:
                        rb.update_priority_if_present(
                            index=handles["index"], generation=handles["index_generation"], priority=0.5
                        )
                    else:
                        written += 3
                        rb[3:6] = batch(3, written - 3)
            except KeyboardInterrupt as stop:
                came += 1
                inside += _HOME in "".join(frame.filename for frame in traceback.extract_tb(stop.__traceback__))
            faults = consistent(rb, before, {0.5})
            if (came % 500 == 0 or came == signals) and not faults:
                faults = by_another_thread(rb)
                if rb.shared and not faults:
                    faults = by_another_process(rb)
                written += 1000
                rb.empty()
                rb.extend(batch(CAPACITY, written))
                written += CAPACITY
    finally:
        signal.signal(number, signal.SIG_IGN)
        senders.close()
    return came, inside, faults


def consistent(rb: Any, before: Snapshot, updated: set[float]) -> list[str]:
    """Locks are free, stamps have not gone back, and every record has a priority that it can have."""
    faults = faults_after(rb, before, lambda x: None, updates=True)
    if faults:
        return faults
    now = Snapshot(rb)
    default = float(rb._learners_sampler().default_priority)
    for slot, (stamp, x, leaf) in enumerate(now.slots()):
        if now.marked[slot] or stamp < 0:
            continue
        possible = {float(own_priority(torch.tensor(x))), *updated}
        was_default = float(before.maximum) <= leaf <= default  # the running maximum rises meanwhile
        if leaf not in possible and not was_default and leaf not in before.leaves:
            faults.append(f"slot {slot} holds record {x} with leaf {leaf}")
    return faults


def by_another_thread(rb: Any) -> list[str]:
    """Another thread uses the buffer."""
    found: list[str] = []
    user = threading.Thread(target=lambda: found.extend(faults_of_use(rb, lambda n, start: batch(n, start))))
    user.start()
    user.join(60)
    return ["another thread waits for good"] if user.is_alive() else found


def by_another_process(rb: Any) -> list[str]:
    """A forked process writes to a shared buffer; what it wrote is drawn here."""
    with forked(lambda: rb.extend(batch(5, 10**6))) as child:
        if child.exit_code():
            return ["another process cannot write"]
    return [] if int((rb.storage._storage["x"] >= 10**6).sum()) == 5 else ["what another process wrote is not here"]


if __name__ == "__main__":
    _, signals, chosen_seed, chosen, *options = sys.argv
    print(json.dumps(run(int(signals), int(chosen_seed), signal.Signals[chosen], **dict.fromkeys(options, True))))
