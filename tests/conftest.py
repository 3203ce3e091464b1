from __future__ import annotations

import gc
import os
from collections.abc import Iterator

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")  # TorchRL logs every storage it initialises

import numpy as np
import pytest
import torch
from support import Actors


def pytest_collection_finish() -> None:
    """Collections of garbage pass over the hundreds of thousands of objects of what is imported: they stay anyhow."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture
def actors() -> Iterator[Actors]:
    made = Actors()
    yield made
    made.close()
