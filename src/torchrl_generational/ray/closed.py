"""Buffers in Ray actors that were closed, and their clients: what is asked of them is refused."""

from __future__ import annotations

from typing import Any

import ray

__all__ = ["ClosedError", "Life", "WhileOpen", "check_open"]


class ClosedError(RuntimeError, AttributeError):
    """A buffer that is closed; an error of attributes too, because TorchRL asks by ``hasattr`` whether it is."""


class Life:
    """Whether a buffer was closed, for its clients in this process; a copy in another process stays as it is."""

    closed = False


def check_open(user: Any, error: type[Exception] = RuntimeError) -> None:
    """Refuses the use of a buffer that was closed, of a client of one, or of either without Ray."""
    if user._life.closed or not ray.is_initialized():
        raise error(
            f"This {type(user).__name__.lstrip('_')} is closed, or Ray was shut down in this process. Make another "
            "GenerationalRayReplayBuffer, and take clients of that one."
        )


class WhileOpen:
    """What leads to the actor, of a buffer or a client: refused when the buffer is closed.

    For a call to an actor that went with its cluster Ray would start another one.
    """

    def __init__(self, error: type[Exception] = RuntimeError) -> None:
        self.error = error

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, user: Any, owner: type | None = None) -> Any:
        if user is None:
            return self
        check_open(user, self.error)
        try:
            return vars(user)[self.name]
        except KeyError:
            raise AttributeError(self.name) from None

    def __set__(self, user: Any, value: Any) -> None:
        vars(user)[self.name] = value

    def __delete__(self, user: Any) -> None:
        del vars(user)[self.name]
