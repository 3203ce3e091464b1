"""Random operations in any order, against a dict; see ``oracle.py``. The soak runs them by the thousand."""

from __future__ import annotations

import os
import random

import hypothesis.core
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from oracle import BufferAgainstDict, GridAgainstDict, PrefetchAgainstDict, WithinAgainstDict

MACHINES = [BufferAgainstDict, GridAgainstDict, WithinAgainstDict, PrefetchAgainstDict]


def run(machine: type, examples: int, *, same_each_time: bool) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    chosen = settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=checks,
        database=None,
        derandomize=same_each_time,
        phases=[Phase.generate],  # 25 steps are readable as they are; to shorten them takes minutes
    )
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("examples", [20, pytest.param(100, marks=pytest.mark.system)])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_buffer_does_what_a_dict_would_do(machine, examples):
    run(machine, examples, same_each_time=True)  # what is new is for the soak to find


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_a_buffer_does_what_a_dict_would_do_for_long(machine, monkeypatch):
    seed = int(os.environ.get("ORACLE_SEED", random.SystemRandom().randrange(2**32)))
    print(f"ORACLE_SEED={seed}")  # runs the same again
    monkeypatch.setattr(hypothesis.core, "global_force_seed", seed)
    run(machine, 5_000, same_each_time=False)
