"""Saving and restoring the priority trees of a sampler: tensors and numbers, in TorchRL's layout on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor
from torchrl.data.replay_buffers.samplers import PrioritizedSampler

from torchrl_generational.persistence.reading import read_json, reading
from torchrl_generational.priorities.segment_trees import array_dtype, read_leaves, tree_dtype, write_leaves

__all__ = ["TreeState"]


class TreeState:
    """The state of a prioritized sampler, read from anywhere and checked before it replaces anything.

    Attributes:
        sums: leaves of the sum tree, ``[capacity]``, one per cell.
        minima: leaves of the min tree, ``[capacity]``.
        numbers: ``_alpha``, ``_beta``, ``_eps``, and ``_schema_version`` of TorchRL's state.
        maximum: the raw running maximum and its cell, both ``None`` where there is none.
    """

    def __init__(
        self,
        sums: torch.Tensor,
        minima: torch.Tensor,
        numbers: dict[str, float],
        maximum: tuple[float | None, int | None],
    ) -> None:
        self.sums, self.minima, self.numbers, self.maximum = sums, minima, numbers, maximum

    @classmethod
    def of(cls, sampler: Any) -> TreeState:
        """What ``sampler`` holds now; copies. O(capacity), without a loop over slots."""
        cells = torch.arange(sampler._max_capacity, device=sampler.device)
        value, cell = sampler._max_priority
        return cls(
            read_leaves(sampler._sum_tree, cells).to(tree_dtype(sampler), copy=True),
            read_leaves(sampler._min_tree, cells).to(tree_dtype(sampler), copy=True),
            _numbers(sampler.__dict__ | {"_schema_version": sampler._STATE_SCHEMA_VERSION}),
            (None if value is None else float(value), None if cell is None else int(cell)),
        )

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> TreeState:
        """Reads :meth:`state_dict`, or the state of a TorchRL sampler, which holds its trees as objects.

        Raises:
            ValueError: if it is not the state of a prioritized sampler, or holds anything but numbers.
        """
        entries = ("_alpha", "_beta", "_eps", "_max_priority", "_sum_tree", "_min_tree")
        _refuse_missing(state, entries, "The sampler's state")
        sums, minima = (_leaves_in(state[name]) for name in entries[-2:])
        return cls(sums, minima, _numbers({"_schema_version": 0} | state), _maximum(state["_max_priority"]))

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only, under TorchRL's keys: the leaves stand where it has tree objects."""
        return {
            **self.numbers,
            "_max_priority": list(self.maximum),
            "_sum_tree": self.sums,
            "_min_tree": self.minima,
        }

    @classmethod
    def from_path(cls, path: Path) -> TreeState:
        """Reads :meth:`dumps`, or what a TorchRL sampler saved.

        Raises:
            FileNotFoundError: if a file is missing.
            ValueError: if they are not those of a prioritized sampler, or are damaged.
        """
        file = path / "sampler_metadata.json"
        metadata = read_json(file)
        _refuse_missing(metadata, ("_alpha", "_beta", "_eps", "_max_priority", "_max_capacity"), str(file))
        capacity = metadata["_max_capacity"]  # TorchRL makes a float of it
        if not (type(capacity) in (int, float) and 0 < capacity < 2**62 and capacity == int(capacity)):
            raise ValueError(f"{file} has _max_capacity={capacity!r:.80}, which should be an int > 0: it is damaged.")
        capacity = int(capacity)
        leaves = []
        for name in ("sumtree.memmap", "mintree.memmap"):
            with reading(path / name):
                if (path / name).stat().st_size != 8 * capacity:
                    raise ValueError(f"it does not have the {8 * capacity} bytes of {capacity} priorities")
                leaves.append(MemoryMappedTensor.from_filename(path / name, dtype=torch.float64, shape=(capacity,)))
        maximum = _maximum(metadata["_max_priority"])
        return cls(leaves[0], leaves[1], _numbers({"_schema_version": 0} | metadata), maximum)

    def dumps(self, path: Path) -> None:
        """Writes TorchRL's three files."""
        path.mkdir(exist_ok=True)
        for name, leaves in (("sumtree.memmap", self.sums), ("mintree.memmap", self.minima)):
            saved = MemoryMappedTensor.empty(leaves.shape, dtype=torch.float64, filename=path / name, existsok=True)
            saved.copy_(leaves)
        metadata = self.numbers | {"_max_priority": list(self.maximum), "_max_capacity": self.sums.numel()}
        (path / "sampler_metadata.json").write_text(json.dumps(metadata))

    def check(self, sampler: Any, *, capacity: int | None = None) -> None:
        """Refuses a state that does not fit ``sampler``; nothing has changed then.

        Args:
            sampler: a prioritized sampler.
            capacity: what it may have grown to besides its own capacity.

        Raises:
            ValueError: for a later version, another capacity, or leaves or exponents that no sampler can have.
        """
        if self.sums.shape != self.minima.shape or self.sums.numel() not in (sampler._max_capacity, capacity):
            raise ValueError(
                f"The checkpoint holds the priorities of {self.sums.numel()} slots but this sampler has "
                f"max_capacity={sampler._max_capacity}. Load it into a buffer of the capacity that it was saved from."
            )
        known = PrioritizedSampler._STATE_SCHEMA_VERSION
        if self.numbers["_schema_version"] > known:
            raise ValueError(
                f"The checkpoint holds a sampler state of schema version {self.numbers['_schema_version']}, and this "
                f"version reads up to {known}. Load it with the version of TorchRL that wrote it, or a later one."
            )
        exponents = [self.numbers[name] for name in ("_alpha", "_beta", "_eps")]
        if not all(0 <= number < float("inf") for number in exponents):
            raise ValueError(f"The checkpoint has alpha, beta and eps {exponents}: they must be finite and >= 0.")
        dtype = tree_dtype(sampler)
        bound = torch.finfo(dtype).max
        # arrays and few passes: this is most of what loading a large buffer takes
        sums, minima = (
            leaves.as_subclass(torch.Tensor).detach().reshape(-1).to("cpu", torch.float64).numpy()
            for leaves in (self.sums, self.minima)
        )
        highest = float(sums.max()) if len(sums) else 0.0
        if len(sums) and not (sums.min() >= 0 and highest < np.inf and minima.min() >= 0):
            raise ValueError("The checkpoint holds priorities that are NaN, infinite or negative: it is damaged.")
        with np.errstate(over="ignore"):
            vanishing = np.count_nonzero(sums.astype(array_dtype(sampler), copy=False)) < np.count_nonzero(sums)
        if len(sums) and (highest > bound / len(sums) or vanishing or not 0 <= (self.maximum[0] or 0.0) < bound):
            raise ValueError(
                f"The checkpoint holds priorities that {dtype} cannot hold: it is damaged, or was saved from a sampler "
                "with dtype=torch.float64. Load it into one like that."
            )
        where = self.maximum[1]
        if where is not None and not 0 <= where < len(sums):
            raise ValueError(f"The checkpoint has its largest priority in slot {where} of {len(sums)}: it is damaged.")
        if not ((sums == minima) | (sums == 0)).all():
            raise ValueError("The two priority trees of the checkpoint do not belong together: it is damaged.")

    def restore(self, sampler: Any) -> None:
        """Replaces what ``sampler`` holds by this, which fits it. O(capacity), without a loop over slots."""
        self.ready(sampler)()

    def ready(self, sampler: Any) -> Callable[[], None]:
        """Makes and fills the trees beside those of ``sampler``, and returns the step that puts them there.

        A capacity that the storage rounded up to whole rows comes along.
        """
        twin: Any = object.__new__(type(sampler))
        vars(twin).update(vars(sampler))
        twin._max_capacity = self.sums.numel()
        twin._init()
        twin._alpha, twin._beta, twin._eps = (self.numbers[name] for name in ("_alpha", "_beta", "_eps"))
        cells = torch.arange(self.sums.numel(), device=twin.device)
        dtype = tree_dtype(twin)
        leaves, minima = (
            held.as_subclass(torch.Tensor).to(device=cells.device, dtype=dtype) for held in (self.sums, self.minima)
        )
        write_leaves(twin, cells, leaves)
        if type(twin)._init is PrioritizedSampler._init:  # TorchRL's own keeps zeros in the minimum
            zero = cells[(leaves == 0) & (minima == 0)]
            if zero.numel():
                twin._min_tree[zero] = torch.zeros(zero.shape, dtype=dtype, device=cells.device)
        value, cell = self.maximum
        twin._max_priority = None
        if value:  # TorchRL's may be zero, which is none
            index = None if cell is None else torch.tensor(cell, device=cells.device)
            twin._max_priority = (torch.tensor(value, dtype=dtype, device=cells.device), index)
            if self.numbers["_schema_version"] < 1 and twin._max_priority_within_buffer:
                twin._recompute_max_priority_from_tree()  # old TorchRL saved a transformed maximum
        changed = {name: held for name, held in vars(twin).items() if vars(sampler).get(name) is not held}
        return lambda: vars(sampler).update(changed)


def _numbers(state: dict[str, Any]) -> dict[str, float]:
    numbers = {name: state[name] for name in ("_alpha", "_beta", "_eps", "_schema_version")}
    wrong = {name: number for name, number in numbers.items() if not _is_number(number)}
    if wrong:
        raise ValueError(f"The checkpoint's sampler has {wrong!s:.200}, where numbers belong: it is damaged.")
    return {name: number.item() if isinstance(number, torch.Tensor) else number for name, number in numbers.items()}


def _maximum(saved: Any) -> tuple[float | None, int | None]:
    """The running maximum and its cell, as either layout has them."""
    pair = (None, None) if saved is None else saved
    if isinstance(pair, tuple | list) and len(pair) == 2:
        value, cell = pair
        whole = cell is None or (_is_number(cell) and float(cell).is_integer())
        if (value is None or _is_number(value)) and whole:
            return None if value is None else float(value), None if cell is None else int(cell)
    raise ValueError(f"The checkpoint's sampler has _max_priority={saved!r:.80}, no priority and slot: it is damaged.")


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.generic):
        return bool(value.size == 1 if isinstance(value, np.generic) else value.numel() == 1)
    return type(value) in (int, float)


def _leaves_in(tree: Any) -> torch.Tensor:
    """The leaves in the state of a tree, or in one of TorchRL's."""
    if isinstance(tree, torch.Tensor):
        if tree.is_complex() or tree.dtype == torch.bool or tree.layout != torch.strided or tree.is_meta:
            raise ValueError(f"The checkpoint's sampler has priorities of {tree.dtype}: it is damaged.")
        return tree
    try:
        return read_leaves(tree, torch.arange(tree.size, device="cpu"))
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"The checkpoint's sampler has a {type(tree).__name__} in the place of a priority tree: it is damaged."
        ) from error


def _refuse_missing(state: Any, names: tuple[str, ...], what: str) -> None:
    if not isinstance(state, dict):
        raise ValueError(f"{what} should be a dict, got {type(state).__name__}. Nothing was loaded.")
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(
            f"{what} is not that of a prioritized sampler: it lacks {missing} and has {sorted(map(str, state))}. "
            "Nothing was loaded. Load it into a buffer with the sampler that it was saved from."
        )
