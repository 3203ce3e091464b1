"""Checkpoint directories that hold the old state or the new one, whenever the process that writes them is killed.

A checkpoint is staged in a folder of its own inside the directory, and complete as soon as the manifest stands there.
From then on its parts are moved over the old ones; whoever finds the moves unfinished finishes them. The layout is
TorchRL's, with a manifest beside it and the number of the dump in every part.

What a directory says is never trusted: a manifest names entries of a checkpoint and files in them, or is refused, and
nothing is moved or removed that is not of a checkpoint. One thread or process uses a directory at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torchrl_generational.concurrency.directory_lock import LOCK, directory_locked
from torchrl_generational.persistence.directory_layout import ENTRIES, FOLDERS, NUMBER, files_in, foreign_in
from torchrl_generational.persistence.reading import ANOTHER, field, is_count, read_json
from torchrl_generational.persistence.saved_parts import check_parts

__all__ = ["Found", "locked_for_writing", "reading", "settle", "verify", "writing"]

MANIFEST = "generational.json"
FORMAT = 1
_STAGED = ".generational-staged"


@contextlib.contextmanager
def locked_for_writing(path: Path, *, in_place: bool) -> Iterator[None]:
    """Has ``path`` to itself, which must be a directory that a checkpoint can be saved to.

    Args:
        path: the directory.
        in_place: whether the storage that is saved lies there itself, as far as is known before it is locked.

    Raises:
        ValueError: if it holds something that a checkpoint would replace and that is none; nothing has changed then.
    """
    if not os.path.lexists(path / LOCK):
        _refuse_foreign(path, in_place=in_place)  # before a file is made in somebody else's directory
    with directory_locked(path, create=True):
        yield


@contextlib.contextmanager
def writing(path: Path, *, in_place: bool) -> Iterator[Path]:
    """The folder to write the next checkpoint of ``path`` into, which becomes its checkpoint unless writing raises.

    Args:
        path: the directory, locked.
        in_place: whether it is ``path`` itself, because the storage that is saved lies there.

    Raises:
        ValueError: if ``path`` holds something that would be replaced and is no checkpoint; nothing has changed then.
    """
    _refuse_foreign(path, in_place=in_place)
    if in_place:
        for _ in files_in(path, "storage"):  # refuses links
            pass
        _begin_in_place(path)
        yield path
        _complete(path, in_place=True)
    else:
        yield _stage(path)
        _commit(path)


class Found:
    """A checkpoint that was found whole.

    Attributes:
        records_may_be_newer: than the rest, because the storage that was saved lies in the directory itself.
    """

    def __init__(self, path: Path, *, records_may_be_newer: bool, locked: bool) -> None:
        self.records_may_be_newer = records_may_be_newer
        self._path, self._locked = path, locked
        self._as_read = _bytes(path / MANIFEST)

    def goes_on_in_place(self) -> None:
        """From now on a storage lies in the directory, and its records may be newer than its stamps."""
        _complete(self._path, in_place=True)
        self._as_read = _bytes(self._path / MANIFEST)

    def refuse_change(self) -> None:
        """To be called when all is read, in a directory that could not be locked as well.

        Raises:
            ValueError: if another checkpoint took the place of this one while it was read.
        """
        if not self._locked and _bytes(self._path / MANIFEST) != self._as_read:
            raise ValueError(f"{self._path} was saved to while it was loaded, and could not be locked. Load it again.")


@contextlib.contextmanager
def reading(path: Path, *, members: int | None = None) -> Iterator[Found]:
    """The checkpoint in ``path``, which stays as it is meanwhile.

    Args:
        path: the directory.
        members: how many buffers it holds, if it is that of an ensemble.

    Raises:
        FileNotFoundError, ValueError: as :func:`verify`.
    """
    there = any((path / name).exists() for name in (MANIFEST, _STAGED, "buffer_metadata.json"))
    with directory_locked(path, create=there) as locked:
        settle(path)
        newer = verify(path, members=members)
        check_parts(path, members=members)
        yield Found(path, records_may_be_newer=newer, locked=locked)


def settle(path: Path) -> None:
    """Finishes the moves of a checkpoint that is complete but not all in its place.

    Raises:
        ValueError: if what is staged there is not a checkpoint, or would replace what is none; nothing has changed.
    """
    staged = path / _STAGED
    _refuse_odd_staging(path)
    manifest = _read(staged)
    if manifest is None:
        return
    if not manifest["complete"]:
        raise ValueError(f"{staged} is damaged: its {MANIFEST} says that it is not complete. {ANOTHER}")
    found = {name: stat.st_size for entry in ENTRIES for name, stat in files_in(staged, entry)}  # refuses links
    entries = {name.partition("/")[0] for name in found}
    listed = {name: size for name, size in manifest["files"].items() if name.partition("/")[0] in entries}
    if found != listed:
        differ = sorted(name for name, _ in found.items() ^ listed.items())
        raise ValueError(f"{staged} is damaged: {differ} are not what its {MANIFEST} lists. {ANOTHER}")
    _refuse_foreign(path, in_place=False)
    # Each entry in one step, and the folders last: by them the others are known, should this be interrupted.
    for entry in reversed(ENTRIES):
        new = (staged / entry).exists()
        if (new or entry not in manifest["entries"]) and (path / entry).exists():
            os.rename(path / entry, staged / f"replaced-{entry}")
        if new:
            os.rename(staged / entry, path / entry)
    os.replace(staged / MANIFEST, path / MANIFEST)
    shutil.rmtree(staged)


def verify(path: Path, *, members: int | None = None) -> bool:
    """Refuses a directory that is not one complete checkpoint.

    Args:
        path: the directory.
        members: how many buffers it holds, if it is that of an ensemble.

    Returns:
        Whether the records in it may be newer than the rest, because the storage that was saved lies there itself.

    Raises:
        FileNotFoundError: if a part is missing.
        ValueError: if parts are torn, damaged, links, or from different dumps, or written by a later version.
    """
    manifest = _read(path)
    found = {name: stat.st_size for entry in ENTRIES for name, stat in files_in(path, entry)}
    numbers = {part: _bytes(path / part / NUMBER) for part in FOLDERS}
    if manifest is None:
        if any(numbers.values()):
            raise FileNotFoundError(f"{path} is not a complete checkpoint: its {MANIFEST} is missing. {ANOTHER}")
        writers = ["writer"] if members is None else [f"writer/{number}" for number in range(members)]
        _require(path, ("buffer_metadata.json", *(f"{writer}/metadata.json" for writer in writers)), found)
        return False
    if not manifest["complete"]:
        raise ValueError(f"{path} is not a complete checkpoint: writing it was interrupted. {ANOTHER}")
    _require(path, manifest["files"], found)
    for part, number in numbers.items():
        if part in manifest["entries"] and number != manifest["number"].encode():
            raise ValueError(f"{path} is mixed: {part} does not belong to the dump of {MANIFEST}. {ANOTHER}")
    for name, size in found.items():
        if manifest["files"].get(name, size) != size:
            raise ValueError(
                f"{path} is damaged: {name} has {size} bytes instead of {manifest['files'][name]}. {ANOTHER}"
            )
        entry = name.partition("/")[0]
        hidden = name.rpartition("/")[2].startswith(".")  # file managers and network file systems leave some
        grows = manifest["in_place"] and entry == "storage"
        if name not in manifest["files"] and not hidden and not grows:
            raise ValueError(f"{path} is mixed: {name} does not belong to the dump of {MANIFEST}. {ANOTHER}")
    for name, checksum in manifest.get("checksums", {}).items():
        if _checksum(path / name) != checksum:
            raise ValueError(f"{path} is damaged: {name} does not hold what was saved. {ANOTHER}")
    return bool(manifest["in_place"])


def _stage(path: Path) -> Path:
    """An empty folder to write the next checkpoint of ``path`` into. What an interrupted one left is removed."""
    staged = path / _STAGED
    with contextlib.suppress(ValueError):  # what is damaged cannot be finished
        settle(path)
    if staged.exists():
        shutil.rmtree(staged)
    staged.mkdir()
    return staged


def _commit(path: Path) -> None:
    """Makes what was staged the checkpoint of ``path``."""
    _complete(path / _STAGED, in_place=False)
    settle(path)


def _begin_in_place(path: Path) -> None:
    """Says that a checkpoint is being written over the one in ``path``, where the storage itself lies."""
    _stage(path).rmdir()
    _write(path, {"format": FORMAT, "complete": False})
    for entry in set(ENTRIES) - {"storage"}:
        _remove(path / entry)  # not every dump writes each of them


def _complete(folder: Path, *, in_place: bool) -> None:
    number = secrets.token_hex(8)
    entries = [entry for entry in os.listdir(folder) if not in_place or entry in ENTRIES]
    if not set(entries) <= set(ENTRIES):
        raise RuntimeError(
            f"The buffer saved {sorted(set(entries) - set(ENTRIES))}, which are not among the entries of a checkpoint, "
            f"{sorted(ENTRIES)}. Nothing was replaced. Save more beside the directory, not in it."
        )
    for part in FOLDERS:
        if (folder / part).is_dir():
            (folder / part / NUMBER).write_text(number)
    files = {name: found.st_size for entry in entries for name, found in files_in(folder, entry)}
    # Of those that are not mapped: a flipped bit in a tensor is a wrong number, and in these another object.
    summed = [name for name in files if not name.endswith(".memmap") and not (in_place and name.startswith("storage/"))]
    manifest = {"format": FORMAT, "complete": True, "in_place": in_place, "number": number}
    checksums = {name: _checksum(folder / name) for name in summed}
    _write(folder, manifest | {"entries": entries, "files": files, "checksums": checksums})


def _refuse_foreign(path: Path, *, in_place: bool) -> None:
    """Refuses to make room for a checkpoint by removing what is none. ``in_place``: the storage stays where it is."""
    _refuse_odd_staging(path)
    own, staged = _listed(path), _listed(path / _STAGED)
    listed = (own or set()) | (staged or set())
    foreign = foreign_in(path, listed, marked=os.path.lexists(path / MANIFEST), complete=own is not None)
    foreign = [entry for entry in foreign if not in_place or entry != "storage"]
    if foreign:
        raise ValueError(
            f"{path} holds {foreign}, which would be replaced and are not of a checkpoint of torchrl-generational or "
            "TorchRL. Nothing was changed. Use another directory."
        )


def _refuse_odd_staging(path: Path) -> None:
    staged = path / _STAGED
    if staged.is_symlink() or (staged.exists() and not staged.is_dir()):
        raise ValueError(f"{staged} is not the folder that checkpoints are staged in. Nothing was changed. Remove it.")


def _listed(folder: Path) -> set[str] | None:
    """The files that the manifest in ``folder`` lists; ``None`` if it is damaged, or of an unfinished dump."""
    try:
        manifest = _read(folder)
    except (ValueError, FileNotFoundError):
        return None
    return set(manifest["files"]) if manifest is not None and manifest["complete"] else None


def _require(path: Path, names: Iterable[str], found: Iterable[str]) -> None:
    for name in names:
        if name not in found:
            raise FileNotFoundError(f"{path} is not a complete checkpoint: {name} is missing. {ANOTHER}")


def _write(folder: Path, manifest: dict[str, Any]) -> None:
    """Puts a manifest in its place in one step."""
    draft = folder / f"{MANIFEST}.draft"
    draft.unlink(missing_ok=True)  # of a process that was killed
    with draft.open("x") as file:  # not through a link
        json.dump(manifest, file)
    os.replace(draft, folder / MANIFEST)


def _read(folder: Path) -> dict[str, Any] | None:
    """The manifest in ``folder``, if there is one.

    Raises:
        ValueError: if it is damaged, of a later version, or names anything but files of a checkpoint in ``folder``.
    """
    file = folder / MANIFEST
    if not os.path.lexists(file):
        return None
    manifest = read_json(file)
    if field(manifest, file, "format", "a number", is_count) > FORMAT:
        raise ValueError(
            f"{folder} was written in format {manifest['format']}, and this version reads up to {FORMAT}. Load it "
            "with the version of torchrl-generational that wrote it, or a later one."
        )
    if not field(manifest, file, "complete", "true or false", lambda value: type(value) is bool):
        return manifest
    field(manifest, file, "in_place", "true or false", lambda value: type(value) is bool)
    field(manifest, file, "number", "a text", lambda value: type(value) is str)
    entries = field(
        manifest,
        file,
        "entries",
        f"names among {ENTRIES}",
        lambda value: type(value) is list and all(entry in ENTRIES for entry in value),
    )
    for key in ("files", *(["checksums"] if "checksums" in manifest else [])):
        listed = field(
            manifest,
            file,
            key,
            "a number for each file",
            lambda value: type(value) is dict and all(map(is_count, value.values())),
        )
        for name in listed:
            if not _is_inside(name, entries) or name not in manifest["files"]:
                raise ValueError(f"{file} is damaged: {name!r} is not the name of a file of a checkpoint. {ANOTHER}")
    return manifest


def _is_inside(name: str, entries: list[str]) -> bool:
    first, *rest = name.split("/")
    plain = "\0" not in name and (os.sep == "/" or not {os.sep, ":"} & set(name))
    return plain and first in entries and not {"", ".", ".."} & set(rest)


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while piece := stream.read(2**20):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _bytes(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
