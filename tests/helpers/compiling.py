"""A thread that stays inside ``torch.compile`` for as long as a test wants."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from support import TIMEOUT


@contextlib.contextmanager
def another_thread_compiles() -> Iterator[None]:
    """Another thread is in the backend of a compile meanwhile, where TorchRL takes every thread for traced."""
    inside, leave = threading.Event(), threading.Event()

    def backend(graph: Any, example: Any) -> Any:
        inside.set()
        assert leave.wait(TIMEOUT)
        return graph.forward

    def compile_and_run() -> None:
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))

    thread = threading.Thread(target=compile_and_run)
    thread.start()
    try:
        assert inside.wait(TIMEOUT)
        assert torch.compiler.is_compiling()
        yield
    finally:
        leave.set()
        thread.join(TIMEOUT)
