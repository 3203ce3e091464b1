from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")  # TorchRL logs every storage it initialises

import numpy as np
import pytest
import torch
from support import Actors


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture
def actors() -> Iterator[Actors]:
    made = Actors()
    yield made
    made.close()
