"""Reading what lies in a checkpoint: whatever is damaged there is a :class:`ValueError` that names the file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["field", "holds_json", "is_count", "is_number", "read_json", "reading"]

ANOTHER = "Nothing was loaded. Use another checkpoint."


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no file, or holds anything but a JSON object.
    """
    with reading(path):
        if path.is_symlink() or (path.exists() and not path.is_file()):  # opening a pipe would wait for a writer
            raise ValueError("it is a folder, a link or a device, and no file")
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"it holds {found!r:.80} and no JSON object")
    result: dict[str, Any] = found
    return result


def holds_json(path: Path) -> bool:
    """Whether a file is whole: a process that is killed while it writes one leaves an empty one, or half of it."""
    try:
        json.loads(path.read_bytes())
    except (ValueError, FileNotFoundError):
        return False
    return True


@contextlib.contextmanager
def reading(path: Path, *, pickled: bool = False) -> Iterator[None]:
    """Turns whatever reading a file or folder raises into a ``ValueError`` or ``FileNotFoundError`` that names it.

    What readers of formats raise on damaged bytes is theirs to choose, and not all of it is documented.

    Args:
        path: of the file or folder.
        pickled: whether it is a small file of pickled objects, whose damaged lengths ask for all of the memory.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{path} is missing, or a part of it ({error}). {ANOTHER}") from error
    except PermissionError:
        raise  # says nothing about the content
    except MemoryError as error:
        if not pickled:
            raise
        raise ValueError(f"{path} asks for more memory than there is, as a damaged file does. {ANOTHER}") from error
    except Exception as error:
        what = str(error).strip() or type(error).__name__
        raise ValueError(f"{path} is damaged: {what}. {ANOTHER}") from error


def field(metadata: dict[str, Any], path: Path, name: str, expected: str, fits: Any) -> Any:
    """An entry of the JSON object in ``path``.

    Args:
        metadata: the object.
        path: where it was read from.
        name: of the entry; a missing one counts as ``None``.
        expected: what it should be, in words.
        fits: says of a value whether it is that.

    Raises:
        ValueError: if it is missing, or anything else.
    """
    value = metadata.get(name)
    if not fits(value):
        raise ValueError(f"{path} is damaged: its {name!r} is {value!r:.80} and should be {expected}. {ANOTHER}")
    return value


def is_count(value: Any) -> bool:
    """Whether a value is an integer that can count something."""
    return type(value) is int and 0 <= value < 2**63


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return type(value) in (int, float) and abs(value) < float("inf")
