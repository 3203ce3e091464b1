"""The examples and the code in README and docs do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
    if "import" in block  # the others go on from what the text has before them
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_of_a_page_runs_and_prints_what_it_says(block, capsys):
    exec(compile(block, "page", "exec"), {})
    promised = re.findall(r"^print\(.*?\)  # (.*)$", block, re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()
    assert printed[: len(promised)] == promised


def run_in(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env={**os.environ, "RL_LOGGING_LEVEL": "ERROR"},
    )


@pytest.mark.system
def test_the_delayed_learner_trains_counts_and_plots(tmp_path):
    plot = tmp_path / "shares.png"
    script = ROOT / "examples" / "delayed_learner.py"
    run = run_in(tmp_path, script, "--duration", "3", "--no-progress", "--plot", plot)
    assert run.returncode == 0, run.stderr
    assert plot.stat().st_size > 10_000
    misapplied = re.search(r"another record\s+([\d,]+)[^\d\n]*(?:\([^)]*\))?\s+([\d,]+)", run.stdout)
    assert misapplied, run.stdout
    raw, conditional = (int(count.replace(",", "")) for count in misapplied.groups())
    assert raw > 0
    assert conditional == 0


@pytest.mark.system
def test_ape_x_learns_from_processes_that_write_first_priorities(tmp_path):
    run = run_in(tmp_path, ROOT / "examples" / "ape_x.py", "--duration", "3", "--warmup", "300", "--no-progress")
    assert run.returncode == 0, run.stderr
    counts = dict(re.findall(r"^ *([a-z ,]+?)  +([\d,]+)$", run.stdout, re.MULTILINE))
    for name in ("transitions written", "rows sampled", "rows returned"):
        assert int(counts[name].replace(",", "")) > 0, run.stdout
    assert run.stdout.count("episodes") == 2


def test_the_benchmark_of_processes_measures_writers_beside_a_learner(tmp_path):
    script = ROOT / "benchmarks" / "processes.py"
    settings = ("--seconds", "0.5", "--writers", "1", "--capacity", "2000", "--start-method", "fork")
    run = run_in(tmp_path, script, *settings)
    assert run.returncode == 0, run.stdout + run.stderr
    for contender in ("ours", "TorchRL"):
        assert re.search(rf"1 +{contender} +[1-9][\d,]* +[\d.]+ +[1-9][\d,]*", run.stdout), run.stdout


@pytest.mark.system
def test_a_storage_of_one_s_own_passes_the_race_suite(tmp_path):
    suite = ROOT / "examples" / "test_half_storage.py"
    run = run_in(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", suite)
    assert run.returncode == 0, run.stdout
    assert "12 passed" in run.stdout
