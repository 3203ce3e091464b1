"""Every component of TorchRL that meets ours: it names exactly the record in each row of a sample, or is refused.

The rows are in ``where.py``, what tries them in ``where_parts.py`` and ``where_batches.py``, the oracle in
``ledger.py``.
"""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl.data.replay_buffers as torchrl_replay
import where_batches  # noqa: F401  fills CHECKS
import where_parts  # noqa: F401  fills CHECKS
from torchrl.data.replay_buffers import replay_buffers, samplers, storages, writers
from where import ROWS, Row, markdown
from where_checks import CHECKS, Check


def cases(verdict: str) -> list[Any]:
    """All checks of the rows with that verdict."""
    return [
        pytest.param(
            row,
            function,
            id=" ".join(filter(None, (row.kind, row.component, variant))),
            marks=pytest.mark.system if row.component == "torch.compile, compilable=True" else [],
        )
        for row in ROWS
        if row.verdict == verdict
        for variant, function in CHECKS.get((row.kind, row.component), {}).items()
    ]


TORCHRLS_WARNINGS = (
    "The VecNorm class is to be deprecated|This class is to be deprecated in favor of",  # VecNorm
    "The last dimension of the tensordict should be marked as 'time'",  # CatFrames
    "__array__ implementation doesn't accept a copy keyword",  # PrioritizedSampler of several dimensions
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("row", "try_it"), cases("works"))
def test_handles_name_the_records_of_a_sample_and_updates_reach_the_live_ones(row: Row, try_it: Check) -> None:
    with warnings.catch_warnings():
        for message in TORCHRLS_WARNINGS:
            warnings.filterwarnings("ignore", message)
        try_it()


@pytest.mark.parametrize(("row", "try_it"), cases("refused"))
def test_what_cannot_work_is_refused_in_words_that_help(row: Row, try_it: Check) -> None:
    with pytest.raises(row.error, match=re.escape(row.note)):
        try_it()


def test_every_row_that_claims_something_is_tried() -> None:
    claimed = {(row.kind, row.component) for row in ROWS if row.verdict != "untested" and not row.tried_in}
    assert set(CHECKS) == claimed
    assert len(ROWS) == len({(row.kind, row.component) for row in ROWS})
    assert all(row.note for row in ROWS if row.verdict != "works")


@pytest.mark.parametrize("tried_in", sorted({row.tried_in for row in ROWS if row.tried_in}))
def test_a_test_that_a_row_names_exists(tried_in: str) -> None:
    file, _, name = tried_in.partition("::")
    text = (Path(__file__).parents[1] / file).read_text()
    assert f"def {name or 'test_'}" in text


@pytest.mark.parametrize(
    ("kinds", "module"),
    [
        (("sampler",), samplers),
        (("storage",), storages),
        (("writer",), writers),
        (("buffer", "sampler"), replay_buffers),
        (("buffer", "sampler", "sample unit", "storage", "writer"), torchrl_replay),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_part_of_a_buffer_that_torchrl_exports_has_a_row(kinds: tuple[str, ...], module: Any) -> None:
    rows = {row.component.split(",")[0] for row in ROWS if row.kind in kinds}
    exported = {name for name in module.__all__ if name[0].isupper()} - NO_PARTS_OF_A_BUFFER - LATER
    assert exported <= rows, sorted(exported - rows)


# Checkpointers and the like: they see a storage as a whole, and no samples.
NO_PARTS_OF_A_BUFFER = {name for name in torchrl_replay.__all__ if name.endswith("Checkpointer")} | {
    *("StorageCheckpointerBase", "Trajectory", "TrajectoryPredicate", "HindsightStrategy", "DEFAULT_DONE_KEYS"),
    *("Flat2TED", "H5Combine", "H5Split", "Nested2TED", "TED2Flat", "TED2Nested"),
}
# Of TorchRL after 0.14. They get rows with its release, when the table is of that.
LATER = {
    *("RateLimitedReplayBuffer", "ReplayBufferDataset", "StorageDataset", "SubgoalTriplet"),
    *("FQLTrainer", "TdMpc2Trainer"),
}


@pytest.mark.parametrize(
    ("kind", "module", "ending"),
    [
        ("trainer", "torchrl.trainers.algorithms", "Trainer"),
        ("collector", "torchrl.collectors", "Collector"),
        ("collector", "torchrl.collectors.distributed", "Collector"),
    ],
)
def test_every_trainer_and_collector_of_torchrl_has_a_row(kind: str, module: str, ending: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchRL's, of its own classes
        exported = {name for name in vars(importlib.import_module(module)) if name.endswith(ending)}
    rows = {name for row in ROWS if row.kind == kind for name in row.component.split(", ")}
    assert exported - BASES - LATER <= rows, sorted(exported - BASES - LATER - rows)


BASES = {"BaseCollector", "MultiCollector", "OnPolicyTrainer"}


def test_the_page_in_the_docs_is_this_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "where_it_works.md").read_text()
    assert page.endswith(markdown()), "run: python docs/where_it_works.py"
