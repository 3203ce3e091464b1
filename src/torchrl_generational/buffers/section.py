"""The section of a buffer: the lock of its storage, held while something changes or is read as a whole."""

from __future__ import annotations

from typing import Any

from torchrl_generational.storages.shared_storage import SharableStorage

__all__ = ["Section", "lock_of"]


class Section:
    """The lock of a buffer's storage, also if the storage is exchanged while this thread waits for it.

    Where an exception leaves the section, slots whose record may lack its data or its priority hold no record. Leaving
    one that was not entered does nothing.
    """

    __slots__ = ("buffer", "lock", "outermost")

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.lock: Any = None  # as long as it is held
        self.outermost: Any = None  # the stamps, if this is the outermost section of their storage

    def __enter__(self) -> None:
        fields, held = self.buffer.__dict__, False
        lock: Any = None
        try:
            while True:
                lock = lock_of(fields)
                held = lock.acquire()
                if lock is lock_of(fields):
                    break
                held = lock.release()
            storage = fields.get("_storage")
            if storage is not None:
                if not getattr(storage, "initialized", True) and isinstance(storage, SharableStorage):
                    storage.join()
                generations = getattr(storage, "slot_generations", None)
                if generations is not None and generations.opened is None:
                    self.outermost = generations
                    generations.opened = []
            self.lock = lock
        except BaseException:
            if self.outermost is not None:
                self.outermost.opened = None
            if held:
                lock.release()
            raise

    def __exit__(self, kind: Any, *exc: object) -> None:
        lock, self.lock = self.lock, None
        if lock is None:
            return
        try:
            if kind is not None:
                self._abandon()
        finally:
            if self.outermost is not None:
                self.outermost.opened = None
            lock.release()

    def _abandon(self) -> None:
        """Has the slots not drawn to which this section, or one around it, has begun to write."""
        storage: Any = self.buffer._storage
        generations: Any = getattr(storage, "slot_generations", None)
        for rows in () if generations is None else generations.opened or ():
            getattr(storage, "abandon", generations.abandon)(rows)


def lock_of(fields: dict[str, Any]) -> Any:
    """The lock of the buffer that has these fields."""
    try:
        return fields["_storage"].lock
    except (KeyError, AttributeError):  # neither with delayed_init nor while it is being unpickled is there a storage
        return fields["_replay_lock"]
