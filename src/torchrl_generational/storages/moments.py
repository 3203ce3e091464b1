"""The moment of a storage: what it had seen of writes when something else was copied that has to agree with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Unchanged", "check_moment", "moment_of"]


def moment_of(storage: Any) -> int:
    """The moment of ``storage``, which every write ends."""
    return int(storage._mutation_revision)


class Unchanged:
    """Is pickled last, and refuses to be if one of the storages was written to meanwhile."""

    def __init__(self, storages: Iterable[Any]) -> None:
        self._storages = list(storages)
        self.moments = self._now()

    def _now(self) -> list[int]:
        return [moment_of(storage) for storage in self._storages]

    def __reduce__(self) -> tuple[Any, ...]:
        if self._now() != self.moments:
            raise RuntimeError(_CHANGED)
        return bool, ()


def check_moment(storage: Any, moment: int | None) -> None:
    """Refuses a copy whose storage is of another moment than the rest of it."""
    if moment is not None and moment_of(storage) != moment:
        raise RuntimeError(_CHANGED)


_CHANGED = (
    "The buffer was written to by another thread or process while it was being pickled, so that records, priorities "
    "and cursor would not be of one moment. Nothing was changed. Use copy.deepcopy(buffer), state_dict() or dumps(), "
    "which hold its locks, and pickle what copy.deepcopy returns."
)
