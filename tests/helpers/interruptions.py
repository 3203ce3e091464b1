"""Raising at one line after the other of a call, wherever in the given files it comes by."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torchrl_generational as g

PACKAGE = Path(g.__file__).parent


class Struck(KeyboardInterrupt):
    """What is raised."""


def strike(call: Callable[[], Any], line: int, files: frozenset[str], error: type[BaseException] = Struck) -> bool:
    """Calls, and raises at the ``line``-th line event in ``files``. Returns whether there were that many."""
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files or frame.f_code.co_name == "_remove":
            return None  # the second is a finalizer of some other buffer, in which nothing can be raised
        if event == "line":
            left -= 1
            if left == -1:
                raise error("struck")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except error:
        return True
    except ValueError as raised:  # of a file that seemed to ask for all of the memory
        if not isinstance(raised.__cause__, error):
            raise
        return True
    finally:
        sys.settrace(before)
    return left < 0


def files_of(*names: str) -> frozenset[str]:
    """Files of this package by room and name, and of others by path."""
    files = [Path(name) if Path(name).is_absolute() else PACKAGE / f"{name}.py" for name in names]
    assert all(file.exists() for file in files), files
    return frozenset(map(str, files))
