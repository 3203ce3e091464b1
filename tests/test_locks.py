from __future__ import annotations

import multiprocessing
import pickle

import pytest
from support import TIMEOUT

from torchrl_generational.locks import StorageLock


@pytest.mark.parametrize("shared", [False, True])
def test_the_lock_is_reentrant_and_excludes_other_threads(shared, actors):
    lock = StorageLock()
    if shared:
        lock.share()

    def take_if_free() -> bool:
        free = lock._threads.acquire(blocking=False)
        if free:
            lock._threads.release()
        return free

    with lock:
        with lock:
            assert not actors.other(take_if_free)
        assert not actors.other(take_if_free)
    assert actors.other(take_if_free)


def test_the_process_lock_is_taken_once_and_given_back_at_the_outermost_exit():
    lock = StorageLock()
    lock.share()
    process_lock = lock._processes
    with lock:
        with lock:
            assert not process_lock.acquire(block=False)
        assert not process_lock.acquire(block=False)
    assert process_lock.acquire(block=False)


def test_sharing_while_the_lock_is_held_takes_effect_at_the_next_entry():
    lock = StorageLock()
    with lock:
        lock.share()
    with lock:
        assert not lock._processes.acquire(block=False)
    assert lock._processes.acquire(block=False)


def test_sharing_again_keeps_the_lock_that_others_already_hold():
    lock = StorageLock()
    lock.share()
    first = lock._processes
    lock.share()
    assert lock._processes is first


@pytest.mark.parametrize("shared", [False, True])
def test_a_copy_gets_locks_of_its_own(shared):
    lock = StorageLock()
    if shared:
        lock.share()
    with lock:
        copy = pickle.loads(pickle.dumps(lock))
        assert copy.is_shared is shared
        with copy:  # would block if it were the same process lock
            pass


def _child(lock, connection) -> None:
    connection.send(lock._processes.acquire(block=False))
    connection.recv()
    with lock:
        connection.send("entered")


def test_a_spawned_process_is_excluded():
    lock = StorageLock()
    lock.share()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(lock, theirs))
    with lock:
        child.start()
        assert ours.poll(TIMEOUT)
        assert ours.recv() is False  # held here, so not to be had there
    ours.send("released")
    assert ours.poll(TIMEOUT)
    assert ours.recv() == "entered"
    child.join(TIMEOUT)
    assert child.exitcode == 0
