"""Checkpoint directories: torn, foreign, mismatched, and written by processes that are killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import buffer_state, filled, prioritized, records
from tensordict import NonTensorData, TensorDict
from torchrl.data import FlatStorageCheckpointer, LazyTensorStorage, TensorDictPrioritizedReplayBuffer

import torchrl_generational as g

SCRIPT = Path(__file__).parents[1] / "helpers" / "killed_dumps.py"


def outcomes(mode: str, kills: int, path: Path, *more: str) -> dict[str, int]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), mode, str(kills), str(path), *more]
    environment = os.environ | {"RL_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.system
def test_a_dump_that_ends_at_any_operation_on_the_file_system_leaves_the_old_checkpoint_or_the_new(tmp_path):
    found = outcomes("every", 1, tmp_path / "checkpoint")
    assert set(found) == {"old", "new", "operations"}
    assert found["old"] + found["new"] == found["operations"] > 50


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.system)])
def test_a_dump_killed_at_random_moments_leaves_the_old_checkpoint_or_the_new(kills, tmp_path):
    found = outcomes("random", kills, tmp_path / "checkpoint")
    assert set(found) <= {"old", "new"}
    assert sum(found.values()) == kills


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.system)])
def test_a_dump_over_the_storage_itself_leaves_a_whole_checkpoint_or_says_that_it_is_incomplete(step, tmp_path):
    found = outcomes("every", step, tmp_path / "checkpoint", "in-place")
    assert set(found) == {"old", "new", "refused", "operations"}


# ------------------------------------------------------------------ what a directory is


def refused(path: Path, error: type[Exception], message: str) -> None:
    rb = filled()
    rb.extend(records(3))
    before = buffer_state(rb)
    with pytest.raises(error, match=message):
        rb.loads(path)
    assert buffer_state(rb) == before


@pytest.fixture
def checkpoint(tmp_path):
    rb = filled()
    rb.extend(records(5, 100))
    rb.dumps(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def every_file(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


FILES = [
    ".generational-dump",
    "buffer_metadata.json",
    "generational.json",
    "generation.memmap",
    "mintree.memmap",
    "prefetch.pkl",
    "sampler_metadata.json",
    "storage_metadata.json",
    "sumtree.memmap",
    "x.memmap",
]


def test_every_file_of_a_checkpoint_is_one_of_those_tested_below(checkpoint):
    names = {Path(name).name for name in every_file(checkpoint)}
    assert set(FILES) <= names
    assert names - set(FILES) == {"generational.lock", "index.memmap", "meta.json", "metadata.json", "rng_state.memmap"}


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(name, checkpoint):
    for file in checkpoint.rglob(name):
        file.unlink()
        break
    refused(checkpoint, (FileNotFoundError, ValueError), "is not a complete checkpoint|is mixed")


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith(("generational", ".gen"))])
def test_a_truncated_file_is_refused(name, checkpoint):
    for file in checkpoint.rglob(name):
        os.truncate(file, file.stat().st_size // 2)
    refused(checkpoint, ValueError, f"is damaged: .*{name} has .* bytes instead of")


@pytest.mark.parametrize("part", ["storage", "sampler", "writer"])
def test_a_part_of_another_dump_is_refused(part, checkpoint, tmp_path):
    other = filled()
    other.extend(records(5, 700))
    other.dumps(tmp_path / "other")
    shutil.rmtree(checkpoint / part)
    shutil.copytree(tmp_path / "other" / part, checkpoint / part)
    refused(checkpoint, ValueError, f"is mixed: {part} does not belong to the dump of generational.json")


def test_a_later_format_is_refused(checkpoint):
    manifest = json.loads((checkpoint / "generational.json").read_text())
    (checkpoint / "generational.json").write_text(json.dumps(manifest | {"format": 2}))
    refused(checkpoint, ValueError, "written in format 2, and this version reads up to 1")


def test_a_later_sampler_state_is_refused(checkpoint):
    rb = filled()
    state = rb.state_dict()
    state["_sampler"]["_schema_version"] = 99
    before = buffer_state(rb)
    with pytest.raises(ValueError, match="schema version 99, and this version reads up to 1"):
        rb.load_state_dict(state)
    assert buffer_state(rb) == before


@pytest.mark.parametrize("content", ["nothing", "no directory", "other files"])
def test_what_is_no_checkpoint_is_refused(content, tmp_path):
    path = tmp_path / "somewhere"
    if content != "no directory":
        path.mkdir()
    if content == "other files":
        (path / "model.pt").write_text("weights")
    refused(path, FileNotFoundError, "buffer_metadata.json is missing")
    if content == "other files":
        assert (path / "model.pt").read_text() == "weights"


def test_other_files_beside_a_checkpoint_stay(tmp_path):
    (tmp_path / "model.pt").write_text("weights")
    rb = filled()
    rb.dumps(tmp_path)
    rb.dumps(tmp_path)
    assert (tmp_path / "model.pt").read_text() == "weights"
    assert not list(tmp_path.glob(".generational-*"))


def test_nothing_of_an_earlier_dump_stays_behind(tmp_path):
    """TorchRL leaves the generator of an earlier dump, and loads it with a later one."""
    rb = filled()
    rb.dumps(tmp_path)
    assert (tmp_path / "rng_state").exists()
    rb.set_rng(None)
    rb.dumps(tmp_path)
    assert not (tmp_path / "rng_state").exists()


def test_a_dump_over_one_of_torchrl_replaces_it(tmp_path):
    stock = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8), batch_size=8)
    stock.extend(records(8, 900))
    stock.dumps(tmp_path)
    rb = filled()
    rb.dumps(tmp_path)
    target = prioritized(8)
    target.loads(tmp_path)
    assert buffer_state(target) == buffer_state(rb)


def test_an_interrupted_move_is_finished_by_whoever_reads_the_directory(checkpoint, monkeypatch):
    from torchrl_generational.persistence import manifest

    rb = filled()
    rb.extend(records(7, 500))
    real, moved = os.rename, []

    def rename(source, target):
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(target)
        real(source, target)

    monkeypatch.setattr(manifest.os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        rb.dumps(checkpoint)
    monkeypatch.undo()
    target = prioritized(8)
    target.loads(checkpoint)
    assert buffer_state(target) == buffer_state(rb)
    assert not list(checkpoint.glob(".generational-*"))


def test_a_checkpoint_moves_with_its_directory(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "copy")
    shutil.rmtree(checkpoint)
    target = prioritized(8)
    target.loads(tmp_path / "copy")
    assert target.storage._storage["x"].tolist() == [100, 101, 102, 103, 104, 5, 6, 7]


@pytest.mark.parametrize("written", [0, 3])
@pytest.mark.parametrize("into", [0, 5, 11])
def test_a_buffer_never_or_half_written_round_trips(written, into, tmp_path):
    """C15."""
    rb, target = prioritized(8), prioritized(8)
    for buffer, count in ((rb, written), (target, into)):
        if count:
            buffer.extend(records(count))
    handles = target.sample().set("td_error", torch.ones(8)) if into else None
    rb.dumps(tmp_path)
    target.loads(tmp_path)
    assert len(target) == written
    assert target.write_count == written
    assert target.writer._cursor == written
    target.extend(records(8 - written, 100))
    assert target.storage._storage["x"].tolist() == [*range(written), *range(100, 108 - written)]
    if handles is not None:
        assert target.update_tensordict_priority_if_present(handles).num_stale == 8
    assert (target.sample()["index_generation"] >= 0).all()


def test_compressed_storages_load(tmp_path):
    """Their shapes on disk are not those of the storage."""

    def build():
        storage = g.GenerationalLazyTensorStorage(8, ndim=1)
        storage.checkpointer = FlatStorageCheckpointer()
        return prioritized(8, storage=storage)

    from tensordict import TensorDict

    data = TensorDict(
        {
            "observation": torch.arange(8.0),
            "next": TensorDict(
                {
                    "observation": torch.arange(1.0, 9.0),
                    "reward": torch.zeros(8, 1),
                    **{key: torch.zeros(8, 1, dtype=torch.bool) for key in ("done", "terminated", "truncated")},
                },
                [8],
            ),
            **{key: torch.zeros(8, 1, dtype=torch.bool) for key in ("done", "terminated", "truncated")},
        },
        [8],
    )
    rb, target = build(), build()
    rb.extend(data)
    rb.dumps(tmp_path)
    target.extend(data)
    target.loads(tmp_path)
    assert target.storage._storage["observation"].tolist() == list(range(8))


def test_a_storage_that_lies_in_its_checkpoint_loads_with_all_handles_stale(tmp_path):
    """Records written after the dump are in the same files as those before it: stamps cannot tell them apart."""
    rb = prioritized(8, storage=g.GenerationalLazyMemmapStorage(8, scratch_dir=tmp_path / "storage"))
    rb.extend(records(11))
    rb.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    sample = rb.sample().set("td_error", torch.full((8,), 50.0))
    rb.dumps(tmp_path)
    rb.extend(records(4, 100))  # after the checkpoint, in its files
    del rb
    target = prioritized(8, storage=g.GenerationalLazyMemmapStorage(8, scratch_dir=tmp_path / "storage"))
    target.loads(tmp_path)
    assert target.storage._storage["x"].tolist() == [8, 9, 10, 100, 101, 102, 103, 7]
    assert target.update_tensordict_priority_if_present(sample).num_stale == 8
    sample = target.sample().set("td_error", torch.ones(8))
    assert target.update_tensordict_priority_if_present(sample).num_stale == 0


def resumed(path: Path) -> g.GenerationalTensorDictPrioritizedReplayBuffer:
    """A buffer that goes on in the files of a checkpoint, as TorchRL offers it."""
    rb = prioritized(8, storage=g.GenerationalLazyMemmapStorage(8, scratch_dir=path / "storage", existsok=True))
    rb.loads(path)
    return rb


@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
def test_a_checkpoint_that_a_storage_goes_on_in_is_not_trusted_later(tmp_path):
    """Killed before its next dump, it leaves records in the files that are newer than the stamps beside them."""
    first = filled()
    first.dumps(tmp_path)
    second = resumed(tmp_path)
    sample = second.sample().set("td_error", torch.ones(8))
    second.extend(records(8, 100))
    del second
    third = prioritized(8)
    third.loads(tmp_path)
    assert third.storage._storage["x"].tolist() == list(range(100, 108))
    assert third.update_tensordict_priority_if_present(sample).num_stale == 8


@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
def test_a_dump_of_a_resumed_buffer_leaves_its_live_files_where_they_are(tmp_path):
    filled().dumps(tmp_path)
    rb = resumed(tmp_path)
    rb.dumps(tmp_path)
    rb.extend(records(8, 100))
    from tensordict import TensorDict

    on_disk = TensorDict.load_memmap(tmp_path / "storage")
    assert on_disk["x"].tolist() == list(range(100, 108))


def test_a_directory_may_be_a_link_to_another_disk(checkpoint, tmp_path):
    shutil.move(checkpoint, tmp_path / "elsewhere")
    checkpoint.symlink_to(tmp_path / "elsewhere")
    rb = prioritized(8)
    rb.loads(checkpoint)
    rb.dumps(checkpoint)
    target = prioritized(8)
    target.loads(checkpoint)
    assert buffer_state(target) == buffer_state(rb)
    assert checkpoint.is_symlink()


@pytest.mark.parametrize("left", ["empty", "half", "nothing"])
@pytest.mark.parametrize("folder", ["", "nested", "text"])
def test_a_dump_in_place_mends_the_metadata_that_a_killed_one_left(folder, left, tmp_path):
    storage = g.GenerationalLazyMemmapStorage(8, scratch_dir=tmp_path / "c" / "storage", existsok=True)
    (tmp_path / "c" / "storage").mkdir(parents=True)
    rb = g.GenerationalTensorDictReplayBuffer(storage=storage, batch_size=4)
    data = records(8, nested=TensorDict({"y": torch.arange(8)}, [8]), text=NonTensorData("same", [8]))
    rb.extend(data)
    rb.dumps(tmp_path / "c")
    file = tmp_path / "c" / "storage" / folder / "meta.json"
    content = file.read_bytes()
    if left == "nothing" and folder:
        pytest.skip("tensordict takes a folder without metadata for none of its own")
    file.unlink() if left == "nothing" else file.write_bytes(content[: len(content) // 2 if left == "half" else 0])
    rb.extend(records(3, 100, nested=TensorDict({"y": torch.arange(3)}, [3]), text=NonTensorData("same", [3])))
    rb.dumps(tmp_path / "c")
    assert json.loads(file.read_bytes()) == json.loads(content)
    other = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=4)
    other.loads(tmp_path / "c")
    assert other[:]["x"].tolist() == [100, 101, 102, 3, 4, 5, 6, 7]
    assert other[:]["nested", "y"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
