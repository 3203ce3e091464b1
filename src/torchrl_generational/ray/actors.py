"""A generational buffer in a Ray actor, and the clients that share it. Needs the extra ``ray``."""

from __future__ import annotations

import pickle
import secrets
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

try:
    import ray
except ImportError as error:
    raise ImportError(
        'torchrl_generational.ray needs Ray, which is not installed. Run: pip install "torchrl-generational[ray]"'
    ) from error

import torch
from tensordict import is_tensor_collection
from torchrl.data.replay_buffers import ReplayBuffer
from torchrl.data.replay_buffers.ray_buffer import (
    RayReplayBuffer,
    _LazyDistributedReplayClient,
    _RayReplayBufferClient,
)

from torchrl_generational.buffers.mixin import GenerationalReplayBufferMixin
from torchrl_generational.buffers.ready_made import GenerationalReplayBuffer
from torchrl_generational.generations.slot_generations import GENERATION_KEY
from torchrl_generational.generations.update_result import UpdateResult
from torchrl_generational.persistence.serialization import like
from torchrl_generational.priorities.td_errors import as_sample
from torchrl_generational.ray.closed import ClosedError, Life, WhileOpen, check_open

__all__ = ["GenerationalRayReplayBuffer", "in_actor", "served"]

if TYPE_CHECKING:
    _Buffer = ReplayBuffer
else:
    _Buffer = object
_LATEST_START = 2**28  # leaves room for more than 50000 restores

#: What an update reads of a sample besides its priorities; the records stay where they are.
_HANDLES = ("index", GENERATION_KEY)
_ANCHORS = ("anchor_index", "anchor_generation", "validity_mask")


class _InActor(_Buffer):
    """Stands in front of a buffer class in the actor that holds the buffer."""

    _refusal: tuple[str, bytes | None] | None = None

    def __init__(self, *args: Any, delayed_init: bool = False, _hold_refusal: bool = False, **kwargs: Any) -> None:
        if delayed_init:  # Ray buffers always pass it, and TorchRL's prioritized buffers do not take it
            kwargs["delayed_init"] = True
        try:
            super().__init__(*args, **kwargs)
        except Exception as error:
            if not _hold_refusal or ray.get_runtime_context().was_current_actor_reconstructed:
                raise  # nobody asks for it
            self._refusal = _packed(error)  # raised, Ray would tell the caller that the actor died

    def __repr__(self) -> str:
        # Ray shows it with the error of a constructor, when there is nothing to show yet
        return super().__repr__() if "_storage" in vars(self) else f"{type(self).__name__}(not made)"

    def _init(self) -> None:
        fresh = not self._initialized
        super()._init()
        if fresh:
            # Ray restarts an actor with the arguments of before. The timeline starts anywhere, so that no handle of
            # the actor that died names a record of this one.
            with self._storage.lock:
                generations = self._storage.slot_generations
                generations.begin_incarnation(after=secrets.randbelow(_LATEST_START))
                generations.invalidate()

    # What returns the buffer would send a copy of it.

    def append_transform(self, *args: Any, **kwargs: Any) -> None:
        super().append_transform(*args, **kwargs)

    def insert_transform(self, *args: Any, **kwargs: Any) -> None:
        super().insert_transform(*args, **kwargs)

    def share(self, *args: Any, **kwargs: Any) -> None:
        super().share(*args, **kwargs)


def _packed(error: Exception) -> tuple[str, bytes | None]:
    """What an error says, and the error itself if it can travel."""
    said = f"{type(error).__name__}: {error}"
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:
        return said, None
    return said, packed


def in_actor(cls: type[ReplayBuffer]) -> type[ReplayBuffer]:
    """The class of which an actor makes a buffer of ``cls``.

    Its buffers begin at a random incarnation: an actor that Ray restarts makes every handle stale that was taken from
    the one before it, until a checkpoint is loaded.

    Raises:
        TypeError: if ``cls`` has no generations.

    Example:
        >>> from torchrl_generational import GenerationalReplayBuffer
        >>> in_actor(GenerationalReplayBuffer)().storage.slot_generations.incarnation > 0
        True
    """
    if not (isinstance(cls, type) and issubclass(cls, GenerationalReplayBufferMixin)):
        raise TypeError(
            f"replay_buffer_cls must be a generational buffer class, got {getattr(cls, '__name__', cls)}. Use "
            "GenerationalReplayBuffer, GenerationalTensorDictReplayBuffer, GenerationalPrioritizedReplayBuffer or "
            "GenerationalTensorDictPrioritizedReplayBuffer, or put GenerationalReplayBufferMixin in front of it."
        )
    return cls if issubclass(cls, _InActor) else type(cls.__name__, (_InActor, cls), {})


def served(
    cls: type[ReplayBuffer], *args: Any, service_backend_options: dict[str, Any] | None = None, **kwargs: Any
) -> GenerationalRayReplayBuffer:
    """The buffer that ``cls(*args, service_backend="ray", **kwargs)`` makes.

    Raises:
        TypeError: if ``service_backend_options`` has other entries than ``ray_init_config`` and ``remote_config``.
    """
    options = dict(service_backend_options or {})
    known = {name: options.pop(name, None) for name in ("ray_init_config", "remote_config")}
    if options:
        raise TypeError(
            f"Unexpected Ray replay-buffer service options: {sorted(options)}. This backend has ray_init_config and "
            "remote_config; what Ray shall give the actor belongs into the second."
        )
    return GenerationalRayReplayBuffer(*args, replay_buffer_cls=cls, **known, **kwargs)


def _start(remote_class: Any, *args: Any, **kwargs: Any) -> Any:
    """An actor with its buffer; raises what the buffer's constructor raised."""
    actor = remote_class.remote(*args, _hold_refusal=True, **kwargs)
    refusal = ray.get(actor._getattr.remote("_refusal"))
    if refusal is not None:
        ray.kill(actor, no_restart=True)
        said, packed = refusal
        raise RuntimeError(said) if packed is None else pickle.loads(packed)
    return actor


class _ConditionalCalls:
    """The conditional updates of the buffer and its clients: one message to the actor, one answer."""

    _actor: Any
    _life: Life = Life()
    has_gpu: bool
    _known_priority_key: Any = None
    _known_to_keep_priorities: bool | None = None

    def update_priority_if_present(self, *, index: Any, generation: Any, priority: Any) -> UpdateResult:
        """The buffer's ``update_priority_if_present``, in its actor: compared and updated there in one section.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: as the buffer's (Ray derives a class from both its own
                error and that one).
            ray.exceptions.RayActorError: if the actor died or is being restarted.
        """
        result: UpdateResult = ray.get(self._update_priority(index, generation, priority))
        return result

    def submit_update_priority_if_present(self, *, index: Any, generation: Any, priority: Any) -> Future[UpdateResult]:
        """:meth:`update_priority_if_present` without waiting for it.

        The arguments are copied before this returns. The actor takes the calls of one process in the order in which
        they were made, so a later ``sample`` sees the priorities (not with Ray's ``max_concurrency`` above 1).

        Returns:
            A future of the :class:`~torchrl_generational.UpdateResult`; its ``result()`` raises what the call would.
        """
        future: Future[UpdateResult] = self._update_priority(index, generation, priority).future()
        return future

    def update_tensordict_priority_if_present(self, data: Any) -> UpdateResult:
        """The buffer's ``update_tensordict_priority_if_present``; only handles and priorities travel."""
        result: UpdateResult = ray.get(self._update_entries(data))
        return result

    def submit_update_tensordict_priority_if_present(self, data: Any) -> Future[UpdateResult]:
        """:meth:`update_tensordict_priority_if_present` without waiting for it."""
        future: Future[UpdateResult] = self._update_entries(data).future()
        return future

    def update_if_present(self, *, index: Any, generation: Any, patch: Any, **comparison: Any) -> UpdateResult:
        """The buffer's ``update_if_present``, in its actor; see there for the keyword arguments."""
        result: UpdateResult = ray.get(self._update_fields(index, generation, patch, comparison))
        return result

    def submit_update_if_present(
        self, *, index: Any, generation: Any, patch: Any, **comparison: Any
    ) -> Future[UpdateResult]:
        """:meth:`update_if_present` without waiting for it."""
        future: Future[UpdateResult] = self._update_fields(index, generation, patch, comparison).future()
        return future

    def stats(self, **_: Any) -> dict[str, int | float | bool]:
        """The buffer's ``stats``, with the totals of the conditional updates of all clients."""
        stats: dict[str, int | float | bool] = ray.get(self._actor.stats.remote())
        return stats

    @property
    def priority_key(self) -> Any:
        """Entry of a sample that holds its TD errors; that of the buffer's construction."""
        if self._known_priority_key is None:
            self._known_priority_key = ray.get(self._actor._getattr.remote("priority_key"))
        return self._known_priority_key

    @property
    def conditional_updates(self) -> bool:
        """Whether ``update_tensordict_priority`` of the buffer in the actor compares handles; may be set.

        Raises:
            TypeError: if it is set, and the samples of that buffer do not carry handles as entries.
        """
        try:
            return bool(ray.get(self._actor._getattr.remote("conditional_updates")))
        except AttributeError:
            return False

    @conditional_updates.setter
    def conditional_updates(self, conditional: bool) -> None:
        try:
            ray.get(self._actor._getattr.remote("conditional_updates"))
        except AttributeError as error:
            raise TypeError(
                "The samples of the buffer in the actor do not carry handles as entries. Make it with "
                "replay_buffer_cls=GenerationalTensorDictReplayBuffer or GenerationalTensorDictPrioritizedReplayBuffer."
            ) from error
        ray.get(self._actor._setattr.remote("conditional_updates", conditional))

    @property
    def keeps_priorities(self) -> bool:
        """Whether the buffer in the actor draws by priority, as it did when this was first asked."""
        if self._known_to_keep_priorities is None:
            self._known_to_keep_priorities = bool(ray.get(self._actor._getattr.remote("keeps_priorities")))
        return self._known_to_keep_priorities

    def share(self, shared: bool = True) -> Any:
        """Nothing, and returns this object: all who have a client share the buffer already."""
        check_open(self)
        return self

    def _update_priority(self, index: Any, generation: Any, priority: Any) -> Any:
        sent = self._sent({"index": index, "generation": generation, "priority": priority})
        return self._actor.update_priority_if_present.remote(**sent)

    def _update_fields(self, index: Any, generation: Any, patch: Any, comparison: dict[str, Any]) -> Any:
        sent = self._sent({"index": index, "generation": generation, "patch": patch, **comparison})
        return self._actor.update_if_present.remote(**sent)

    def _update_entries(self, data: Any) -> Any:
        update = getattr(self._actor, "update_tensordict_priority_if_present", None)
        if update is None:
            raise AttributeError(
                "The buffer in the actor has no update_tensordict_priority_if_present. Make it with "
                "replay_buffer_cls=GenerationalTensorDictReplayBuffer or GenerationalTensorDictPrioritizedReplayBuffer."
            )
        data = as_sample(data, f"{type(self).__name__.lstrip('_')}.update_tensordict_priority_if_present")
        needed = (*_HANDLES, self.priority_key)
        if all(key in data.keys(True) for key in needed):
            data = data.select(*needed, *_ANCHORS, strict=False)
        return update.remote(self._sent(data))

    def _sent(self, value: Any) -> Any:
        """``value`` as it can travel: without what it is a view of, on a device that the actor has."""
        if isinstance(value, dict):
            return {key: self._sent(entry) for key, entry in value.items()}
        if isinstance(value, tuple | list):
            return like(value, map(self._sent, value))
        if is_tensor_collection(value) or isinstance(value, torch.Tensor):
            # pickle takes all of the memory that a tensor is a view of
            return value.clone() if self.has_gpu else value.to("cpu").clone()
        return value


class _Client(_ConditionalCalls, _RayReplayBufferClient):
    """A client that sends everything through Ray."""

    _actor = WhileOpen()


class _DistributedClient(_ConditionalCalls, _LazyDistributedReplayClient):
    """A client that sends records over ``torch.distributed``, and the small conditional updates through Ray."""

    has_gpu = False
    _actor, _control_client = WhileOpen(), WhileOpen()
    _extend_client, _sample_client, _priority_client = WhileOpen(), WhileOpen(), WhileOpen()


class GenerationalRayReplayBuffer(_ConditionalCalls, RayReplayBuffer):
    """:class:`~torchrl.data.RayReplayBuffer` with generations: one buffer in an actor, any number of clients.

    This object and every :meth:`client` of it (picklable: pass them to tasks and actors on any node) write, sample and
    update. A TD error reaches the record that it was computed for, or none, whatever other clients did meanwhile.

    An actor that dies loses its records. If Ray restarts it (``remote_config={"max_restarts": ...}``), calls raise
    ``ray.exceptions.RayActorError`` until it is back, empty, and every handle from before is stale. ``loads`` or
    ``load_state_dict`` of a checkpoint, before anything is written to it, makes those handles live again whose records
    are in the checkpoint. ``dumps`` and ``loads`` take a path on the actor's node.

    Args:
        *args: those of ``replay_buffer_cls``.
        replay_buffer_cls: a generational buffer class; defaults to
            :class:`~torchrl_generational.GenerationalReplayBuffer`.
        **kwargs: TorchRL's ``ray_init_config``, ``remote_config``, ``transport``, ``transport_options`` and
            ``delayed_init``, and those of ``replay_buffer_cls``. Pass storage and sampler as callables
            (``functools.partial``), so that they are made in the actor, and a transform as ``transform_factory``.
            With ``transport="distributed"`` conditional updates go through Ray all the same.

    Raises:
        TypeError: if ``replay_buffer_cls`` has no generations.
        Exception: what the constructor of ``replay_buffer_cls`` raises in the actor; the actor is ended then.

    Thread safety: all methods may be called from any thread. Each is one message to the actor and one answer.

    Example:
        >>> from functools import partial
        >>> from tensordict import TensorDict
        >>> from torchrl_generational import GenerationalLazyTensorStorage
        >>> from torchrl_generational import GenerationalTensorDictPrioritizedReplayBuffer
        >>> rb = GenerationalRayReplayBuffer(
        ...     replay_buffer_cls=GenerationalTensorDictPrioritizedReplayBuffer,
        ...     alpha=0.7,
        ...     beta=0.5,
        ...     storage=partial(GenerationalLazyTensorStorage, 8),
        ...     batch_size=4,
        ...     ray_init_config={"num_cpus": 1, "include_dashboard": False},
        ...     remote_config={"num_cpus": 0},
        ... )
        >>> index = rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
        >>> client = rb.client()  # for other tasks and actors
        >>> sample = client.sample()
        >>> sample["td_error"] = torch.rand(4)
        >>> client.update_tensordict_priority_if_present(sample)
        UpdateResult(num_updated=4, num_stale=0, num_rejected=0, shape=(4,))
        >>> rb.close()
    """

    def __init__(
        self, *args: Any, replay_buffer_cls: type[ReplayBuffer] = GenerationalReplayBuffer, **kwargs: Any
    ) -> None:
        served: Any = in_actor(replay_buffer_cls)
        self._life = Life()
        # all that TorchRL asks of it is as_remote(...).remote(...)
        starter = SimpleNamespace(
            as_remote=lambda config: SimpleNamespace(remote=partial(_start, served.as_remote(config)))
        )
        super().__init__(*args, replay_buffer_cls=starter, **kwargs)
        self._service_cls = replay_buffer_cls  # what isinstance goes by
        self._client = self.client()

    _rb, _client = WhileOpen(ClosedError), WhileOpen(ClosedError)  # TorchRL's

    @property
    def _actor(self) -> Any:
        check_open(self)
        return self._rb

    def close(self) -> None:
        """Ends the actor, and its buffer with it; whatever this object and its clients are asked next is refused."""
        if not ray.is_initialized() and "_rb" in vars(self):  # it went with Ray
            del self._rb
            self._runtime_lease.release()
        try:
            super().close()
        finally:
            self._life.closed = True

    def client(self) -> Any:
        """A picklable object with the methods of the buffer, for other tasks, actors and processes of the cluster.

        It cannot end the actor. Besides what this class has, it forwards every public method of the buffer.

        Raises:
            RuntimeError: if this buffer is closed.
        """
        client: Any
        if self.transport_kind == "distributed":
            client = _DistributedClient(self._actor, batch_size=self._distributed_batch_size)
        else:
            client = _Client(self._actor, has_gpu=self.has_gpu)
        client._life = self._life
        return client

    def append_transform(self, *args: Any, **kwargs: Any) -> GenerationalRayReplayBuffer:
        """Appends a transform to the buffer in the actor; returns this object."""
        super().append_transform(*args, **kwargs)
        return self

    def insert_transform(self, *args: Any, **kwargs: Any) -> GenerationalRayReplayBuffer:
        """Inserts a transform into the buffer in the actor; returns this object."""
        super().insert_transform(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        check_open(self, ClosedError)
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}: the buffer is in an actor. A client() has its other public "
            "methods; its parts (storage, sampler, writer) cannot be reached."
        )

    def __repr__(self) -> str:
        state = f"transport={self.transport_kind!r}" if self.is_alive else "closed"
        return f"{type(self).__name__}({self._service_cls.__name__}, {state})"
