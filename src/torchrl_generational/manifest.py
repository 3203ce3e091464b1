"""Checkpoint directories that hold the old state or the new one, whenever the process that writes them is killed.

A checkpoint is staged in a folder of its own inside the directory, and complete as soon as the manifest stands there.
From then on its parts are moved over the old ones; whoever finds the moves unfinished finishes them. The layout is
TorchRL's, with a manifest beside it and the number of the dump in every part.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torchrl_generational.folder_lock import IN_USE

__all__ = ["complete_in_place", "settle", "verify", "writing"]

MANIFEST = "generational.json"
FORMAT = 1
_STAGED = ".generational-staged"
_NUMBER = ".generational-dump"
_FOLDERS = ("storage", "sampler", "writer")
_ENTRIES = (*_FOLDERS, "rng_state", "transform.t", "buffer_metadata.json", "prefetch.pkl")  # TorchRL's


@contextlib.contextmanager
def writing(path: Path, *, in_place: bool) -> Iterator[Path]:
    """The folder to write the next checkpoint of ``path`` into, which becomes its checkpoint unless writing raises.

    Args:
        path: the directory.
        in_place: whether it is ``path`` itself, because the storage that is saved lies there.
    """
    if in_place:
        _begin_in_place(path)
        yield path
        complete_in_place(path)
    else:
        yield _stage(path)
        _commit(path)


def _stage(path: Path) -> Path:
    """An empty folder to write the next checkpoint of ``path`` into. What an interrupted one left is removed."""
    settle(path)
    staged = path / _STAGED
    if staged.exists():
        shutil.rmtree(staged)
    staged.mkdir()
    return staged


def _commit(path: Path) -> None:
    """Makes what was staged the checkpoint of ``path``."""
    staged = path / _STAGED
    _complete(staged, in_place=False)
    settle(path)


def settle(path: Path) -> None:
    """Finishes the moves of a checkpoint that is complete but not all in its place."""
    staged = path / _STAGED
    manifest = _read(staged)
    if manifest is None:
        return
    for entry in sorted({*_ENTRIES, *manifest["entries"]}):
        if (staged / entry).exists() or entry not in manifest["entries"]:
            _remove(path / entry)
        if (staged / entry).exists():
            os.rename(staged / entry, path / entry)
    os.replace(staged / MANIFEST, path / MANIFEST)
    shutil.rmtree(staged)


def _begin_in_place(path: Path) -> None:
    """Says that a checkpoint is being written over the one in ``path``, where the storage itself lies."""
    _stage(path).rmdir()
    _write(path, {"format": FORMAT, "complete": False})
    for entry in set(_ENTRIES) - {"storage"}:
        _remove(path / entry)  # not every dump writes each of them


def complete_in_place(path: Path) -> None:
    """Makes what was written over ``path`` its checkpoint."""
    _complete(path, in_place=True)


def verify(path: Path, *, members: int | None = None) -> bool:
    """Refuses a directory that is not one complete checkpoint.

    Args:
        path: the directory.
        members: how many buffers it holds, if it is that of an ensemble.

    Returns:
        Whether the records in it may be newer than the rest, because the storage that was saved lies there itself.

    Raises:
        FileNotFoundError: if a part is missing.
        ValueError: if parts are torn or from different dumps, or written by a later version.
    """
    manifest = _read(path)
    numbers = {part: _number(path / part) for part in _FOLDERS}
    if manifest is None and any(numbers.values()):
        raise FileNotFoundError(f"{path} is not a complete checkpoint: its {MANIFEST} is missing. {_REMEDY}")
    if manifest is not None:
        if manifest["format"] > FORMAT:
            raise ValueError(
                f"{path} was written in format {manifest['format']}, and this version reads up to {FORMAT}. Load it "
                "with the version of torchrl-generational that wrote it, or a later one."
            )
        if not manifest["complete"]:
            raise ValueError(f"{path} is not a complete checkpoint: writing it was interrupted. {_REMEDY}")
        _require(path, manifest["files"])
        for part, number in numbers.items():
            if part in manifest["entries"] and number != manifest["number"]:
                raise ValueError(f"{path} is mixed: {part} does not belong to the dump of {MANIFEST}. {_REMEDY}")
        for name, size in manifest["files"].items():
            found = (path / name).stat().st_size
            if found != size:
                raise ValueError(f"{path} is damaged: {name} has {found} bytes instead of {size}. {_REMEDY}")
        return bool(manifest["in_place"])
    writers = ["writer"] if members is None else [f"writer/{number}" for number in range(members)]
    _require(path, ("buffer_metadata.json", *(f"{writer}/metadata.json" for writer in writers)))
    return False


_REMEDY = "Nothing was loaded. Use another checkpoint."


def _require(path: Path, names: Iterable[str]) -> None:
    for name in names:
        if not (path / name).exists():
            raise FileNotFoundError(f"{path} is not a complete checkpoint: {name} is missing. {_REMEDY}")


def _complete(folder: Path, *, in_place: bool) -> None:
    number = secrets.token_hex(8)
    for part in _FOLDERS:
        if (folder / part).is_dir():
            (folder / part / _NUMBER).write_text(number)
    entries = [entry for entry in os.listdir(folder) if not in_place or entry in _ENTRIES]
    files: dict[str, int] = {}
    for entry in entries:
        found = [folder / entry] if (folder / entry).is_file() else (folder / entry).rglob("*")
        found = (file for file in found if file.is_file() and file.name != IN_USE)  # says who writes now
        files.update((str(file.relative_to(folder)), file.stat().st_size) for file in found)
    manifest = {"format": FORMAT, "complete": True, "in_place": in_place, "number": number}
    _write(folder, manifest | {"entries": entries, "files": files})


def _write(folder: Path, manifest: dict[str, Any]) -> None:
    """Puts a manifest in its place in one step."""
    draft = folder / f"{MANIFEST}.draft"
    draft.write_text(json.dumps(manifest))
    os.replace(draft, folder / MANIFEST)


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return None
    return manifest


def _number(part: Path) -> str | None:
    try:
        return (part / _NUMBER).read_text()
    except FileNotFoundError:
        return None


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
