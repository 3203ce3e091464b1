"""Methods of TorchRL that one of ours replaces without calling it, and what they looked like when ours was written.

``python tests/helpers/bypassed.py`` writes the digests anew, once ours do what TorchRL's do now.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import pkgutil
import textwrap
from pathlib import Path
from typing import Any

import torchrl_generational as g

FILE = Path(__file__).with_name("bypassed.json")
#: Magic methods that have nothing to do with what TorchRL's do.
_OURS_ALONE = {"__init__", "__getattr__", "__repr__", "__init_subclass__", "__class_getitem__"}


def _classes() -> list[type]:
    found = set()
    for module in pkgutil.walk_packages(g.__path__, "torchrl_generational."):
        if ".testing" in module.name or ".ray" in module.name:
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(value) and value.__module__ == module.name:
                found.add(value)
    return sorted(found, key=lambda cls: f"{cls.__module__}.{cls.__name__}")


def _calls_upstream(ours: Any, name: str) -> bool:
    try:
        source = inspect.getsource(ours)
    except OSError:  # made by a decorator
        return True
    return f"super().{name}" in source or f").{name}(" in source


def replaced() -> dict[str, tuple[Any, str]]:
    """Each method of TorchRL that is never called, by its name there, with where ours is."""
    fronts = [cls for cls in _classes() if any(base.__module__.startswith("torchrl.") for base in cls.__mro__)]
    found: dict[str, tuple[Any, str]] = {}
    for cls in fronts:
        for name in {name for base in cls.__mro__ for name in vars(base)}:
            chain = [base for base in cls.__mro__ if name in vars(base)]
            ours = [base for base in chain if base.__module__.startswith("torchrl_generational")]
            if not ours or chain[0] is not ours[0] or name in _OURS_ALONE:
                continue
            theirs = next((base for base in chain if base.__module__.startswith("torchrl.")), None)
            methods = [vars(base)[name] for base in ours]
            if theirs is None or not all(inspect.isfunction(inspect.unwrap(method)) for method in methods):
                continue
            upstream = inspect.unwrap(vars(theirs)[name])
            if not inspect.isfunction(upstream) or getattr(upstream, "__isabstractmethod__", False):
                continue
            if not any(_calls_upstream(inspect.unwrap(method), name) for method in methods):
                where = f"{ours[0].__module__.removeprefix('torchrl_generational.')}.{ours[0].__name__}.{name}"
                found[f"{theirs.__name__}.{name}"] = (upstream, where)
    return dict(sorted(found.items()))


def digest(method: Any) -> str:
    """Of what a method does, whatever its comments, docstring and layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    body: Any = tree.body[0]
    body.decorator_list = []
    if ast.get_docstring(body) is not None:
        body.body = body.body[1:]
    return hashlib.sha256(ast.unparse(body).encode()).hexdigest()[:16]


def known() -> dict[str, str]:
    digests: dict[str, str] = json.loads(FILE.read_text())
    return digests


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: digest(method) for name, (method, _) in replaced().items()}, indent=1) + "\n")
    print(f"{len(known())} methods")
