"""The saved state of a writer, read and checked before it changes anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor

from torchrl_generational.generations.slot_generations import ReadyStamps
from torchrl_generational.persistence.reading import read_json, reading
from torchrl_generational.persistence.restores import Plan, Saved

__all__ = ["WriterState", "named_origin", "newest_of"]

_ORIGIN = "_generation_"  # before the names of what a checkpoint says about its stamps
_NEWEST = _ORIGIN + "newest"
_LIKE = "Nothing was loaded. Load it into a buffer with the writer that it was saved from."


@dataclass(frozen=True, slots=True)
class WriterState:
    """What a writer takes over.

    Attributes:
        cursor: the next row; ``None`` for a writer that has none.
        count: records written; ``None``: not saved.
        stamps: int64 ``[rows]``; ``None``: none were saved.
        origin: where they come from; empty for TorchRL's.
        newest: the row written last, ``None`` where that is not known.
        rank_key: of a writer that ranks records; ``None``: not saved.
    """

    cursor: int | None
    count: int | None
    stamps: torch.Tensor | None
    origin: dict[str, Any] = field(default_factory=dict)
    newest: int | None = None
    rank_key: Any = None

    @classmethod
    def of(cls, writer: Any, saved: Saved, *, ranks: bool) -> WriterState:
        """Reads the state of a writer that ranks records, or of one that goes round.

        Raises:
            FileNotFoundError: if a file is missing.
            ValueError: if it is that of the other kind, or damaged.
        """
        kind = type(writer).__name__
        if saved.folder is not None:
            return cls._from_folder(kind, saved.folder, ranks)
        state = saved.state
        has = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        if not isinstance(state, dict) or ("_cursor" in state) == ranks or (ranks and "_write_count" not in state):
            raise ValueError(f"The writer's state is not that of a {kind}: it has {has}. {_LIKE}")
        return cls(
            None if ranks else _number("_cursor", state["_cursor"]),
            _number("_write_count", state.get("_write_count"), optional=True),
            state.get("_generation"),
            _origin_in(state),
            _number(_NEWEST, state.get(_NEWEST), optional=True),
        )

    @classmethod
    def _from_folder(cls, kind: str, folder: Path, ranks: bool) -> WriterState:
        file = folder / "metadata.json"
        metadata = read_json(file)
        if "cursor" not in metadata or ("rank_key" in metadata) != ranks:
            raise ValueError(f"{file} is not that of a {kind}: it has {sorted(metadata)}. {_LIKE}")
        key = metadata.get("rank_key")
        if ranks and not (isinstance(key, str) or (isinstance(key, list) and all(isinstance(k, str) for k in key))):
            raise ValueError(f"{file} has rank_key={key!r:.80}, which is no key: it is damaged. {_LIKE}")
        return cls(
            _number("cursor", metadata["cursor"]),
            _number("write_count", metadata.get("write_count"), optional=True),
            _stamps_in(folder, metadata),
            _origin_in(metadata),
            _number(_NEWEST, metadata.get(_NEWEST), optional=True),
            tuple(key) if isinstance(key, list) else key,
        )

    def ready_stamps(self, generations: Any) -> ReadyStamps | None:
        """The stamps as a storage takes them over; ``None`` if none were saved.

        Raises:
            ValueError: if they do not fit.
        """
        return None if self.stamps is None else generations.restored(self.stamps, **self.origin)

    def check(self, rows: int, reached: int) -> None:
        """Refuses a cursor that no write on the records loaded with it can have left.

        Args:
            rows: of the storage.
            reached: how many of them hold a record.

        Raises:
            ValueError: if it would write outside, or leave rows without a record before those with one.
        """
        if self.cursor is not None and not self.cursor <= min(reached, max(rows - 1, 0)):
            raise ValueError(
                f"The checkpoint's writer goes on at row {self.cursor}, and its storage of {rows} rows has records in "
                f"the first {reached}: they do not belong together. {_LIKE}"
            )

    def plan(self, plan: Plan, writer: Any) -> None:
        """Plans to have a writer go on from here; its storage sees to the stamps."""

        def install() -> None:
            if self.cursor is not None:
                writer._cursor = self.cursor
            if self.count is not None:
                writer._write_count = self.count
            if self.rank_key is not None:
                writer._rank_key = self.rank_key
            if hasattr(writer, "_revision"):
                writer._revision = None  # its ranking is made of the records again

        plan.install(install)


def named_origin(origin: dict[str, int]) -> dict[str, int]:
    """Where stamps come from, under the names that checkpoints give it."""
    return {_ORIGIN + key: value for key, value in origin.items()}


def newest_of(storage: Any) -> dict[str, int]:
    """The row that was written last, by which slices and trajectories are told apart, for a writer to save."""
    newest = getattr(storage, "_last_cursor_index", None)
    return {} if newest is None or not len(storage) else {_NEWEST: int(newest)}


def _origin_in(state: dict[str, Any]) -> dict[str, Any]:
    return {key: state[_ORIGIN + key] for key in ("lineage", "incarnation") if _ORIGIN + key in state}


def _number(name: str, value: Any, *, optional: bool = False) -> int | None:
    if value is None and optional:
        return None
    if type(value) is int and 0 <= value < 2**63:
        return value
    raise ValueError(f"The checkpoint's writer has {name}={value!r:.80}, which should be an int >= 0. {_LIKE}")


def _stamps_in(folder: Path, metadata: dict[str, Any]) -> torch.Tensor | None:
    shape = metadata.get("generation_shape")
    if shape is None:
        return None
    dtype = metadata.get("generation_dtype", "torch.int64")
    if not (isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int and shape[0] >= 0):
        raise ValueError(f"{folder} has generations of shape {shape!r:.80}: it is damaged. {_LIKE}")
    if dtype != "torch.int64":
        raise ValueError(f"{folder} has generations of dtype {dtype!r:.80}, which should be torch.int64. {_LIKE}")
    with reading(folder / "generation.memmap"):
        if (folder / "generation.memmap").stat().st_size != 8 * shape[0]:
            raise ValueError(f"it does not have the {8 * shape[0]} bytes of {shape[0]} generations")
        held = MemoryMappedTensor.from_filename(
            folder / "generation.memmap", dtype=torch.int64, shape=torch.Size(shape)
        )
    stamps: torch.Tensor = held.as_subclass(torch.Tensor)
    return stamps
