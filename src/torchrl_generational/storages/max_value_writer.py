"""The writer that keeps the best records: TorchRL's, on storages that stamp every record they are given."""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDictBase
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.utils import _reduce
from torchrl.data.replay_buffers.writers import TensorDictMaxValueWriter

from torchrl_generational.concurrency.shared_counter import SharedCounter
from torchrl_generational.concurrency.write_access import refuse_write
from torchrl_generational.generations.protocols import generations_on
from torchrl_generational.generations.write_protocol import NEVER_WRITTEN
from torchrl_generational.persistence.reading import reading
from torchrl_generational.persistence.restores import Plan, Saved, carry_out
from torchrl_generational.storages.round_robin_writers import plan_writer_alone, stamps_in, withdraw_handles
from torchrl_generational.storages.writer_state import WriterState, named_origin, newest_of
from torchrl_generational.tensors.default_devices import as_tensor

__all__ = ["GenerationalTensorDictMaxValueWriter"]


class GenerationalTensorDictMaxValueWriter(TensorDictMaxValueWriter):
    """:class:`~torchrl.data.replay_buffers.writers.TensorDictMaxValueWriter` whose slots always carry generations.

    A slot's generation advances when a better record replaces the one in it. Records that are not good enough get
    index -1, which samplers ignore.

    What differs from TorchRL: the ranking is made of the records in the storage whenever something else has written to
    it (item assignment, another buffer, a restore, a write that failed), so it cannot disagree with them;
    ``state_dict`` works; the ``index`` entry of stored records is that of their slot; a rank that is NaN is refused.

    Args:
        rank_key: entry that records are ranked by. Defaults to ``("next", "reward")``.
        reduction: ``"max"``, ``"min"``, ``"mean"``, ``"median"`` or ``"sum"`` of a rank of several numbers.
        track_generations: accepted so that the class can stand where TorchRL's round-robin writer stands; must be True.
        **kwargs: as in TorchRL.

    Raises:
        ValueError: for ``track_generations=False``.

    Complexity: a write is O(rows log capacity), the first one after somebody else's O(capacity).

    Thread safety: none of its own; a buffer calls it under the storage's lock.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_generational import GenerationalLazyTensorStorage
        >>> writer = GenerationalTensorDictMaxValueWriter(rank_key="score")
        >>> writer.register_storage(GenerationalLazyTensorStorage(2))
        >>> writer.extend(TensorDict({"score": torch.tensor([1.0, 5.0, 3.0, 2.0])}, [4]))
        tensor([-1,  1,  0, -1])
        >>> writer.generations_of(torch.tensor([0, 1]))
        tensor([0, 0])
    """

    tracks_generations = True
    # The ranking and the revision of the storage that it was made of; guarded by the storage's lock.
    _current_top_values: list[tuple[float, int]]
    _revision: int | None = None
    _cursor: int
    _write_count: int
    _waiting: tuple[torch.Tensor, dict[str, Any]] | None = None  # stamps loaded while there is no storage

    def __init__(
        self, rank_key: Any = None, reduction: str = "sum", *, track_generations: bool = True, **kwargs: Any
    ) -> None:
        if not track_generations:
            raise ValueError(f"{type(self).__name__} always tracks generations, got track_generations=False.")
        super().__init__(rank_key=rank_key, reduction=reduction, **kwargs)
        self._write_count_value = SharedCounter(0)  # TorchRL counts in 32 bits

    def register_storage(self, storage: Storage) -> None:
        """Binds the writer to ``storage``.

        Raises:
            TypeError: if the storage cannot carry generations.
            ValueError: if it has several dimensions.
        """
        generations = generations_on(storage, user=type(self).__name__)
        super().register_storage(storage)
        self._revision = None
        waiting, self._waiting = self._waiting, None
        if waiting is not None and bool((generations.values == NEVER_WRITTEN).all()):
            generations.restore(waiting[0], **waiting[1])

    def generations_of(self, index: int | torch.Tensor) -> torch.Tensor:
        """Current stamps of the slots in ``index``, -1 for those never written or outside the storage."""
        if self._storage is None:
            never: torch.Tensor = super().generations_of(index)
            return never
        index = as_tensor(index)
        generations = self._storage.slot_generations
        known = (index >= 0) & (index < generations.num_rows)
        return torch.where(known, generations.lookup(torch.where(known, index, 0)), NEVER_WRITTEN)

    def add(self, data: Any) -> int | None:
        """Writes one record if it is good enough, and returns its index, else ``None``."""
        self._refuse_write()
        ranks = self._ranks(data, ())
        self._check(data, None)
        slots, _, accepted = self._place(ranks)
        if not slots:
            return None
        withdraw_handles(data)
        data.set("index", slots[0])
        self._write(slots[0], data, accepted)
        self._mark_update_entities(torch.tensor(slots, device="cpu"))
        return slots[0]

    def extend(self, data: TensorDictBase) -> torch.Tensor:
        """Writes the records that are good enough, and returns the index of each, -1 for the others."""
        self._refuse_write()
        ranks = self._ranks(data)
        self._check(data, len(data))
        slots, rows, accepted = self._place(ranks)
        index = torch.full(data.shape, -1, dtype=torch.long, device=data.device)
        if slots:
            index[rows] = torch.tensor(slots, device=index.device)
            withdraw_handles(data)
            data.set("index", index)
            self._write(index[rows], data[torch.tensor(rows, device="cpu")], accepted)
        self._mark_update_entities(index)
        return index

    def _check(self, data: Any, count: int | None) -> None:
        """Refuses what the storage would, before the ranking changes."""
        if count != 0 and hasattr(self._storage, "check"):
            self._storage.check(data, count)

    def _ranks(self, data: Any, shape: Any = None) -> list[float]:
        """One number per record, checked before anything changes."""
        if not isinstance(data, TensorDictBase):
            raise RuntimeError(
                f"{type(self).__name__} expects data to be a tensor collection with entries to rank, a tensordict, "
                f"got {type(data).__name__}."
            )
        single, shape = shape is not None, data.shape if shape is None else shape
        if not (single or data.shape) or len(data.shape) > 1 or data.shape != shape:
            raise RuntimeError(
                f"{type(self).__name__} writes records of batch size {tuple(shape)[:1]}, got {tuple(data.shape)}. "
                "Flatten the data, or store trajectories as records."
            )
        return self._ranks_of(data, len(data) if shape else 1)

    def _ranks_of(self, data: Any, count: int) -> list[float]:
        values = data.get(self._rank_key, None)
        if values is None:
            raise KeyError(f"Rank key {self._rank_key!r} not found in data, which has {sorted(map(str, data.keys()))}.")
        values = values.detach().reshape(count, -1)
        rank = values[:, 0] if values.shape[1] == 1 else _reduce(values, self._reduction, dim=1)
        if bool(rank.isnan().any()):
            row = int(rank.isnan().nonzero()[0, 0])
            raise ValueError(f"{self._rank_key!r} ranks the record at row {row} by NaN. Nothing was written.")
        ranks: list[float] = rank.tolist()
        return ranks

    def _place(self, ranks: list[float]) -> tuple[list[int], list[int], int]:
        """Slots for the records that stay, each slot once, the rows of those records, and how many were good enough."""
        storage, heap = self._storage, self._ranking()
        self._revision = None  # until the write is through
        taken: dict[int, int] = {}
        accepted = 0
        for row, rank in enumerate(ranks):
            if len(heap) < storage.max_size:
                slot = self._cursor
                self._cursor = (slot + 1) % storage.max_size
                heapq.heappush(heap, (rank, slot))
            elif rank > heap[0][0]:
                slot = heap[0][1]
                heapq.heapreplace(heap, (rank, slot))
            else:
                continue
            taken[slot] = row
            accepted += 1
        if not taken:
            self._revision = storage._mutation_revision
        return list(taken), list(taken.values()), accepted

    def _ranking(self) -> list[tuple[float, int]]:
        """The ranking, made of the records that are there if others have written. O(1), or O(capacity)."""
        storage = self._storage
        if self._revision == storage._mutation_revision:
            return self._current_top_values
        count = len(storage) if storage.initialized else 0
        ranks = self._ranks_of(storage._storage[:count], count) if count else []
        self._current_top_values = [(rank, slot) for slot, rank in enumerate(ranks)]
        heapq.heapify(self._current_top_values)
        self._cursor = count % storage.max_size
        self._revision = storage._mutation_revision
        return self._current_top_values

    def _write(self, slots: Any, data: Any, count: int) -> None:
        self._storage.set(slots, data)
        self._write_count += count
        self._revision = self._storage._mutation_revision

    def _refuse_write(self) -> None:
        if self._storage is not None:
            refuse_write(self._storage.lock)

    def _empty(self, empty_write_count: bool = True) -> None:
        self._refuse_write()
        super()._empty(empty_write_count=empty_write_count)
        self._revision = None

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Counters and stamps. The ranking is made of the records again."""
        generations = self._storage.slot_generations
        state = {"_write_count": self._write_count, "_generation": stamps_in(self._storage).clone()}
        return state | named_origin(generations.origin()) | newest_of(self._storage)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over :meth:`state_dict`.

        Raises:
            ValueError: if it is not the state of such a writer, or does not fit; nothing has changed then.
        """
        self._refuse_write()
        self._take(WriterState.of(self, Saved(state_dict), ranks=True))

    def dumps(self, path: str | Path) -> None:
        """Saves TorchRL's files, and the stamps beside them."""
        self._ranking()
        super().dumps(path)
        stamps = stamps_in(self._storage).cpu()
        MemoryMappedTensor.from_tensor(stamps.contiguous(), filename=Path(path) / "generation.memmap", existsok=True)
        file = Path(path) / "metadata.json"
        origin = named_origin(self._storage.slot_generations.origin()) | newest_of(self._storage)
        more = {"generation_shape": list(stamps.shape), "generation_dtype": str(stamps.dtype)} | origin
        file.write_text(json.dumps(json.loads(file.read_text()) | more))

    def loads(self, path: str | Path) -> None:
        """Takes over what :meth:`dumps`, or TorchRL's, saved.

        Raises:
            FileNotFoundError: if a file is missing; nothing has changed then.
            ValueError: if it is not that of such a writer, does not fit, or is damaged; nothing has changed then.
        """
        self._refuse_write()
        state = WriterState.of(self, Saved(folder=Path(path)), ranks=True)
        ranking = self._current_top_values
        if self._storage is None:  # TorchRL's, which stands until there are records to make it of
            reader = TensorDictMaxValueWriter(rank_key=self._rank_key)
            with reading(Path(path)):
                reader.loads(path)
            ranking = reader._current_top_values
        self._take(state)
        self._current_top_values = ranking

    def _take(self, state: WriterState) -> None:
        """Takes over a state without the records that it was saved with."""
        if self._storage is not None:
            carry_out(lambda plan: plan_writer_alone(plan, self, state))
            return
        plan = Plan()
        state.plan(plan, self)
        if state.stamps is not None:
            waiting = (state.stamps.clone(), state.origin)
            plan.install(lambda: self.__dict__.update(_waiting=waiting))
        plan.go()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank_key={self._rank_key!r}, reduction={self._reduction!r})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        write_count = state.pop("write_count__context", None)
        super().__setstate__(state)
        self._revision = None
        if write_count is not None:
            self._write_count_value = SharedCounter(write_count)
