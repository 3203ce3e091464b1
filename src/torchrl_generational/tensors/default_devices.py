"""Where the tensors live that this package makes: on the CPU, or with the records, and never on a default device.

``torch.set_default_device`` and ``with torch.device(...)`` speak of what the program around a buffer makes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["CPU", "as_tensor", "has_default_device", "without_default_device"]

CPU = torch.device("cpu")

_modes = torch._C._len_torch_function_stack


def has_default_device() -> bool:
    """Whether this thread may have a default device: that is a mode, and so are a few other things. O(1)."""
    return bool(_modes())


@contextlib.contextmanager
def without_default_device(within: Any = None) -> Iterator[None]:
    """What TorchRL makes without naming a device goes to the CPU meanwhile; after ``within`` is entered."""
    with within or contextlib.nullcontext(), torch.device("cpu") if has_default_device() else contextlib.nullcontext():
        yield


def as_tensor(value: Any) -> torch.Tensor:
    """``value`` as a tensor: one where it is, anything else on the CPU. ``torch.as_tensor`` moves both."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device=CPU)
