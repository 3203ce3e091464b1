"""The mixin that stands in front of a TorchRL buffer: its lock, the handles of its samples, and its writes."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torchrl.data.replay_buffers import (
    PrioritizedReplayBuffer,
    RemoteTensorDictReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import PrioritizedSampler

from torchrl_generational.buffers.checkpoints import CheckedCheckpoints
from torchrl_generational.buffers.components import BufferParts
from torchrl_generational.buffers.conditional_updates import ConditionalUpdates
from torchrl_generational.buffers.field_updates import FieldUpdates
from torchrl_generational.buffers.integrations import integration
from torchrl_generational.buffers.process_sharing import SharedByProcesses
from torchrl_generational.buffers.sampling import Sampling
from torchrl_generational.buffers.waiters import WakesWaiters
from torchrl_generational.buffers.work_in_flight import drop_prefetched
from torchrl_generational.concurrency.deferred_signals import run_through
from torchrl_generational.concurrency.write_access import refuse_left_behind
from torchrl_generational.generations.indexing import as_rows, cells_in, leading_shape, rows_written
from torchrl_generational.generations.protocols import observers_of
from torchrl_generational.priorities.tree_updates import forget
from torchrl_generational.records.cursors import plain_cursor
from torchrl_generational.records.incoming import Inverted
from torchrl_generational.storages.moments import check_moment
from torchrl_generational.storages.shared_storage import SharableStorage
from torchrl_generational.tensors.compilation import untraced
from torchrl_generational.tensors.same_width import assign

__all__ = ["GenerationalReplayBufferMixin"]

# TorchRL's four plain buffers, whose _sample is what the mixin replaces, and what it replaces it by.
_PLAIN_BUFFERS = (
    ReplayBuffer,
    TensorDictReplayBuffer,
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    Sampling,
)


class GenerationalReplayBufferMixin(
    WakesWaiters, SharedByProcesses, BufferParts, CheckedCheckpoints, ConditionalUpdates, FieldUpdates, Sampling
):
    """Adds generations and conditional priority updates to a TorchRL buffer class; stands in front of it.

    The storage defaults to :class:`GenerationalLazyTensorStorage` of 1000 records and the writer to the round-robin
    writer of this package. Every other argument is that of the class behind.

    Args:
        writer: a writer that tracks generations, or a callable that makes one. Taken here so that TorchRL's
            prioritized buffers, which have no such argument, accept it too.
        **kwargs: the arguments of the class behind.

    Raises:
        TypeError: if the storage or the writer cannot track generations; names the class to use.
        ValueError: if a prioritized sampler is smaller than the storage.

    Thread safety: all methods may be called from any thread. They hold the lock of the *storage*, so buffers on one
    storage exclude each other. Lock order: futures lock, then storage lock.

    Example:
        >>> from torchrl.data import TensorDictReplayBuffer
        >>> class MyBuffer(GenerationalReplayBufferMixin, TensorDictReplayBuffer):
        ...     pass
        >>> MyBuffer(batch_size=4).storage.supports_generations
        True
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        behind = cls.__mro__[cls.__mro__.index(GenerationalReplayBufferMixin) + 1 :]
        for base in behind:
            if "_sample" in vars(base) and base not in _PLAIN_BUFFERS:
                raise TypeError(
                    f"{cls.__name__}: the mixin replaces _sample, and {base.__name__} has one of its own that would be "
                    "skipped. Put what it does into a sampler, a transform or a class in front of the mixin."
                )
            if base is RemoteTensorDictReplayBuffer:
                raise TypeError(
                    f"{cls.__name__}: RemoteTensorDictReplayBuffer forwards the methods that TorchRL knows, and no "
                    "conditional update. Any buffer of this package can be made in another process by "
                    "torch.distributed.rpc.remote(worker, GenerationalTensorDictReplayBuffer, kwargs=...), and its "
                    "methods called by rref.rpc_sync()."
                )

    # ---------------------------------------------------------------- Ray

    @classmethod
    def _ServiceClass(cls, service_backend: str, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  TorchRL's name
        """What ``service_backend="ray"`` makes."""
        if service_backend != "ray":
            return super()._ServiceClass(service_backend, *args, **kwargs)
        return integration("ray").served(cls, *args, **kwargs)

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Any:
        """TorchRL's ``as_remote``, of a class whose handles do not outlive a restart of its actor. Needs Ray."""
        in_actor = integration("ray").in_actor(cls)
        return super(GenerationalReplayBufferMixin, in_actor).as_remote(remote_config)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._initialized and hasattr(self._storage, "lock"):
            self._lend_lock()

    def _on_storage_unpickled(self) -> None:
        """Whichever of the two is complete last ties them together."""
        if "_sampler" in vars(self):
            self._lend_lock()
            check_moment(self._storage, self._moment)

    # ---------------------------------------------------------------- writing

    def _add(self, data: Any) -> Any:
        if self._stays_out_of_graphs():
            return untraced(self._add, data)
        self._refuse_write()
        with self._exclusive():
            if self._storage.ndim == 1 and not self._is_consuming():
                written = self._writer.add(data)
                self._sampler.add(written)
                self._notify_replay_state_change()
                return written
            self._check_rounding(leading_shape(data)[: self._storage.ndim - 1])
            self._check_consumed(data, None)
            return super()._add(data)

    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Writes records; see TorchRL's ``extend``."""
        if type(data) is Inverted:
            return self._extend(data.data)
        written: torch.Tensor = super().extend(data, update_priority=update_priority)
        return written

    def _extend(self, data: Any, *, update_priority: bool = True) -> torch.Tensor:
        written: torch.Tensor
        if self._stays_out_of_graphs():
            written = untraced(self._extend, data, update_priority=update_priority)
            return written
        self._refuse_write()
        with self._exclusive():
            if self._storage.ndim == 1 and not self._is_consuming():
                written = self._writer.extend(data)
                self._sampler.extend(written)
                self._notify_replay_state_change()
                return written
            shape = list(leading_shape(data)[: self._storage.ndim])
            if len(shape) > self.dim_extend:
                del shape[self.dim_extend]
            self._check_rounding(shape)
            self._check_consumed(data, self._get_batch_size(data))
            index: torch.Tensor = super()._extend(data, update_priority=update_priority)
        return index

    def __setitem__(self, index: Any, value: Any) -> None:
        """Puts new records into slots: their stamps advance, and they get the sampler's default priority."""
        self._ready()
        self._refuse_write()
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        with self._exclusive(), torch.no_grad():
            storage = self._storage
            if isinstance(index, str) or (isinstance(index, tuple) and index and isinstance(index[0], str)):
                self._set_field(index, value)
                return
            if isinstance(index, tuple):
                # TorchRL writes this form through a view, past the storage's own set()
                view, index, value, rows = self._checked_view(index, value)
                generations = storage.slot_generations
                if isinstance(storage, SharableStorage):
                    storage._about_to_write()
                try:
                    generations.begin(rows)
                    assign(view, index, value)
                    storage._bump_mutation_revision()
                except BaseException:
                    getattr(storage, "abandon", generations.abandon)(rows)
                    raise
                generations.complete(rows)
                if isinstance(storage, SharableStorage):
                    storage._wrote()
            else:
                num_rows = storage.generations.shape[0]
                index = plain_cursor(index, num_rows)
                rows = as_rows(rows_written(index if self.dim_extend == 0 else slice(None), num_rows), num_rows)
                super().__setitem__(index, value)
            rows = rows[rows < storage._len_along_dim0]
            cells = cells_in(rows, storage.generations.shape)
            for entity in storage._attached_entities:
                entity.mark_update(cells)

    def mark_update(self, index: Any) -> None:
        """Gives the records at ``index`` the sampler's default priority.

        Where a learner follows the writers (``shared``, ``sync=False``), it does so before it next samples or updates,
        for the records that are new to it.
        """
        self._ready()
        self._refuse_write()
        with self._exclusive():
            if not self._follows:
                super().mark_update(index)

    def _on_records_torn(self, rows: torch.Tensor) -> None:
        """Slots without a record are not drawn. Lock held."""
        sampler = self._learners_sampler()
        if not self._follows and isinstance(sampler, PrioritizedSampler):
            forget(sampler, cells_in(rows, self._storage.generations.shape).to(sampler.device))

    def update_priority(self, index: Any, priority: Any) -> None:
        """Writes priorities by raw index, whatever record is there now; see the sampler's ``update_priority``.

        Prefer :meth:`update_priority_if_present`.
        """
        if isinstance(priority, float | list | tuple | np.ndarray):
            with contextlib.suppress(ValueError, TypeError, RuntimeError):  # what is no number is refused below
                given = torch.as_tensor(priority, device="cpu")
                if given.is_floating_point():  # TorchRL makes it float32, whatever the tree's
                    priority = torch.as_tensor(priority, dtype=torch.float64, device="cpu")
        self._ready()
        self._refuse_write()
        with self._exclusive():
            self._refuse_elsewhere()
            self._catch_up()
            super().update_priority(index, priority)

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Puts new records into the first slots, in one section; see ``__setitem__``."""
        self._ready()
        with self._exclusive():
            super().write_all(data, end)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Sets the generator that all parts draw from; ``None`` for torch's global one (``torch.manual_seed``)."""
        self._ready()
        refuse_left_behind(self._replay_lock)
        with self._exclusive():
            super().set_rng(generator)

    def empty(self, empty_write_count: bool = True) -> None:
        """Removes all records: every handle is stale and prefetched batches are dropped.

        Args:
            empty_write_count: whether the count of written records starts again at 0.
        """
        self._ready()
        self._refuse_write()
        with self._futures_lock:
            drop_prefetched(self)
            with self._exclusive():
                run_through(lambda: self._empty_parts(empty_write_count))

    def _empty_parts(self, empty_write_count: bool) -> None:
        """Empties all parts, and those of other buffers on the storage. Lock held."""
        super().empty(empty_write_count=empty_write_count)
        # A sibling that went on from its old cursor would leave slots below the length without a record.
        for sibling in observers_of(self._storage):
            if sibling is not self:
                sibling._on_records_replaced()
