"""TorchRL's trainers with conditional priority updates: a hook, a log of stale rows, and a switch."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from tensordict import TensorDictBase

with warnings.catch_warnings():  # TorchRL's collectors warn about classes of their own
    warnings.filterwarnings("ignore", ".*inherits from WeightUpdaterBase is deprecated", DeprecationWarning)
    from torchrl.trainers import ReplayBufferTrainer, Trainer, TrainerHookBase

__all__ = ["GenerationalReplayBufferTrainer", "LogStaleUpdates", "use_conditional_updates"]

_BufferT = TypeVar("_BufferT")


def use_conditional_updates(replay_buffer: _BufferT, conditional: bool = True) -> _BufferT:
    """Has ``replay_buffer.update_tensordict_priority(sample)`` compare handles, for code that knows only this name.

    That is TorchRL's ready-made trainers (``DQNTrainer``, ``SACTrainer``, ...), its ``TD3OptimizationStepper`` and its
    hook :class:`~torchrl.trainers.ReplayBufferTrainer`: none of them has to be subclassed. It holds for hooks that
    took hold of the method before, too, and goes with copies and pickles of the buffer. The same is had by
    ``conditional_updates=True`` at construction, which is the way for a buffer made in another process
    (``RayReplayBuffer(replay_buffer_cls=..., conditional_updates=True)``).

    ``CQLTrainer`` of TorchRL 0.14.1 asks for no update at all, because it has an ``OptimizationStepper``. Give it one:
    ``trainer.register_op("post_optim_log", replay_buffer.update_tensordict_priority)``.

    Totals are in ``replay_buffer.stats()``; :class:`LogStaleUpdates` logs them. Where the sampler has no priorities,
    updates go on doing nothing. First priorities of ``add`` and ``extend`` and ``update_priority(index, priority)``,
    which carries no handles, stay as they are.

    Args:
        replay_buffer: a tensordict buffer of this package, or a
            :class:`~torchrl_generational.ray.GenerationalRayReplayBuffer` or a client of one. A class of yours that
            overrides ``update_tensordict_priority`` has to call that of its base.
        conditional: False goes back to raw indices.

    Returns:
        The buffer.

    Raises:
        TypeError: if the samples of the buffer do not carry handles as entries.

    A sample without ``index``, ``index_generation`` or the buffer's ``priority_key`` is refused by the update with a
    ``KeyError``. O(1), safe from any thread.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_generational import GenerationalLazyTensorStorage
        >>> from torchrl_generational import GenerationalTensorDictPrioritizedReplayBuffer
        >>> rb = GenerationalTensorDictPrioritizedReplayBuffer(
        ...     alpha=0.7, beta=0.5, storage=GenerationalLazyTensorStorage(8), batch_size=4
        ... )
        >>> index = use_conditional_updates(rb).extend(TensorDict({"x": torch.arange(8)}, [8]))
        >>> sample = rb.sample()
        >>> index = rb.extend(TensorDict({"x": torch.arange(8)}, [8]))  # the ring wraps
        >>> sample["td_error"] = torch.rand(4)
        >>> rb.update_tensordict_priority(sample)
        >>> rb.stats()["conditional_updated"], rb.stats()["conditional_stale"]
        (0, 4)
    """
    if not hasattr(type(replay_buffer), "conditional_updates"):
        raise TypeError(
            f"use_conditional_updates needs a buffer whose samples carry handles, got {type(replay_buffer).__name__}. "
            "Use GenerationalTensorDictPrioritizedReplayBuffer or GenerationalTensorDictReplayBuffer; where the buffer "
            "is made in another process by TorchRL's classes, pass conditional_updates=True to its constructor there."
        )
    buffer: Any = replay_buffer
    buffer.conditional_updates = conditional
    return replay_buffer


class LogStaleUpdates(TrainerHookBase):
    """Logs how many priority updates came too late, through the logger of a trainer.

    At the trainer's ``log_interval`` it logs ``num_updated``, ``num_stale`` and ``stale_fraction`` of all conditional
    updates of the buffer since it last did, whoever made them; nothing where there were none. They are read off
    ``replay_buffer.stats()`` then and only then, so that a buffer on CUDA is not waited for between logs.

    A large stale fraction says that the ring is short for the delay of the learner.

    Args:
        trainer: the trainer whose interval and logger count.
        replay_buffer: a buffer of this package, or a remote one whose ``stats()`` has the totals.

    Raises:
        TypeError: if the buffer does not count conditional updates.

    One trainer takes one such hook: a second would find the interval used up by the first. Not for several threads.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_generational import GenerationalLazyTensorStorage
        >>> from torchrl_generational import GenerationalTensorDictPrioritizedReplayBuffer
        >>> rb = GenerationalTensorDictPrioritizedReplayBuffer(
        ...     alpha=0.7, beta=0.5, storage=GenerationalLazyTensorStorage(8), batch_size=4
        ... )
        >>> trainer = Trainer(
        ...     collector=None,  # and so on
        ...     loss_module=None,
        ...     total_frames=1000,
        ...     frame_skip=1,
        ...     optim_steps_per_batch=1,
        ...     log_interval=0,
        ... )
        >>> log = LogStaleUpdates(trainer, rb)
        >>> log.register(trainer)
        >>> index = rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
        >>> rb.update_tensordict_priority_if_present(rb.sample().set("td_error", torch.rand(4))).num_updated
        4
        >>> trainer.collected_frames = 8
        >>> log()
        {'num_updated': 4, 'num_stale': 0, 'stale_fraction': 0.0}
    """

    def __init__(self, trainer: Trainer, replay_buffer: Any) -> None:
        self.trainer = trainer
        self.replay_buffer = replay_buffer
        stats = replay_buffer.stats() if hasattr(replay_buffer, "stats") else {}
        if "conditional_stale" not in stats:
            raise TypeError(
                f"LogStaleUpdates needs a buffer that counts conditional updates, got {type(replay_buffer).__name__}. "
                "Use GenerationalTensorDictPrioritizedReplayBuffer or GenerationalTensorDictReplayBuffer."
            )
        self._logged = self._totals()

    def _totals(self) -> tuple[int, int]:
        stats = self.replay_buffer.stats()
        return int(stats["conditional_updated"]), int(stats["conditional_stale"])

    def _since(self) -> tuple[int, int]:
        updated, stale = self._totals()
        return updated - self._logged[0], stale - self._logged[1]

    def _due(self) -> bool:
        """Whether the trainer would pass a value on to its logger now; it says so under no public name."""
        since: int = self.trainer.collected_frames - self.trainer._last_log.get("num_stale", 0)
        due: bool = since > self.trainer._log_interval
        return due

    def __call__(self, batch: TensorDictBase | None = None) -> dict[str, float] | None:
        """What to log now, or ``None``; the trainer calls it."""
        if not self._due():
            return None
        updated, stale = self._since()
        if not updated + stale:
            return None
        self._logged = self._logged[0] + updated, self._logged[1] + stale
        return {"num_updated": updated, "num_stale": stale, "stale_fraction": stale / (updated + stale)}

    def state_dict(self) -> dict[str, Any]:
        """What is counted and not logged yet."""
        updated, stale = self._since()
        return {"num_updated": updated, "num_stale": stale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Has the next log include what was counted and not logged then."""
        updated, stale = self._totals()
        self._logged = updated - state_dict["num_updated"], stale - state_dict["num_stale"]

    def register(self, trainer: Trainer, name: str = "log_stale_updates") -> None:
        """Has ``trainer`` call the hook after the optimization steps on each collected batch."""
        trainer.register_module(name, self)
        trainer.register_op("post_steps_log", self)


class GenerationalReplayBufferTrainer(ReplayBufferTrainer):
    """:class:`~torchrl.trainers.ReplayBufferTrainer` that updates the priorities of records that are still there.

    It collects, samples, and saves as TorchRL's hook does, and its checkpoints and those load into each other.
    ``update_priority`` goes by handles, whatever the buffer's ``conditional_updates`` says. A buffer whose sampler has
    no priorities is not updated, as in TorchRL.

    Args:
        replay_buffer: a tensordict buffer of this package, or a remote one that has
            ``update_tensordict_priority_if_present``.
        *args: the others of TorchRL's hook, in their order: ``batch_size``, ``memmap``, ``device``,
            ``flatten_tensordicts``, ``max_dims``, ``iterate``.
        **kwargs: the same by name.

    Raises:
        TypeError: if the buffer cannot compare handles.

    Used on the trainer's thread; the buffer may be written to by others.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_generational import GenerationalLazyTensorStorage
        >>> from torchrl_generational import GenerationalTensorDictPrioritizedReplayBuffer
        >>> rb = GenerationalTensorDictPrioritizedReplayBuffer(
        ...     alpha=0.7, beta=0.5, storage=GenerationalLazyTensorStorage(8), batch_size=4
        ... )
        >>> hook = GenerationalReplayBufferTrainer(rb, flatten_tensordicts=True)  # and hook.register(trainer)
        >>> collected = TensorDict({"x": torch.arange(8), "next": {}}, [8])
        >>> collected = hook.extend(collected)
        >>> sample = hook.sample(collected)
        >>> collected = hook.extend(collected)  # the ring wraps
        >>> hook.update_priority(sample.set("td_error", torch.rand(4)))
        >>> rb.stats()["conditional_stale"]
        4
    """

    _log: LogStaleUpdates | None = None

    def __init__(self, replay_buffer: Any, *args: Any, **kwargs: Any) -> None:
        if not callable(getattr(replay_buffer, "update_tensordict_priority_if_present", None)):
            raise TypeError(
                f"{type(self).__name__} needs a buffer that updates priorities by handles, got "
                f"{type(replay_buffer).__name__}. Use GenerationalTensorDictPrioritizedReplayBuffer or "
                "GenerationalTensorDictReplayBuffer, or TorchRL's ReplayBufferTrainer."
            )
        super().__init__(replay_buffer, *args, **kwargs)

    def update_priority(self, batch: TensorDictBase) -> None:
        """Updates the priorities of the records of ``batch`` that are still in their slots.

        Raises:
            KeyError: if ``batch`` lacks ``index``, ``index_generation`` or the buffer's ``priority_key``, as where a
                hook behind ``sample`` or a transform left it out.
            TypeError, ValueError, IndexError: as ``update_tensordict_priority_if_present``.
        """
        if getattr(self.replay_buffer, "keeps_priorities", True):
            self.replay_buffer.update_tensordict_priority_if_present(batch)

    def state_dict(self) -> dict[str, Any]:
        """The state of TorchRL's hook, with what :class:`LogStaleUpdates` has not logged yet."""
        state: dict[str, Any] = super().state_dict()
        if self._log is not None:
            state["stale_updates"] = self._log.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over :meth:`state_dict`, or that of TorchRL's hook."""
        super().load_state_dict(state_dict)
        if self._log is not None and "stale_updates" in state_dict:
            self._log.load_state_dict(state_dict["stale_updates"])

    def register(self, trainer: Trainer, name: str = "replay_buffer") -> None:
        """Has ``trainer`` collect into the buffer, sample from it, update priorities, and log what was stale.

        Priorities are updated after the optimizer's step, at ``post_optim_log``: TorchRL calls ``post_loss``, which it
        is about to give up, only in trainers without an ``OptimizationStepper``. By hand either stage will do:
        ``trainer.register_op("post_loss", hook.update_priority)``.

        Raises:
            RuntimeError: if the trainer's ``OptimizationStepper`` updates this buffer by raw index, or its learners are
                in other processes (``learner_backend="ray"``), which sample and update without hooks.
        """
        if getattr(trainer, "learner_backend", "local") != "local":
            raise RuntimeError(
                f"{type(self).__name__} samples and updates in the trainer's process, and this trainer learns in "
                "others. Give the trainer the buffer, call "
                "torchrl_generational.trainer.use_conditional_updates(replay_buffer), and register "
                "LogStaleUpdates(trainer, replay_buffer)."
            )
        stepper = trainer.optimization_stepper
        updates = getattr(stepper, "updates_replay_priority", False)
        updated = updates and _is_one(trainer.replay_buffer, self.replay_buffer)
        # a client of TorchRL's has a function under every name
        if updated and getattr(self.replay_buffer, "conditional_updates", False) is not True:
            raise RuntimeError(
                f"{type(stepper).__name__} updates priorities itself, by raw index. Call "
                "torchrl_generational.trainer.use_conditional_updates(replay_buffer) first."
            )
        log = LogStaleUpdates(trainer, self.replay_buffer)
        trainer.register_module(name, self)
        trainer.register_op("batch_process", self.extend)
        trainer.register_op("process_optim_batch", self.sample)
        if not updated:
            trainer.register_op("post_optim_log", self.update_priority)
        trainer.register_op("post_steps_log", log)
        self._log = log


def _is_one(buffer: Any, other: Any) -> bool:
    """Whether two buffers are the same, also where they are clients of one in an actor."""
    if buffer is other:
        return True
    actor = getattr(buffer, "_actor", None)
    return actor is not None and actor == getattr(other, "_actor", None)
