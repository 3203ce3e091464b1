"""Checkpoints that are damaged anywhere, by chance or on purpose: they load, or are refused and nothing has changed."""

from __future__ import annotations

import secrets
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from damage import DAMAGES, MAKE, MANIFESTS, copy_of, damage, everything, source, target, tree
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st


@cache
def saved(kind: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="saved-"))
    rb = source(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rb.dumps(folder)
    return folder


def attempt(kind: str, damages: list[dict[str, Any]], manifest: str) -> str:
    """Loads a damaged checkpoint and returns what came of it."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        beside = Path(place) / "beside"
        beside.mkdir()
        (beside / "keep.txt").write_text("mine")
        (beside / "x.memmap").write_bytes(bytes(88))
        folder = copy_of(saved(kind), Path(place))
        damage(folder, beside, damages, manifest)
        rb = target(kind)
        before, around, inside = everything(rb), tree(beside), tree(folder)
        error = None
        try:
            rb.loads(folder)
        except (ValueError, FileNotFoundError) as refusal:
            error = refusal
        if error is not None:
            assert everything(rb) == before, f"changed, though refused: {error!r}"
            assert tree(folder) == inside, f"the directory changed, though refused: {error!r}"
        assert tree(beside) == around
        assert {path.name for path in Path(place).iterdir()} == {"beside", "checkpoint"}
        for member in getattr(rb, "_rbs", [rb]):
            member.shutdown()
        return "loaded" if error is None else "refused"


KINDS = st.sampled_from(sorted(MAKE))
QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=100, derandomize=True, **QUIET)
@given(kind=KINDS, damages=DAMAGES, manifest=MANIFESTS)
def test_a_damaged_checkpoint_loads_or_is_refused_and_nothing_has_changed(kind, damages, manifest):
    attempt(kind, damages, manifest)


@pytest.mark.slow
def test_many_damaged_checkpoints_load_or_are_refused_and_nothing_has_changed():
    number = secrets.randbits(32)
    print(f"seed {number}")

    @seed(number)
    @settings(max_examples=2000, **QUIET)
    @given(kind=KINDS, damages=DAMAGES, manifest=MANIFESTS)
    def many(kind, damages, manifest):
        attempt(kind, damages, manifest)

    many()
