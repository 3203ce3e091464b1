"""What a benchmark ran on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "torchrl", "tensordict", "numpy", "torchrl-generational", "cpprb", "tianshou", "flashbax", "jax")
NOT_INSTALLED = "not installed"


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of all that takes part, `not installed` where it does not."""
    found = {"Python": platform.python_version()}
    for package in packages:
        found[package] = NOT_INSTALLED
        for name in (package, f"{package}-nightly"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(name)
                break
    return found


def cpu() -> str:
    """The model, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Everything but the versions."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "os": platform.platform(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def available_bytes() -> int | None:
    """Memory that can be had without swapping, `None` where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


class Others:
    """How many cores other processes, other machines on the same host among them, took while this one was timed."""

    def __init__(self) -> None:
        self.wall_s = self.others_s = 0.0

    def __enter__(self) -> Others:
        self.start = self.look()
        return self

    def __exit__(self, *_: object) -> None:
        wall, busy = (now - then for now, then in zip(self.look(), self.start, strict=True))
        self.wall_s += wall
        self.others_s += busy

    @staticmethod
    def look() -> tuple[float, float]:
        """The clock, and the CPU time of all processes but this one since the system started, in seconds."""
        try:
            fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return time.monotonic(), 0.0
        user, nice, system, _, _, irq, softirq, steal = fields
        everyone = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        return time.monotonic(), everyone - own.user - own.system

    @property
    def cores(self) -> float:
        """On average; not below 0, which the system's coarse clock may give."""
        return max(0.0, self.others_s / self.wall_s) if self.wall_s else 0.0
