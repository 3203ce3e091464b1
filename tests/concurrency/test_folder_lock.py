"""One live storage per folder while its maker or one of its writers lives; and writers whose maker is gone."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Child, child_says, forked
from support import TIMEOUT, buffer_state, filled, prioritized, records
from tensordict import TensorDict

import torchrl_generational as g
from torchrl_generational.concurrency import folder_lock
from torchrl_generational.concurrency.folder_lock import IN_USE, FolderLock
from torchrl_generational.concurrency.write_access import Maker


def lying_in(folder: Path, **kwargs: Any) -> Any:
    storage = g.GenerationalLazyMemmapStorage(8, scratch_dir=folder, existsok=True)
    return prioritized(8, storage=storage, **kwargs)


def on_disk(folder: Path) -> list[int]:
    return TensorDict.load_memmap(folder)["x"].tolist()


# ------------------------------------------------------------------ one process


def test_a_second_storage_is_refused_when_it_is_made_and_the_first_goes_on(tmp_path):
    rb = lying_in(tmp_path / "mine")
    rb.extend(records(8))
    before = buffer_state(rb)
    with pytest.raises(RuntimeError, match=r"The folder .*mine is in use: a storage of this process lies there.*drop"):
        lying_in(tmp_path / "mine")
    assert buffer_state(rb) == before
    rb.extend(records(2, 100))
    assert on_disk(tmp_path / "mine")[:3] == [100, 101, 2]


def test_of_two_that_were_made_before_either_wrote_the_one_that_writes_first_has_it(tmp_path):
    first, second = lying_in(tmp_path), lying_in(tmp_path)
    second.extend(records(8))
    with pytest.raises(RuntimeError, match="is in use"):
        first.extend(records(8, 100))
    assert len(first) == 0
    assert first.storage.generations.tolist() == [-1] * 8
    assert on_disk(tmp_path) == list(range(8))


def test_a_storage_that_never_writes_leaves_nothing_behind(tmp_path):
    lying_in(tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("end", ["dropped", "cleaned up"])
def test_the_folder_is_free_once_the_first_is_gone(end, tmp_path):
    rb = lying_in(tmp_path / "mine")
    rb.extend(records(8))
    if end == "dropped":
        del rb
        assert lying_in(tmp_path / "mine") is not None  # in whatever cycle it hangs
    else:
        rb.storage.cleanup()
        assert not (tmp_path / "mine").exists()
    again = lying_in(tmp_path / "mine")
    again.extend(records(8, 100))
    assert on_disk(tmp_path / "mine") == list(range(100, 108))


def test_a_storage_that_is_shared_has_its_folder_from_then_on(tmp_path):
    lying_in(tmp_path).share()  # dropped
    gc.collect()
    rb = lying_in(tmp_path)
    rb.share()
    with pytest.raises(RuntimeError, match="is in use"):
        lying_in(tmp_path)
    with forked(lambda: rb.extend(records(8))) as child:
        assert child.exit_code() == 0
    assert rb[:]["x"].tolist() == list(range(8))


def test_records_around_files_may_be_read_twice_and_written_once(tmp_path):
    records(8, index=torch.arange(8)).memmap(tmp_path)
    first, second = (
        prioritized(8, storage=g.GenerationalTensorStorage(TensorDict.load_memmap(tmp_path))) for _ in range(2)
    )
    first.extend(records(2, 100))
    second.sample()
    with pytest.raises(RuntimeError, match="is in use"):
        second.extend(records(2, 200))
    assert second.storage.generations.tolist() == [0] * 8
    assert on_disk(tmp_path)[:3] == [100, 101, 2]


def test_two_storages_that_are_threads_race_for_a_folder_and_one_gets_it(tmp_path, actors):
    def take() -> FolderLock | None:
        try:
            return FolderLock(tmp_path)
        except RuntimeError:
            return None

    futures = [actors.start(str(number), take) for number in range(4)]
    assert sum(future.result(TIMEOUT) is not None for future in futures) == 1


def test_who_only_asks_does_not_keep_who_takes_it_out(tmp_path, monkeypatch):
    FolderLock(tmp_path).close()
    asking = os.open(tmp_path / IN_USE, os.O_RDONLY)
    folder_lock.fcntl.flock(asking, folder_lock.fcntl.LOCK_SH)
    closed: list[None] = []

    def sleep(_: float) -> None:
        if not closed:  # other threads sleep too
            closed.append(os.close(asking))

    monkeypatch.setattr(folder_lock.time, "sleep", sleep)
    FolderLock(tmp_path).close()


def test_a_folder_that_was_removed_while_it_was_taken_is_made_again(tmp_path, monkeypatch):
    flock, first = folder_lock.fcntl.flock, [True]

    def removed(file: int, how: int) -> None:
        if first:
            first.clear()
            os.unlink(tmp_path / IN_USE)
        flock(file, how)

    monkeypatch.setattr(folder_lock.fcntl, "flock", removed)
    held = FolderLock(tmp_path)
    with pytest.raises(RuntimeError, match="is in use"):
        folder_lock.refuse_used_folder(tmp_path)
    held.close()
    folder_lock.refuse_used_folder(tmp_path)


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def fails(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "flock", fails)
    rb = lying_in(tmp_path)
    with pytest.warns(RuntimeWarning, match="cannot be locked .*No locks available.* would not be noticed"):
        rb.extend(records(8))
    rb.extend(records(2))  # once
    assert len(rb) == 8


def test_a_lock_is_passed_to_processes_that_are_started_only(tmp_path):
    import pickle

    with pytest.raises(RuntimeError, match="can only be passed to a process that is being started"):
        pickle.dumps(FolderLock(tmp_path))


def test_a_lock_is_passed_again_without_more_descriptors(tmp_path):
    class Starting:
        pass

    lock = FolderLock(tmp_path)

    def passed(times: int) -> list[int]:
        process = Starting()
        return [lock._another_descriptor(process)[0] for _ in range(times)]

    assert len(set(passed(2))) == 2
    assert [passed(2) for _ in range(3)] == [passed(2)] * 3


# ------------------------------------------------------------------ checkpoints


def test_a_checkpoint_over_the_storage_itself_does_not_list_the_lock(tmp_path):
    rb = lying_in(tmp_path / "storage")
    rb.extend(records(8))
    rb.dumps(tmp_path)
    assert (tmp_path / "storage" / IN_USE).exists()
    assert not any(IN_USE in name for name in json.loads((tmp_path / "generational.json").read_text())["files"])
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    for path in (tmp_path, tmp_path / "copy"):
        target = prioritized(8)
        target.loads(path)
        assert target[:]["x"].tolist() == list(range(8))
    del rb
    gc.collect()
    (tmp_path / "storage" / IN_USE).write_text("12345678")  # of a process that is gone
    again = prioritized(8, storage=g.GenerationalLazyMemmapStorage(8, scratch_dir=tmp_path / "storage"))
    again.loads(tmp_path)
    with pytest.raises(RuntimeError, match="is in use"):
        lying_in(tmp_path / "storage")
    again.extend(records(2, 100))
    again.dumps(tmp_path)
    again.loads(tmp_path)
    assert again[:]["x"].tolist()[:3] == [100, 101, 2]


@pytest.mark.parametrize("ensemble", [False, True])
def test_a_dump_by_another_buffer_over_a_live_storage_is_refused(ensemble, tmp_path):
    folder = tmp_path / "storage" / "0" if ensemble else tmp_path / "storage"
    rb = lying_in(folder)
    rb.extend(records(8))
    other = filled(batch_size=None)
    if ensemble:
        other = g.GenerationalReplayBufferEnsemble(other, batch_size=4)
    with pytest.raises(
        (RuntimeError, ValueError), match="is in use: a storage of this process|holds .* of a checkpoint"
    ):
        other.dumps(tmp_path)
    assert not (tmp_path / "generational.json").exists()
    rb.extend(records(1, 100))
    assert on_disk(folder)[:2] == [100, 1]
    assert rb is not None


# ------------------------------------------------------------------ processes


def test_a_storage_of_another_process_is_refused_with_its_number(tmp_path):
    def make() -> None:
        rb = lying_in(tmp_path)
        rb.extend(records(8))
        child_says("made")
        signal_pause()

    with forked(make) as child:
        child.wait_for("made")
        with pytest.raises(RuntimeError, match=f"process {child.pid} made a storage there"):
            lying_in(tmp_path)
        assert on_disk(tmp_path) == list(range(8))
        child.kill()
    rb = lying_in(tmp_path)
    rb.extend(records(8, 100))


def signal_pause() -> None:
    import signal

    signal.pause()


def test_a_child_that_does_not_share_the_storage_does_not_keep_its_folder(tmp_path):
    rb = lying_in(tmp_path)
    rb.extend(records(8))

    def stay() -> None:
        child_says("forked")
        signal_pause()

    with forked(stay) as child:
        child.wait_for("forked")
        del rb
        lying_in(tmp_path).extend(records(8, 100))
        child.kill()


class Writer:
    """A process that writes when it is told to, and says what became of it; started by another one."""

    def __init__(self) -> None:
        self.commands, self._ask = multiprocessing.Pipe(duplex=False)
        self._answers, self.answer = multiprocessing.Pipe(duplex=False)

    def ask(self, command: str) -> str:
        self._ask.send(command)
        assert self._answers.poll(TIMEOUT)
        answer: str = self._answers.recv()
        return answer

    def wait(self) -> str:
        return self.ask("nothing")

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._ask.send("end")


ACTS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda rb: None,
    "read": lambda rb: (len(rb), rb[:]),
    "extend": lambda rb: rb.extend(records(2, 100)),
    "empty": lambda rb: rb.empty(),
    "set_": lambda rb: rb.set_("x", torch.zeros(8, dtype=torch.int64)),
    "[]": lambda rb: rb.__setitem__(slice(0, 1), records(1, index=torch.zeros(1, dtype=torch.int64))),
    "storage": lambda rb: rb.storage.set(slice(0, 1), records(1, index=torch.zeros(1, dtype=torch.int64))),
}


def serve(rb: Any, commands: Any, answer: Any) -> None:
    torch.set_num_threads(1)
    while (command := commands.recv()) != "end":
        try:
            ACTS[command](rb)
        except Exception as error:  # whatever it is, the test looks at it
            answer.send(f"{type(error).__name__}: {error}")
        else:
            answer.send("done")


@contextlib.contextmanager
def made_elsewhere(make: Callable[[], Any], method: str, *, end: str) -> Iterator[tuple[Child, Writer]]:
    """A process that makes a buffer and starts a writer; then it waits, drops the buffer, or ends."""
    writer = Writer()

    def work() -> None:
        rb = make()
        process = multiprocessing.get_context(method).Process(target=serve, args=(rb, writer.commands, writer.answer))
        process.start()
        if end == "drops it":
            del rb
            gc.collect()
        writer.wait()
        child_says("ready")
        if end != "ends":
            signal_pause()

    with forked(work) as maker:
        try:
            maker.wait_for("ready")
            yield maker, writer
        finally:
            writer.end()


@pytest.mark.parametrize("end", ["is killed", "ends", "drops it"])
@pytest.mark.parametrize("storage", ["tensors", "files", "not written"])
def test_a_writer_whose_maker_is_gone_is_told_so_at_its_next_write(storage, end, tmp_path):
    def make() -> Any:
        rb = lying_in(tmp_path, shared=True) if storage == "files" else prioritized(8, shared=True)
        if storage != "not written":
            rb.extend(records(8))
        return rb

    with made_elsewhere(make, "fork", end=end) as (maker, writer):
        if end == "drops it":
            assert writer.ask("extend") == "done" or storage == "not written"
            return
        if end == "is killed":
            assert writer.ask("extend") == "done"
            maker.kill()
        else:
            assert maker.exit_code() == 0
        for command in ("extend", "empty", "[]", "storage", "set_"):
            answer = writer.ask(command)
            assert answer.startswith(f"RuntimeError: The process that made this buffer, {maker.pid}, has ended"), answer
            assert "nobody would learn" in answer
        if storage != "not written" or end == "is killed":
            assert writer.ask("read") == "done"
    if storage == "files":
        assert on_disk(tmp_path) == ([100, 101, *range(2, 8)] if end == "is killed" else list(range(8)))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.system)])
def test_a_learner_that_is_started_again_is_refused_until_the_writers_of_the_first_have_ended(method, tmp_path):
    def make() -> Any:
        rb = lying_in(tmp_path, shared=True)
        rb.extend(records(8))
        return rb

    with made_elsewhere(make, method, end="is killed") as (maker, writer):
        with pytest.raises(RuntimeError, match=f"process {maker.pid} made a storage there\\. Another"):
            lying_in(tmp_path)
        maker.kill()
        with pytest.raises(RuntimeError, match=f"process {maker.pid} .* has ended, but [0-9]+ that it started"):
            lying_in(tmp_path)
        assert "has ended" in writer.ask("extend")
        assert on_disk(tmp_path) == list(range(8))
    # the kernel gives the folder back when the writer ends
    end = folder_lock.time.monotonic() + TIMEOUT
    while folder_lock._is_used(tmp_path):
        assert folder_lock.time.monotonic() < end
        folder_lock.time.sleep(0.01)
    rb = lying_in(tmp_path)
    rb.extend(records(8, 200))


def test_a_maker_does_not_give_its_own_sign_of_life_away():
    maker = Maker.this_process()
    assert maker is Maker.this_process()
    for _ in range(2):
        assert not maker.is_gone()

    def look() -> None:
        assert not maker.is_gone()
        assert not maker.is_gone()
        assert Maker.this_process().pid == os.getpid() != maker.pid

    with forked(look) as child:
        assert child.exit_code() == 0
    with forked(look) as child:  # asking has left it as it was
        assert child.exit_code() == 0


def test_a_writer_asks_for_its_maker_with_no_more_than_two_calls_of_the_kernel(monkeypatch):
    """And the maker itself with none."""
    rb = filled(shared=True)
    calls: list[int] = []

    def write() -> None:
        from torchrl_generational.concurrency import write_access

        lockf = write_access.fcntl.lockf
        alive = rb.storage.lock.maker._alive._file

        def counted(file: int, how: int) -> None:
            calls.append(file)
            lockf(file, how)

        monkeypatch.setattr(write_access.fcntl, "lockf", counted)
        rb.storage.set(slice(0, 1), records(1, index=torch.zeros(1, dtype=torch.int64)))
        monkeypatch.undo()
        return calls.count(alive)

    assert write() == 0
    with forked(lambda: exit_unless(0 < write() <= 2)) as child:
        assert child.exit_code() == 0


def exit_unless(true: bool) -> None:
    assert true
