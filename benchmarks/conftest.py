"""Prints the ratios to stock after pytest-benchmark's own table."""

from __future__ import annotations

import os

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")

import pytest

from benchmarks.machine import machine, versions

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
    host = machine()
    packages = ", ".join(f"{name} {version}" for name, version in versions(("torch", "torchrl")).items())
    terminalreporter.write_line(f"{packages}, {host['cores']} cores, {host['torch_threads']} torch threads")
