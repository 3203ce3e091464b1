"""Conversion of a TorchRL buffer that somebody else's code made and filled into the generational one."""

from __future__ import annotations

import os
from concurrent.futures import wait
from typing import Any, NoReturn

import torch
from torchrl.data.replay_buffers import (
    RayReplayBuffer,
    RemoteTensorDictReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
)
from torchrl.data.replay_buffers.samplers import (
    ConsumingSampler,
    PrioritizedSampler,
    SamplerEnsemble,
    StreamingSliceSampler,
)
from torchrl.data.replay_buffers.storages.utils import _collate_id

from torchrl_generational.buffers import ready_made as buffers
from torchrl_generational.buffers.mixin import GenerationalReplayBufferMixin
from torchrl_generational.concurrency.storage_lock import StorageLock
from torchrl_generational.generations.slot_generations import SlotGenerations
from torchrl_generational.priorities.tree_state import TreeState
from torchrl_generational.samplers import prioritized as samplers
from torchrl_generational.samplers import prioritized_slices as slices
from torchrl_generational.storages import round_robin_writers as writers
from torchrl_generational.storages import tensor_storages as storages

__all__ = ["convert"]


def _by_parent(*classes: type[Any]) -> dict[type, type[Any]]:
    """Classes of this package by the class of TorchRL's that each stands for, which is its last base."""
    return {cls.__bases__[-1]: cls for cls in classes}


_BUFFERS = _by_parent(
    buffers.GenerationalReplayBuffer,
    buffers.GenerationalTensorDictReplayBuffer,
    buffers.GenerationalPrioritizedReplayBuffer,
    buffers.GenerationalTensorDictPrioritizedReplayBuffer,
)
_STORAGES = _by_parent(
    storages.GenerationalTensorStorage,
    storages.GenerationalLazyTensorStorage,
    storages.GenerationalLazyMemmapStorage,
)
_WRITERS = _by_parent(writers.GenerationalRoundRobinWriter, writers.GenerationalTensorDictRoundRobinWriter)
_SAMPLERS = _by_parent(samplers.GenerationalPrioritizedSampler, slices.GenerationalPrioritizedSliceSampler)

# What TorchRL's buffers make anew when they are unpickled, and the name that asks for it.
_MADE_ANEW = {
    name: f"{name}_placeholder"
    for name in ("_replay_lock", "_futures_lock", "_prefetch_queue", "_prefetch_executor", "_update_executor")
}
# What belongs to the old buffer alone.
_LEFT_BEHIND = {*_MADE_ANEW, "_pending_update_futures", "_sample_dependency", "_rng", "_iterator"}


def convert(rb: ReplayBuffer) -> Any:
    """Turns a buffer of TorchRL, filled or not, into the generational one, without copying its records.

    For loops whose buffer is made by code that cannot be changed. Where it can, make the generational buffer at once.

    The buffer returned has the records (the same tensors or files), length, cursor, write count, priorities and their
    maximum, transforms, collation, batch size, prefetching and generator of ``rb``. If the writer of ``rb`` tracked
    generations, records keep theirs and handles taken before stay good, as far as TorchRL's stamps tell
    (``rb[i] = ...``, ``write_all`` and loads without stamps do not advance those), and later records get stamps of
    another incarnation, as after a restore; if not, every record counts as the first of its slot. Batches that ``rb``
    had prefetched are dropped: updates by them could not be conditional.

    Storage and samplers stay the objects that they are and become generational: files stay in place, and a schedule
    that anneals ``beta`` of the sampler goes on to work. ``rb`` and its writer must not be used afterwards: whatever
    needs their records raises ``RuntimeError``. Hand the buffer returned to everything that holds ``rb``, such as
    collectors and trainers.

    Args:
        rb: a ``ReplayBuffer``, ``TensorDictReplayBuffer``, ``PrioritizedReplayBuffer`` or
            ``TensorDictPrioritizedReplayBuffer`` (none of a subclass), on a ``TensorStorage``, ``LazyTensorStorage`` or
            ``LazyMemmapStorage`` that no other buffer uses, with a round-robin writer and any sampler that neither
            consumes nor streams. A buffer with ``delayed_init`` is initialised.

    Returns:
        The ``Generational...`` buffer of the same name.

    Raises:
        TypeError: if the buffer or a part of it has no generational counterpart.
        ValueError: if it is shared, shut down, compilable, or its parts do not belong together.

        Whatever is raised, nothing has changed.

    Complexity: O(capacity) for stamps (8 bytes per slot) and, by priority, for the trees.

    Thread safety: waits for prefetching and updates in flight. Another thread that waits to get into ``rb`` gets the
    ``RuntimeError``; none may use its storage, sampler or writer directly meanwhile. Other processes must not use
    ``rb`` at all.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
        >>> made_elsewhere = TensorDictPrioritizedReplayBuffer(
        ...     alpha=0.7, beta=0.5, storage=LazyTensorStorage(8), batch_size=4
        ... )
        >>> index = made_elsewhere.extend(TensorDict({"x": torch.arange(8)}, [8]))
        >>> rb = convert(made_elsewhere)
        >>> sample = rb.sample()
        >>> index = rb.extend(TensorDict({"x": torch.arange(8)}, [8]))  # the ring wraps
        >>> sample["td_error"] = torch.rand(4)
        >>> rb.update_tensordict_priority_if_present(sample).num_stale
        4
    """
    _refuse_buffer(rb)
    _refuse_parts(rb, rb.storage, rb.writer)
    for sampler in _samplers_of(rb):
        _refuse_sampler(sampler)
    with rb._futures_lock:
        wait((*rb._prefetch_queue, *rb._pending_update_futures))
        with rb._replay_lock:
            # Everything that can fail comes first: from the first change on there are only assignments.
            storage, lock = rb._storage, StorageLock()
            if not getattr(rb, "_sync", True):
                catch_up: Any = rb  # one of the two prioritized buffers
                catch_up._catch_up_prioritized_sampler()
            generations = _generations_for(storage)
            prioritized = [
                (sampler, _with_priorities_of(sampler, storage))
                for sampler in _samplers_of(rb)
                if isinstance(sampler, PrioritizedSampler)
            ]
            new = _emerging(rb)
            with lock:
                _upgrade(storage, generations, lock)
                for sampler, made in prioritized:
                    sampler.__class__ = type(made)
                    vars(sampler).update(vars(made))
                new._writer.register_storage(storage)
                storage._attached_entities_list = [new]
                new._lend_lock()
                new.set_rng(rb._rng)
                if not getattr(new, "_sync", True):
                    new._keep_log(known=True)
            _retire(rb, type(new).__name__)
    return new


# ---------------------------------------------------------------- refusals


def _refuse_buffer(rb: Any) -> None:
    kind = type(rb)
    name = kind.__name__
    if isinstance(rb, GenerationalReplayBufferMixin):
        raise TypeError(f"convert: rb is a {name}, which is generational already. Use it as it is.")
    if kind not in _BUFFERS:
        known = ", ".join(cls.__name__ for cls in _BUFFERS)
        if isinstance(rb, ReplayBufferEnsemble):
            remedy = "Convert its members, and make the ensemble of what comes back."
        elif isinstance(rb, RayReplayBuffer | RemoteTensorDictReplayBuffer):
            remedy = "Its records are in another process: make a generational buffer there."
        else:
            remedy = (
                "Put GenerationalReplayBufferMixin (GenerationalTensorDictReplayBufferMixin for tensordict buffers) in "
                "front of that class, and load rb.state_dict() into a buffer of the new one."
            )
        raise TypeError(f"convert: rb should be one of {known} itself, got {name}. {remedy}")
    if rb.shared:
        raise ValueError(
            "convert: rb is shared between processes, which would go on to write without generations. End them, call "
            "rb.share(False), convert, and share() the buffer that comes back before starting others."
        )
    if rb._service_shutdown:
        raise ValueError("convert: rb was shut down. Convert it before that, or load its checkpoint into a new buffer.")
    if hasattr(rb, "_distributed_service"):
        raise ValueError(
            "convert: rb serves clients in other processes. Make a generational buffer before the service is started."
        )


def _refuse_parts(rb: Any, storage: Any, writer: Any) -> None:
    _refuse_kind("storage", storage, _STORAGES)
    _refuse_kind("writer", writer, _WRITERS)
    for name, part in (("storage", storage), ("writer", writer)):
        if part._compilable:
            raise ValueError(
                f"convert: the {name} of rb was made with compilable=True, and what torch.compile has traced would go "
                "on to write without generations. Make a generational buffer with compilable=True instead."
            )
    if getattr(storage, "shared_init", False):
        raise ValueError(
            "convert: the storage of rb was made with shared_init=True: other processes look for its records. Make it "
            "without, or make a generational buffer at once."
        )
    others = [buffer for buffer in storage._attached_entities if buffer is not rb]
    if others:
        raise ValueError(
            f"convert: the storage of rb is also that of {len(others)} more buffer(s), which would go on to write "
            "without its lock. Make all of them anew as generational buffers on one generational storage."
        )
    if writer._storage is not storage:
        raise ValueError(
            "convert: the writer of rb writes to another storage than rb.storage, as TorchRL's set_storage leaves it. "
            "Call rb.set_writer(rb.writer) first."
        )


def _refuse_kind(name: str, part: Any, known: dict[type, type[Any]]) -> None:
    if isinstance(part, _Converted):
        part._refuse()
    if type(part) not in known:
        raise TypeError(
            f"convert: the {name} of rb should be one of {', '.join(cls.__name__ for cls in known)} itself, got "
            f"{type(part).__name__}. Make a generational buffer with one of "
            f"{', '.join(cls.__name__ for cls in known.values())} and extend() it with the records."
        )


def _refuse_sampler(sampler: Any) -> None:
    name = type(sampler).__name__
    if isinstance(sampler, ConsumingSampler | StreamingSliceSampler | SamplerEnsemble):
        raise TypeError(
            f"convert: the sampler of rb is a {name}, whose draws so far cannot be taken over. Call rb.set_sampler() "
            "with another one first, or make a generational buffer at once."
        )
    if isinstance(sampler, PrioritizedSampler) and type(sampler) not in _SAMPLERS:
        raise TypeError(
            f"convert: the sampler of rb should be a PrioritizedSampler or PrioritizedSliceSampler itself, got {name}. "
            "Derive it from GenerationalPrioritizedSampler and make a generational buffer with it."
        )


# ---------------------------------------------------------------- what the new buffer has


def _samplers_of(rb: Any) -> list[Any]:
    """The sampler, and the one that TorchRL keeps for the learner with ``sync=False``."""
    learners = vars(rb).get("_prioritized_sampler")
    return [rb._sampler] if learners is None else [rb._sampler, learners]


def _generations_for(storage: Any) -> SlotGenerations:
    """Stamps of the records in a storage of TorchRL's: those that it has, else first ones."""
    mixin = storages.GenerationalStorageMixin
    rows = mixin._num_rows(storage) if storage.initialized else storage.max_size
    generations = SlotGenerations(rows, device=mixin._stamp_device(storage))
    tracked = getattr(storage, "_slot_generations", None)
    if tracked is not None:
        generations.restore(tracked)
    generations.mark_written(int(storage._len_along_dim0 or 0))
    return generations


def _with_priorities_of(sampler: Any, storage: Any) -> Any:
    """A generational sampler like ``sampler``, its priorities included.

    Cells that a storage of several dimensions has beyond the trees of ``sampler``, because it rounded its capacity up
    to whole rows, get the default priority.
    """
    made = _SAMPLERS[type(sampler)].like(sampler)
    state = TreeState.of(sampler)
    try:
        state.check(made)
    except ValueError as error:
        raise ValueError(
            f"convert: the priorities of rb cannot be taken over, as a checkpoint of them could not: {error} Call "
            "rb.set_sampler() with a new sampler first."
        ) from error
    state.restore(made)
    covered = made.max_size
    made.fit(storage)
    samplers.check_capacity(made, storage)
    beyond = torch.arange(covered, max(covered, len(storage)), device=made.device)
    if len(beyond):
        made.mark_update(beyond)
    return made


def _emerging(rb: Any) -> Any:
    """The new buffer as if unpickled, with a writer of its own and the other parts of ``rb`` as they are now."""
    state = {name: value for name, value in vars(rb).items() if name not in _LEFT_BEHIND}
    state.update({asked: None for name, asked in _MADE_ANEW.items() if name in vars(rb)})
    state["_writer"] = writer = _WRITERS[type(rb._writer)]()
    writer._cursor, writer._write_count = rb._writer._cursor, rb._writer._write_count
    cls: Any = _BUFFERS[type(rb)]
    new = cls.__new__(cls)
    new.__setstate__(state | {"_owner": None, "_collates_itself": rb._collate_fn is not _collate_id})
    return new


def _upgrade(storage: Any, generations: SlotGenerations, lock: StorageLock) -> None:
    """Makes a storage of TorchRL's generational; its records, files and what cleans those up stay as they are."""
    vars(storage).pop("_slot_generations", None)  # a property from here on
    storage.__class__ = _STORAGES[type(storage)]
    storage.lock, storage._generations, storage._maker = lock, generations, os.getpid()
    storage._own_counters()


# ---------------------------------------------------------------- what the old buffer has


def _retire(rb: Any, successor: str) -> None:
    """Leaves nothing in ``rb`` that could be read or written by mistake. Futures lock held, nothing in flight."""
    for executor in (getattr(rb, "_prefetch_executor", None), rb._update_executor):
        if executor is not None:
            executor.shutdown()
    rb._prefetch_executor = rb._update_executor = rb._sample_dependency = None
    rb._prefetch_queue.clear()
    rb._pending_update_futures.clear()
    names = type(rb).__name__, successor
    rb._writer._storage = gone = _ConvertedPart(*names)
    for name in ("_storage", "_sampler", "_writer", "_prioritized_sampler"):
        if name in vars(rb):
            vars(rb)[name] = gone
    rb._transform = _Converted(*names)


class _Converted:
    """Stands where a converted buffer had something, and says so whatever it is asked for."""

    __slots__ = ("_names",)

    def __init__(self, old: str, new: str) -> None:
        object.__setattr__(self, "_names", (old, new))

    def _refuse(self, *args: Any) -> NoReturn:
        old, new = self._names
        raise RuntimeError(
            f"This {old} was converted: its records, priorities and transforms are those of the {new} that "
            "torchrl_generational.convert() returned. Use that one."
        )

    def __repr__(self) -> str:
        return "<converted>"

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse()

    def __reduce__(self) -> NoReturn:
        self._refuse()

    __call__ = __contains__ = __iter__ = __len__ = __getitem__ = __setitem__ = _refuse


class _ConvertedPart(_Converted):
    """Says so also where it is asked what it is: TorchRL passes over what is no prioritized sampler."""

    __slots__ = ()
    __class__: Any = property(_Converted._refuse)
