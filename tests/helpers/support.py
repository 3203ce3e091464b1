"""What the tests share: records, buffers, snapshots of a sampler, and actors that act in a forced order."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

import torchrl_generational as g

#: Whether this is a TorchRL after 0.14, whose samples can wait for records.
AFTER_0_14 = hasattr(ReplayBuffer, "wait_until_sampleable")

TIMEOUT = 60  # seconds until a test that hangs is given up; nothing waits this long when it passes

RAY_TOKEN = secrets.token_hex(
    32
)  # Ray keeps the first one that a process has, and writes its own to the home directory


def records(count: int, start: int = 0, **fields: Any) -> TensorDict:
    """``count`` records ``x = start, start + 1, ...``."""
    return TensorDict({"x": torch.arange(start, start + count), **fields}, [count])


def prioritized(
    capacity: int = 8, *, batch_size: int = 8, alpha: float = 1.0, beta: float = 1.0, seed: int = 0, **kwargs: Any
) -> g.GenerationalTensorDictPrioritizedReplayBuffer:
    """A prioritized buffer of ``capacity`` records that draws reproducibly."""
    kwargs.setdefault("storage", g.GenerationalLazyTensorStorage(capacity))
    return g.GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=alpha, beta=beta, batch_size=batch_size, generator=torch.Generator().manual_seed(seed), **kwargs
    )


def plain_prioritized(capacity: int = 8, *, ndim: int = 1, **kwargs: Any) -> g.GenerationalReplayBuffer:
    """The same with handles in the info only."""
    sampler = {
        key: kwargs.pop(key) for key in ("alpha", "beta", "eps", "dtype", "max_priority_within_buffer") if key in kwargs
    }
    sampler = {"alpha": 1.0, "beta": 1.0, **sampler}
    kwargs.setdefault("batch_size", 8)
    return g.GenerationalReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(capacity, ndim=ndim),
        sampler=g.GenerationalPrioritizedSampler(capacity, **sampler),
        generator=torch.Generator().manual_seed(0),
        **kwargs,
    )


def filled(capacity: int = 8, **kwargs: Any) -> g.GenerationalTensorDictPrioritizedReplayBuffer:
    """A prioritized buffer whose ring is full of first records."""
    rb = prioritized(capacity, **kwargs)
    rb.extend(records(capacity))
    return rb


def leaves(rb: Any) -> torch.Tensor:
    """What the sum tree holds for every cell, in the dtype of the priorities."""
    sampler = rb.sampler
    dtype = torch.float64 if sampler.dtype == torch.float64 else torch.float32
    held = sampler._sum_tree[torch.arange(sampler.max_size)]
    assert torch.equal(held, held.to(dtype).double())  # float64 sums, but leaves of this dtype
    return held.to(dtype)


def sampler_state(rb: Any) -> tuple[Any, ...]:
    """Everything that an update can change in a sampler, bit for bit."""
    sampler = rb.sampler
    cells = torch.arange(sampler.max_size)
    maximum, where = sampler._max_priority
    return (
        sampler._sum_tree[cells].tolist(),
        sampler._min_tree[cells].tolist(),
        sampler._sum_tree.query(0, sampler.max_size),
        sampler._min_tree.query(0, sampler.max_size),
        None if maximum is None else float(maximum),
        None if where is None else torch.as_tensor(where).tolist(),
        float(sampler.default_priority),
    )


def buffer_state(rb: Any) -> tuple[Any, ...]:
    """Sampler, stamps, records and counters."""
    storage = rb.storage
    data = storage._storage.clone().to_dict() if storage.initialized else None
    shown = None if data is None else {key: str(value.tolist()) for key, value in data.items()}  # NaN is itself
    return sampler_state(rb), storage.generations.tolist(), len(rb), shown, rb.write_count, rb.writer._cursor


class Actors:
    """Threads that act one at a time, in the order in which they are told to.

    ``actors.learner(f)`` runs ``f`` on the learner's own thread and returns its result when it is done.
    """

    def __init__(self) -> None:
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def start(self, name: str, step: Callable[[], Any]) -> Any:
        """Starts a step and returns its future, for steps that overlap others."""
        pool = self._pools.setdefault(name, ThreadPoolExecutor(1, thread_name_prefix=name))
        return pool.submit(step)

    def __getattr__(self, name: str) -> Callable[[Callable[[], Any]], Any]:
        return lambda step: self.start(name, step).result(TIMEOUT)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=True)


def transfer(source: Any, target: Any, how: str, path: Any) -> None:
    """Restores ``source`` into ``target`` by ``"state_dict"``, or by ``"dumps"`` to ``path``."""
    if how == "state_dict":
        target.load_state_dict(source.state_dict())
    else:
        source.dumps(path)
        target.loads(path)


def announce_blocked(lock: Any, thread_name: str) -> threading.Event:
    """An event that is set when a thread of that name finds ``lock`` taken and is about to wait for it.

    Only sound while no third thread contends: then the lock does not change hands between the two lines.
    """
    blocked = threading.Event()

    plain = type(lock)

    class Announcing(plain):
        __slots__ = ()

        def __reduce__(self) -> Any:
            return plain, ()  # a copy announces nothing

        def acquire(self) -> bool:
            if threading.current_thread().name.startswith(thread_name):
                if self._threads.acquire(blocking=False):
                    self._threads.release()
                else:
                    blocked.set()
            return super().acquire()

        __enter__ = acquire

    lock.__class__ = Announcing
    return blocked


def until_blocked_or_done(blocked: threading.Event, future: Any) -> None:
    """Returns once the step behind ``future`` waits at the lock, or is through."""
    future.add_done_callback(lambda _: blocked.set())
    assert blocked.wait(TIMEOUT)
