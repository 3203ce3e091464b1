"""Threads on one buffer or more, and a judge who knows every record, every handle and every TD error."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers.storages import TensorStorage

from torchrl_generational.generations.write_protocol import NEVER_WRITTEN
from torchrl_generational.records import record_io as records
from torchrl_generational.testing.sequencer import Sequencer

__all__ = ["BufferScene"]

BORN = 1.0  # the first priority of every record


def td_error_of(record: int) -> float:
    """Below the first priority, so that the default priority of new records stays what it is."""
    return (record + 1) / 1024


class BufferScene:
    """A few threads on prioritized tensordict buffers, judged between any two turns.

    Every record has a number (its entry ``x``; ``rank`` grows with it) and a TD error that goes with it, so that a
    priority in a wrong place is seen at once. What is judged, whatever the buffer is made of:

    - a handle names one record for ever: no slot shows two records under one generation;
    - a sample's handles are those of its records;
    - a priority is the first one or the TD error of the very record in its slot;
    - an update takes every record that is there, and none that is gone, and nothing undoes it;
    - every slot below the length has a priority, save where a write did not end and the storage says so, and the root
      of the tree is the sum of its leaves.

    Args:
        sequencer: of the run.
        buffers: on one storage, or each on its own; ``alpha`` 1 and ``eps`` 0.
        threads: name -> steps, each the name of a method of this class and its arguments, e.g.
            ``{"learner": [("sample",), ("update",)], "writer": [("extend", 3)]}``.
        before: steps that are done before the threads start.

    Raises:
        AssertionError: from :meth:`check` and the steps, saying which promise is broken for which record.

    Example:
        >>> from torchrl_generational.testing import RaceSuite, explore
        >>> def build(sequencer):
        ...     torch.manual_seed(0)
        ...     rb = RaceSuite().buffer(RaceSuite().storage(3), 3)
        ...     return BufferScene(sequencer, [rb], {"learner": [("sample",), ("update",)], "writer": [("add",)]})
        >>> explore(build, preemptions=1).complete
        True
    """

    def __init__(
        self,
        sequencer: Sequencer,
        buffers: Sequence[Any],
        threads: Mapping[str, Sequence[tuple[Any, ...]]],
        before: Sequence[tuple[Any, ...]] = (("extend", 3),),
    ) -> None:
        self.sequencer, self.buffers, self.threads = sequencer, buffers, threads
        self.records = 0
        self.names: dict[tuple[int, int, int], int] = {}  # (storage, slot, generation) -> record
        self.samples: dict[str, Any] = {}
        self.written: list[int] = []  # records in the order in which their writes began
        self.torn: set[int] = set()  # records whose write failed: their slots may keep the priority of before
        self.taken: set[tuple[int, int]] = set()  # (buffer, record) whose TD error has arrived
        self.restored = 0
        self.states: dict[str, Any] = {}
        for step in before:
            self._do("before", step)
        for rb in buffers:
            self._instrument(rb)
        self.check()

    def programs(self) -> dict[str, Callable[[], None]]:
        """The threads, as an exploration runs them."""
        return {name: functools.partial(self._run, name, steps) for name, steps in self.threads.items()}

    def _run(self, name: str, steps: Sequence[tuple[Any, ...]]) -> None:
        for step in steps:
            self._do(name, step)

    def _do(self, name: str, step: tuple[Any, ...]) -> None:
        method, *arguments = step
        getattr(self, method)(name, *arguments)

    # ---------------------------------------------------------------- instruments

    def _instrument(self, rb: Any) -> None:
        """Puts the sequencer's locks in the place of the buffer's, and points between stamps and data."""
        storage = rb.storage
        if hasattr(storage, "lock"):
            if storage.lock not in self.sequencer.locks:
                storage.lock = self.sequencer.lock()
            if hasattr(rb.sampler, "lock"):
                rb.sampler.lock = storage.lock
        else:
            rb._replay_lock = self.sequencer.lock()
            rb._write_lock = self.sequencer.lock(quiet=True)
        rb._futures_lock = self.sequencer.lock(quiet=True)
        generations = getattr(storage, "slot_generations", None)
        if generations is not None:
            self._point_after(generations, "advance", "stamps and data")
            self._point_after(generations, "live", "comparison and update")
            self._point_after(generations, "live_array", "comparison and update")
        self._point_after(storage, "set", "data and priority")

    def _point_after(self, owner: Any, name: str, label: str) -> None:
        point, cls = self.sequencer.point, type(owner)
        instrumented: frozenset[str] = getattr(cls, "_instrumented", frozenset())
        if name in instrumented:
            return  # a sibling's storage

        def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
            result = getattr(super(made, self), name)(*arguments, **keywords)
            point(f"the point between {label}")
            return result

        namespace = {
            name: method,
            "__slots__": (),
            "_instrumented": instrumented | {name},
            "__module__": cls.__module__,
        }
        made: type = type(cls.__name__, (cls,), namespace)
        made.__qualname__ = cls.__qualname__
        owner.__class__ = made

    # ---------------------------------------------------------------- steps

    def extend(self, name: str, count: int, who: int = 0) -> None:
        """Writes ``count`` new records."""
        self.buffers[who].extend(self._new(count))

    def add(self, name: str, who: int = 0) -> None:
        """Writes one new record."""
        self.buffers[who].add(self._new(1)[0])

    def fail(self, name: str, count: int, who: int = 0) -> None:
        """Writes new records, and the write fails when their data has changed: a full disk, say."""
        data = self._new(count)
        self.torn.update(data["x"].tolist())
        set_records, copy_records, me = TensorStorage.set, records.copy, threading.get_ident()

        def fail_here() -> None:
            if threading.get_ident() == me:
                raise OSError("no space left on device")

        def set_and_fail(*arguments: Any, **keywords: Any) -> None:
            set_records(*arguments, **keywords)
            fail_here()

        def copy_and_fail(*arguments: Any) -> None:
            copy_records(*arguments)
            fail_here()

        TensorStorage.set, records.copy = set_and_fail, copy_and_fail  # type: ignore[assignment]
        try:
            self.buffers[who].extend(data)
        except OSError:
            pass
        finally:
            TensorStorage.set, records.copy = set_records, copy_records

    def sample(self, name: str, who: int = 0) -> None:
        """Draws a batch, which this thread's next ``update`` hands back."""
        try:
            sample = self.buffers[who].sample()
        except RuntimeError as error:
            if "empty" not in str(error):
                raise
            self.samples[name] = None
            return
        self._keep(name, sample, who)

    def _keep(self, name: str, sample: Any, who: int) -> None:
        assert "index_generation" in sample, "samples carry no index_generation: nothing can be known about them later."
        for slot, generation, record in self._rows(sample):
            assert generation >= NEVER_WRITTEN, f"a sample holds slot {slot}, whose last write did not end."
            self._name(who, slot, generation, record)
        self.samples[name] = (sample, self.restored)

    def update(self, name: str, who: int = 0) -> None:
        """Hands the TD errors of this thread's batch back."""
        if self.samples.get(name) is None:
            return
        sample, restored = self.samples[name]
        rb = self.buffers[who]
        sample["td_error"] = torch.tensor([td_error_of(record) for record in sample["x"].tolist()])
        there_before, begun = self._held(who), len(self.written)
        result = rb.update_tensordict_priority_if_present(sample)
        there_after = self._held(who)
        possible = {*there_before.values(), *there_after.values(), *self.written[begun:]}
        for row, (slot, _, record) in enumerate(self._rows(sample)):
            if bool(result.updated_mask[row]):
                assert record in possible, f"an update of record {record} counts as done, and the record was gone."
                self.taken.add((who, record))
            elif restored == self.restored and there_before.get(slot) == there_after.get(slot) == record:
                raise AssertionError(f"an update of record {record} was refused, and the record is in its slot {slot}.")

    def empty(self, name: str, who: int = 0) -> None:
        """Removes all records."""
        self.buffers[who].empty()

    def save(self, name: str, who: int = 0) -> None:
        """Takes a checkpoint."""
        self.states[name] = self.buffers[who].state_dict()

    def restore(self, name: str, who: int = 0) -> None:
        """Goes back to the checkpoint of this thread, or of those before."""
        self.restored += 1
        self.buffers[who].load_state_dict(self.states.get(name, self.states.get("before")))
        self.taken.clear()  # priorities went back too

    def _new(self, count: int) -> TensorDict:
        numbers = torch.arange(self.records, self.records + count)
        self.records += count
        self.written += numbers.tolist()
        return TensorDict({"x": numbers, "rank": numbers.double(), "td_error": torch.full((count,), BORN)}, [count])

    # ---------------------------------------------------------------- the judge

    def _rows(self, sample: Any) -> list[tuple[int, int, int]]:
        columns = (sample["index"].reshape(-1), sample["index_generation"].reshape(-1), sample["x"].reshape(-1))
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def _held(self, who: int) -> dict[int, int]:
        storage = self.buffers[who].storage
        if not storage.initialized:
            return {}
        return dict(enumerate(storage._storage["x"][: len(storage)].tolist()))

    def _name(self, who: int, slot: int, generation: int, record: int) -> None:
        known = self.names.setdefault((id(self.buffers[who].storage), slot, generation), record)
        assert known == record, (
            f"generation {generation} of slot {slot} names two records, {known} and {record}: a TD error of the first "
            "would reach the second."
        )

    def check(self) -> None:
        """Judges what everybody can see, whenever nobody is in a section."""
        if any(lock.owner is not None for lock in self.sequencer.locks):
            return
        for who, rb in enumerate(self.buffers):
            held = self._held(who)
            if not held:
                continue
            generations = rb.writer.generations_of(torch.arange(len(held))).tolist()
            for slot, generation in enumerate(generations):
                if generation >= NEVER_WRITTEN:
                    self._name(who, slot, generation, held[slot])
            tree = rb.sampler._sum_tree
            every = torch.as_tensor(tree[torch.arange(rb.sampler.max_size)]).reshape(-1).double()
            for slot, priority in enumerate(every[: len(held)].tolist()):
                if generations[slot] < NEVER_WRITTEN:
                    assert priority == 0, f"slot {slot}, whose last write did not end, has a priority."
                    continue
                assert priority > 0, f"slot {slot} holds record {held[slot]} and has no priority."
                if held[slot] in self.torn:
                    continue
                mine = td_error_of(held[slot])
                if (who, held[slot]) in self.taken and abs(priority - BORN) <= 1e-6:
                    raise AssertionError(
                        f"the TD error of record {held[slot]} was there, and its first priority is back."
                    )
                if abs(priority - BORN) > 1e-6 and abs(priority - mine) > 1e-6:
                    of = round(priority * 1024 - 1)
                    raise AssertionError(f"the TD error of record {of} is on record {held[slot]} in slot {slot}.")
            total = float(tree.query(0, rb.sampler.max_size))
            assert abs(total - float(every.sum())) < 1e-5, "the root of the tree is not the sum of its leaves."
