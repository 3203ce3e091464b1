"""Sampling: an index and its handles are drawn and the records read in one section; then they are transformed."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

import torch
from tensordict import is_tensor_collection
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.data.replay_buffers.utils import pin_memory_output

from torchrl_generational.buffers.base import BufferBase
from torchrl_generational.buffers.work_in_flight import drop_failed_batches
from torchrl_generational.generations.indexing import rows_of
from torchrl_generational.generations.slot_generations import GENERATION_KEY, SlotGenerations
from torchrl_generational.records.row_tracking import follow, steps_of
from torchrl_generational.samplers.torn_rows import complete_records, rows_drawn_together
from torchrl_generational.tensors.compilation import untraced

__all__ = ["Sampling", "on_device_of"]


class Sampling(BufferBase):
    """The samples of :class:`GenerationalReplayBufferMixin`."""

    #: Entries of the info that a transform of this class of buffers finds in the batch.
    _visible_handles: tuple[str, ...] = ()
    _collates_itself = False

    def sample(self, batch_size: int | None = None, return_info: bool = False, **deprecated: Any) -> Any:
        """Draws a batch; see TorchRL's ``sample``. Prefetched draws that failed are drawn again.

        A draw made ahead fails where another thread empties the buffer; by now there may be records.
        """
        if self._prefetch:
            with self._futures_lock:
                wait((*self._prefetch_queue,)[:1])  # the next one
                drop_failed_batches(self)
        # by keyword: TorchRL's RPC buffer asks itself again, and forgets the second argument
        return super().sample(batch_size, return_info=return_info, **deprecated)

    def _synchronize_futures_locked(self) -> None:
        """Waits for work in flight, of which a failed draw spoils nothing: neither a checkpoint nor a restore."""
        wait(self._prefetch_queue)
        drop_failed_batches(self)
        super()._synchronize_futures_locked()

    @pin_memory_output  # type: ignore[untyped-decorator]
    def _sample(self, batch_size: int) -> tuple[Any, dict[str, Any]]:
        if self._stays_out_of_graphs():
            drawn: tuple[Any, dict[str, Any]] = untraced(self._sample, batch_size)
            return drawn
        with self._exclusive():
            storage = self._storage
            sampler = self._drawing_sampler()
            self._catch_up()
            if storage.slot_generations.interrupted:
                unit = rows_drawn_together(sampler, self._sample_unit, batch_size)
                once = isinstance(sampler, SamplerWithoutReplacement)
                index, info = complete_records(lambda: self._draw(sampler, batch_size), unit=unit, once=once)
            else:
                index, info = self._draw(sampler, batch_size)
            data = storage.get(on_device_of(index, storage))
        return self._finish_sample(data, info)

    def _draw(self, sampler: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """An index, and an info with the handles of what it names. Lock held."""
        storage = self._storage
        index, info = sampler.sample(storage, batch_size)
        if storage.ndim > 1 and isinstance(index, torch.Tensor) and (index.ndim < 2 or index.shape[-1] != storage.ndim):
            raise TypeError(
                f"{type(sampler).__name__} draws an index of shape {tuple(index.shape)}, which does not say where the "
                f"records are in the {storage.ndim} dimensions of the storage. Use a storage of one dimension, or a "
                "sampler that draws coordinates, as RandomSampler and GenerationalPrioritizedSampler do."
            )
        if self._sample_unit is not None:
            if isinstance(index, tuple) and len(index) == 1:
                (index,) = index  # of a slice sampler, which the unit would take for rows of one coordinate
            index, info = self._sample_unit.expand(index, info, storage)
            if "anchor_index" in info:
                info["anchor_generation"] = self._generations_now(info["anchor_index"])
        info["index"] = index
        if self._sample_unit is not None or GENERATION_KEY not in info:
            info[GENERATION_KEY] = self._generations_now(index)
        return index, info

    def _get_collate_fn(self, collate_fn: Any) -> None:
        self._collates_itself = collate_fn is not None
        super()._get_collate_fn(collate_fn)

    def _finish_sample(self, data: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Collates and transforms what was drawn; handles follow their records."""
        if self._collates_itself:
            data, info = follow(data, info, self._collate_fn)
        else:
            data = self._collate_fn(data)
        if self._transform is not None and len(self._transform):
            given, collection = data, is_tensor_collection(data)
            locked = collection and data.is_locked
            try:
                if locked:  # not `with given.unlock_()`, which loses what is raised inside
                    given.unlock_()
                with _set_dispatch_td_nn_modules(collection):
                    for transform in steps_of(self._transform):
                        data, info = follow(data, info, transform, attach=self._visible_handles)
            finally:
                if locked:
                    given.lock_()
        return data, info

    def _generations_now(self, index: Any) -> torch.Tensor:
        """Stamps of an index that a sampler just drew. Lock held."""
        generations: SlotGenerations = self._storage.slot_generations
        if isinstance(index, torch.Tensor) and self._storage.ndim > 1:
            index = index.unbind(-1)
        return generations.lookup(rows_of(index))


def on_device_of(index: Any, storage: Any) -> Any:
    """A sampler's index where the storage can use it."""
    device = getattr(storage, "device", None)
    if device is None or device == "auto":
        return index
    if isinstance(index, tuple):
        return tuple(part.to(device) if isinstance(part, torch.Tensor) else part for part in index)
    return index.to(device) if isinstance(index, torch.Tensor) else index
