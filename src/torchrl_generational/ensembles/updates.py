"""Routes the rows of a batch to the members of an ensemble that they are from."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_generational.buffers.conditional_updates import PRIORITY
from torchrl_generational.buffers.work_in_flight import submit_in_order
from torchrl_generational.ensembles.base import EnsembleBase
from torchrl_generational.ensembles.routing import common_device, inner_of, owners_of, routes_of
from torchrl_generational.generations.duplicate_handles import once_each, per_handle
from torchrl_generational.generations.indexing import (
    as_generation,
    as_int64,
    repeats_from,
)
from torchrl_generational.generations.slot_generations import GENERATION_KEY
from torchrl_generational.generations.update_result import UpdateResult
from torchrl_generational.priorities.td_errors import as_sample, rows_of_errors
from torchrl_generational.priorities.validation import as_priority, match_shape
from torchrl_generational.tensors.default_devices import as_tensor, without_default_device

__all__ = ["EnsembleUpdates"]


class EnsembleUpdates(EnsembleBase):
    """Conditional and raw updates of an ensemble, and its totals."""

    @property
    def priority_key(self) -> Any:
        """The entry that the members read TD errors from; ``"td_error"`` if none of them reads any.

        Raises:
            ValueError: if they read different ones.
        """
        reading = [rb for rb in self._rbs if hasattr(rb, "priority_key")]
        keys = {rb.priority_key for rb in [rb for rb in reading if rb.keeps_priorities] or reading} or {"td_error"}
        if len(keys) > 1:
            raise ValueError(
                f"The members of this ensemble read their TD errors from different entries, {sorted(map(str, keys))}. "
                "Give them one priority_key, or call update_priority_if_present(index=sample['index'], ...)."
            )
        return keys.pop()

    @property
    def keeps_priorities(self) -> bool:
        """Whether a member draws by priority."""
        return any(rb.keeps_priorities for rb in self._rbs)

    def update_priority_if_present(
        self, *, index: Any, generation: Any, priority: Any, buffer_ids: Any = None
    ) -> UpdateResult:
        """Updates the priorities of the records that are still in their slots of their members; says which those were.

        All rows are checked, for all members, before the first member changes. Then each member's rows are compared
        and updated in one critical section of that member, in the order of the batch, as by its own
        ``update_priority_if_present``; the members follow one another, and another thread may write to one of them in
        between.

        Args:
            index: a tensordict or mapping with ``index`` and ``buffer_ids``, as a sample and its info hold it under
                ``"index"``; or the index within the members alone, in any form that their own method takes.
            generation: the sample's ``index_generation``, int64 ``[...]``.
            priority: as the members' own method: a number, or ``[...]`` or ``[..., 1]``.
            buffer_ids: the number of each row's member, int64 ``[...]`` or the beginning of that shape; if ``index``
                does not have them.

        Returns:
            One :class:`UpdateResult` for the whole batch, with masks of shape ``[...]``.

        Raises:
            TypeError: if rows are of a member without priorities, or an argument has the wrong kind of numbers.
            ValueError: if shapes do not fit, a member does not exist, or a priority is NaN, infinite, negative or too
                large for the tree.
            IndexError: if an index outside its member's storage comes with a generation that a record can have.
            RuntimeError: if nothing has ever been written to a member with rows in the batch.

            Whatever is raised, nothing has changed in any member, unless another thread exchanges a member's parts
            at the same time.

        Complexity: O(members · rows + rows · log capacity).

        Example:
            >>> from torchrl_generational import GenerationalLazyTensorStorage, GenerationalPrioritizedReplayBuffer
            >>> from torchrl_generational import GenerationalReplayBufferEnsemble
            >>> members = [
            ...     GenerationalPrioritizedReplayBuffer(alpha=1, beta=1, storage=GenerationalLazyTensorStorage(4))
            ...     for _ in range(2)
            ... ]
            >>> index = [member.extend(torch.arange(4)) for member in members]
            >>> rb = GenerationalReplayBufferEnsemble(*members, batch_size=4)
            >>> data, info = rb.sample(return_info=True)
            >>> rb.update_priority_if_present(
            ...     index=info["index"], generation=info["index_generation"], priority=torch.rand(2, 2)
            ... )
            UpdateResult(num_updated=4, num_stale=0, num_rejected=0, shape=(2, 2))
        """
        index, buffer_ids = _split(index, buffer_ids)
        device = common_device(self)
        generation = as_generation(generation, device)
        inner = max(inner_of(rb.storage) for rb in self._rbs)

        def repeats(dim: int) -> bool:
            parts = [as_int64("index", part, device) for part in (index if isinstance(index, tuple) else (index,))]
            return repeats_from([generation, as_int64("buffer_ids", buffer_ids, device), *parts], dim, inner)

        values = match_shape(as_priority(priority, dtype=torch.float64, device=device), generation.shape, repeats)
        return self._update(index, buffer_ids, generation, values)

    def update_tensordict_priority_if_present(self, data: TensorDictBase) -> UpdateResult:
        """Updates the priorities of a sample's records that are still in their slots of their members.

        Reads ``("index", "index")``, ``("index", "buffer_ids")``, ``index_generation`` and :attr:`priority_key`. What
        is more than one number per record is reduced by the ``reduction`` of the member's sampler.

        Args:
            data: a sample of this ensemble, or any part or reshaping of one, with the priority entry set; also as a
                dict. Its batch size plays no part: the entries say which TD error is of which record.

        Returns:
            An :class:`UpdateResult` with masks of the shape of ``index_generation``, which is the sample's batch shape
            (its leading dimensions, where each record is a trajectory).

        Raises:
            KeyError: if an entry is missing.
            ValueError: if the priority entry does not begin with the shape of the handles, or the entries of handles
                do not belong together.
            TypeError, ValueError, IndexError, RuntimeError: as :meth:`update_priority_if_present`.
        """
        data = as_sample(data, f"{type(self).__name__}.update_tensordict_priority_if_present")
        keys = (GENERATION_KEY, ("index", "index"), ("index", "buffer_ids"))
        stamps, index, ids = (self._entry(data, key) for key in keys)
        device = common_device(self)
        generation = as_generation(stamps, device)
        priority = self._entry(data, self.priority_key)
        stored = [rb.storage for rb in self._rbs]
        # a row that is all of a trajectory can be told where all members keep trajectories of one shape
        trajectories = {storage._storage.shape[storage.ndim :] for storage in stored if inner_of(storage)}
        rows = rows_of_errors(
            as_priority(priority, dtype=torch.float64, device=device, name=str(self.priority_key)),
            [generation, as_int64("index", index, device), as_int64("buffer_ids", ids, device)],
            [str(key) for key in (self.priority_key, *keys)],
            inner=max(map(inner_of, stored)),
            trajectories=trajectories if len(trajectories) == 1 else (),
            ndims={storage.ndim for storage in stored},
        )
        (generation, index, ids), count = rows.handles, rows.shape.numel()
        values = rows.errors.reshape(count, -1) if count else rows.errors.reshape(0, 1)
        return self._update(index, ids, generation, values, repeated=rows.apart)

    def _entry(self, data: TensorDictBase, key: Any) -> torch.Tensor:
        try:
            value = data.get(key, None)
        except (KeyError, ValueError):  # "index" is no tensordict, as in a sample of a single buffer
            value = None
        if not isinstance(value, torch.Tensor):
            raise KeyError(
                f"{type(self).__name__}.update_tensordict_priority_if_present reads the entry {key!r}, and the data "
                f"has only {sorted(map(str, data.keys(True, True)))}. Pass a sample of this ensemble, with its TD "
                f"errors under {self.priority_key!r}."
            )
        return value

    def update_priority(self, index: Any, priority: Any) -> None:
        """Writes priorities by raw index, whatever record is there now; TorchRL's ensemble does nothing here.

        Prefer :meth:`update_priority_if_present`.

        Args:
            index: a tensordict or mapping with ``index`` and ``buffer_ids``, as a sample holds it under ``"index"``.
            priority: a number, or one number per row.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: as :meth:`update_priority_if_present`.
        """
        index, buffer_ids = _split(index, None)
        device = common_device(self)
        written = torch.zeros_like(as_int64("buffer_ids", buffer_ids, device))
        values = as_priority(priority, dtype=torch.float64, device=device)
        values = match_shape(values, written.shape, lambda dim: repeats_from([written], dim, 0))
        for route in routes_of(self, index, buffer_ids, written, values, "update_priority"):
            route.member.update_priority(route.places, route.priority)

    def _update(
        self, index: Any, buffer_ids: Any, generation: torch.Tensor, values: torch.Tensor, *, repeated: bool = False
    ) -> UpdateResult:
        """Updates each row in its member. ``repeated``: several rows may be of one trajectory stored as a record."""
        updated = torch.zeros(generation.numel(), dtype=torch.bool, device=generation.device)
        stamps = generation.reshape(-1)
        for route in routes_of(self, index, buffer_ids, generation, values, "update_priority_if_present"):
            own, priority = stamps[route.rows], route.priority
            if repeated and priority.ndim and inner_of(route.member.storage):
                priority = per_handle(route.places, own, priority, route.member._drawing_sampler().reduction)
            result = route.apply(own, priority)
            updated[route.rows] = result.updated_mask.to(updated.device)
        return UpdateResult(updated.reshape(generation.shape))

    def submit_update_if_present(self, **update: Any) -> Future[UpdateResult]:
        """TorchRL's, whose updates and later samples are not held up by a batch drawn ahead that failed."""
        self._ready()
        return submit_in_order(self, super().submit_update_if_present, update)

    def submit_update_priority_if_present(
        self, *, index: Any, generation: Any, priority: Any, buffer_ids: Any = None
    ) -> Future[UpdateResult]:
        """:meth:`update_priority_if_present` on a background thread, in order with prefetched batches.

        Arguments, order and errors as for the members' own ``submit_update_priority_if_present``.

        Returns:
            A future of the :class:`UpdateResult`, with masks of the shape of ``generation``.

        Raises:
            TypeError, ValueError: if ``index`` does not come with the members of its rows.
            RuntimeError: if the ensemble has been shut down.

        Example:
            >>> from torchrl_generational import GenerationalLazyTensorStorage, GenerationalPrioritizedReplayBuffer
            >>> from torchrl_generational import GenerationalReplayBufferEnsemble
            >>> member = GenerationalPrioritizedReplayBuffer(alpha=1, beta=1, storage=GenerationalLazyTensorStorage(4))
            >>> index = member.extend(torch.arange(4))
            >>> rb = GenerationalReplayBufferEnsemble(member, batch_size=4)
            >>> data, info = rb.sample(return_info=True)
            >>> rb.submit_update_priority_if_present(
            ...     index=info["index"], generation=info["index_generation"], priority=torch.rand(1, 4)
            ... ).result().num_updated
            4
            >>> rb.shutdown()
        """
        index, buffer_ids = (as_tensor(part) for part in _split(index, buffer_ids))
        handles = TensorDict({"index": index, "buffer_ids": buffer_ids}, buffer_ids.shape)
        future: Future[UpdateResult] = self.submit_update_if_present(
            index=handles, generation=generation, patch={PRIORITY: priority}
        )
        return future

    def update_if_present(self, *, index: Any, generation: Any, patch: Any, **comparison: Any) -> UpdateResult:
        """TorchRL's conditional update of stored fields by ``index`` of a sample, with an :class:`UpdateResult`.

        TorchRL's routing updates one member after the other: what a later one refuses leaves earlier ones updated.
        """
        if isinstance(patch, dict) and PRIORITY in patch:  # submitted, see above
            return self.update_priority_if_present(index=index, generation=generation, priority=patch[PRIORITY])
        self._ready()
        generation = as_generation(generation)
        shape = generation.shape
        if isinstance(index, TensorDictBase):
            ids, places = index.get("buffer_ids"), index.get("index")
            inner = min(inner_of(rb.storage) for rb in self._rbs)
            whole = len(shape) - inner
            if inner and whole > 0 and ids.shape == shape and shape[whole:].numel():
                # the sample's handles: one record, and one value of the patch, for each trajectory
                firsts = [once_each(handle, whole, len(shape)) for handle in (ids, places, generation)]
                if all(first is not None for first in firsts):
                    ids, places, generation = firsts
                    if isinstance(patch, TensorDictBase):
                        patch = patch.copy()
                        patch.batch_size = shape[:whole]
            if generation.shape != ids.shape:
                raise ValueError(
                    f"buffer_ids has shape {tuple(ids.shape)} but generation has shape {tuple(shape)}. Nothing was "
                    "updated. Pass one member per handle, both as the sample carries them."
                )
            owners = owners_of(self, ids, ids.shape, ids.device).reshape(ids.shape)
            for number in set(owners.reshape(-1).tolist()):
                self._rbs[number]._refuse_write()
            index = TensorDict({"index": places, "buffer_ids": owners}, owners.shape)
        with without_default_device():
            outcome = super().update_if_present(index=index, generation=generation, patch=patch, **comparison)

        def in_shape(mask: Any) -> Any:
            return None if mask is None else mask.reshape(*mask.shape, *(1,) * (len(shape) - mask.ndim)).expand(shape)

        return UpdateResult(in_shape(outcome.updated), in_shape(outcome.version_rejected))

    def stats(self) -> dict[str, int | float | bool]:
        """TorchRL's totals over the members, and those of their conditional updates, whoever made them."""
        if self.initialized:
            self._ready()
        stats: dict[str, int | float | bool] = super().stats()
        members = [rb.stats() for rb in {id(rb): rb for rb in self._rbs}.values()]
        for key in ("conditional_updated", "conditional_stale"):
            stats[key] = sum(member[key] for member in members)
        return stats


def _split(index: Any, buffer_ids: Any) -> tuple[Any, Any]:
    """The index within the members, and the members."""
    if isinstance(index, TensorDictBase | Mapping) and buffer_ids is None:
        missing = {"index", "buffer_ids"} - set(index.keys())
        if missing:
            raise ValueError(
                f"index has the entries {sorted(map(str, index.keys()))} and lacks {sorted(missing)}. Pass "
                "sample['index'], or info['index'], of a sample of this ensemble."
            )
        return index["index"], index["buffer_ids"]
    if buffer_ids is None or isinstance(index, TensorDictBase | Mapping):
        raise TypeError(
            f"index ({type(index).__name__}) has to come with the members of its rows, once. Pass "
            "index=sample['index'] (or info['index']), or index= and buffer_ids= of one shape."
        )
    return index, buffer_ids
