"""Checkpoints of all members of an ensemble, of one moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchrl_generational.buffers.checkpoints import parts_of_state, plain_state, refuse_no_dict
from torchrl_generational.buffers.work_in_flight import refuse_in_own_draw
from torchrl_generational.concurrency.folder_lock import refuse_used_folder
from torchrl_generational.ensembles.base import EnsembleBase
from torchrl_generational.persistence import manifest
from torchrl_generational.persistence.kept_objects import refuse_lost_in_files
from torchrl_generational.persistence.reading import read_json, reading
from torchrl_generational.persistence.restores import PREFETCHED, Plan, Rest, Saved, carry_out, load_part
from torchrl_generational.persistence.serialization import to_plain

__all__ = ["EnsembleCheckpoints"]


class EnsembleCheckpoints(EnsembleBase):
    """``state_dict``, ``dumps`` and their like over all members, checked before the first one changes."""

    def state_dict(self) -> dict[str, Any]:
        """One consistent snapshot of all members, in TorchRL's layout; see the members' own ``state_dict``."""
        refuse_in_own_draw(self, "state_dict")
        with self._still():
            for rb in self._rbs:
                rb._catch_up_here()
            state: dict[str, Any] = super().state_dict()
            for number, rb in enumerate(self._rbs):
                state["_sampler"][str(number)] = plain_state(rb.sampler, state["_sampler"][str(number)])
        prefetched = state["_prefetch_state"]
        return state | {PREFETCHED: to_plain(prefetched["queue"]), "_prefetch_state": prefetched | {"queue": ()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state of this class, or of TorchRL's, in one section over all members.

        Raises:
            ValueError: if the number of members or any part of them does not fit.

        Whatever is raised, and wherever: all members have taken over theirs then, or nothing has changed in any.
        """
        self._refuse_write()
        refuse_in_own_draw(self, "load_state_dict")
        parts = parts_of_state(state_dict, "an ensemble")
        if any(not part or set(part) - set(map(str, range(len(part)))) for part in parts):
            raise ValueError(
                f"The state is not that of an ensemble, whose members have numbers: it has {sorted(state_dict)}, and "
                f"for the storage {sorted(map(str, parts[0]))}. Nothing was loaded. Load a state of a single buffer "
                "into a member, ensemble[i].load_state_dict(...)."
            )
        for name, part in zip(("_storage", "_sampler", "_writer"), parts, strict=True):
            for number, state in part.items():
                refuse_no_dict(f"{name}.{number}", state)
        self._check_number(*(len(part) for part in parts))
        with self._still():

            def make(plan: Plan) -> None:
                for number, rb in enumerate(self._rbs):
                    rb._plan_parts(plan, *(Saved(part[str(number)]) for part in parts))
                Rest.from_state_dict(self, state_dict).plan(plan, self)

            carry_out(make)

    def dumps(self, path: str | Path) -> None:
        """Saves all members in one section, in TorchRL's layout with a manifest; see the members' own ``dumps``."""
        refuse_in_own_draw(self, "dumps")
        path = Path(path).absolute()
        path.mkdir(exist_ok=True)
        self._ready()
        in_place = self._lie_in(path / "storage")
        with self._still(directory=manifest.locked_for_writing(path, in_place=in_place)):
            for rb in self._rbs:
                rb._catch_up_here()
                refuse_lost_in_files(rb.storage)
            in_place = self._lie_in(path / "storage")
            if in_place:
                self._refuse_write()
            for number, rb in enumerate(self._rbs):
                if not rb._lies_in(path / "storage" / str(number)):
                    refuse_used_folder(path / "storage" / str(number))
            with manifest.writing(path, in_place=in_place) as folder:
                super().dumps(folder)

    def loads(self, path: str | Path) -> None:
        """Takes over what ``dumps`` of this class, or of TorchRL's, saved; in one section over all members.

        Raises:
            FileNotFoundError, ValueError: as the members' own ``loads``; nothing has changed in any member.
        """
        self._refuse_write()
        refuse_in_own_draw(self, "loads")
        path = Path(path).absolute()
        with self._still(directory=manifest.reading(path, members=len(self._rbs))) as found:
            self._check_number(sum(entry.is_dir() for entry in (path / "writer").iterdir()))

            def make(plan: Plan) -> None:
                empty = self._members_without_records(path)
                for number, rb in enumerate(self._rbs):
                    parts = [Saved(folder=path / part / str(number)) for part in ("storage", "sampler", "writer")]
                    if number in empty:
                        parts[0] = Saved()
                    rb._plan_parts(plan, *parts, may_be_newer=found.records_may_be_newer)
                for number, transform in enumerate(self._storage._transforms or ()):
                    if transform is not None:
                        file = path / "storage" / f"{number}_transform.pt"
                        with reading(file, pickled=True):
                            state = torch.load(file)
                        load_part(plan, transform, f"transform of member {number}", Saved(state))
                Rest.from_path(self, path).plan(plan, self)
                found.refuse_change()
                if self._lie_in(path / "storage"):
                    found.goes_on_in_place()

            carry_out(make)

    def _members_without_records(self, path: Path) -> list[int]:
        said = path / "storage" / "metadata.json"
        empty = read_json(said).get("empty_members") if said.exists() else []
        if not isinstance(empty, list) or any(number not in range(len(self._rbs)) for number in empty):
            raise ValueError(f"{said} has empty_members={empty!r:.80}: it is damaged. Nothing was loaded.")
        return empty

    def _load_prefetch_state(self, path: Path) -> Any:
        with reading(path / "prefetch.pkl", pickled=True):
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
