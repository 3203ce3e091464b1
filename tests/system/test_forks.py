"""A process that was forked without sharing reads on, and is refused whatever it would change."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import child_says, forked
from support import TIMEOUT, buffer_state, filled, prioritized, records
from tensordict import TensorDict
from test_lock_discipline import ACTS, HARMLESS, KINDS, READS, names_of
from torchrl.data.replay_buffers import SliceSampler

import torchrl_generational as g

REFUSED = r"was forked from the one that made the buffer.*share\(\) before the fork.*copy\.deepcopy"
READS = READS | {"next", "__iter__"}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def in_a_child(work: Callable[[], Any]) -> None:
    with forked(work) as child:
        assert child.exit_code() == 0


STORAGES: dict[str, Callable[[], Any]] = {
    "tensors": lambda: g.GenerationalLazyTensorStorage(8),
    "files": lambda: g.GenerationalLazyMemmapStorage(8),
    "around tensors": lambda: g.GenerationalTensorStorage(records(8, index=torch.arange(8))),
    "around shared memory": lambda: g.GenerationalTensorStorage(records(8, index=torch.arange(8)).share_memory_()),
}


def build(kind: str, storage: str) -> Any:
    rb = KINDS[kind](batch_size=4, storage=STORAGES[storage]())
    rb.set_rng(torch.Generator().manual_seed(0))
    rb.extend(records(8))
    return rb


def state_of(rb: Any) -> Any:
    stats = {name: number for name, number in rb.stats().items() if "sample" not in name}  # later TorchRL counts reads
    return buffer_state(rb), rb.storage._mutation_revision, stats


def refused(act: Callable[[], Any], name: str) -> None:
    with pytest.raises(RuntimeError, match=REFUSED):
        act()
        raise AssertionError(f"{name} was not refused")


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_public_method_that_changes_something_is_refused_and_every_other_works(kind, storage, tmp_path):
    """The methods are those that the test of the locks finds; one that is added later has to be listed there."""
    rb = build(kind, storage)
    assert names_of(rb) - ACTS.keys() - HARMLESS.keys() == set()
    data, info = rb.sample(return_info=True)
    td = data.set("td_error", torch.ones(4)) if "tensordict" in kind else None
    rb.dumps(tmp_path / "before")
    torch.save(rb.state_dict(), tmp_path / "state.pt")
    before = state_of(rb)

    def all_of_them() -> None:
        for name, act in ACTS.items():
            if "_tensordict_" in name and td is None:
                continue
            if name in READS:
                act(rb, info, td, tmp_path)
            else:
                refused(lambda act=act: act(rb, info, td, tmp_path), name)
                assert state_of(rb) == before, name
        refused(rb.share, "share")
        assert state_of(rb) == before
        assert not rb.shared

    in_a_child(all_of_them)
    assert state_of(rb) == before
    rb.extend(records(3))  # here it goes on to work


PARTS: dict[str, Callable[[Any, Path], Any]] = {
    "storage.set": lambda rb, path: rb.storage.set(0, records(1, index=torch.zeros(1))[0]),
    "storage[]": lambda rb, path: rb.storage.__setitem__(slice(2), records(2, index=torch.zeros(2))),
    "storage._empty": lambda rb, path: rb.storage._empty(),
    "storage.load_state_dict": lambda rb, path: rb.storage.load_state_dict(rb.storage.state_dict()),
    "storage.loads": lambda rb, path: rb.storage.loads(path / "before" / "storage"),
    "storage.load": lambda rb, path: rb.storage.load(path / "before" / "storage"),
    "storage.share": lambda rb, path: rb.storage.share(),
    "writer.add": lambda rb, path: rb.writer.add(records(1)[0]),
    "writer.extend": lambda rb, path: rb.writer.extend(records(2)),
    "writer.write_at": lambda rb, path: rb.writer.write_at(torch.tensor([1]), records(1, index=torch.zeros(1))),
    "writer._empty": lambda rb, path: rb.writer._empty(),
    "writer.load_state_dict": lambda rb, path: rb.writer.load_state_dict(rb.writer.state_dict()),
    "writer.loads": lambda rb, path: rb.writer.loads(path / "before" / "writer"),
    "sampler.alpha": lambda rb, path: setattr(rb.sampler, "alpha", 0.1),
    "sampler.beta": lambda rb, path: setattr(rb.sampler, "beta", 0.1),
    "sampler.load_state_dict": lambda rb, path: rb.sampler.load_state_dict(rb.sampler.state_dict()),
    "sampler.loads": lambda rb, path: rb.sampler.loads(path / "before" / "sampler"),
}


@pytest.mark.parametrize("storage", ["tensors", "files"])
def test_parts_that_are_written_to_directly_are_refused_too(storage, tmp_path):
    rb = build("tensordict prioritized", storage)
    rb.dumps(tmp_path / "before")
    before = state_of(rb)

    def all_of_them() -> None:
        for name, act in PARTS.items():
            refused(lambda act=act: act(rb, tmp_path), name)
            assert state_of(rb) == before, name

    in_a_child(all_of_them)
    assert state_of(rb) == before


def test_data_of_a_refused_write_is_as_it_was():
    rb = filled()
    data = TensorDict({"x": torch.arange(2)}, [2])

    def write() -> None:
        for act in (rb.extend, rb.writer.extend, rb.writer.add):
            refused(lambda act=act: act(data), "extend")
        assert set(data.keys()) == {"x"}

    in_a_child(write)


def test_a_writer_that_keeps_the_best_is_refused_too():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(4),
        writer=g.GenerationalTensorDictMaxValueWriter(rank_key="x"),
        batch_size=2,
    )
    rb.extend(records(4))

    def write() -> None:
        for act in (rb.extend, rb.writer.extend):
            refused(lambda act=act: act(records(2, 100)), "extend")
        refused(lambda: rb.add(records(1, 100)[0]), "add")
        refused(rb.writer._empty, "_empty")
        assert rb.writer._current_top_values[0] == (0.0, 0)
        assert (rb[:]["x"].tolist(), rb.write_count, len(rb)) == ([0, 1, 2, 3], 4, 4)

    in_a_child(write)
    rb.extend(records(1, 100))
    assert sorted(rb[:]["x"].tolist()) == [1, 2, 3, 100]


@pytest.mark.parametrize("ndim", [2, 3])
@pytest.mark.parametrize("storage", [g.GenerationalLazyTensorStorage, g.GenerationalLazyMemmapStorage])
def test_several_dimensions_are_refused_too(storage, ndim):
    shape = (4, 2, 2)[:ndim]
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=storage(torch.Size(shape).numel(), ndim=ndim),
        sampler=g.GenerationalPrioritizedSampler(torch.Size(shape).numel(), 0.7, 0.5),
        batch_size=4,
    )
    data = TensorDict({"x": torch.zeros(shape)}, shape)
    rb.extend(data)
    handles = rb.sample().set("td_error", torch.ones(4))

    def write() -> None:
        refused(lambda: rb.extend(data + 1), "extend")
        refused(lambda: rb.__setitem__((0, 1), data[0, 1] + 1), "[]")
        refused(lambda: rb.update_tensordict_priority_if_present(handles), "update")
        rb.sample()
        assert (rb[:]["x"] == 0).all()

    in_a_child(write)
    assert (rb[:]["x"] == 0).all()
    assert rb.update_tensordict_priority_if_present(handles).num_updated == 4


@pytest.mark.parametrize("how", ["fork", "thread", "multiprocessing", "twice"])
def test_however_the_process_was_forked(how, actors):
    rb = filled(storage=g.GenerationalLazyMemmapStorage(8))

    def write() -> None:
        torch.set_num_threads(1)
        refused(lambda: rb.extend(records(3, 100)), how)
        rb.sample()

    if how == "fork":
        in_a_child(write)
    elif how == "thread":
        actors.other(lambda: in_a_child(write))
    elif how == "twice":
        in_a_child(lambda: in_a_child(write))
    else:
        process = multiprocessing.get_context("fork").Process(target=write)
        process.start()
        process.join(TIMEOUT)
        assert process.exitcode == 0
    assert rb[:]["x"].tolist() == list(range(8))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("storage", ["tensors", "files"])
def test_a_copy_made_in_the_child_is_its_own(way, storage):
    rb = build("tensordict prioritized", storage)

    def write() -> None:
        twin = copy.deepcopy(rb) if way == "deepcopy" else pickle.loads(pickle.dumps(rb))
        sample = twin.sample().set("td_error", torch.ones(4))
        twin.extend(records(8, 100))
        assert twin.update_tensordict_priority_if_present(sample).num_stale == 4
        twin.share()
        in_a_child(lambda: twin.extend(records(2, 200)))
        assert twin[:]["x"].tolist() == [200, 201, *range(102, 108)]

    in_a_child(write)
    assert rb[:]["x"].tolist() == list(range(8))


def test_a_child_that_was_forked_before_the_sharing_is_refused():
    rb = filled()
    reading, go_on = multiprocessing.Pipe(duplex=False)

    def write() -> None:
        child_says("forked")
        reading.recv()
        refused(lambda: rb.extend(records(3, 100)), "extend")

    with forked(write) as child:
        child.wait_for("forked")
        rb.share()
        rb.extend(records(2, 50))
        go_on.send(None)
        assert child.exit_code() == 0
    in_a_child(lambda: rb.extend(records(3, 100)))
    assert rb[:]["x"].tolist() == [50, 51, 100, 101, 102, 5, 6, 7]


def test_a_child_has_length_cursor_and_count_of_the_moment_of_the_fork():
    rb = prioritized(8)
    rb.extend(records(3))
    reading, go_on = multiprocessing.Pipe(duplex=False)

    def look() -> None:
        child_says("forked")
        reading.recv()
        assert (len(rb), rb.write_count, rb.writer._cursor) == (3, 3, 3)
        assert (rb.sample()["x"] < 3).all()
        assert rb[:]["x"].tolist() == [0, 1, 2]

    with forked(look) as child:
        child.wait_for("forked")
        rb.extend(records(4, 3))
        go_on.send(None)
        assert child.exit_code() == 0
    assert len(rb) == 7


SNAPSHOTS: dict[str, Callable[[Any, Path], Any]] = {
    "state_dict": lambda rb, path: rb.state_dict(),
    "dumps": lambda rb, path: rb.dumps(path / "child"),
    "deepcopy": lambda rb, path: copy.deepcopy(rb),
    "pickle": lambda rb, path: pickle.dumps(rb),
    "storage.dumps": lambda rb, path: rb.storage.dumps(path / "child"),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "extend": lambda rb: rb.extend(records(2, 100)),
    "[]": lambda rb: rb.__setitem__((0,), records(1, 100, index=torch.zeros(1, dtype=torch.int64))[0]),
    "empty": lambda rb: rb.empty(),
    "load": lambda rb: rb.load_state_dict(rb.state_dict()),
    "failed": lambda rb: write_misfits(rb),
}


def write_misfits(rb: Any) -> None:
    with pytest.raises(RuntimeError):
        rb.extend(TensorDict({"x": torch.zeros(2, 3)}, [2]))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("storage", ["tensors", "files", "around shared memory"])
def test_a_child_saves_what_is_of_one_moment_or_is_refused(storage, write, tmp_path):
    """Records in files change under a child; its generations and priorities do not."""
    rb = build("tensordict prioritized", storage)
    reading, go_on = multiprocessing.Pipe(duplex=False)

    def save() -> None:
        for act in SNAPSHOTS.values():
            act(rb, tmp_path)
        child_says("saved")
        reading.recv()
        for name, act in SNAPSHOTS.items():
            if storage == "tensors" or write == "failed":
                act(rb, tmp_path)
            else:
                with pytest.raises(RuntimeError, match="has written to the same files or memory since"):
                    act(rb, tmp_path)
                    raise AssertionError(name)
        if write != "empty":
            rb.sample()

    with forked(save) as child:
        child.wait_for("saved")
        WRITES[write](rb)
        go_on.send(None)
        assert child.exit_code() == 0
    in_a_child(lambda: rb.state_dict())  # of a child that was forked afterwards


@pytest.mark.parametrize("storage", ["tensors", "files"])
def test_a_record_that_a_thread_was_writing_at_the_fork_is_none_in_the_child(storage, actors, monkeypatch):
    """Its generation is there, and its data is not, nor will be."""
    rb = build("tensordict prioritized", storage)
    inside, go_on = threading.Event(), threading.Event()
    reach = rb.storage.reach

    def wait(rows) -> None:
        inside.set()
        assert go_on.wait(TIMEOUT)
        reach(rows)

    def look() -> None:
        assert rb.storage.generations.tolist() == [-3] * 3 + [0] * 5
        for _ in range(20):
            sample = rb.sample()
            assert (sample["index"] >= 3).all()
            assert (sample["index_generation"] == 0).all()
        if storage == "files":
            with pytest.raises(RuntimeError, match="has written to the same files"):
                rb.state_dict()
        else:
            rb.state_dict()

    with monkeypatch.context() as patch:
        patch.setattr(rb.storage, "reach", wait)
        writing = actors.start("writer", lambda: rb.extend(records(3, 100)))
        assert inside.wait(TIMEOUT)
        with forked(look) as child:
            assert child.exit_code() == 0
        go_on.set()
        writing.result(TIMEOUT)
    assert rb.storage.generations.tolist() == [1] * 3 + [0] * 5


def test_a_buffer_that_is_initialised_in_the_child_is_its_own():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=lambda: g.GenerationalLazyTensorStorage(8),
        sampler=lambda: g.GenerationalPrioritizedSampler(8, 1.0, 1.0),
        batch_size=4,
        delayed_init=True,
    )

    def use() -> None:
        rb.extend(records(8))
        rb.update_tensordict_priority_if_present(rb.sample().set("td_error", torch.ones(4)))
        rb.share()
        rb.sample()

    in_a_child(use)
    assert not rb.initialized
    rb.extend(records(2))
    assert len(rb) == 2


def test_a_storage_that_was_made_before_the_fork_stays_the_parents_when_the_child_initialises_the_buffer():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyMemmapStorage(8), batch_size=4, delayed_init=True
    )
    in_a_child(lambda: refused(lambda: rb.extend(records(8)), "extend"))
    rb.extend(records(8))


def test_a_buffer_that_a_thread_was_initialising_at_the_fork_can_be_initialised_in_the_child(actors):
    inside, go_on = threading.Event(), threading.Event()
    first = [True]

    def make() -> Any:
        if first:
            first.clear()
            inside.set()
            assert go_on.wait(TIMEOUT)
        return g.GenerationalLazyTensorStorage(8)

    rb = g.GenerationalTensorDictReplayBuffer(storage=make, batch_size=4, delayed_init=True)
    making = actors.start("maker", lambda: rb.extend(records(2)))
    assert inside.wait(TIMEOUT)

    def use() -> None:
        rb.extend(records(3))
        assert len(rb) == 3

    with forked(use) as child:
        assert child.exit_code() == 0
    go_on.set()
    making.result(TIMEOUT)
    assert len(rb) == 2


def test_a_converted_buffer_is_refused_too():
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    stock = TensorDictReplayBuffer(storage=LazyMemmapStorage(8), batch_size=4)
    stock.extend(records(8))
    rb = g.convert(stock)

    def write() -> None:
        refused(lambda: rb.extend(records(3, 100)), "extend")
        rb.sample()
        rb.state_dict()

    in_a_child(write)
    assert rb[:]["x"].tolist() == list(range(8))


def test_a_dump_over_the_storage_itself_is_refused(tmp_path):
    rb = filled(storage=g.GenerationalLazyMemmapStorage(8, scratch_dir=tmp_path / "storage"))
    in_a_child(lambda: refused(lambda: rb.dumps(tmp_path), "dumps"))
    assert not (tmp_path / "generational.json").exists()
    rb.dumps(tmp_path)


# ------------------------------------------------------------------ ensembles


def ensemble(**kwargs: Any) -> Any:
    members = [filled(batch_size=None) for _ in range(2)]
    rb = g.GenerationalReplayBufferEnsemble(*members, batch_size=8, sample_from_all=True, **kwargs)
    rb.set_rng(torch.Generator().manual_seed(0))
    return rb


@pytest.mark.parametrize("shared", [False, True], ids=["no member shared", "first member shared"])
def test_an_ensemble_is_refused_before_any_member_changes(shared, tmp_path):
    rb = ensemble(routing_key="to")
    if shared:
        rb[0].share()
    sample = rb.sample().set("td_error", torch.ones(2, 4))
    handles = {"index": sample["index"], "generation": sample["index_generation"]}
    data = records(4, 100, to=torch.tensor([0, 0, 1, 1]))
    rb.dumps(tmp_path / "before")
    torch.save(rb.state_dict(), tmp_path / "state.pt")
    acts: dict[str, Callable[[], Any]] = {
        "extend": lambda: rb.extend(data),
        "add": lambda: rb.add(data[3]),
        "empty": rb.empty,
        "update_priority": lambda: rb.update_priority(sample["index"], 2.0),
        "update_priority_if_present": lambda: rb.update_priority_if_present(**handles, priority=2.0),
        "update_tensordict_priority_if_present": lambda: rb.update_tensordict_priority_if_present(sample),
        "update_if_present": lambda: rb.update_if_present(**handles, patch={"x": torch.zeros(2, 4, dtype=torch.int64)}),
        "set_rng": lambda: rb.set_rng(None),
        "load_state_dict": lambda: rb.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)),
        "loads": lambda: rb.loads(tmp_path / "before"),
        "end_streams": rb.end_streams,
    }
    before = [buffer_state(member) for member in rb._rbs]

    def all_of_them() -> None:
        for name, act in acts.items():
            if shared:  # what it may not do with the first member for another reason is refused as well
                with pytest.raises(RuntimeError, match=f"{REFUSED}|by the process that made it"):
                    act()
                    raise AssertionError(name)
            else:
                refused(act, name)
            assert [buffer_state(member) for member in rb._rbs] == before, name
        if not shared:
            rb.sample()
            rb.state_dict()
            rb.dumps(tmp_path / "child")

    in_a_child(all_of_them)
    assert [buffer_state(member) for member in rb._rbs] == before


def test_an_ensemble_of_the_childs_own_buffer_and_one_of_the_parents_is_refused_as_a_whole():
    rb = ensemble(routing_key="to")

    def update() -> None:
        own = copy.deepcopy(rb[0])
        mixed = g.GenerationalReplayBufferEnsemble(own, rb[1], batch_size=8, sample_from_all=True, routing_key="to")
        sample = mixed.sample().set("td_error", torch.full((2, 4), 50.0))
        handles = {"index": sample["index"], "generation": sample["index_generation"]}
        acts: dict[str, Callable[[], Any]] = {
            "update": lambda: mixed.update_tensordict_priority_if_present(sample),
            "raw": lambda: mixed.update_priority(sample["index"], 50.0),
            "fields": lambda: mixed.update_if_present(**handles, patch={"x": torch.zeros(2, 4, dtype=torch.int64)}),
            "extend": lambda: mixed.extend(records(4, 100, to=torch.tensor([0, 0, 1, 1]))),
            "empty": mixed.empty,
        }
        before = buffer_state(own)
        for name, act in acts.items():
            refused(act, name)
            assert buffer_state(own) == before, name

    in_a_child(update)


# ------------------------------------------------------------------ work in flight at the fork


class Held:
    """Keeps a thread of a buffer's executor at work until it is told to go on."""

    def __init__(self, rb: Any, monkeypatch: Any) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.active, sample = True, rb._sample

        def wait(batch_size: int) -> Any:
            if self.active and threading.current_thread() is not threading.main_thread():
                self.inside.set()
                assert self.go_on.wait(TIMEOUT)
            return sample(batch_size)

        monkeypatch.setattr(rb, "_sample", wait)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()

    def let_go(self) -> None:
        self.active = False


@pytest.mark.parametrize("kind", ["buffer", "ensemble"])
def test_a_child_that_is_forked_while_batches_are_drawn_ahead_draws_its_own(kind, monkeypatch):
    rb = filled(prefetch=2) if kind == "buffer" else ensemble(prefetch=2)
    with Held(rb, monkeypatch) as held:
        rb.sample()
        assert held.inside.wait(TIMEOUT)

        def use() -> None:
            held.let_go()
            assert len(rb._prefetch_queue) == 0
            for _ in range(5):
                rb.sample()
            next(iter(rb))
            rb.state_dict()
            rb.synchronize()
            copy.deepcopy(rb) if kind == "buffer" else None
            refused(rb.empty, "empty")
            rb.shutdown()

        in_a_child(use)
    assert len(rb._prefetch_queue) == 2
    rb.sample()
    rb.shutdown()


@pytest.mark.parametrize("shared", [False, True])
def test_a_child_that_is_forked_while_updates_are_under_way_has_none(shared, actors):
    rb = filled(shared=shared)
    if shared:
        rb = g.GenerationalTensorDictReplayBuffer(
            storage=g.GenerationalLazyTensorStorage(8), sampler=SliceSampler(slice_len=1, traj_key="x"), batch_size=4
        )
        rb.extend(records(8))
        rb.share()
    sample = rb.sample()
    handles = {"index": sample["index"].reshape(-1), "generation": sample["index_generation"].reshape(-1)}
    count = len(handles["index"])
    actors.other(rb.storage.lock.acquire)
    future = rb.submit_update_if_present(**handles, patch={"x": torch.full((count,), 50)})
    assert rb._sample_dependency is not None

    def use() -> None:
        assert rb._sample_dependency is None
        rb.sample()
        rb.state_dict()
        if shared:
            rb.submit_update_if_present(**handles, patch={"x": torch.full((count,), 60)}).result(TIMEOUT)
            rb.empty()
        else:
            refused(rb.empty, "empty")
            refused(lambda: rb.submit_update_if_present(**handles, patch={"x": torch.zeros(count)}), "submit")
        rb.shutdown()

    with forked(use) as child:
        if shared:  # the lock between processes is the parent's
            actors.other(rb.storage.lock.release)
        assert child.exit_code() == 0
    if not shared:
        actors.other(rb.storage.lock.release)
    with contextlib.suppress(RuntimeError):
        future.result(TIMEOUT)
    rb.shutdown()
