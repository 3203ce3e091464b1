"""Numbers that processes share without a lock of their own."""

from __future__ import annotations

import contextlib
import ctypes
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawValue
from typing import Any

__all__ = ["SharedCounter"]


class SharedCounter:
    """A 64-bit number that processes can share, in the place of TorchRL's ``multiprocessing.Value``.

    That one counts in 32 bits in places, which a run of days leaves behind, and has a lock that a killed process keeps
    for good. This one has none: the storage's lock guards it. After :meth:`share` processes that are forked or started
    with it share it; a process that was forked before has the number as it was then, beside records that are as they
    were then.

    Example:
        >>> written = SharedCounter(3)
        >>> written.value += 2**31
        >>> written.value
        2147483651
    """

    __slots__ = ("_raw", "_shared")

    def __init__(self, value: int, *, shared: bool = False) -> None:
        self._raw: Any = ctypes.c_int64(value)
        self._shared = False
        if shared:
            self.share()

    def share(self) -> None:
        """Moves the number to shared memory. Idempotent; the caller holds the storage's lock."""
        if not self._shared:
            self._raw = RawValue(ctypes.c_int64, self._raw.value)
            self._shared = True

    @property
    def value(self) -> int:
        """The number. Reading needs no lock, changing it the storage's."""
        number: int = self._raw.value
        return number

    @value.setter
    def value(self, value: int) -> None:
        self._raw.value = value

    def get_lock(self) -> contextlib.AbstractContextManager[None]:
        """What TorchRL holds while it increments: nothing, because it holds the storage's lock."""
        return contextlib.nullcontext()

    def __getstate__(self) -> tuple[Any, bool]:
        if get_spawning_popen() is not None:
            self.share()
        return self._raw, self._shared

    def __setstate__(self, state: tuple[Any, bool]) -> None:
        self._raw, self._shared = state
