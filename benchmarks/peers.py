"""Other libraries' prioritized rings as contenders: the one room that imports them, and only when one is made.

Each holds the same transitions, in its own layout, and gets its input as its own kind of array, made beforehand.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.contenders import Call, Contender
from benchmarks.workload import ALPHA, BATCH, BETA, FILL_BATCH, SEED, arrays, fill_sizes, random_slots


class Peer(Contender):
    """A contender that may not be installed."""

    packages: ClassVar[Sequence[str]]  # to import
    install: ClassVar[str]
    note: ClassVar[str]

    @classmethod
    def missing(cls) -> str | None:
        """Why it cannot take part, or `None` if it can."""
        absent = [package for package in cls.packages if importlib.util.find_spec(package) is None]
        if absent:
            return f"not installed: pip install {cls.install}"
        try:
            cls.load()
        except Exception as error:  # whatever a library that is half there raises when it is imported
            return f"does not import: {type(error).__name__}: {error}"
        return None

    @classmethod
    def load(cls) -> None:
        """Imports the library."""
        for package in cls.packages:
            importlib.import_module(package)


class Cpprb(Peer):
    """cpprb's ring; its checkpoints leave priorities out, so they are not compared."""

    name, packages, install = "cpprb", ("cpprb",), "cpprb"
    note = "NumPy and C++, no lock"
    kind = "PrioritizedReplayBuffer"

    def __init__(self, capacity: int) -> None:
        torch.manual_seed(SEED)
        self.capacity = capacity
        fields = {key: {"shape": entry.shape[1:], "dtype": entry.dtype} for key, entry in arrays(1).items()}
        make = getattr(importlib.import_module("cpprb"), self.kind)
        self.rb: Any = make(capacity, fields, alpha=ALPHA)
        chunk = arrays(min(capacity, FILL_BATCH))
        for size in fill_sizes(capacity):
            self.rb.add(**{key: entry[:size] for key, entry in chunk.items()}, priorities=torch.rand(size).numpy())

    def sample(self, batch: int) -> Call:
        """With importance weights."""
        return lambda: self.rb.sample(batch, beta=BETA)

    def extend(self, batch: int) -> Call:
        """At the largest priority so far."""
        records = arrays(batch)
        return lambda: self.rb.add(**records)

    def add(self, batch: int) -> Call:
        """A batch of one."""
        return self.extend(1)

    def update_priority(self, batch: int) -> Call:
        """By raw index."""
        slots = itertools.cycle([slots.numpy() for slots in random_slots(self.capacity, batch)])
        priority = torch.rand(batch).numpy()
        return lambda: self.rb.update_priorities(next(slots), priority)


class CpprbMP(Cpprb):
    """cpprb's ring for several processes, which tracks what was written since the last sample."""

    name = "cpprb-mp"
    note = "as cpprb, in shared memory and with its locks"
    kind = "MPPrioritizedReplayBuffer"

    def update_priority(self, batch: int) -> Call:
        """By raw index; it skips what was written since the last sample, hence one."""
        self.rb.sample(batch, beta=BETA)
        return super().update_priority(batch)


class Tianshou(Peer):
    """One sub-buffer per row of a batch: tianshou writes one record per environment at a time."""

    name, packages, install = "tianshou", ("tianshou", "tianshou.data"), "tianshou"
    note = f"NumPy and numba, {BATCH} sub-buffers, capacity rounded up to a multiple of that, rewards as float64"

    @classmethod
    def missing(cls) -> str | None:
        """Looks for the package alone first: a submodule cannot be looked for without it."""
        if importlib.util.find_spec("tianshou") is None:
            return f"not installed: pip install {cls.install}"
        return super().missing()

    def __init__(self, capacity: int) -> None:
        torch.manual_seed(SEED)
        self.data: Any = importlib.import_module("tianshou.data")
        self.kind = self.data.PrioritizedVectorReplayBuffer
        self.rb: Any = self.kind(capacity, BATCH, alpha=ALPHA, beta=BETA)
        records = self.records(BATCH)
        for _ in range(-(-capacity // BATCH)):
            self.rb.add(records)
        self.capacity = len(self.rb)
        self.rb.update_weight(np.arange(self.capacity), torch.rand(self.capacity).numpy())

    def records(self, count: int) -> Any:
        """Its names for the fields, and two ways to be done instead of one."""
        fields = arrays(count)
        done = fields["next_done"][:, 0]
        return self.data.Batch(
            obs=fields["observation"],
            act=fields["action"],
            obs_next=fields["next_observation"],
            rew=fields["next_reward"][:, 0],
            terminated=done,
            truncated=done.copy(),
        )

    def sample(self, batch: int) -> Call:
        """With importance weights."""
        return lambda: self.rb.sample(batch)

    def extend(self, batch: int) -> Call | None:
        """One row to each sub-buffer."""
        if batch != BATCH:
            return None
        records = self.records(batch)
        return lambda: self.rb.add(records)

    def add(self, batch: int) -> Call:
        """One row to one of the sub-buffers, in turn."""
        record, turns = self.records(1), itertools.cycle(np.arange(BATCH).reshape(-1, 1))
        return lambda: self.rb.add(record, buffer_ids=next(turns))

    def update_priority(self, batch: int) -> Call:
        """By raw index."""
        slots = itertools.cycle([slots.numpy() for slots in random_slots(self.capacity, batch)])
        priority = torch.rand(batch).numpy()
        return lambda: self.rb.update_weight(next(slots), priority)

    def dumps(self, folder: Path) -> Call:
        """One HDF5 file with records and priorities."""
        return lambda: self.rb.save_hdf5(str(folder / "tianshou.hdf5"))

    def loads(self, folder: Path) -> Call:
        """A new buffer from it: it cannot be restored in place."""
        return lambda: self.kind.load_hdf5(str(folder / "tianshou.hdf5"))


class Flashbax(Peer):
    """Sequences of one record, so that a sample holds what everyone else's does; every call is waited for.

    Writes and updates are jitted with the state that they change donated; an update is not given the records, which
    jax would copy if it were.
    """

    name, packages, install = "flashbax", ("flashbax", "jax"), "flashbax 'jax[cpu]'"
    note = "jitted jax on the CPU, state donated, waited for; samples carry probabilities, not weights"

    @classmethod
    def load(cls) -> None:
        """On the CPU, where everyone else is."""
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        super().load()

    def __init__(self, capacity: int) -> None:
        torch.manual_seed(SEED)
        self.load()
        self.jax: Any = importlib.import_module("jax")
        self.capacity = capacity
        self.key = self.jax.random.key(SEED)
        self.make: Any = importlib.import_module("flashbax").make_prioritised_trajectory_buffer
        buffer = self.buffer(BATCH)
        self.state: Any = buffer.init({key: entry[0, 0] for key, entry in self.records(1).items()})
        self.written = self.jax.jit(buffer.add, donate_argnums=0)
        self.updated = self.jax.jit(
            lambda tree, rest, slots, priority: (
                buffer.set_priorities(rest.replace(sum_tree_state=tree), slots, priority).sum_tree_state
            ),
            donate_argnums=0,
        )
        chunk = self.records(min(capacity, FILL_BATCH))
        for size in fill_sizes(capacity):
            self.write({key: entry[:, :size] for key, entry in chunk.items()})
        self.update(self.jax.numpy.arange(capacity), self.jax.numpy.asarray(torch.rand(capacity).numpy()))

    def buffer(self, batch: int) -> Any:
        """Its functions, for one batch size of samples."""
        return self.make(
            add_batch_size=1,
            sample_batch_size=batch,
            sample_sequence_length=1,
            period=1,
            min_length_time_axis=1,
            max_length_time_axis=self.capacity,
            priority_exponent=ALPHA,
        )

    def records(self, count: int) -> dict[str, Any]:
        """One row of `count` steps."""
        return {key: self.jax.numpy.asarray(entry)[None] for key, entry in arrays(count).items()}

    def write(self, records: dict[str, Any]) -> None:
        """Appends to the ring."""
        self.state = self.jax.block_until_ready(self.written(self.state, records))

    def update(self, slots: Any, priority: Any) -> None:
        """Sets priorities by raw index."""
        tree = self.updated(self.state.sum_tree_state, self.state.replace(sum_tree_state=None), slots, priority)
        self.state = self.state.replace(sum_tree_state=self.jax.block_until_ready(tree))

    def sample(self, batch: int) -> Call:
        """With probabilities."""
        buffer = self.buffer(batch)

        def draw(state: Any, key: Any) -> Any:
            key, own = self.jax.random.split(key)
            return key, buffer.sample(state, own)

        drawn = self.jax.jit(draw)

        def call() -> object:
            self.key, sample = drawn(self.state, self.key)
            return self.jax.block_until_ready(sample)

        return call

    def extend(self, batch: int) -> Call:
        """At the largest priority so far."""
        records = self.records(batch)
        return lambda: self.write(records)

    def add(self, batch: int) -> Call:
        """A batch of one."""
        return self.extend(1)

    def update_priority(self, batch: int) -> Call:
        """By raw index."""
        numpy = self.jax.numpy
        slots = itertools.cycle([numpy.asarray(slots.numpy()) for slots in random_slots(self.capacity, batch)])
        priority = numpy.asarray(torch.rand(batch).numpy())
        return lambda: self.update(next(slots), priority)


PEERS: tuple[type[Peer], ...] = (Cpprb, CpprbMP, Tianshou, Flashbax)
