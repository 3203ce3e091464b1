"""Checkpoints that are damaged anywhere, by chance or on purpose: they load, or are refused and nothing has changed."""

from __future__ import annotations

import json
import secrets
import shutil
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


@settings(max_examples=60, derandomize=True, **QUIET)
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


# ------------------------------------------------------------------ each kind of damage once

VALUES: dict[str, dict[str, list[Any]]] = {
    "storage/storage_metadata.json": {
        "len": [None, -1, 0.5, "8", 10**30, float("nan"), [8], True],
        "is_pytree": [None, 0, "false"],
        "metadata": [None, []],
    },
    "storage/meta.json": {
        "_type": [None, "x", 3, []],
        "shape": [0, "x", [-1], [8, 8], [10**30]],
        "x": [
            {"dtype": "torch.int64", "shape": shape}
            for shape in ([16], [4], [-8], [10**30], 8, None, [0.5], [2**40, 2**40])
        ]
        + [{"dtype": dtype, "shape": [8]} for dtype in ("torch.int8", "torch.complex128", "x", None, 3)]
        + [{"type": "TensorDict"}, {"dtype": "torch.int64", "shape": [8], "is_nested": True}],
    },
    "sampler/sampler_metadata.json": {
        "_alpha": [None, "x", float("nan"), float("inf"), -1, [], True],
        "_max_capacity": [None, "8", 4, 16, 8.5, 10**30, -8],
        "_max_priority": [None, 3, [], [1], ["x", 0], [1.0, "x"], [float("nan"), 0], [1.0, -1]],
        "_schema_version": [-1, "1", 99, None],
    },
    "writer/metadata.json": {
        "cursor": [None, "0", -1, 0.5, 10**30, 10**9, float("nan")],
        "write_count": [-1, "3", 10**30],
        "generation_shape": [[16], [4], [8, 1], 8, "x", [-8], [10**30]],
        "generation_dtype": ["torch.int32", "torch.float64", "x", 3, None],
        "_generation_lineage": ["x", -1, 10**30],
        "_generation_incarnation": ["x", -1, 10**30],
    },
    "rng_state/meta.json": {"device": ["nowhere", 3], "rng_state": [None, {"dtype": "torch.uint8", "shape": [16]}]},
    "buffer_metadata.json": {"batch_size": ["4", 0, -1, 0.5, True, [4]], "consume_after_n_samples": ["x", -1]},
}


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [(file, key, value) for file, keys in VALUES.items() for key, values in keys.items() for value in values],
)
def test_a_value_that_cannot_be_is_refused(file, key, value, tmp_path):
    def change(folder: Path) -> None:
        found = json.loads((folder / file).read_bytes())
        found[key] = value
        (folder / file).write_text(json.dumps(found))

    refused(change, "none", tmp_path)  # as TorchRL saves, where no manifest tells


FILES = [*VALUES, "storage/x.memmap", "sampler/sumtree.memmap", "writer/generation.memmap",
         "rng_state/rng_state.memmap", "prefetch.pkl", "transform.t", "generational.json"]  # fmt: skip
CONTENTS = {
    "empty": lambda _: b"",
    "half": lambda content: content[: len(content) // 2],
    "not text": lambda content: b"\xff\xfe\xfd" + content[3:-1],
    "deep": lambda _: b"[" * 100_000,
    "a list": lambda _: b"[1]",
    "a large number": lambda _: b'{"len": ' + b"9" * 10_000 + b"}",
    # bytes of 2**60, which pickle makes room for before it looks for them
    "a pickle that takes all of the memory": lambda _: b"\x80\x04\x8e" + (2**60).to_bytes(8, "little") + b"x.",
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("file", FILES)
def test_a_file_that_holds_something_else_is_refused(file, content, tmp_path):
    def change(folder: Path) -> None:
        (folder / file).write_bytes(CONTENTS[content]((folder / file).read_bytes()))

    refused(change, "agrees", tmp_path)


@pytest.mark.parametrize("manifest", ["agrees", "none"])
@pytest.mark.parametrize("file", FILES)
def test_a_folder_in_the_place_of_a_file_is_refused(file, manifest, tmp_path):
    def change(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    refused(change, manifest, tmp_path)


@pytest.mark.parametrize("manifest", ["agrees", "none"])
@pytest.mark.parametrize("part", ["storage", "sampler", "writer", "rng_state"])
def test_a_file_in_the_place_of_a_folder_is_refused(part, manifest, tmp_path):
    def change(folder: Path) -> None:
        shutil.rmtree(folder / part)
        (folder / part).write_text("")

    refused(change, manifest, tmp_path)


def test_a_text_that_changed_on_the_disk_is_refused(tmp_path):
    """Its length is right, and it is JSON."""
    folder = copy_of(saved("objects"), tmp_path)
    file = folder / "storage" / "text" / "meta.json"
    changed = file.read_text().replace("text 5", "text 6")
    assert changed != file.read_text()
    file.write_text(changed)
    rb = target("objects")
    before = everything(rb)
    with pytest.raises(ValueError, match="is damaged: storage/text/meta.json does not hold what was saved"):
        rb.loads(folder)
    assert everything(rb) == before


def refused(change: Any, manifest: str, place: Path) -> None:
    folder = copy_of(saved("transform"), place)
    change(folder)
    damage(folder, place, [], manifest)
    rb = in_use()
    before, inside = everything(rb), tree(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((ValueError, FileNotFoundError)):
            rb.loads(folder)
    assert everything(rb) == before
    assert tree(folder) == inside


@cache
def in_use() -> Any:
    return target("transform")
