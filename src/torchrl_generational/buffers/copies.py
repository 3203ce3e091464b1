"""Copies of buffers, of one moment whatever other threads do meanwhile."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from copy import deepcopy
from typing import Any

from torchrl_generational.storages.moments import Unchanged

__all__ = ["copied", "frozen", "frozen_ensemble", "still", "take_moment"]

_MOMENT = "_moment"  # in a copy's state: what its storage had seen of writes
_THROUGH = "_moment_has_passed"  # after everything else


@contextlib.contextmanager
def still(buffers: Iterable[Any]) -> Iterator[None]:
    """No work in flight in ``buffers`` and in all others on their storages, and all their locks.

    Futures locks come before the locks of storages, each kind in one order for everybody.
    """
    mine = list(buffers)
    storages = {id(storage): storage for buffer in mine if (storage := vars(buffer).get("_storage")) is not None}
    entities = (entity for storage in storages.values() for entity in getattr(storage, "_attached_entities", ()))
    everyone = {id(buffer): buffer for buffer in (*mine, *entities) if hasattr(buffer, "_futures_lock")}
    with contextlib.ExitStack() as held:
        for key in sorted(everyone, key=lambda key: (not hasattr(everyone[key], "_rbs"), key)):  # ensembles first
            held.enter_context(everyone[key]._futures_lock)
        for buffer in everyone.values():
            wait((*buffer._prefetch_queue, *buffer._pending_update_futures))
        locks = {id(lock): lock for buffer in mine if (lock := buffer._replay_lock) is not None}
        for lock in sorted(locks.values(), key=lambda lock: getattr(lock, "order", -1)):
            held.enter_context(lock)
        yield


def copied(buffer: Any, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy``'s copy of a buffer. The caller holds its locks."""
    cls: Any = type(buffer)
    twin = cls.__new__(cls)
    memo[id(buffer)] = twin
    twin.__setstate__(deepcopy(buffer.__getstate__(), memo))
    return twin


def frozen(buffer: Any, state: dict[str, Any]) -> None:
    """Makes a buffer's state, whose entries are pickled one after the other, one of now. Lock held.

    Samplers and writer are copied. The storage copies itself when its turn comes, and is checked to be what it is now.
    """
    _forget_work(state)
    storage = state.get("_storage")
    if storage is None or not hasattr(storage, "_mutation_revision"):
        return
    memo = {id(part): part for part in (buffer, storage, *getattr(storage, "_attached_entities", ()))}
    for name in ("_sampler", "_prioritized_sampler", "_writer", "_follower"):
        if state.get(name) is not None:
            state[name] = deepcopy(state[name], memo)
    through = Unchanged([storage])
    state[_MOMENT], state[_THROUGH] = through.moments[0], through


def frozen_ensemble(ensemble: Any, state: dict[str, Any]) -> None:
    """The same for an ensemble, whose members make their own state when their turn comes. Locks held."""
    _forget_work(state)
    for name, parts in (("_sampler", "_samplers"), ("_writer", "_writers")):  # theirs, which are copied with them
        if name in state:
            bare = object.__new__(type(state[name]))
            vars(bare).update(vars(state[name]), **{parts: ()})
            state[name] = bare
    state[_THROUGH] = Unchanged([rb._storage for rb in ensemble._rbs if hasattr(rb, "_storage")])


def _forget_work(state: dict[str, Any]) -> None:
    """Updates under way have been waited for; those that are submitted from now on are the original's."""
    state["_pending_update_futures"], state["_sample_dependency"], state["_iterator"] = deque(), None, None


def take_moment(state: dict[str, Any]) -> int | None:
    """Takes out of a state what :func:`frozen` has put there, for ``check_moment``."""
    state.pop(_THROUGH, None)
    moment: int | None = state.pop(_MOMENT, None)
    return moment
