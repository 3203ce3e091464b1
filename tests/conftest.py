from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")  # TorchRL logs every storage it initialises

import numpy as np
import pytest
import torch
from support import Actors

from torchrl_generational.concurrency.deferred_signals import deferral

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Collections of garbage pass over the hundreds of thousands of objects of what is imported: they stay anyhow."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def outside_of_sections() -> Iterator[None]:
    """A test that ends while its main thread holds a lock leaves no signals deferred to the next one."""
    yield
    deferral.back_to(0)


@pytest.fixture
def actors() -> Iterator[Actors]:
    made = Actors()
    yield made
    made.close()
