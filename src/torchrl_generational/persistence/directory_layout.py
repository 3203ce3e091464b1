"""What a checkpoint directory consists of, and what in one is somebody else's."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from torchrl_generational.concurrency.folder_lock import IN_USE

__all__ = ["ENTRIES", "FOLDERS", "NUMBER", "files_in", "foreign_in"]

NUMBER = ".generational-dump"
FOLDERS = ("storage", "sampler", "writer")
#: Everything that a checkpoint consists of, besides its manifest. TorchRL's names.
ENTRIES = (*FOLDERS, "rng_state", "transform.t", "buffer_metadata.json", "prefetch.pkl")

# The files that TorchRL and tensordict write into the folders of a checkpoint, at any depth.
_FILE = re.compile(
    r"(.*\.memmap|.*\.h5|meta\.json|metadata\.json|storage_metadata\.json|sampler_metadata\.json|other\.pickle"
    r"|pickle\.pkl|consuming_sampler\.pt|streaming_slice\.pt|data_indices\.json|[0-9]+_transform\.pt"
    rf"|{re.escape(NUMBER)})"
)
# By which file a folder shows that it is of a checkpoint, and which of its keys that file has then.
_MARKS: dict[str, dict[str, tuple[str, ...]]] = {
    "storage": {"storage_metadata.json": ("is_pytree",), "metadata.json": ("empty_members",), "checkpoint.h5": ()},
    "sampler": {
        "sampler_metadata.json": ("_max_capacity",),
        "meta.json": ("len_storage",),
        "consuming_sampler.pt": (),
        "streaming_slice.pt": (),
    },
    "writer": {"metadata.json": ("cursor",)},
}


def files_in(path: Path, entry: str) -> Iterator[tuple[str, os.stat_result]]:
    """The files of an entry of ``path``, named from there, with what ``lstat`` says of them.

    Raises:
        ValueError: for a link, and for what is neither file nor folder: nothing of a checkpoint is.
    """
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        try:
            found = os.lstat(path / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISDIR(found.st_mode):
            waiting += (f"{name}/{inner}" for inner in os.listdir(path / name))
        elif stat.S_ISREG(found.st_mode):
            if name.rpartition("/")[2] != IN_USE:  # says who writes now
                yield name, found
        else:
            kind = "a link" if stat.S_ISLNK(found.st_mode) else "no file"
            raise ValueError(
                f"{path} is no checkpoint: {name} is {kind}. Checkpoints hold files and folders only. Nothing was "
                "changed. Use another directory; to keep checkpoints on another disk, let the whole directory be the "
                "link."
            )


def foreign_in(path: Path, listed: set[str], *, marked: bool, complete: bool) -> list[str]:
    """What is at the places of a checkpoint in ``path`` and is of none. To make room for one would delete it.

    Args:
        path: the directory.
        listed: the files that manifests list.
        marked: whether it has a manifest, in whatever state.
        complete: whether that lists all files.
    """

    def is_ours(entry: str, marked: bool) -> bool:
        try:
            files = {name for name, _ in files_in(path, entry)} - listed
        except ValueError:
            return False
        if (path / entry).is_dir() != (entry in (*FOLDERS, "rng_state")):
            return False
        if not files:
            return True
        if entry in FOLDERS:
            named = all(_FILE.fullmatch(name.rpartition("/")[2]) for name in files)
            return named and (marked or _is_marked(path / entry, entry))
        if marked:
            return not complete
        # Of TorchRL's, which writes these after the folders, and its metadata last.
        return all((path / part).is_dir() and is_ours(part, False) for part in ("storage", "writer"))

    return [entry for entry in ENTRIES if os.path.lexists(path / entry) and not is_ours(entry, marked)]


def _is_marked(folder: Path, part: str) -> bool:
    if (folder / NUMBER).is_file():
        return True
    members = [folder / name for name in os.listdir(folder) if name.isdecimal() and (folder / name).is_dir()]
    if any(_is_marked(member, part) for member in members):
        return True
    return any((folder / name).is_file() and _has(folder / name, keys) for name, keys in _MARKS[part].items())


def _has(file: Path, keys: tuple[str, ...]) -> bool:
    if not keys:
        return True
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() >= set(keys)
