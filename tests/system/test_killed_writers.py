"""Writers that are killed at any moment of a write block nobody, and harm no record, handle or priority."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from killed_writers import (
    AROUND,
    CHANGING,
    KINDS,
    Points,
    killed_at_every_line,
    killed_at_every_line_of_a_first_write,
    killed_at_random_moments,
)
from support import TIMEOUT


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """A forked child has no team of threads, and what the parent waits for is the child."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(found: dict[str, Any], kills: int) -> None:
    assert found["kills"] >= kills
    assert found["worst"] < TIMEOUT
    for happened in ("sampled", "updated", "stale"):
        assert found[happened] > 0


def check_lines(kind: str, found: dict[str, Any]) -> None:
    assert found["worst"] < TIMEOUT
    assert min(found["sampled"], found["updated"], found["stale"]) > 0
    assert (found["interrupted"] > 0) == (kind != "empty")
    assert (found["all interrupted"] > 0) == (kind == "extend longer than the ring")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind == "extend with td_error" else pytest.mark.system)
        for kind in KINDS
        if kind != "extend of a ring not full"
    ],
)
def test_a_writer_killed_at_any_line_blocks_nobody_and_harms_nothing(kind, tmp_path):
    """At every line next to a change, and for one kind of write at those around them as well."""
    modules = AROUND if kind == "extend" else CHANGING
    foreign = 30 if kind == "assignment" else 0  # which tensordict does
    found = killed_at_every_line(kind, "tensors", tmp_path / "storage", Points(modules, foreign=foreign, again=False))
    least = {"extend": 80, "empty": 20}  # the second moves all stamps in one operation
    assert found["kills"] > least.get(kind, 30)
    check_lines(kind, found)


@pytest.mark.system
@pytest.mark.parametrize("storage", ["tensors", "memmap"])
def test_a_writer_killed_at_any_line_of_the_first_write_leaves_it_to_the_next(storage, tmp_path):
    """At every line next to a change, and some of those in TorchRL and tensordict that make the files."""
    points = Points({"shared_counter", "shared_storage", "storage_counters", "first_write"}, foreign=400, again=False)
    check_first(killed_at_every_line_of_a_first_write(storage, tmp_path, points))


def check_first(found: dict[str, Any]) -> None:
    assert found["kills"] > 30
    assert found["worst"] < TIMEOUT
    assert found["before the records were there"] > 20
    assert found["interrupted"] > 0


def check_random(found: dict[str, Any]) -> None:
    assert min(found["sampled"], found["updated"], found["stale"]) > 0
    assert found["worst recovery of learner"] < TIMEOUT
    assert found["worst recovery of writer"] < TIMEOUT


@pytest.mark.parametrize("storage", ["tensors", pytest.param("memmap", marks=pytest.mark.system)])
def test_writers_killed_at_random_moments_block_nobody_and_harm_nothing(storage, tmp_path):
    check_random(killed_at_random_moments(15, storage, tmp_path / "storage"))


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["tensors", "memmap"])
def test_hundreds_of_writers_killed_at_random_moments_block_nobody_and_harm_nothing(storage, tmp_path, capsys):
    found = killed_at_random_moments(300, storage, tmp_path / "storage")
    with capsys.disabled():
        print("\nkilled writers", storage, json.dumps(found))
    check_random(found)
    assert found["inside a write"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "first"])
@pytest.mark.parametrize("storage", ["tensors", "memmap"])
def test_a_writer_killed_at_any_line_of_any_code_blocks_nobody_and_harms_nothing(storage, kind, tmp_path, capsys):
    """Every line of the package each time it runs, and every few lines of what it calls."""
    if kind == "first":
        found = killed_at_every_line_of_a_first_write(storage, tmp_path, Points(foreign=20))
        check_first(found)
    else:
        found = killed_at_every_line(kind, storage, tmp_path / "storage", Points(foreign=4))
        check_lines(kind, found)
    with capsys.disabled():
        print("\nkilled at lines", storage, kind, json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["extend that wraps", "extend with td_error"])
def test_a_writer_killed_at_any_instruction_blocks_nobody_and_harms_nothing(kind, tmp_path, capsys):
    points = Points(CHANGING | {"round_robin_writers"}, instructions=True)
    found = killed_at_every_line(kind, "tensors", tmp_path / "storage", points)
    with capsys.disabled():
        print("\nkilled at instructions", kind, json.dumps(found))
    check_lines(kind, found)
