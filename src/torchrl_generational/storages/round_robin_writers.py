"""Writers: TorchRL's, on storages that stamp every record they are given."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, is_tensor_collection, is_tensorclass
from torchrl.data.replay_buffers.writers import RoundRobinWriter, TensorDictRoundRobinWriter

from torchrl_generational.concurrency.process_lock import renew_in_forked_children
from torchrl_generational.concurrency.shared_counter import SharedCounter
from torchrl_generational.concurrency.write_access import refuse_write
from torchrl_generational.generations.indexing import rows_written
from torchrl_generational.generations.protocols import generations_on
from torchrl_generational.generations.slot_generations import GENERATION_KEY, SlotGenerations
from torchrl_generational.generations.write_protocol import NEVER_WRITTEN
from torchrl_generational.persistence.restores import Plan, Saved, carry_out
from torchrl_generational.records.record_io import attach, entries_of
from torchrl_generational.storages.tensor_storages import GenerationalStorageMixin
from torchrl_generational.storages.writer_state import WriterState, named_origin, newest_of
from torchrl_generational.tensors.default_devices import CPU

__all__ = ["GenerationalRoundRobinWriter", "GenerationalTensorDictRoundRobinWriter"]

_CPU = (None, CPU)


class _Number:
    """Stands in for a counter while a write is under way."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


# A plain class, which stands in front of one of TorchRL's.
if TYPE_CHECKING:
    _Base = RoundRobinWriter
else:
    _Base = object


class GenerationalWriterMixin(_Base):
    """What makes a round-robin writer generational: it leaves the stamps to the storage, which advances them first."""

    _pending_generation: torch.Tensor | None  # TorchRL's: stamps loaded while there is no storage
    _origin: dict[str, int]  # where the stamps being loaded come from; empty for TorchRL's checkpoints
    _plain_records: tuple[type, ...] = (TensorDict, torch.Tensor)  # what is written without TorchRL's help
    _standing: Any = None  # the counters while others stand in for them; guarded by the storage's lock
    # TorchRL's counters; guarded by the same lock
    _cursor: int
    _write_count: int

    def __init__(self, compilable: bool = False, *, track_generations: bool = True) -> None:
        if not track_generations:
            raise ValueError(
                f"{type(self).__name__} always tracks generations, got track_generations=False. Use TorchRL's "
                f"{type(self).__name__.removeprefix('Generational')} where none are wanted."
            )
        self._origin = {}
        self._compilable = bool(compilable)
        self._own_counters(0, 0)
        super().__init__(compilable=bool(compilable), track_generations=True)

    def _own_counters(self, cursor: int, write_count: int) -> None:
        """Takes the place of TorchRL's: 64 bits, and no locks that a killed process would keep."""
        renew_in_forked_children(self, "_stand")
        own: Any = (lambda value: value) if self._compilable else SharedCounter
        self._cursor_value, self._write_count_value = own(cursor), own(write_count)

    def share_counters(self) -> None:
        """Moves cursor and count to memory that processes share. Idempotent. Lock held."""
        if not self._compilable:
            self._cursor_value.share()
            self._write_count_value.share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        cursor, write_count = state.pop("cursor__context", None), state.pop("write_count__context", None)
        super().__setstate__(state)
        renew_in_forked_children(self, "_stand")
        if cursor is not None and write_count is not None:
            self._own_counters(cursor, write_count)

    def register_storage(self, storage: Any) -> None:
        """Binds the writer to ``storage``. Stamps that were loaded before go to it, unless it has live ones.

        Raises:
            TypeError: if the storage cannot carry generations.
        """
        generations = generations_on(storage, user=type(self).__name__)
        pending, origin = self._pending_generation, self._origin
        super().register_storage(storage)
        if storage.lock.is_shared:
            self.share_counters()
        if pending is not None and bool((generations.values == NEVER_WRITTEN).all()):
            generations.restore(pending, **origin)
        self._origin = {}

    @property
    def _generation(self) -> torch.Tensor | None:
        """The stamps as TorchRL's writers know them; those loaded while there is no storage wait here."""
        if self._storage is None:
            return self._pending_generation
        return stamps_in(self._storage)

    @_generation.setter
    def _generation(self, values: torch.Tensor) -> None:
        if self._storage is None:
            self._pending_generation = values
        else:
            self._storage.slot_generations.restore(values, **self._origin)

    def state_dict(self) -> dict[str, Any]:
        """TorchRL's state, and where its stamps come from. Numbers and tensors only."""
        state: dict[str, Any] = super().state_dict()
        state.update(named_origin(self._origin_now()) | newest_of(self._storage))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over cursor, count and stamps; see :meth:`SlotGenerations.restore`.

        Raises:
            ValueError: if it is not the state of such a writer, or does not fit; nothing has changed then.
        """
        self._refuse_write()
        self._take(WriterState.of(self, Saved(state_dict), ranks=False))

    def dumps(self, path: Any) -> None:
        """Saves the state in TorchRL's layout, and where its stamps come from beside it."""
        super().dumps(path)
        metadata = Path(path) / "metadata.json"
        more = named_origin(self._origin_now()) | newest_of(self._storage)
        metadata.write_text(json.dumps(json.loads(metadata.read_text()) | more))

    def loads(self, path: Any) -> None:
        """Takes over what :meth:`dumps` saved, or TorchRL's.

        Raises:
            FileNotFoundError: if a file is missing; nothing has changed then.
            ValueError: if it is not that of such a writer, does not fit, or is damaged; nothing has changed then.
        """
        self._refuse_write()
        self._take(WriterState.of(self, Saved(folder=Path(path)), ranks=False))

    def _take(self, state: WriterState) -> None:
        """Takes over a state without the records that it was saved with."""
        storage = self._storage
        if storage is not None:
            carry_out(lambda plan: plan_writer_alone(plan, self, state))
            return
        SlotGenerations(0 if state.stamps is None else len(state.stamps)).check(
            torch.empty(0, dtype=torch.int64, device=CPU) if state.stamps is None else state.stamps, **state.origin
        )
        plan = Plan()
        state.plan(plan, self)
        stamps = None if state.stamps is None else state.stamps.clone()
        plan.install(lambda: self.__dict__.update(_pending_generation=stamps, _origin=state.origin))
        plan.go()

    def _refuse_write(self) -> None:
        """Refuses a process that must not write, before even the data is given handles."""
        if self._storage is not None and self._storage.lock.elsewhere:
            refuse_write(self._storage.lock)

    def _origin_now(self) -> dict[str, int]:
        origin: dict[str, int] = self._origin if self._storage is None else self._storage.slot_generations.origin()
        return origin

    def _bump_generation(self, index: Any, data: Any) -> None:
        """Nothing left to do: the storage stamped the slots before their data changed."""

    def _align_generation_device(self) -> None:
        """Nothing left to do: the storage keeps its stamps where its data is."""

    def _update_storage_len_for_write_at(self, index: Any) -> None:
        """TorchRL takes rows for cells here, which differ in storages of several dimensions."""
        storage = self._storage
        if hasattr(storage, "reach"):
            storage.reach(rows_written(index, storage.slot_generations.num_rows))
        else:
            super()._update_storage_len_for_write_at(index)

    def add(self, data: Any) -> int | torch.Tensor:
        """Writes one record and returns its index. A write that fails leaves the cursor where it was."""
        self._refuse_write()
        if self._is_contiguous(data, ndim=0):
            return self._write_one(data)
        with self._moving_last():
            result: int | torch.Tensor = super().add(data)
            return result

    def extend(self, data: Any) -> torch.Tensor:
        """Writes records one after the other and returns their indices, one per record.

        A write that fails leaves the cursor where it was, so that the next one goes over its slots again.
        """
        self._refuse_write()
        if self._is_contiguous(data):
            return self._write_run(data)
        with self._moving_last():
            result: torch.Tensor = super().extend(data)
            return result

    def write_at(self, index: int | torch.Tensor, data: Any) -> int | torch.Tensor:
        """Writes records to explicit slots without moving the cursor. One that fails is not counted."""
        with self._moving_last():
            result: int | torch.Tensor = super().write_at(index, data)
            return result

    @contextlib.contextmanager
    def _moving_last(self) -> Iterator[None]:
        """Moves cursor and count when the records are there, where TorchRL moves them first.

        A write that fails, or a process that is killed in the middle of one, leaves them where they were, so that the
        next write goes over the same slots again. Lock held.
        """
        if self._compilable:
            before = self._cursor, self._write_count
            try:
                yield
            except BaseException:
                self._cursor, self._write_count = before
                raise
            return
        shared = self._cursor_value, self._write_count_value
        moved = _Number(shared[0].value), _Number(shared[1].value)
        try:
            self._standing = shared
            self._cursor_value, self._write_count_value = moved
            yield
        finally:
            self._stand()
        self._cursor, self._write_count = (number.value for number in moved)

    def _stand(self) -> None:
        """Puts the counters back; also in a child that was forked while another thread was writing."""
        if self._standing is not None:
            self._cursor_value, self._write_count_value = self._standing
            self._standing = None

    def _write_run(self, data: Any) -> torch.Tensor:
        """Writes plain records to the next slots of a storage of one dimension, and returns those. Lock held."""
        storage = self._storage
        start, rows = self._cursor, storage.max_size
        stop = start + data.shape[0]
        index = torch.arange(start, stop, device=CPU)
        if stop > rows:
            index %= rows
        self._tell(data, index)
        storage.set(slice(start, stop) if stop <= rows else index, data)
        self._moved_to(stop % rows, data.shape[0], index)
        return index

    def _write_one(self, data: Any) -> int:
        """Writes a plain record to the next slot of a storage of one dimension, and returns that. Lock held."""
        storage, row = self._storage, self._cursor
        self._tell(data, torch.tensor(row, device=CPU))
        storage.set(row, data)
        self._moved_to((row + 1) % storage.max_size, 1, row)
        return row

    def _moved_to(self, cursor: int, records: int, index: int | torch.Tensor) -> None:
        """The records are there. Cursor and count move last, so that whatever fails has the next write go over them."""
        for entity in self._storage._attached_entities:
            entity.mark_update(index)
        self._cursor = cursor
        self._write_count += records

    def _tell(self, data: Any, index: torch.Tensor) -> None:
        """Tells the data which slots it goes to."""

    def _is_contiguous(self, data: Any, ndim: int = 1) -> bool:
        return (
            not self._compilable  # whoever traces the frames around this one, or some of them
            and type(data) in self._plain_records
            and (data.ndim == ndim if type(data) is TensorDict else data.ndim >= ndim)
            and (ndim == 0 or data.shape[0] > 0)
            and data.device in _CPU
            and isinstance(self._storage, GenerationalStorageMixin)
            and self._storage.ndim == 1
        )

    def _empty(self, empty_write_count: bool = True) -> None:
        """Starts again at slot 0; the storage's own ``_empty`` makes the handles stale."""
        self._refuse_write()
        self._cursor = 0
        if empty_write_count:
            self._write_count = 0


class GenerationalRoundRobinWriter(GenerationalWriterMixin, RoundRobinWriter):
    """:class:`~torchrl.data.replay_buffers.writers.RoundRobinWriter` whose slots always carry generations.

    Args:
        compilable: as in TorchRL.
        track_generations: accepted so that the class can stand where TorchRL's stands; must be True.

    Raises:
        ValueError: for ``track_generations=False``.

    Thread and process safety: none of its own; a buffer calls it under the storage's lock.

    Example:
        >>> from torchrl_generational import GenerationalLazyTensorStorage
        >>> writer = GenerationalRoundRobinWriter()
        >>> writer.register_storage(GenerationalLazyTensorStorage(4))
        >>> writer.generations_of(writer.extend(torch.arange(6)))
        tensor([1, 1, 0, 0, 1, 1])
    """


class GenerationalTensorDictRoundRobinWriter(GenerationalWriterMixin, TensorDictRoundRobinWriter):
    """:class:`~torchrl.data.replay_buffers.writers.TensorDictRoundRobinWriter` whose slots always carry generations.

    Arguments, errors and safety as :class:`GenerationalRoundRobinWriter`.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_generational import GenerationalLazyTensorStorage
        >>> writer = GenerationalTensorDictRoundRobinWriter()
        >>> writer.register_storage(GenerationalLazyTensorStorage(4))
        >>> index = writer.extend(TensorDict({"x": torch.arange(3)}, [3]))
        >>> writer.generations_of(index)
        tensor([0, 0, 0])
    """

    _plain_records = (TensorDict,)

    def add(self, data: Any) -> int | torch.Tensor:
        """Writes one record and returns its index, which also becomes the data's ``index`` entry."""
        self._refuse_write()
        withdraw_handles(data)
        result: int | torch.Tensor = super().add(data)
        return result

    def extend(self, data: Any) -> torch.Tensor:
        """Writes records one after the other and returns their indices, one per record."""
        self._refuse_write()
        withdraw_handles(data)
        result: torch.Tensor = super().extend(data)
        return result

    def _tell(self, data: TensorDict, index: torch.Tensor) -> None:
        if data.is_locked:
            data.set("index", index)  # refuses
        attach(data, {"index": index})

    def write_at(self, index: int | torch.Tensor, data: Any) -> int | torch.Tensor:
        """Writes records to explicit slots without moving the cursor."""
        self._refuse_write()
        withdraw_handles(data)
        result: int | torch.Tensor = super().write_at(index, data)
        return result


def stamps_in(storage: Any) -> torch.Tensor:
    """The live stamps of the rows of a storage, as a writer saves them."""
    stamps: torch.Tensor = storage.slot_generations.values
    return stamps[: storage.generations.shape[0]]


def plan_writer_alone(plan: Plan, writer: Any, state: WriterState) -> None:
    """Plans to take over the state of a writer whose storage keeps its records."""
    generations = writer._storage.slot_generations
    ready = state.ready_stamps(generations)
    if state.cursor is not None and state.cursor > max(generations.num_rows - 1, 0):
        state.check(generations.num_rows, generations.num_rows)
    state.plan(plan, writer)
    if ready is not None:
        plan.install(lambda: generations.install(ready))


def withdraw_handles(data: Any) -> None:
    """Data written gets a new ``index``: the stamp that a sample among it had must not stand beside that."""
    entries = entries_of(data)
    if entries is not None and GENERATION_KEY not in entries:
        return
    if is_tensor_collection(data) and not is_tensorclass(data) and GENERATION_KEY in data:
        data.set(GENERATION_KEY, torch.full_like(data.get(GENERATION_KEY), NEVER_WRITTEN))
