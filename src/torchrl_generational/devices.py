"""Where the tensors live that this package makes: on the CPU, or with the records, and never on a default device.

``torch.set_default_device`` and ``with torch.device(...)`` speak of what the program around a buffer makes.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CPU", "as_tensor"]

CPU = torch.device("cpu")


def as_tensor(value: Any) -> torch.Tensor:
    """``value`` as a tensor: one where it is, anything else on the CPU. ``torch.as_tensor`` moves both."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device=CPU)
