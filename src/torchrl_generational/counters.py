"""Numbers that processes share without a lock of their own."""

from __future__ import annotations

import contextlib
import ctypes
from multiprocessing.sharedctypes import RawValue
from typing import Any

__all__ = ["SharedCounter"]


class SharedCounter:
    """A 64-bit number in shared memory, in the place of TorchRL's ``multiprocessing.Value``.

    That one counts in 32 bits in places, which a run of days leaves behind, and has a lock that a killed process keeps
    for good. This one has none: the storage's lock guards it. Forked children share it, and so do processes that it is
    pickled for when they are started.

    Example:
        >>> written = SharedCounter(3)
        >>> written.value += 2**31
        >>> written.value
        2147483651
    """

    __slots__ = ("_raw",)

    def __init__(self, value: int) -> None:
        self._raw: Any = RawValue(ctypes.c_int64, value)

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
