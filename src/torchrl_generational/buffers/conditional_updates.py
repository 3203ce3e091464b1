"""Conditional updates: compare a sample's handles with the slots, and apply what is still there, in one section."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch

from torchrl_generational.buffers.base import BufferBase
from torchrl_generational.buffers.patches import patched_rows
from torchrl_generational.buffers.priority_updates import update
from torchrl_generational.buffers.work_in_flight import submit_in_order
from torchrl_generational.generations.update_result import UpdateResult
from torchrl_generational.tensors.compilation import runs_in_compiled_code, untraced
from torchrl_generational.tensors.default_devices import without_default_device

__all__ = ["PRIORITY", "ConditionalUpdates"]

#: Stands for the name of a field where what TorchRL was given to submit is no field but a priority.
PRIORITY: Any = object()


class ConditionalUpdates(BufferBase):
    """The conditional updates of :class:`GenerationalReplayBufferMixin`, which supplies storage and lock."""

    def update_priority_if_present(self, *, index: Any, generation: Any, priority: Any) -> UpdateResult:
        """Updates the priorities of the records that are still in their slots, and says which those were.

        The comparison and the update are one critical section against every writer of the storage. A stale row
        changes nothing: no priority, no running maximum, no default priority of later records. Rows are judged one by
        one; where one record is named more than once, the last row wins and all of them count as updated.

        Without a stale row the sampler ends in exactly the state that ``update_priority`` leaves.

        Args:
            index: as the sample carries it: int64 ``[...]``; or for a storage of ``n`` dimensions ``[..., n]`` or a
                tuple of ``n`` coordinate tensors ``[...]``.
            generation: the sample's ``index_generation``, int64 ``[...]``, and no other dtype: a stamp that was cast
                may equal that of another record.
            priority: a number, or real numbers ``[...]`` or ``[..., 1]``: tensor, array or list of any real dtype, on
                any device. Finite and >= 0, as absolute TD errors are. Raw priorities: the sampler applies
                ``(p + eps) ** alpha``.

        Returns:
            An :class:`UpdateResult` with masks of shape ``[...]``.

        Raises:
            TypeError: if the sampler has no priorities, or an argument has the wrong kind of numbers.
            ValueError: if shapes do not fit, or a priority is NaN, infinite, negative or too large for the tree.
            IndexError: if an index outside the storage comes with a generation that a record can have.
            RuntimeError: if nothing has ever been written to the buffer.

            Whatever is raised, nothing has changed.

        Complexity: O(rows · log capacity). Safe from any thread, and against writers in other processes.

        Example:
            >>> from tensordict import TensorDict
            >>> from torchrl_generational import GenerationalLazyTensorStorage
            >>> from torchrl_generational import GenerationalTensorDictPrioritizedReplayBuffer
            >>> rb = GenerationalTensorDictPrioritizedReplayBuffer(
            ...     alpha=0.7, beta=0.5, storage=GenerationalLazyTensorStorage(8), batch_size=4
            ... )
            >>> index = rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
            >>> sample = rb.sample()
            >>> index = rb.extend(TensorDict({"x": torch.arange(8)}, [8]))  # the ring wraps
            >>> rb.update_priority_if_present(
            ...     index=sample["index"], generation=sample["index_generation"], priority=torch.rand(4)
            ... )
            UpdateResult(num_updated=0, num_stale=4, num_rejected=0, shape=(4,))
        """
        if runs_in_compiled_code():
            done: UpdateResult = untraced(
                self.update_priority_if_present, index=index, generation=generation, priority=priority
            )
            return done
        return update(self, index, generation, priority)

    def submit_update_priority_if_present(self, *, index: Any, generation: Any, priority: Any) -> Future[UpdateResult]:
        """:meth:`update_priority_if_present` on a background thread, in order with prefetched batches.

        Ordered as TorchRL's ``submit_update_if_present``: it runs after the batches that were drawn ahead when it was
        submitted, before those that are drawn ahead later, and after all updates submitted earlier, of fields too. What
        lies on CUDA and belongs on the CPU is copied without waiting for the device, in order with the caller's stream.

        Args:
            index: as in :meth:`update_priority_if_present`. Like the other two it is kept by reference, so do not
                change it before the future is done.
            generation: as there.
            priority: as there.

        Returns:
            A future of an :class:`UpdateResult`. It also carries the errors of :meth:`update_priority_if_present`,
            which the next ``sample``, ``synchronize`` or submission raises as well, as for TorchRL's. ``shutdown``
            waits for it.

        Raises:
            RuntimeError: if the buffer has been shut down.

        Example:
            >>> from tensordict import TensorDict
            >>> from torchrl_generational import GenerationalLazyTensorStorage
            >>> from torchrl_generational import GenerationalTensorDictPrioritizedReplayBuffer
            >>> rb = GenerationalTensorDictPrioritizedReplayBuffer(
            ...     alpha=0.7, beta=0.5, storage=GenerationalLazyTensorStorage(8), batch_size=4
            ... )
            >>> index = rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
            >>> sample = rb.sample()
            >>> future = rb.submit_update_priority_if_present(
            ...     index=sample["index"], generation=sample["index_generation"], priority=torch.rand(4)
            ... )
            >>> future.result().num_updated
            4
            >>> rb.shutdown()
        """
        if isinstance(index, tuple) and all(isinstance(part, torch.Tensor) for part in index):
            index = torch.stack(index, -1)  # what TorchRL copies from CUDA
        future: Future[UpdateResult] = self.submit_update_if_present(
            index=index, generation=generation, patch={PRIORITY: priority}
        )
        return future

    def submit_update_if_present(self, **update: Any) -> Future[UpdateResult]:
        """:meth:`update_if_present` on a background thread, in order with prefetched batches; see TorchRL's.

        A batch drawn ahead that failed, because the buffer was empty then, holds up neither this nor later samples.
        """
        self._ready()
        self._refuse_write()
        return submit_in_order(self, super().submit_update_if_present, update)

    def update_if_present(
        self,
        *,
        index: Any,
        generation: Any,
        patch: Any,
        version_key: Any = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> UpdateResult:
        """TorchRL's conditional update of stored fields, with an :class:`UpdateResult`.

        Args:
            index: as in :meth:`update_priority_if_present`; for a storage of several dimensions also TorchRL's 1-D
                form, which names whole rows.
            generation: as in :meth:`update_priority_if_present`.
            patch: mapping or tensordict of the fields to overwrite, leading dimensions as the records named.
            version_key: stored per-record scalar that holds each record's version, if versions decide too.
            version: incoming version, a scalar or one per record; together with ``version_key``.
            require_newer: whether an equal version is rejected.

        Returns:
            An :class:`UpdateResult`; its ``rejected_mask`` is set if ``version_key`` was given.

        Raises:
            KeyError, ValueError: as TorchRL, for fields that do not exist or do not fit.
            TypeError, ValueError, IndexError, RuntimeError: as :meth:`update_priority_if_present`.

        Example:
            >>> from tensordict import TensorDict
            >>> from torchrl_generational import GenerationalLazyTensorStorage, GenerationalTensorDictReplayBuffer
            >>> rb = GenerationalTensorDictReplayBuffer(storage=GenerationalLazyTensorStorage(8), batch_size=4)
            >>> index = rb.extend(TensorDict({"x": torch.zeros(8)}, [8]))
            >>> sample = rb.sample()
            >>> rb.update_if_present(
            ...     index=sample["index"], generation=sample["index_generation"], patch={"x": torch.ones(4)}
            ... ).num_updated
            4
        """
        if isinstance(patch, dict) and PRIORITY in patch:  # submitted, see above
            return self.update_priority_if_present(index=index, generation=generation, priority=patch[PRIORITY])
        if runs_in_compiled_code():
            numbers = {"version_key": version_key, "version": version, "require_newer": require_newer}
            done: UpdateResult = untraced(
                self.update_if_present, index=index, generation=generation, patch=patch, **numbers
            )
            return done
        self._refuse_write()
        rows = patched_rows(self._written_storage("update_if_present"), index, generation, patch)
        with without_default_device():
            outcome = super().update_if_present(
                index=rows.places,
                generation=rows.stamps,
                patch=patch,
                version_key=version_key,
                version=rows.version_of(version),
                require_newer=require_newer,
            )
        rejected = None if outcome.version_rejected is None else rows.in_shape(outcome.version_rejected)
        result = UpdateResult(rows.in_shape(outcome.updated), rejected)
        with self._exclusive():
            self._count(result)
        return result

    def stats(self) -> dict[str, int | float | bool]:
        """TorchRL's snapshot, plus totals of all conditional updates since construction.

        ``conditional_updated``: rows applied. ``conditional_stale``: rows refused because their record was gone.
        """
        stats: dict[str, int | float | bool] = super().stats()
        with self._replay_lock:
            updated, rejected = int(self._conditional_updated), int(self._conditional_rejected)
            stats["conditional_updated"] = updated
            stats["conditional_stale"] = self._conditional_rows - updated - rejected
        return stats
