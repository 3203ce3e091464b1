"""Prints the ratios to stock after pytest-benchmark's own table."""

from __future__ import annotations

import os

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")

import platform

import pytest
import torch
import torchrl

RATIOS = pytest.StashKey[list[tuple[str, float, float, float]]]()


@pytest.fixture
def ratios(request: pytest.FixtureRequest) -> list[tuple[str, float, float, float]]:
    """Rows (name, ours, stock, ratio) of the table, times in microseconds."""
    return request.config.stash.setdefault(RATIOS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table."""
    rows = config.stash.get(RATIOS, [])
    if not rows:
        return
    terminalreporter.section("ours against stock TorchRL, interleaved, median microseconds")
    terminalreporter.write_line(f"{'operation and slots':56}{'ours':>9}{'stock':>9}{'ratio':>8}")
    for name, ours, stock, ratio in rows:
        terminalreporter.write_line(f"{name:56}{ours:9.1f}{stock:9.1f}{ratio:8.2f}")
    terminalreporter.write_line(
        f"torch {torch.__version__}, torchrl {torchrl.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    )
