"""What every generational buffer promises, as tests that anybody can run on classes of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from torchrl_generational.buffers.ready_made import GenerationalTensorDictPrioritizedReplayBuffer
from torchrl_generational.generations.protocols import SupportsGenerations, TracksGenerations
from torchrl_generational.storages.tensor_storages import GenerationalLazyTensorStorage
from torchrl_generational.testing.explorer import Report, explore
from torchrl_generational.testing.scene import BufferScene
from torchrl_generational.testing.sequencer import Sequencer

__all__ = ["RaceSuite"]

LEARNER: list[tuple[Any, ...]] = [("sample",), ("update",)]


class RaceSuite:
    """The wraparound race in every order, and what else a third party's storage, writer, sampler or buffer has to keep.

    Make a subclass whose name begins with ``Test``, let :meth:`storage` or :meth:`buffer` return your own, and run
    pytest on its file. Each test says which promise it is about; where one breaks, the message says what happened, and
    the order of the threads in which it did.

    Records are tensordicts with the entries ``x`` (int64), ``rank`` (float64, growing from record to record) and
    ``td_error`` (float32). Every record written has to be kept, in the place of the oldest.

    Example:
        >>> class TestMine(RaceSuite):
        ...     def storage(self, capacity):
        ...         return GenerationalLazyTensorStorage(capacity)
        >>> TestMine().test_a_wrapped_ring_makes_its_handles_stale()
    """

    #: Bound on the preemptions that are explored; ``None`` explores every order.
    preemptions: int | None = 2

    def storage(self, capacity: int) -> Any:
        """A new storage of ``capacity`` slots."""
        return GenerationalLazyTensorStorage(capacity)

    def buffer(self, storage: Any, capacity: int) -> Any:
        """A new prioritized tensordict buffer on ``storage``, with ``alpha=1``, ``eps=0`` and batches of four."""
        return GenerationalTensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, eps=0.0, storage=storage, batch_size=4
        )

    def _make(self, capacity: int = 3, count: int = 1) -> list[Any]:
        torch.manual_seed(0)
        storage = self.storage(capacity)
        return [self.buffer(storage, capacity) for _ in range(count)]

    def _explore(self, threads: Mapping[str, Sequence[tuple[Any, ...]]], *, count: int = 1, **more: Any) -> Report:
        def build(sequencer: Sequencer) -> BufferScene:
            return BufferScene(sequencer, self._make(count=count), threads, **more)

        report = explore(build, preemptions=self.preemptions)
        assert report.complete
        return report

    def _records(self, count: int, start: int = 0) -> TensorDict:
        x = torch.arange(start, start + count)
        return TensorDict({"x": x, "rank": x.double(), "td_error": torch.ones(count)}, [count])

    # ---------------------------------------------------------------- protocol

    def test_the_storage_supports_generations(self) -> None:
        """R13: what the buffers of this package ask of a storage."""
        assert isinstance(self.storage(3), SupportsGenerations), "see the protocol SupportsGenerations"

    def test_the_writer_tracks_generations(self) -> None:
        """R13: what they ask of a writer."""
        writer = self._make()[0].writer
        assert isinstance(writer, TracksGenerations), "see the protocol TracksGenerations"
        assert writer.tracks_generations

    # ---------------------------------------------------------------- stamps

    def test_a_slot_s_generation_changes_with_its_record_and_only_then(self) -> None:
        """R1: -1 before the first record, then growing."""
        (rb,) = self._make(4)
        rb.extend(self._records(3))
        slots = torch.arange(4)
        before = rb.writer.generations_of(slots).clone()
        assert before.tolist() == [0, 0, 0, -1], "first records have generation 0, slots without one -1"
        rb.update_priority(torch.tensor([0]), 0.5)
        rb.sample()
        assert torch.equal(rb.writer.generations_of(slots), before), "neither updates nor samples are new records"
        rb.extend(self._records(3, 3))
        after = rb.writer.generations_of(slots)
        replaced = torch.tensor([True, True, False, True])
        assert torch.equal(after > before, replaced), "exactly the slots with a new record have a later generation"

    def test_a_sample_s_handles_are_those_of_its_records(self) -> None:
        """R3."""
        (rb,) = self._make(4)
        rb.extend(self._records(6))
        sample = rb.sample()
        assert torch.equal(sample["index_generation"], rb.writer.generations_of(sample["index"]))

    def test_a_wrapped_ring_makes_its_handles_stale(self) -> None:
        """R4, R5: and stale rows change nothing."""
        (rb,) = self._make(4)
        rb.extend(self._records(4))
        sample = rb.sample()
        rb.extend(self._records(4, 4))
        before = [float(rb.sampler._sum_tree[slot]) for slot in range(4)]
        sample["td_error"] = torch.full((4,), 50.0)
        result = rb.update_tensordict_priority_if_present(sample)
        assert result.num_stale == 4, "every record of the sample is gone"
        assert [float(rb.sampler._sum_tree[slot]) for slot in range(4)] == before
        assert float(rb.sampler.default_priority) == 1.0

    def test_live_handles_take_their_td_errors(self) -> None:
        """R4."""
        (rb,) = self._make(4)
        rb.extend(self._records(4))
        sample = rb.sample()
        sample["td_error"] = torch.full((4,), 0.5)
        assert rb.update_tensordict_priority_if_present(sample).num_updated == 4
        assert all(float(rb.sampler._sum_tree[slot]) == 0.5 for slot in sample["index"].tolist())

    # ---------------------------------------------------------------- every order

    def test_a_learner_and_a_writer(self) -> None:
        """R6, R10: no TD error reaches another record."""
        self._explore({"learner": LEARNER * 2, "writer": [("extend", 2), ("add",)]})

    def test_two_writers(self) -> None:
        """R6: records and their first priorities are written in one section."""
        self._explore({"learner": LEARNER, "one": [("extend", 2)], "two": [("extend", 2)]})

    def test_two_buffers_on_one_storage(self) -> None:
        """R2, R6: they see each other's writes, and exclude each other."""
        self._explore({"learner": LEARNER, "writer": [("extend", 2, 1), ("extend", 2, 1)]}, count=2)

    def test_a_buffer_that_is_emptied(self) -> None:
        """R6: samplers and stamps are emptied in one section."""
        self._explore({"learner": LEARNER * 2, "writer": [("empty",), ("extend", 2)]})

    def test_a_buffer_that_is_restored(self) -> None:
        """R8: no handle of an abandoned timeline is ever live."""
        before = [("extend", 3), ("save",)]
        steps = [("extend", 2), ("restore",), ("extend", 2)]
        self._explore({"learner": [("sample",), ("update",), ("update",)], "writer": steps}, before=before)

    def test_a_write_that_fails(self) -> None:
        """R14: no handle is live on a record that is torn."""
        self._explore({"learner": [("sample",), ("update",), ("update",)], "writer": [("fail", 2)]})
