"""Directories that checkpoints are saved to and loaded from: what is not ours stays, and one at a time uses one."""

from __future__ import annotations

import gc
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import tree
from support import buffer_state, filled, prioritized, records
from torchrl.data import (
    LazyTensorStorage,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

import torchrl_generational as g
from torchrl_generational.concurrency.directory_lock import LOCK
from torchrl_generational.persistence import manifest

MANIFEST = "generational.json"


def ensemble(start: int = 0) -> g.GenerationalReplayBufferEnsemble:
    rb = g.GenerationalReplayBufferEnsemble(filled(), filled(), batch_size=4, sample_from_all=True)
    for member in rb._rbs:
        member.extend(records(3, start))
    return rb


def state(rb: Any) -> Any:
    return [buffer_state(member) for member in getattr(rb, "_rbs", [rb])]


def fresh(rb: Any) -> Any:
    """A buffer like that one, never written."""
    if hasattr(rb, "_rbs"):
        return g.GenerationalReplayBufferEnsemble(prioritized(8), prioritized(8), batch_size=4, sample_from_all=True)
    return prioritized(8)


BUFFERS = {"buffer": filled, "ensemble": ensemble}


@pytest.fixture(params=sorted(BUFFERS))
def make(request):
    return BUFFERS[request.param]


@pytest.fixture
def mine(tmp_path):
    """A folder of the user's, beside the checkpoint."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("chapter 1")
    return folder


def refused(rb: Any, path: Path, message: str, *, around: Path) -> None:
    before, files = state(rb), tree(around)
    with pytest.raises(ValueError, match=message):
        rb.loads(path)
    assert state(rb) == before
    assert tree(around) == files


# ------------------------------------------------------------------ manifests name files of a checkpoint only

NAMES = [
    "{mine}",
    "../mine",
    "..",
    ".",
    "",
    "/",
    "storage/../../mine",
    "thesis.txt",
    "writer/..",
    "sampler\0",
    MANIFEST,
]


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("key", ["entries", "files", "checksums"])
@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_that_names_anything_else_is_refused_and_nothing_is_touched(name, key, staged, make, mine, tmp_path):
    """C43: an entry ``/abs/dir`` or ``../other`` had loads remove that folder."""
    path = tmp_path / "checkpoint"
    rb = make()
    rb.dumps(path)
    (path / "thesis.txt").write_text("chapter 2")
    if staged:
        shutil.copytree(path, tmp_path / "staged", ignore=shutil.ignore_patterns("thesis.txt", LOCK))
        shutil.move(tmp_path / "staged", path / ".generational-staged")
    file = (path / ".generational-staged" if staged else path) / MANIFEST
    found = json.loads(file.read_text())
    name = name.format(mine=mine)
    if key == "entries":
        found["entries"].append(name)
    else:
        found[key][name] = 9
    file.write_text(json.dumps(found))
    refused(rb, path, "should be names among|is not the name of a file of a checkpoint", around=tmp_path)


def test_a_number_of_a_part_in_another_place_is_refused(make, mine, tmp_path):
    """A file in an entry that the manifest does not name belongs to nothing."""
    path = tmp_path / "checkpoint"
    rb = make()
    rb.dumps(path)
    file = path / MANIFEST
    found = json.loads(file.read_text())
    found["entries"].remove("rng_state" if "rng_state" in found["entries"] else "prefetch.pkl")
    found["files"] = {name: size for name, size in found["files"].items() if name.split("/")[0] in found["entries"]}
    found["checksums"] = {name: size for name, size in found["checksums"].items() if name in found["files"]}
    file.write_text(json.dumps(found))
    refused(rb, path, "is mixed: .* does not belong to the dump", around=tmp_path)


LINKS = [
    "storage",
    "writer",
    "prefetch.pkl",
    MANIFEST,
    "storage/{member}x.memmap",
    "writer/{member}metadata.json",
    LOCK,
]


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("name", LINKS)
def test_links_are_not_followed(name, tracked, make, mine, tmp_path):
    path = tmp_path / "checkpoint"
    rb = make()
    rb.dumps(path)
    if not tracked:
        for file in [path / MANIFEST, *path.rglob(".generational-dump")]:
            file.unlink()
    place = path / name.format(member="0/" if make is ensemble else "")
    if not place.exists():
        place.touch()
    shutil.move(place, mine / "moved")
    place.symlink_to(mine / "moved")
    refused(rb, path, "is a link|a link or a device|is not the file that checkpoints are locked by", around=tmp_path)


@pytest.mark.parametrize("link", [True, False])
def test_a_staging_folder_that_is_none_is_refused(link, make, mine, tmp_path):
    path = tmp_path / "checkpoint"
    rb = make()
    rb.dumps(path)
    place = path / ".generational-staged"
    place.symlink_to(mine) if link else place.write_text("")
    refused(rb, path, "is not the folder that checkpoints are staged in", around=tmp_path)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="is not the folder that checkpoints are staged in. Nothing was changed"):
        rb.dumps(path)
    assert tree(tmp_path) == before


def test_a_manifest_is_not_written_through_a_link(mine, tmp_path):
    path = tmp_path / "checkpoint"
    rb = prioritized(8, storage=g.GenerationalLazyMemmapStorage(8, scratch_dir=path / "storage"))
    rb.extend(records(8))
    (path / f"{MANIFEST}.draft").symlink_to(mine / "thesis.txt")
    rb.dumps(path)
    assert (mine / "thesis.txt").read_text() == "chapter 1"


def test_a_staged_checkpoint_that_is_torn_does_not_replace_the_one_that_is_there(make, tmp_path):
    path = tmp_path / "checkpoint"
    rb = make()
    rb.dumps(path)
    shutil.copytree(path, tmp_path / "staged", ignore=shutil.ignore_patterns(LOCK))
    shutil.move(tmp_path / "staged", path / ".generational-staged")
    file = next((path / ".generational-staged").rglob("generation.memmap"))
    os.truncate(file, 8)
    refused(rb, path, "generation.memmap'] are not what its generational.json lists", around=tmp_path)
    rb.dumps(path)  # which replaces both
    fresh(rb).loads(path)
    assert not (path / ".generational-staged").exists()


# ------------------------------------------------------------------ what is not of a checkpoint stays


def put(path: Path, name: str, content: str) -> None:
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_text(content)


MINE = [
    {"storage/notes.txt": "mine", "writer/poem.txt": "mine"},
    {"storage/notes.txt": "mine"},
    {"sampler/drums.wav": "mine"},
    {"writer/metadata.json": '{"author": "me"}'},
    {"writer/metadata.json": "not JSON"},
    {"storage/meta.json": "{}", "storage/x.memmap": "records of mine"},
    {"rng_state": "mine"},
    {"rng_state/seeds.txt": "mine"},
    {"rng_state/meta.json": "mine"},
    {"transform.t": "mine"},
    {"buffer_metadata.json": '{"batch_size": 3}'},
    {"prefetch.pkl": "mine"},
    {"storage": "mine"},
    {"storage/deep/down/below/notes.txt": "mine"},
]


@pytest.mark.parametrize("files", MINE, ids=lambda files: ",".join(files))
def test_a_users_files_of_the_names_of_a_checkpoint_are_refused_before_anything_changes(files, make, tmp_path):
    """C44: they were deleted."""
    path = tmp_path / "project"
    for name, content in files.items():
        put(path, name, content)
    put(path, "model.pt", "weights")
    before = tree(path)
    message = f"holds .*{next(iter(files)).split('/')[0]}.* would be replaced and are not of a checkpoint .* another"
    with pytest.raises(ValueError, match=message):
        make().dumps(path)
    assert tree(path) == before
    assert not (path / LOCK).exists()


@pytest.mark.parametrize("name", ["storage/notes.txt", "rng_state/notes.txt", "writer/0/notes.txt", "sampler/x.wav"])
def test_a_users_file_in_a_checkpoint_is_refused_too(name, make, tmp_path):
    rb = make()
    rb.dumps(tmp_path)
    put(tmp_path, name, "mine")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="would be replaced and are not of a checkpoint"):
        rb.dumps(tmp_path)
    assert tree(tmp_path) == before


def test_a_users_link_of_the_name_of_a_part_stays(make, mine, tmp_path):
    path = tmp_path / "project"
    path.mkdir()
    (path / "storage").symlink_to(mine)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="storage.* are not of a checkpoint"):
        make().dumps(path)
    assert tree(tmp_path) == before


def test_other_entries_and_empty_folders_are_no_obstacle(make, tmp_path):
    put(tmp_path, "model.pt", "weights")
    put(tmp_path, "logs/storage/notes.txt", "mine")
    (tmp_path / "storage").mkdir()
    rb = make()
    for _ in range(2):
        rb.dumps(tmp_path)
    assert (tmp_path / "model.pt").read_text() == "weights"
    assert (tmp_path / "logs/storage/notes.txt").read_text() == "mine"
    target = fresh(rb)
    target.loads(tmp_path)
    assert state(target) == state(rb)


def stock_single(sampler: Any = None) -> Any:
    generator = torch.Generator().manual_seed(0)
    if sampler is None:
        return TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=LazyTensorStorage(8), batch_size=4, generator=generator
        )
    return TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=4, generator=generator)


@pytest.mark.parametrize("kind", ["prioritized", "random", "without replacement", "ensemble"])
def test_a_checkpoint_of_torchrl_is_replaced(kind, make, tmp_path):
    if kind == "ensemble":
        stock = ReplayBufferEnsemble(stock_single(), stock_single(), batch_size=4)
        for member in stock._rbs:
            member.extend(records(8))
    else:
        sampler = {"random": False, "without replacement": SamplerWithoutReplacement()}.get(kind)
        if sampler is False:
            stock = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
        else:
            stock = stock_single(sampler)
        stock.extend(records(8))
        stock.sample()
    stock.dumps(tmp_path)
    rb = make()
    rb.dumps(tmp_path)
    target = fresh(rb)
    target.loads(tmp_path)
    assert state(target) == state(rb)


@pytest.mark.parametrize("lost", ["buffer_metadata.json", "writer", "writer/metadata.json", "sampler", "prefetch.pkl"])
def test_what_a_killed_dump_of_torchrl_left_is_replaced(lost, tmp_path):
    """It writes storage, sampler and writer in this order; the rest belongs to no one without them."""
    stock = stock_single()
    stock.extend(records(8))
    stock.dumps(tmp_path)
    gone = tmp_path / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    if lost.startswith("writer"):
        for name in ("rng_state", "buffer_metadata.json", "prefetch.pkl"):
            other = tmp_path / name
            shutil.rmtree(other) if other.is_dir() else other.unlink()
        if lost != "writer":
            (tmp_path / "writer").rmdir()
    rb = filled()
    rb.dumps(tmp_path)
    target = prioritized(8)
    target.loads(tmp_path)
    assert state(target) == state(rb)


@pytest.mark.parametrize("before", ["TorchRL's", "an ensemble's", "ours", "nothing"])
def test_moves_that_are_interrupted_anywhere_are_finished_whatever_they_replace(before, tmp_path, monkeypatch):
    real, rb = os.rename, filled()
    rb.set_rng(None)  # its entry goes
    done, count = False, 0
    while not done:
        path = tmp_path / str(count)
        path.mkdir()
        earlier = {"TorchRL's": stock_single(), "an ensemble's": ensemble(), "ours": filled()}.get(before)
        if earlier is not None:
            if before == "TorchRL's":
                earlier.extend(records(8, 500))
            earlier.dumps(path)
        moves = 0

        def rename(source, target, count=count):
            nonlocal moves
            if moves == count:
                raise KeyboardInterrupt
            moves += 1
            real(source, target)

        monkeypatch.setattr(manifest.os, "rename", rename)
        try:
            rb.dumps(path)
            done = True
        except KeyboardInterrupt:
            pass
        monkeypatch.undo()
        for _ in range(2):
            target = fresh(rb)
            target.loads(path)
            assert state(target) == state(rb)
            rb.dumps(path)
        assert not list(path.glob(".generational-*"))
        count += 1
    assert count > (4 if before == "nothing" else 8)


def spoil(name: str, content: str | None) -> Any:
    def change(path: Path) -> None:
        (path / name).unlink() if content is None else (path / name).write_text(content)

    return change


@pytest.mark.parametrize(
    "change",
    [
        spoil(MANIFEST, None),
        spoil(MANIFEST, "{"),
        spoil(MANIFEST, '{"format": 1, "complete": false}'),
        spoil(MANIFEST, '{"format": 99}'),
        spoil("buffer_metadata.json", ""),
        spoil("prefetch.pkl", ""),
    ],
    ids=["lost", "garbled", "incomplete", "later", "metadata", "queue"],
)
def test_a_damaged_checkpoint_is_replaced(change, make, tmp_path):
    rb = make()
    rb.dumps(tmp_path)
    change(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError)):
        rb.loads(tmp_path)
    rb.dumps(tmp_path)
    target = fresh(rb)
    target.loads(tmp_path)
    assert state(target) == state(rb)


def test_a_dump_over_a_storage_in_place_goes_on_and_one_of_another_buffer_replaces_it_when_that_is_gone(tmp_path):
    storage = g.GenerationalLazyMemmapStorage(8, scratch_dir=tmp_path / "storage")
    rb = prioritized(8, storage=storage)
    rb.extend(records(8))
    for _ in range(2):
        rb.dumps(tmp_path)
    other = filled()
    with pytest.raises(RuntimeError, match="is in use"):
        other.dumps(tmp_path)
    del rb, storage
    gc.collect()
    other.dumps(tmp_path)
    target = prioritized(8)
    target.loads(tmp_path)
    assert state(target) == state(other)


def test_files_of_a_live_storage_that_was_never_saved_are_nobodys_checkpoint(tmp_path):
    rb = prioritized(8, storage=g.GenerationalLazyMemmapStorage(8, scratch_dir=tmp_path / "storage"))
    rb.extend(records(8))
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="storage.* are not of a checkpoint"):
        filled().dumps(tmp_path)
    assert tree(tmp_path) == before


def test_a_dump_in_place_leaves_other_parts_of_a_user(tmp_path):
    rb = prioritized(8, storage=g.GenerationalLazyMemmapStorage(8, scratch_dir=tmp_path / "storage"))
    rb.extend(records(8))
    put(tmp_path, "writer/poem.txt", "mine")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="writer.* are not of a checkpoint"):
        rb.dumps(tmp_path)
    assert tree(tmp_path) == before


def test_what_a_buffer_of_ones_own_saves_beside_is_refused(tmp_path):
    rb = filled()
    rb.dumps(tmp_path)
    before = tree(tmp_path)

    class More(type(rb.storage)):
        def dumps(self, path):
            super().dumps(path)
            (Path(path).parent / "more.txt").write_text("")

    rb.storage.__class__ = More
    with pytest.raises(RuntimeError, match=r"saved \['more.txt'\], which are not among.*Nothing was replaced"):
        rb.dumps(tmp_path)
    rb.storage.__class__ = More.__mro__[1]
    rb.loads(tmp_path)
    rb.dumps(tmp_path)
    assert before.keys() == tree(tmp_path).keys()
