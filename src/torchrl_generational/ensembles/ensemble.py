"""An ensemble of buffers: each row of a batch says which member it is from, and its TD error goes back to that one."""

from __future__ import annotations

import contextlib
from concurrent.futures import wait
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import ReplayBufferEnsemble
from torchrl.data.replay_buffers.storages.utils import _collate_id, _stack_anything
from torchrl.data.replay_buffers.utils import pin_memory_output

from torchrl_generational.buffers.copies import copied, frozen_ensemble, still, take_moment
from torchrl_generational.buffers.mixin import GenerationalReplayBufferMixin
from torchrl_generational.buffers.ready_made import GenerationalReplayBuffer
from torchrl_generational.buffers.waiters import WakesWaiters
from torchrl_generational.buffers.work_in_flight import drop_failed_batches, drop_prefetched
from torchrl_generational.concurrency.process_lock import renew_in_forked_children
from torchrl_generational.concurrency.write_access import refuse_left_behind
from torchrl_generational.ensembles.checkpoints import EnsembleCheckpoints
from torchrl_generational.ensembles.draws import Draw, attached, follow_parts, on_first
from torchrl_generational.ensembles.routed_writes import Routed
from torchrl_generational.ensembles.updates import EnsembleUpdates
from torchrl_generational.records.row_tracking import steps_of
from torchrl_generational.tensors.default_devices import without_default_device

__all__ = ["GenerationalReplayBufferEnsemble"]


class GenerationalReplayBufferEnsemble(
    WakesWaiters,
    EnsembleCheckpoints,
    EnsembleUpdates,
    ReplayBufferEnsemble,
):
    """:class:`~torchrl.data.ReplayBufferEnsemble` whose samples carry handles, and which routes priorities back.

    A sample has three entries per row: ``("index", "buffer_ids")`` says which member the record is from,
    ``("index", "index")`` and ``"index_generation"`` are its handle there. Data that are no tensordict have them in
    the info. Rows keep them through collation and transforms, whatever shape these give the batch. Rows of members
    that draw without priorities weigh 1.

    Each member is one critical section, for a draw as for an update; a batch over several members is not one: another
    thread may write to a member between the sections of two. Routed writes (``routing_key``, ``routing_dim``),
    ``empty``, checkpoints and restores are one section over all members.

    Args:
        *rbs: the members, buffers of this package.
        storages: a :class:`~torchrl.data.replay_buffers.StorageEnsemble`, with ``samplers`` and ``writers`` instead
            of ``rbs``.
        samplers: a :class:`~torchrl.data.replay_buffers.SamplerEnsemble`.
        writers: a :class:`~torchrl.data.replay_buffers.WriterEnsemble`.
        collate_fns: one per member.
        **kwargs: the others of the TorchRL class.

    Raises:
        TypeError: if a member is no buffer of this package, is an ensemble itself, or has a sample unit.
        ValueError: if members have storages of different ``ndim``, or for ``shared=True``.

    Thread safety: all methods may be called from any thread. Lock order: futures locks, the ensemble's lock, the locks
    of the members' storages. Process safety: the ensemble stays in its process; its members may be shared.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_generational import GenerationalLazyTensorStorage
        >>> from torchrl_generational import GenerationalTensorDictPrioritizedReplayBuffer
        >>> new, old = (
        ...     GenerationalTensorDictPrioritizedReplayBuffer(
        ...         alpha=0.7, beta=0.5, storage=GenerationalLazyTensorStorage(8)
        ...     )
        ...     for _ in range(2)
        ... )
        >>> rb = GenerationalReplayBufferEnsemble(new, old, sample_from_all=True, batch_size=8)
        >>> index = new.extend(TensorDict({"x": torch.arange(8)}, [8]))
        >>> index = old.extend(TensorDict({"x": torch.arange(8)}, [8]))
        >>> sample = rb.sample()
        >>> sample["index", "buffer_ids"]
        tensor([[0, 0, 0, 0],
                [1, 1, 1, 1]])
        >>> index = new.extend(TensorDict({"x": torch.arange(8)}, [8]))  # the ring of the first member wraps
        >>> sample["td_error"] = torch.rand(2, 4)
        >>> rb.update_tensordict_priority_if_present(sample)
        UpdateResult(num_updated=4, num_stale=4, num_rejected=0, shape=(2, 4))
    """

    def __init__(
        self,
        *rbs: Any,
        storages: Any = None,
        samplers: Any = None,
        writers: Any = None,
        collate_fns: Any = None,
        **kwargs: Any,
    ) -> None:
        given = (storages, samplers, writers)
        if (None in given) if not rbs else given != (None, None, None):
            raise TypeError(
                f"{type(self).__name__} is made of buffers, or of storages, samplers and writers together, got "
                f"{len(rbs)} buffers and {3 - given.count(None)} of the three."
            )
        self._collated_by_members = collate_fns is None
        if not rbs:
            rbs = _members_of(storages, samplers, writers, collate_fns)
            self._given = given
            for name in ("p", "sample_from_all", "num_buffer_sampled"):
                kwargs[name] = getattr(samplers, name)  # TorchRL's goes by those of the sampler, too
        self._check_members(rbs)
        super().__init__(*rbs, collate_fns=collate_fns, **kwargs)
        renew_in_forked_children(self, "_renew_locks")
        if self.initialized:
            self._adopt()

    def _check_members(self, rbs: tuple[Any, ...]) -> None:
        name = type(self).__name__
        for number, rb in enumerate(rbs):
            if not isinstance(rb, GenerationalReplayBufferMixin):
                nested = isinstance(rb, ReplayBufferEnsemble)
                raise TypeError(
                    f"{name} needs members whose samples carry generations, got {type(rb).__name__} as member "
                    f"{number}. "
                    + (
                        "Ensembles do not nest: pass its members themselves."
                        if nested
                        else "Use GenerationalReplayBuffer, GenerationalTensorDictReplayBuffer, "
                        "GenerationalPrioritizedReplayBuffer or GenerationalTensorDictPrioritizedReplayBuffer, or put "
                        "GenerationalReplayBufferMixin in front of your class."
                    )
                )
            if rb._sample_unit is not None:
                raise TypeError(
                    f"{name} draws by the samplers of its members, and member {number} has a sample_unit, which that "
                    "leaves out. Use a slice sampler there, or sample that buffer on its own."
                )
        dimensions = [rb.storage.ndim for rb in rbs]
        if len(set(dimensions)) > 1:
            raise ValueError(
                f"{name} puts the indices of its members into one tensor, and their storages have ndim={dimensions}. "
                "Use storages of one ndim."
            )

    def _synchronize_futures_locked(self) -> None:
        wait(self._prefetch_queue)
        drop_failed_batches(self)
        super()._synchronize_futures_locked()

    # ---------------------------------------------------------------- sampling

    def sample(self, batch_size: int | None = None, return_info: bool = False, **waiting: Any) -> Any:
        """Draws a batch; see TorchRL's ``sample``. Prefetched draws that failed are drawn again."""
        self._ready()
        if self._prefetch:
            with self._futures_lock:
                wait((*self._prefetch_queue,)[:1])  # the next one
                drop_failed_batches(self)
        return super().sample(batch_size, return_info, **waiting)

    @pin_memory_output  # type: ignore[untyped-decorator]
    def _sample(self, batch_size: int) -> tuple[Any, TensorDictBase]:
        drawn = Draw(self._rbs)
        with without_default_device(self._replay_lock):  # one generator for all members
            twin = drawn.sampler(self._sampler)
            found, _ = twin.sample(self._storage, batch_size)
            drawn.keep(twin, self._sampler)
        chunks, places = [], []
        for number, place in zip(found["buffer_ids"].tolist(), drawn.places(found["index"]), strict=True):
            data = drawn.records(place)
            transforms = self._storage._transforms
            for step in (*steps_of(transforms and transforms[number]), self._collate_fns[number]):
                if step is not _collate_id:
                    data, place = follow_parts([data], [place], partial(on_first, step))
            chunks.append(data)
            places.append(place)
        collate = self._collate_fn_val
        if collate is not _stack_anything:
            data, place = follow_parts(chunks, places, collate)
        elif len({place.shape for place in places}) == 1:
            data, place = collate(chunks), torch.stack(places)
        else:
            raise RuntimeError(
                f"The members gave parts of shapes {[tuple(place.shape) for place in places]}, which do not stack. "
                "Build the ensemble with collate_fn=torch.cat, or have the members draw parts of one length."
            )
        for step in steps_of(self._transform):
            data, place = follow_parts([data], [place], partial(on_first, step))
        info = drawn.info(place)
        return attached(data, info), info

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether the members can serve a batch; see TorchRL's ``can_sample``."""
        self._ready()
        wanted = self._batch_size if batch_size is None else batch_size
        if wanted is None:
            return bool(super().can_sample(wanted))  # refuses
        with self._replay_lock:
            return bool(Draw(self._rbs).sampler(self._sampler).can_sample(self._storage, wanted))

    def __getitem__(self, index: Any) -> Any:
        """A member, an ensemble of some of them, or records of theirs; see TorchRL's."""
        self._ready()
        with self._locked() if isinstance(index, tuple) else contextlib.nullcontext():
            found = super().__getitem__(index)
        if type(found) is not ReplayBufferEnsemble:
            return found
        return type(self)(
            *found._rbs,
            transform=self._transform,
            batch_size=self._batch_size,
            collate_fn=self._collate_fn_val,
            collate_fns=found._collate_fns,
            p=found._sampler.p,
            sample_from_all=found._sampler.sample_from_all,
            num_buffer_sampled=found._sampler.num_buffer_sampled,
            generator=self._rng,
        )

    # ---------------------------------------------------------------- writing

    def extend(self, data: Any, *, update_priority: bool | None = None) -> TensorDictBase:
        """Routes a batch to the members, and returns the handles of its records; see TorchRL's.

        One section over all members, so that the handles are those of the records written here.
        """
        self._ready()
        if update_priority is None:
            flat, buffer_ids = self._route(data)  # user code, possibly slow: before the locks, as in TorchRL
            routed = Routed(self._rbs, flat, buffer_ids)
            with self._locked():
                routed.check()
                return super().extend(routed)
        return super().extend(data, update_priority=update_priority)

    def _route(self, data: Any) -> Any:
        return (data, data.buffer_ids) if isinstance(data, Routed) else super()._route(data)

    def empty(self, empty_write_count: bool = True) -> None:
        """Empties all members in one section: every handle is stale and prefetched batches are dropped."""
        self._ready()
        self._refuse_write()
        with self._still(errors=False):
            drop_prefetched(self)
            for rb in self._rbs:
                rb.empty(empty_write_count)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Sets the generator that members are drawn with; see TorchRL's."""
        if self._made:
            for rb in self._rbs:
                refuse_left_behind(rb._replay_lock)
        super().set_rng(generator)

    def end_streams(self, **kwargs: Any) -> None:
        """Closes each member's stream; see TorchRL's."""
        self._ready()
        self._refuse_write()
        with self._still():
            super().end_streams(**kwargs)

    # ---------------------------------------------------------------- parts and processes

    def _refuse_exchange(self, part: Any, *args: Any) -> Any:
        raise RuntimeError(
            f"{type(self).__name__} draws, writes and updates with the parts of its members. Exchange a member's "
            "(ensemble[i].set_sampler(...), set_writer, set_storage), set ensemble.sampler.p, or build another one."
        )

    set_storage = set_sampler = set_writer = _refuse_exchange

    def share(self, shared: bool = True) -> Any:
        """Refuses to share the ensemble: share its members instead.

        Raises:
            ValueError: for ``shared=True``.
        """
        if shared:
            raise ValueError(_NOT_SHARED)
        return super().share(shared)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise ValueError(_NOT_SHARED)
        if not self._made:
            self._ready()
        with self._still():
            state: dict[str, Any] = super().__getstate__()
            frozen_ensemble(self, state)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._ready()
        with self._futures_lock:
            self._synchronize_futures_locked()
        with still([self, *self._rbs]):
            return copied(self, memo)

    def __setstate__(self, state: dict[str, Any]) -> None:
        take_moment(state)
        super().__setstate__(state)
        self._ready()
        renew_in_forked_children(self, "_renew_locks")


_NOT_SHARED = (
    "An ensemble stays in the process that samples and updates. Share its members, member.share(), before or after it "
    "is made; hand those to the processes that write, and keep the ensemble here."
)


def _members_of(storages: Any, samplers: Any, writers: Any, collate_fns: Any) -> tuple[Any, ...]:
    """Buffers of the parts that TorchRL's ensembles can be made of."""
    count = len(storages._storages)
    return tuple(
        GenerationalReplayBuffer(
            storage=storage,
            sampler=sampler,
            writer=writer,
            transform=transform,
            collate_fn=collate_fn,
            checkpointer=storage.checkpointer,
        )
        for storage, sampler, writer, transform, collate_fn in zip(
            storages._storages,
            samplers._samplers,
            writers._writers,
            storages._transforms or [None] * count,
            collate_fns or [None] * count,
            strict=True,
        )
    )
