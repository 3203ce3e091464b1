"""The mixin for tensordict buffers: handles inside the sample, write and first priority in one section."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torchrl.data.replay_buffers import TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.storages.utils import _collate_id
from torchrl.data.replay_buffers.utils import _reduce
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs.transforms import Compose

from torchrl_generational.buffers.absent_sampler import keeps_priorities
from torchrl_generational.buffers.conditional_updates import ConditionalUpdates
from torchrl_generational.buffers.first_priorities import FirstPriorities
from torchrl_generational.buffers.mixin import GenerationalReplayBufferMixin
from torchrl_generational.buffers.priority_updates import PreparedUpdate, apply, prepared_arrays
from torchrl_generational.generations.duplicate_handles import per_anchor, per_handle
from torchrl_generational.generations.indexing import as_generation, as_int64
from torchrl_generational.generations.slot_generations import GENERATION_KEY
from torchrl_generational.generations.update_result import UpdateResult
from torchrl_generational.priorities.td_errors import as_sample, rows_of_errors
from torchrl_generational.priorities.tree_updates import checked_priority
from torchrl_generational.priorities.validation import some_each
from torchrl_generational.records.incoming import Inverted, refuse_layout
from torchrl_generational.records.record_io import attach, entries_of, gathers, select, shallow
from torchrl_generational.samplers.prioritized import GenerationalPrioritizedSampler
from torchrl_generational.storages.round_robin_writers import (
    GenerationalTensorDictRoundRobinWriter,
)
from torchrl_generational.storages.tensor_storages import GenerationalStorageMixin
from torchrl_generational.tensors.compilation import runs_in_compiled_code, untraced
from torchrl_generational.tensors.default_devices import CPU, as_tensor

__all__ = ["GenerationalTensorDictReplayBufferMixin"]

# TorchRL's two ways to a record's own priority, both of which say the default where it has none.
_PRIORITY_ITEMS = (TensorDictReplayBuffer._get_priority_item, TensorDictPrioritizedReplayBuffer._get_priority_item)
if TYPE_CHECKING:
    _Buffer = TensorDictReplayBuffer
else:
    _Buffer = object


class GenerationalTensorDictReplayBufferMixin(FirstPriorities, GenerationalReplayBufferMixin, _Buffer):
    """:class:`GenerationalReplayBufferMixin` for TorchRL's tensordict buffers.

    Samples carry ``index`` and ``index_generation`` as entries. ``add`` and ``extend`` write a record and its first
    priority in one section, so that no other thread sees the one without the other.

    Args:
        conditional_updates: whether :meth:`update_tensordict_priority` compares handles too; defaults to the class
            attribute of this name, which is False. The attribute may be changed at any time, and
            :func:`~torchrl_generational.trainer.use_conditional_updates` sets it.
        **kwargs: the arguments of :class:`GenerationalReplayBufferMixin`.

    Thread safety and errors as :class:`GenerationalReplayBufferMixin`.

    Example:
        >>> class MyBuffer(GenerationalTensorDictReplayBufferMixin, TensorDictReplayBuffer):
        ...     pass
        >>> type(MyBuffer(batch_size=4).writer).__name__
        'GenerationalTensorDictRoundRobinWriter'
    """

    _default_writer: type[Writer] = GenerationalTensorDictRoundRobinWriter
    _visible_handles = ("index", GENERATION_KEY)
    conditional_updates: bool = False
    _written: Any = None  # what holds a record just written, while it gets its priority; guarded by the storage's lock

    def __init__(self, *, conditional_updates: bool | None = None, **kwargs: Any) -> None:
        if conditional_updates is not None:
            self.conditional_updates = conditional_updates
        super().__init__(**kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state.pop("_written", None)
        return state

    def sample(self, batch_size: int | None = None, return_info: bool = False, **deprecated: Any) -> Any:
        """Draws a batch whose entries include ``index``, ``index_generation`` and, by priority, its weights.

        Args:
            batch_size: defaults to the buffer's.
            return_info: whether to return the info as well.
            **deprecated: TorchRL's ``include_info``.

        Raises:
            RuntimeError: if there is nothing to draw.
        """
        if self._stays_out_of_graphs():
            return untraced(self.sample, batch_size, return_info, **deprecated)
        own = self._batch_size
        wanted = own if batch_size is None else batch_size
        if wanted is not None and own in (None, wanted) and not (deprecated or self._prefetch) and self.initialized:
            drawn = self._sample_plainly(wanted)
            if drawn is not None:
                return drawn if return_info else drawn[0]
        return super().sample(batch_size, return_info=return_info, **deprecated)

    def _sample_plainly(self, batch_size: int) -> tuple[TensorDict, dict[str, Any]] | None:
        """A sample that takes no more than the sampler's draw and the records there; ``None`` if it would."""
        with self._exclusive():
            storage = self._storage
            if not self._samples_are_plain() or storage.slot_generations.interrupted:
                return None  # in the second case slots without a record have to be drawn again
            if storage.lock.is_shared:
                self._refuse_elsewhere()
            self._catch_up()
            sampler: GenerationalPrioritizedSampler = self._learners_sampler()
            index, info = sampler.sample(storage, batch_size)
            info["index"] = index
            data = select(storage._storage, index, leave_out=info)  # what the info replaces
        assert data is not None
        self._count_sample(len(index))
        return attach(data, info), info

    def _samples_are_plain(self) -> bool:
        """Whether a sample is what the storage holds and the sampler says, of one dimension, on the CPU. Lock held."""
        storage = self._storage
        return (
            (storage._storage is self._plain_records or self._settle_plain_records(storage))
            and getattr(storage.get, "__func__", None) is GenerationalStorageMixin.get
            and self._sample_dependency is None
            and not self._service_shutdown
            and not self._pin_memory
            and self._collate_fn is _collate_id
            and type(self)._sample is GenerationalReplayBufferMixin._sample
            and type(self)._draw is GenerationalReplayBufferMixin._draw
            and type(self)._finish_sample is GenerationalReplayBufferMixin._finish_sample
            and self._sample_unit is None
            and self._has_no_transform()
            and type(self._learners_sampler()) is GenerationalPrioritizedSampler
            and gathers(storage._storage)
        )

    def _settle_plain_records(self, storage: Any) -> bool:
        """Whether the records are of a kind that is gathered; if so, that is known until there are others."""
        plain = (
            storage.ndim == 1
            and storage.initialized
            and type(storage._storage) is TensorDict
            and storage._storage.ndim == 1
            and storage._storage.device in (None, CPU)
            and storage.device == CPU
        )
        if plain:
            self._plain_records = storage._storage
        return bool(plain)

    def update_tensordict_priority_if_present(self, data: TensorDictBase) -> UpdateResult:
        """Updates the priorities of a sample's records that are still in their slots.

        Reads ``index``, ``index_generation`` and the buffer's ``priority_key`` from ``data``. What is more than one
        number per record (a trajectory stored as one record, a TD error per head) is reduced by the sampler's
        ``reduction``, as TorchRL's ``update_tensordict_priority`` does. A sample that a sample unit expanded updates
        its anchors, with the maximum over each anchor's valid records; rows of an anchor without any count as stale.

        Args:
            data: a sample of this buffer, or any part or reshaping of one, with the priority entry set; also as a dict.
                Its batch size plays no part: the entries say which TD error is of which record.

        Returns:
            An :class:`UpdateResult` with masks of the shape of ``index_generation``, which is the sample's batch shape
            (its leading dimensions, where each record is a trajectory).

        Raises:
            KeyError: if one of the three entries is missing.
            ValueError: if the priority entry does not begin with the shape of the handles, or the two entries of
                handles do not belong together.
            TypeError, ValueError, IndexError, RuntimeError: as ``update_priority_if_present``.

        Example:
            >>> from tensordict import TensorDict
            >>> from torchrl_generational import GenerationalLazyTensorStorage
            >>> from torchrl_generational import GenerationalTensorDictPrioritizedReplayBuffer
            >>> rb = GenerationalTensorDictPrioritizedReplayBuffer(
            ...     alpha=0.7, beta=0.5, storage=GenerationalLazyTensorStorage(8), batch_size=4
            ... )
            >>> index = rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
            >>> sample = rb.sample()
            >>> sample["td_error"] = torch.rand(4)
            >>> rb.update_tensordict_priority_if_present(sample).num_updated
            4
        """
        if runs_in_compiled_code():
            done: UpdateResult = untraced(self.update_tensordict_priority_if_present, data)
            return done
        prepared = self._prepared_entries(data)
        result = None if prepared is None else apply(self, prepared)
        if result is not None:
            return result
        method = "update_tensordict_priority_if_present"
        self._refuse_write()
        storage = self._written_storage(method)
        sampler = self._priority_sampler(method)
        data = as_sample(data, f"{type(self).__name__}.{method}")
        anchored = self._sample_unit is not None and data.get("anchor_index", None) is not None
        names = ["anchor_generation", "anchor_index"] if anchored else [GENERATION_KEY, "index"]
        stamps, index, errors = (self._entry(data, key, method) for key in (*names, self.priority_key))
        handles = [as_generation(stamps), as_int64(names[1], index)]
        valid = data.get("validity_mask", None) if anchored else None
        if valid is not None:
            names, handles = [*names, "validity_mask"], [*handles, valid]
        inner = int(getattr(storage, "record_ndim", 0))
        rows = rows_of_errors(
            checked_priority(sampler, errors, name=str(self.priority_key)),
            handles,
            [str(self.priority_key), *names],
            inner=inner,
            trajectories=(storage._storage.shape[storage.ndim :],) if inner else (),
            ndims=(storage.ndim,),
        )
        (generation, index, *masks), priority = rows.handles, rows.errors
        priority = _reduce(priority, sampler.reduction, dim=-1) if priority.shape[-1] > 1 else priority.squeeze(-1)
        if anchored:
            priority, generation = per_anchor(index, generation, priority, masks[0] if masks else None)
        elif rows.apart and generation.numel():
            priority = per_handle(index, generation, priority, sampler.reduction)  # reshaped, or some steps only
            if rows.once is not None:
                (generation, index), priority = rows.once, priority.flatten(generation.ndim - inner)[..., 0]
        return self.update_priority_if_present(index=index, generation=generation, priority=priority)

    def _prepared_entries(self, data: Any) -> PreparedUpdate | None:
        """The update by a plain sample with one number per record; ``None`` for any other."""
        entries = entries_of(data)
        overridden = type(self).update_priority_if_present is not ConditionalUpdates.update_priority_if_present
        if entries is None or overridden or not self.initialized or self._sample_unit is not None:
            return None
        if getattr(self._storage, "record_ndim", 1):  # what a record is decides what there is one number of
            return None
        return prepared_arrays(self, *map(entries.get, ("index", GENERATION_KEY, self.priority_key)))

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Updates priorities by raw index; see TorchRL's. Prefer :meth:`update_tensordict_priority_if_present`.

        With ``conditional_updates`` it does what that method does, for code that knows only this name: TorchRL's
        trainers and remote buffers. Without priorities it does nothing, either way.

        Raises:
            RuntimeError: in another process than the one that keeps the priorities.
            KeyError, TypeError, ValueError, IndexError: with ``conditional_updates``, as
                :meth:`update_tensordict_priority_if_present`.
        """
        self._ready()
        self._refuse_elsewhere()
        if not self.conditional_updates or data is self._written:
            super().update_tensordict_priority(data)
        elif keeps_priorities(self._learners_sampler()):
            self.update_tensordict_priority_if_present(data)

    def _give_first_priority(self, data: Any, index: Any) -> None:
        """Updates by the slot just written to, whatever old handle ``data`` holds, through overrides. Lock held."""
        ours = GenerationalTensorDictReplayBufferMixin.update_tensordict_priority
        if type(self).update_tensordict_priority is not ours and is_tensor_collection(data):
            stamp = self._generations_now(as_tensor(index).reshape(-1))  # for one that goes by handles
            data.set(GENERATION_KEY, stamp.reshape((1,) * data.ndim).expand(data.batch_size))
        before, self._written = self._written, data
        try:
            self.update_tensordict_priority(data)
        finally:
            self._written = before

    def _entry(self, data: TensorDictBase, key: Any, method: str) -> torch.Tensor:
        value = data.get(key, None)
        if value is None:
            raise KeyError(
                f"{type(self).__name__}.{method} reads the entry {key!r}, and the data has only "
                f"{sorted(map(str, data.keys()))}. Pass a sample of this buffer, with its TD errors under "
                f"{self.priority_key!r}."
            )
        entry: torch.Tensor = value.tolist() if is_non_tensor(value) else value
        return entry

    def _defaults_are_plain(self) -> bool:
        """Whether a record without a priority needs no more than the default that its writer has given it."""
        cls = type(self)
        return (
            cls.update_tensordict_priority is GenerationalTensorDictReplayBufferMixin.update_tensordict_priority
            and cls._get_priority_item in _PRIORITY_ITEMS
        )

    def add(self, data: Any) -> Any:
        """Writes one record and its first priority in one section; see TorchRL's ``add``.

        Raises:
            ValueError: if the priority entry is NaN, infinite, negative or too large; nothing has been written then.
        """
        if self._stays_out_of_graphs():
            return untraced(self.add, data)
        self._ready()
        self._refuse_write()
        # User code, possibly slow: before the lock, as in TorchRL.
        if type(data) is TensorDict and self._has_no_transform():
            data = shallow(data)
        elif self._transform is not None:
            with _set_dispatch_td_nn_modules(is_tensor_collection(data)):
                data = self._transform.inv(data)
        if data is None:
            return torch.zeros((0, self._storage.ndim), dtype=torch.long, device="cpu")
        refuse_layout(self, data, self._storage.ndim - 1)
        priority = self._first_priority(data)
        keeps = priority is not None and keeps_priorities(self._learners_sampler())
        if keeps:
            shape = data.batch_size[: self._storage.ndim - 1]
            priority = self._per_record(some_each(priority, shape, self.priority_key), shape.numel())
        with self._exclusive():
            index = self._add(data)
            if index is not None:
                if is_tensor_collection(data) and not self._writer_tells():
                    self._set_index_in_td(data, index)
                if self._follows:
                    self._leave_first_priority(index, priority, 1)
                elif self._storage.ndim == 1 and not self._defaults_are_plain():
                    self._give_first_priority(data, index)
                elif keeps:
                    self.update_priority(
                        index if self._storage.ndim > 1 else torch.as_tensor([index], device="cpu"), priority
                    )
        return index

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> torch.Tensor:
        """Writes records and their first priorities in one section; see TorchRL's ``extend``.

        Args:
            tensordicts: the records.
            update_priority: whether a priority entry among the data is used. Defaults to True.

        Raises:
            ValueError: if a first priority is NaN, infinite, negative or too large; nothing has been written then.
            RuntimeError: if there is not one first priority per record; nothing has been written then.
        """
        written: torch.Tensor
        if self._stays_out_of_graphs():
            written = untraced(self.extend, tensordicts, update_priority=update_priority)
            return written
        self._ready()
        self._refuse_write()
        inverted = type(tensordicts) is Inverted
        if inverted:
            (tensordicts,) = tensordicts
        if not isinstance(tensordicts, TensorDictBase):
            written = super().extend(tensordicts, update_priority=update_priority)
            return written
        if inverted or self._has_no_transform():
            tensordicts = shallow(tensordicts) if type(tensordicts) is TensorDict else tensordicts.copy()
        elif self._transform is not None:
            tensordicts = self._transform.inv(tensordicts)
        if tensordicts is None:
            return torch.zeros((0, self._storage.ndim), dtype=torch.long, device="cpu")
        priority = self._check_incoming(tensordicts, update_priority is None or update_priority)
        with self._exclusive():
            index: torch.Tensor = self._extend(tensordicts)
            if not self._writer_tells():
                self._set_index_in_td(tensordicts, index)
            if self._follows:
                self._leave_first_priority(index, priority, len(index))
            elif priority is not None:
                self.update_priority(index, priority)
        return index

    def _has_no_transform(self) -> bool:
        transform = self._transform
        # not transform.transforms, which takes modules longer than all else here
        return type(transform) is Compose and not transform._modules["transforms"]._modules

    def _set_index_in_td(self, tensordict: TensorDictBase, index: Any) -> None:
        """Tells the written data which cells it went to. Lock held."""
        ndim = self._storage.ndim
        if ndim == 1 or not isinstance(index, torch.Tensor) or index.ndim != 2:
            super()._set_index_in_td(tensordict, index)
            return
        # TorchRL guesses the layout from sizes, and fails (the record written) where a row has as many cells as
        # the data has leading elements: every add() among them.
        shape = list(tensordict.batch_size[:ndim])
        if len(shape) == ndim and torch.Size(shape).numel() == index.shape[0]:
            dim = self.dim_extend
            shape[0], shape[dim] = shape[dim], shape[0]
            coordinates = index.reshape(*shape, ndim).transpose(0, dim)
        else:
            coordinates = index.reshape(*tensordict.batch_size[: ndim - 1], ndim)
        tensordict.set("index", coordinates)
