"""Checkpoints of all members of an ensemble, of one moment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl.data.replay_buffers import ReplayBufferEnsemble

from torchrl_generational import manifest
from torchrl_generational.checkpoints import PREFETCHED
from torchrl_generational.kept import refuse_lost_in_files
from torchrl_generational.metadata import read_json, reading
from torchrl_generational.plain import from_plain, to_plain

__all__ = ["EnsembleCheckpoints"]

_Ensemble: Any = ReplayBufferEnsemble if TYPE_CHECKING else object


class EnsembleCheckpoints(_Ensemble):  # type: ignore[misc]  # TorchRL is untyped
    """``state_dict``, ``dumps`` and their like over all members, checked before the first one changes."""

    _rbs: tuple[Any, ...]
    _ready: Any

    def _still(
        self, *, errors: bool = True, directory: AbstractContextManager[Any] | None = None
    ) -> AbstractContextManager[Any]:
        """No work in flight, here and in the members, and all their locks; that of a directory before them."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """One consistent snapshot of all members, in TorchRL's layout; see the members' own ``state_dict``."""
        with self._still():
            for rb in self._rbs:
                rb._catch_up_here()
            state: dict[str, Any] = super().state_dict()
        prefetched = state["_prefetch_state"]
        return state | {PREFETCHED: to_plain(prefetched["queue"]), "_prefetch_state": prefetched | {"queue": ()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state of this class, or of TorchRL's, in one section over all members.

        Raises:
            ValueError: if the number of members, capacities, shapes or priorities do not fit; nothing has changed.
        """
        if PREFETCHED in state_dict:
            queue = from_plain(state_dict[PREFETCHED])
            state_dict = state_dict | {"_prefetch_state": state_dict["_prefetch_state"] | {"queue": queue}}
        self._validate_prefetch_state(state_dict.get("_prefetch_state"))
        parts = [state_dict.get(part, {}) for part in ("_storage", "_sampler", "_writer")]
        if any(set(part) - set(map(str, range(len(part)))) or not part for part in parts):
            raise ValueError(
                f"The state is not that of an ensemble, whose members have numbers: it has {sorted(state_dict)}, and "
                f"for the storage {sorted(map(str, parts[0]))}. Nothing was loaded. Load a state of a single buffer "
                "into a member, ensemble[i].load_state_dict(...)."
            )
        self._check_number(*(len(part) for part in parts))
        with self._still():
            for number, rb in enumerate(self._rbs):
                rb._check_state(*(part[str(number)] for part in parts))
            with self._loading():
                super().load_state_dict(state_dict)

    def dumps(self, path: str | Path) -> None:
        """Saves all members in one section, in TorchRL's layout with a manifest; see the members' own ``dumps``."""
        path = Path(path).absolute()
        path.mkdir(exist_ok=True)
        self._ready()
        in_place = self._lie_in(path / "storage")
        with self._still(directory=manifest.locked_for_writing(path, in_place=in_place)):
            for rb in self._rbs:
                rb._catch_up_here()
                refuse_lost_in_files(rb.storage)
            with manifest.writing(path, in_place=self._lie_in(path / "storage")) as folder:
                super().dumps(folder)

    def loads(self, path: str | Path) -> None:
        """Takes over what ``dumps`` of this class, or of TorchRL's, saved; in one section over all members.

        Raises:
            FileNotFoundError, ValueError: as the members' own ``loads``; nothing has changed in any member.
        """
        path = Path(path).absolute()
        with self._still(directory=manifest.reading(path, members=len(self._rbs))) as found:
            self._check_number(sum(entry.is_dir() for entry in (path / "writer").iterdir()))
            said = path / "storage" / "metadata.json"
            empty = read_json(said)["empty_members"] if said.exists() else ()
            self._validate_prefetch_state(self._load_prefetch_state(path))
            for number, rb in enumerate(self._rbs):
                storage, sampler, writer = (path / part / str(number) for part in ("storage", "sampler", "writer"))
                rb._check_saved(None if number in empty else storage, sampler, writer)
            if self._lie_in(path / "storage"):
                found.goes_on_in_place()
            with self._loading():
                super().loads(path)
                found.refuse_change()
            if found.records_may_be_newer:
                for rb in self._rbs:
                    rb.storage.slot_generations.replaced(int(rb.storage._len_along_dim0 or 0))

    def _load_prefetch_state(self, path: Path) -> Any:
        with reading(path / "prefetch.pkl"):
            return super()._load_prefetch_state(path)

    def _lie_in(self, folder: Path) -> bool:
        """Whether the files of members are those of their numbers in ``folder``.

        Raises:
            ValueError: if they are those of other members, over which this one would be written or read.
        """
        home = [rb._lies_in(folder / str(number)) for number, rb in enumerate(self._rbs)]
        astray = [number for number, rb in enumerate(self._rbs) if not home[number] and rb._lies_in(folder)]
        if astray:
            raise ValueError(
                f"The records of the members {astray} of this ensemble are memory-mapped files in {folder}, which is "
                "not their place in a checkpoint of it. Nothing was written or loaded. Use another directory, or keep "
                "the members in the order in which they were saved."
            )
        return any(home)

    def _check_number(self, *saved: int) -> None:
        if set(saved) != {len(self._rbs)}:
            raise ValueError(
                f"The checkpoint holds {max(saved)} members but this ensemble has {len(self._rbs)}. Nothing was "
                "loaded. Load it into an ensemble like the one that it was saved from."
            )

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        with contextlib.ExitStack() as loading:
            for rb in self._rbs:
                loading.enter_context(rb._loading_storage())
            yield
