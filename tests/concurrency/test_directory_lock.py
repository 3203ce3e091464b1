"""One thread or process at a time uses a checkpoint directory, and what is loaded is one whole checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from support import TIMEOUT, Actors, filled, prioritized, records, until_blocked_or_done

import torchrl_generational as g
from torchrl_generational.concurrency import directory_lock
from torchrl_generational.concurrency.directory_lock import LOCK, directory_locked
from torchrl_generational.persistence import manifest


def written(start: int, **kwargs: Any) -> Any:
    """A full buffer all of whose parts tell its ``start``."""
    rb = prioritized(8, **kwargs)
    rb.extend(records(8, start))
    rb.update_priority(list(range(8)), float(start + 1))
    return rb


def ensemble(start: int) -> Any:
    return g.GenerationalReplayBufferEnsemble(written(start), written(start), batch_size=4)


MAKE = {"buffer": written, "ensemble": ensemble}


def told(rb: Any) -> set[int]:
    """The starts that the parts of a buffer tell; one unless they are a mixture."""
    found: set[int] = set()
    for member in getattr(rb, "_rbs", [rb]):
        found |= {int(x) // 8 * 8 for x in member.storage._storage["x"]}
        found |= {int(member.sampler._sum_tree[slot]) - 1 for slot in range(8)}
    return found


@pytest.fixture(params=sorted(MAKE))
def make(request):
    return MAKE[request.param]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


class Gate:
    """Stops the method of an object in its middle until it is told to go on."""

    def __init__(self, monkeypatch: Any, owner: Any, name: str) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        plain = getattr(owner, name)

        def stopped(*args: Any, **kwargs: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(TIMEOUT)
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, stopped, raising=False)


@pytest.fixture
def blocked(monkeypatch):
    """An event that is set when a thread finds the directory taken, and is about to wait."""
    event, plain = threading.Event(), directory_lock.fcntl.flock

    def flock(file: int, operation: int) -> None:
        if operation == directory_lock.fcntl.LOCK_EX:
            try:
                plain(file, operation | directory_lock.fcntl.LOCK_NB)
            except BlockingIOError:
                event.set()
            else:
                return
        plain(file, operation)

    monkeypatch.setattr(directory_lock.fcntl, "flock", flock)
    return event


def part(rb: Any) -> Any:
    """What is saved last but the rest."""
    return getattr(rb, "_rbs", [rb])[-1].writer


@pytest.mark.parametrize("second", ["dumps", "loads"])
@pytest.mark.parametrize("first", ["dumps", "loads"])
def test_whoever_comes_second_waits_until_the_first_is_through(first, second, make, path, blocked, actors, monkeypatch):
    """C45: errors in the dumper, and a mixture accepted by the loader."""
    make(0).dumps(path)
    one, other = make(8), make(16)
    gate = Gate(monkeypatch, *((part(one), "dumps") if first == "dumps" else (one, "_load_prefetch_state")))
    running = actors.start("first", lambda: getattr(one, first)(path))
    assert gate.reached.wait(TIMEOUT)
    waiting = actors.start("second", lambda: getattr(other, second)(path))
    until_blocked_or_done(blocked, waiting)
    assert not waiting.done()
    gate.opened.set()
    running.result(TIMEOUT)
    waiting.result(TIMEOUT)
    held = {"dumps": 8, "loads": 0}[first]
    assert told(one) == {held}
    assert told(other) == ({16} if second == "dumps" else {held})
    last = make(24)
    last.loads(path)
    assert told(last) == {16 if second == "dumps" else held}


def test_a_buffer_stays_usable_while_another_thread_of_it_waits_for_a_directory(path, blocked, actors):
    """The directory is waited for before the storage's lock is taken."""
    rb = written(8)
    rb.dumps(path)
    with directory_locked(path, create=True):
        waiting = actors.start("dumper", lambda: rb.dumps(path))
        until_blocked_or_done(blocked, waiting)
        sample = rb.sample()
        rb.extend(records(3, 100))
        sample["td_error"] = sample["x"].float()
        rb.update_tensordict_priority_if_present(sample)
        assert not waiting.done()
    waiting.result(TIMEOUT)


def test_two_buffers_on_one_storage_save_and_load_one_directory_without_deadlock(path, actors):
    one = written(8)
    other = prioritized(8, storage=one.storage)
    one.dumps(path)

    def use(rb: Any, how: str) -> None:
        for _ in range(5):
            getattr(rb, how)(path)

    steps = [
        actors.start(f"{number} {how}", lambda rb=rb, how=how: use(rb, how))
        for number, rb in enumerate((one, other))
        for how in ("dumps", "loads")
    ]
    for step in steps:
        step.result(TIMEOUT)


def test_what_is_loaded_beside_dumping_threads_and_processes_is_one_whole_checkpoint(path):
    written(0).dumps(path)
    children = []
    for start in (8, 16):
        pid = os.fork()
        if not pid:
            status = 1
            with contextlib.suppress(BaseException):
                rb = written(start)
                for _ in range(8):
                    rb.dumps(path)
                status = 0
            os._exit(status)
        children.append(pid)
    actors = Actors()
    source = written(24)
    dumping = actors.start("dumper", lambda: [source.dumps(path) for _ in range(8)])
    target = written(32)
    for _ in range(12):
        target.loads(path)
        assert told(target) in ({0}, {8}, {16}, {24})
    dumping.result(TIMEOUT)
    actors.close()
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]
    assert not list(path.glob(".generational-*"))


# ------------------------------------------------------------------ nothing stays held


def is_free(path: Path) -> bool:
    with (path / LOCK).open() as file:
        try:
            directory_lock.fcntl.flock(file, directory_lock.fcntl.LOCK_EX | directory_lock.fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_lock_is_freed_by_an_error_and_by_its_end(make, path, monkeypatch):
    rb = make(8)
    rb.dumps(path)
    assert is_free(path)
    monkeypatch.setattr(part(rb), "dumps", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rb.dumps(path)
    assert is_free(path)
    monkeypatch.undo()
    (path / "buffer_metadata.json").unlink()
    with pytest.raises(FileNotFoundError):
        rb.loads(path)
    assert is_free(path)
    rb.dumps(path)


def held_by_child(path: Path, then: Any = None) -> tuple[int, int]:
    """A child that holds the lock, and a pipe whose other end it closes when it ends."""
    told_here, tell = os.pipe()
    pid = os.fork()
    if not pid:
        with directory_locked(path, create=True) as locked:
            if then is not None:
                then()
            os.write(tell, b"y" if locked else b"n")
            signal.pause()
    os.close(tell)
    assert os.read(told_here, 1) == b"y"
    return pid, told_here


def test_a_lock_is_freed_by_the_death_of_its_holder(path):
    rb = written(8)
    rb.dumps(path)
    pid, pipe = held_by_child(path)
    assert not is_free(path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(pipe)
    assert is_free(path)
    rb.loads(path)


def test_a_child_that_is_forked_in_the_middle_does_not_hold_the_lock_of_its_parent(path):
    """A descriptor is inherited, and with it the kernel's lock: here the parent is killed and the child lives on."""
    rb = written(8)
    rb.dumps(path)
    place, other = os.pipe()

    def fork() -> None:
        grandchild = os.fork()
        if not grandchild:
            signal.pause()
        os.write(other, str(grandchild).encode())

    pid, pipe = held_by_child(path, fork)
    grandchild = int(os.read(place, 20))
    try:
        assert not is_free(path)  # the grandchild closes its copy, and does not unlock the parent's
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert is_free(path)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        for file in (place, other, pipe):
            os.close(file)


@pytest.fixture
def interrupted():
    """Interrupts the main thread, once, as soon as it has begun to wait in the kernel or is about to."""
    main, raised = threading.get_ident(), threading.Event()

    def handler(*_: Any) -> None:
        if not raised.is_set():
            raised.set()
            raise KeyboardInterrupt

    def interrupt(when: threading.Event) -> None:
        assert when.wait(TIMEOUT)
        while not raised.is_set():  # one that comes just before the system call does not end it
            signal.pthread_kill(main, signal.SIGINT)
            raised.wait(0.05)

    before = signal.signal(signal.SIGINT, handler)
    yield interrupt
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", ["dumps", "loads"])
def test_an_interrupt_while_it_waits_leaves_nothing_held(how, make, path, blocked, actors, interrupted):
    rb = make(8)
    rb.dumps(path)
    held, end = threading.Event(), threading.Event()

    def hold() -> None:
        with directory_locked(path, create=True):
            held.set()
            assert end.wait(TIMEOUT)

    holding = actors.start("holder", hold)
    assert held.wait(TIMEOUT)
    interrupting = actors.start("interrupter", lambda: interrupted(blocked))
    try:
        with pytest.raises(KeyboardInterrupt):
            getattr(rb, how)(path)
        interrupting.result(TIMEOUT)

        def use() -> None:  # in another thread: locks are reentrant
            getattr(rb, "_rbs", [rb])[-1].extend(records(2, 100))
            rb.state_dict()

        actors.learner(use)
    finally:
        end.set()
    holding.result(TIMEOUT)
    assert is_free(path)
    rb.dumps(path)


def test_whoever_would_wait_for_itself_is_told(path):
    """As a signal handler that saves while its thread is saving."""
    rb = written(8)
    rb.dumps(path)
    with directory_locked(path, create=True):
        for method in (rb.dumps, rb.loads):
            with pytest.raises(RuntimeError, match="would wait for itself. Save from a signal handler only by"):
                method(path)
    assert is_free(path)
    rb.loads(path)


# ------------------------------------------------------------------ where there is no lock


def without_lock_files(monkeypatch: Any, code: int) -> None:
    plain = os.open

    def refusing(file: Any, *args: Any, **kwargs: Any) -> int:
        if str(file).endswith(LOCK):
            raise OSError(code, os.strerror(code), str(file))
        return plain(file, *args, **kwargs)

    monkeypatch.setattr(directory_lock.os, "open", refusing)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_directory_that_cannot_be_written_to_is_loaded_without_a_lock(code, make, path, monkeypatch):
    make(8).dumps(path)
    (path / LOCK).unlink()
    without_lock_files(monkeypatch, code)
    rb = make(16)
    rb.loads(path)
    assert told(rb) == {8}
    assert not (path / LOCK).exists()


def test_a_dump_that_comes_in_between_where_there_is_no_lock_is_noticed(make, path, monkeypatch):
    make(8).dumps(path)
    rb, other = make(16), make(24)
    without_lock_files(monkeypatch, errno.EROFS)
    plain = rb._load_prefetch_state  # what is read last

    def load(folder: Any) -> Any:
        found = plain(folder)
        other.dumps(path)
        return found

    monkeypatch.setattr(rb, "_load_prefetch_state", load)
    with pytest.raises(ValueError, match="was saved to while it was loaded, and could not be locked. Load it again."):
        rb.loads(path)
    monkeypatch.undo()
    rb.loads(path)
    assert told(rb) == {24}


@pytest.mark.parametrize("how", ["no fcntl", errno.ENOLCK, errno.EOPNOTSUPP])
def test_systems_without_such_locks_do_without(how, make, path, monkeypatch):
    if how == "no fcntl":
        monkeypatch.setattr(directory_lock, "fcntl", None)
    else:

        def flock(file: int, operation: int) -> None:
            raise OSError(how, os.strerror(how))

        monkeypatch.setattr(directory_lock.fcntl, "flock", flock)
    make(8).dumps(path)
    rb = make(16)
    rb.loads(path)
    assert told(rb) == {8}


def test_a_directory_that_is_replaced_while_one_waits_is_locked_anew(path, blocked, actors, monkeypatch):
    rb, other = written(8), written(16)
    rb.dumps(path)
    gate = Gate(monkeypatch, other.writer, "dumps")
    with directory_locked(path, create=True):
        waiting = actors.start("dumper", lambda: other.dumps(path))
        until_blocked_or_done(blocked, waiting)
        shutil.rmtree(path)
        path.mkdir()
        (path / LOCK).touch()
    assert gate.reached.wait(TIMEOUT)
    assert not is_free(path)
    gate.opened.set()
    waiting.result(TIMEOUT)
    rb.loads(path)
    assert told(rb) == {16}
    assert is_free(path)


def test_loading_makes_no_lock_file_where_there_is_no_checkpoint(make, path):
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(FileNotFoundError, match="is not a complete checkpoint"):
        make(8).loads(path)
    assert [file.name for file in path.iterdir()] == ["notes.txt"]


def test_a_finished_dump_leaves_its_lock_file_and_no_other(path):
    filled().dumps(path)
    assert sorted(file.name for file in path.glob("*generational*")) == [manifest.MANIFEST, LOCK]
    assert (path / LOCK).stat().st_size == 0
