"""Checks by the row of ``where.py`` that they try."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Check = Callable[[], Any]
CHECKS: dict[tuple[str, str], dict[str, Check]] = {}


def check(kind: str, component: str, variant: str = "") -> Callable[[Check], Check]:
    """Says that a function tries the row of that name, in one of several variants."""

    def remember(function: Check) -> Check:
        variants = CHECKS.setdefault((kind, component), {})
        assert variant not in variants
        variants[variant] = function
        return function

    return remember
