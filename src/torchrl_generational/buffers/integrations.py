"""Rooms above this one, which need packages that not everybody has: found by name when somebody asks for one."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["integration"]


def integration(name: str) -> Any:
    """The module ``torchrl_generational.<name>``.

    Raises:
        ImportError: if what it needs is not installed; names the extra to install.
    """
    return importlib.import_module(f"torchrl_generational.{name}")
