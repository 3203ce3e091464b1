from __future__ import annotations

import fcntl
import multiprocessing
import os
import pickle
import threading
import time

import pytest
from children import child_says, forked
from support import TIMEOUT, prioritized, records

from torchrl_generational.concurrency import process_lock as process_locks
from torchrl_generational.concurrency.storage_lock import StorageLock


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


def taken_elsewhere(lock: StorageLock) -> bool:
    """Whether another process finds the lock taken; asks the kernel, without waiting."""
    with forked(lambda: os._exit(_try(lock._processes._file))) as child:
        return child.exit_code() == 1


def _try(file: int) -> int:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 1
    return 0


def test_the_process_lock_is_taken_once_and_given_back_at_the_outermost_exit():
    lock = StorageLock()
    lock.share()
    with lock:
        with lock:
            assert taken_elsewhere(lock)
        assert taken_elsewhere(lock)
    assert not taken_elsewhere(lock)


def test_sharing_while_the_lock_is_held_takes_effect_at_the_next_entry():
    lock = StorageLock()
    with lock:
        lock.share()
    with lock:
        assert taken_elsewhere(lock)
    assert not taken_elsewhere(lock)


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
    connection.send(_try(lock._processes._file))
    connection.recv()
    with lock:
        connection.send("entered")


@pytest.mark.system
def test_a_spawned_process_is_excluded():
    lock = StorageLock()
    lock.share()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(lock, theirs))
    with lock:
        child.start()
        assert ours.poll(TIMEOUT)
        assert ours.recv() == 1  # held here, so not to be had there
    ours.send("released")
    assert ours.poll(TIMEOUT)
    assert ours.recv() == "entered"
    child.join(TIMEOUT)
    assert child.exitcode == 0


def test_a_killed_holder_gives_the_lock_back():
    lock = StorageLock()
    lock.share()
    with forked(lambda: (lock.acquire(), child_says("held"), time.sleep(TIMEOUT))) as child:
        child.wait_for("held")
        assert taken_elsewhere(lock)
        child.kill()
    with lock:
        pass


def test_a_process_without_record_locks_is_warned_and_excluded_all_the_same(monkeypatch):
    monkeypatch.setattr(process_locks, "fcntl", None)
    lock = StorageLock()
    with pytest.warns(RuntimeWarning, match="no lock that is released when its process is killed"):
        lock.share()
    with lock, lock:
        assert not lock._processes._semaphore.acquire(block=False)
    assert lock._processes._semaphore.acquire(block=False)


def test_copies_of_a_lock_in_one_process_exclude_its_threads(actors):
    """A buffer that was unpickled twice: the kernel's lock is one of the process."""
    first = process_locks.KernelLock()
    second = process_locks._rebuild(_Passed(os.dup(first._file)))
    assert second is first
    first.acquire()
    assert not actors.other(lambda: second._threads.acquire(blocking=False))
    first.release()
    assert not taken_by_this_process(first)


class _Passed:
    """What multiprocessing passes a descriptor in."""

    def __init__(self, file: int) -> None:
        self.file = file

    def detach(self) -> int:
        return self.file


def taken_by_this_process(lock) -> bool:
    with forked(lambda: os._exit(_try(lock._file))) as child:
        return child.exit_code() == 1


def test_the_lock_is_free_in_a_forked_child_whatever_threads_of_the_parent_hold(actors):
    lock = StorageLock()
    lock.share()
    actors.other(lock.acquire)
    with forked(lambda: os._exit(lock._threads.acquire(blocking=False))) as child:
        assert child.exit_code() == 1
    actors.other(lock.release)


def test_two_locks_that_two_processes_take_in_turn_in_two_threads_are_no_deadlock(actors):
    """The kernel counts locks by process, and takes this for a circle."""
    first, second = StorageLock(), StorageLock()
    first.share()
    second.share()

    def other_process() -> None:
        second.acquire()
        child_says("holds the second")
        first.acquire()  # waits for this process
        os._exit(0)

    first.acquire()
    with forked(other_process) as child:
        child.wait_for("holds the second")
        waiting = actors.start("other", second.acquire)  # in another thread: waits for the child
        first.release()
        assert child.exit_code() == 0
        waiting.result(TIMEOUT)


def test_an_interrupt_after_the_kernel_has_given_the_lock_leaves_neither_lock_behind(monkeypatch):
    take = process_locks.KernelLock._take

    def interrupted(self):
        take(self)
        raise KeyboardInterrupt

    lock = StorageLock()
    lock.share()
    with monkeypatch.context() as patch:
        patch.setattr(process_locks.KernelLock, "_take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
    assert not taken_elsewhere(lock)
    with lock:
        assert taken_elsewhere(lock)


def test_a_child_forked_inside_a_section_does_not_hold_it():
    lock = StorageLock()
    lock.share()

    def leave_and_enter() -> None:
        with pytest.raises(RuntimeError, match="does not hold the lock"):
            lock.release()
        child_says("left")
        with lock:
            pass

    with lock, forked(leave_and_enter) as child:
        child.wait_for("left")
        assert taken_elsewhere(lock)
        lock.release()
        assert child.exit_code() == 0
        lock.acquire()


def test_a_child_forked_while_a_thread_writes_shares_cursor_and_count(actors, monkeypatch):
    rb = prioritized(8, shared=True)
    rb.extend(records(2))
    inside, go_on = threading.Event(), threading.Event()
    reach = rb.storage.reach

    def wait(rows) -> None:
        reach(rows)
        inside.set()
        assert go_on.wait(TIMEOUT)

    def write_too() -> None:
        child_says("forked")
        rb.extend(records(3, 10))

    with monkeypatch.context() as patch:
        patch.setattr(rb.storage, "reach", wait)
        writing = actors.start("writer", lambda: rb.add(records(1, 2)[0]))
        assert inside.wait(TIMEOUT)
        with forked(lambda: (patch.undo(), write_too())) as child:
            child.wait_for("forked")
            go_on.set()
            writing.result(TIMEOUT)
            assert child.exit_code() == 0
    assert (rb.writer._cursor, rb.write_count, len(rb)) == (6, 6, 6)
    assert rb[:]["x"].tolist() == [0, 1, 2, 10, 11, 12]


def test_a_child_forked_while_a_thread_is_inside_the_buffer_can_use_it(actors):
    rb = prioritized(8, shared=True)
    rb.extend(records(2))
    actors.other(rb._futures_lock.acquire)
    with forked(lambda: rb.empty()) as child:
        assert child.exit_code() == 0
    actors.other(rb._futures_lock.release)
    assert len(rb) == 0


def test_whoever_waits_for_very_long_is_told_which_process_holds_the_lock(monkeypatch):
    lock = StorageLock()
    lock.share()
    with forked(lambda: (lock.acquire(), child_says("held"), time.sleep(TIMEOUT))) as child:
        child.wait_for("held")
        assert lock._processes.holder() == child.pid
        told: list[str] = []

        def tell(message: str, *args: object, **kwargs: object) -> None:
            told.append(message)
            if len(told) == 1:  # the watch of an earlier test may look as well
                child.kill()

        monkeypatch.setattr(process_locks.warnings, "warn", tell)
        monkeypatch.setattr(process_locks, "_LONG", 0.04)
        monkeypatch.setattr(process_locks, "_watch", None)
        with lock:
            pass
    assert f"process {child.pid} holds" in told[0]
    assert "kill it" in told[0]
    assert lock._processes.holder() is None
