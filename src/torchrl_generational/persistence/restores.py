"""Taking over a saved state: everything of it, or nothing.

Whatever is saved is read and checked first, beside what is there. Parts that can only load themselves (samplers,
transforms, storages that are TorchRL's or a user's) do that next, each with the way back at hand. The rest is put in
place by steps that can be taken again wherever they were left: from then on the way is forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers.samplers import ConsumingSampler, SamplerWithoutReplacement

from torchrl_generational.persistence.reading import is_count, read_json, reading
from torchrl_generational.persistence.serialization import from_plain, unshared

__all__ = ["PREFETCHED", "Plan", "QueueMisfitError", "Rest", "Saved", "carry_out", "fitting", "load_part"]

PREFETCHED = "_generational_prefetched"  # the queue of prefetched batches, which TorchRL keeps as objects

_LIKE = "Nothing was loaded. Load it into a buffer like the one that it was saved from."


_NOT_GIVEN = object()


class Saved(NamedTuple):
    """Where the state of a part comes from: what its ``state_dict`` gave, or the folder that its ``dumps`` wrote."""

    state: Any = _NOT_GIVEN
    folder: Path | None = None

    @property
    def nothing(self) -> bool:
        """Whether there is none: a member of an ensemble that had no records."""
        return self.folder is None and self.state is _NOT_GIVEN


class QueueMisfitError(ValueError, RuntimeError):
    """A queue of prefetched batches does not fit. TorchRL raises a RuntimeError there, which this is too."""


class Plan:
    """What one load is going to change, collected while everything is read and checked."""

    __slots__ = ("_back", "_discards", "_last", "_loads", "_steps", "_through")

    def __init__(self) -> None:
        self._last: list[Callable[[], None]] = []
        self._loads: list[tuple[Callable[[], Callable[[], None]], Callable[[], None]]] = []
        self._steps: list[Callable[[], None]] = []
        self._discards: list[Callable[[], None]] = []
        self._back: list[Callable[[], None]] = []
        self._through = False

    def install(self, step: Callable[[], None], *, last: bool = False) -> None:
        """Adds a step that puts in place what is ready. It can be taken again wherever it was left.

        Args:
            step: the step.
            last: whether it comes after all that are not, because it goes by what they have put in place.
        """
        (self._last if last else self._steps).append(step)

    def load(self, keep: Callable[[], Callable[[], None]], load: Callable[[], None]) -> None:
        """Adds a part that loads itself.

        Args:
            keep: keeps the part's state and returns the way back to it.
            load: may raise, and leave the part half loaded.
        """
        self._loads.append((keep, load))

    def discard(self, what: Callable[[], None]) -> None:
        """Adds what there is to clear away if nothing is loaded."""
        self._discards.append(what)

    def go(self) -> None:
        """Loads the parts, then takes the steps."""
        for keep, load in self._loads:
            self._back.append(keep())
            load()
        self._through = True
        self.end()

    def end(self) -> None:
        """Ends what was begun: forward where all parts have loaded, else back."""
        steps = [*self._steps, *self._last] if self._through else [*reversed(self._back), *self._discards]
        for step in steps:
            step()


def carry_out(make: Callable[[Plan], None]) -> None:
    """Makes a plan and carries it out. Whatever raises, and wherever, all of it is in place afterwards, or nothing.

    Args:
        make: reads and checks what is to be loaded, and changes nothing.
    """
    plan = Plan()
    try:
        make(plan)
        plan.go()
    except BaseException:
        plan.end()
        raise


@contextlib.contextmanager
def fitting(what: str) -> Iterator[None]:
    """Turns what reading a state of the wrong kind raises into a ``ValueError`` that says what does not fit.

    Which error that is depends on what happens to be missing or of another type.
    """
    try:
        yield
    except (FileNotFoundError, MemoryError, torch.OutOfMemoryError, ValueError):
        raise
    except Exception as error:
        raise ValueError(f"{what} does not fit: {described(error)}. {_LIKE}") from error


def described(error: Exception) -> str:
    """An error in words: a KeyError says no more than the key."""
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}" if error.args else "an entry is missing"
    return (str(error).strip() or type(error).__name__).rstrip(".")


# ---------------------------------------------------------------- parts that load themselves


def load_part(plan: Plan, part: Any, what: str, saved: Saved) -> None:
    """Has a part load its state by its own method. The state of before is kept until then: a copy of it.

    Args:
        plan: of the restore.
        part: a sampler, transform, writer or storage.
        what: its name in an error.
        saved: its state.
    """
    kind = type(part).__name__

    def keep() -> Callable[[], None]:
        attributes, held = dict(vars(part)), unshared(part.state_dict())

        def back() -> None:
            vars(part).update(attributes)  # what its state leaves out
            for name in vars(part).keys() - attributes.keys():
                del vars(part)[name]
            part.load_state_dict(held)

        return back

    def load() -> None:
        try:
            if saved.folder is not None:
                part.loads(saved.folder)
            else:
                part.load_state_dict(_decoupled(saved.state))
            _refuse_damaged(part)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"The {what} of the checkpoint has no file for a {kind} ({error}). {_LIKE}"
            ) from error
        except Exception as error:
            raise ValueError(
                f"The {what} of the checkpoint is not that of a {kind}, or is damaged: {described(error)}. Nothing was "
                f"loaded. Load it into a buffer with the {what} that it was saved from."
            ) from error

    plan.load(keep, load)


def _refuse_damaged(part: Any) -> None:
    """Refuses what TorchRL's samplers take over unseen, and would read other records by, or fail at the next draw."""
    if isinstance(part, SamplerWithoutReplacement):
        rows = part._sample_list
        if rows is not None:
            whole = isinstance(rows, torch.Tensor) and rows.ndim == 1 and not rows.is_floating_point()
            if not whole or (rows.numel() and not (rows.min() >= 0 and rows.max() < part.len_storage)):
                raise ValueError(f"it has _sample_list={rows!r:.80} of {part.len_storage} records")
    if isinstance(part, ConsumingSampler):
        for name in ("_sample_count", "_live_mask"):
            held = getattr(part, name)
            if held is not None and not (isinstance(held, torch.Tensor) and held.shape[0] >= part._known_storage_len):
                raise ValueError(f"it has {name}={held!r:.80} of {part._known_storage_len} records")


def _decoupled(state: Any) -> Any:
    """The containers of a state copied, so that a part that takes entries out of them leaves the caller's as it is."""
    if isinstance(state, dict):
        twin = copy(state)
        twin.update((key, _decoupled(entry)) for key, entry in state.items())
        return twin
    return state


# ---------------------------------------------------------------- what a buffer has besides its parts


class Rest:
    """What a buffer, or an ensemble, saves besides its storages, samplers and writers; read and checked.

    Attributes:
        batch_size: the default one.
        consume: TorchRL's ``consume_after_n_samples``.
        rng: the generator, ``None`` to keep the one that is there.
        queue: prefetched batches; ``None``: none were saved.
        sampled: how many samples were drawn, and records in them: TorchRL counts both after 0.14.
    """

    __slots__ = ("batch_size", "consume", "queue", "rng", "sampled", "transform")

    def __init__(
        self,
        *,
        batch_size: Any,
        consume: Any,
        rng: Any,
        prefetch: Any,
        transform: Any,
        sampled: tuple[Any, Any],
        buffer: Any,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("consume_after_n_samples", consume)):
            if not (value is None or (type(value) is int and value > 0)):
                raise ValueError(
                    f"The checkpoint has {name}={value!r}, which should be a positive int or None. {_LIKE}"
                )
        if not all(map(is_count, sampled)):
            raise ValueError(
                f"The checkpoint counts {sampled} samples and records in them, which no buffer does. {_LIKE}"
            )
        self.batch_size, self.consume, self.transform, self.sampled = batch_size, consume, transform, sampled
        with fitting("The state of the random number generator"):
            self.rng = None if rng is None else _generator(*rng)
        try:
            buffer._validate_prefetch_state(prefetch)
            self.queue = None if prefetch is None else [_done(result) for result in prefetch["queue"]]
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            raise QueueMisfitError(
                f"The prefetched batches of the checkpoint do not fit: {described(error)}. {_LIKE}"
            ) from error

    @classmethod
    def from_state_dict(cls, buffer: Any, state: dict[str, Any]) -> Rest:
        """Reads the state of a buffer."""
        prefetch = state.get("_prefetch_state")
        if prefetch is not None:
            with fitting("The queue of prefetched batches"):
                if PREFETCHED in state:
                    prefetch = prefetch | {"queue": from_plain(state[PREFETCHED])}
                queue = tuple(map(buffer._clone_prefetch_result, prefetch["queue"]))
                prefetch = prefetch | {"queue": queue}
        return cls(
            batch_size=state["_batch_size"],
            consume=state.get("_consume_after_n_samples"),
            rng=state.get("_rng"),
            prefetch=prefetch,
            transform=state["_transforms"],
            sampled=(state.get("_sample_calls", 0), state.get("_sampled_items", 0)),
            buffer=buffer,
        )

    @classmethod
    def from_path(cls, buffer: Any, path: Path) -> Rest:
        """Reads the directory of a checkpoint."""
        metadata = read_json(path / "buffer_metadata.json")
        with fitting(f"{path / 'buffer_metadata.json'}"):
            batch_size = metadata["batch_size"]
        rng = transform = None
        if (path / "rng_state").exists():
            with reading(path / "rng_state"):
                held = TensorDict.load_memmap(path / "rng_state")
                rng = held.get("rng_state").as_subclass(torch.Tensor), str(held.device or "cpu")
        if (path / "transform.t").exists():
            with reading(path / "transform.t", pickled=True):
                transform = torch.load(path / "transform.t")
        with reading(path / "prefetch.pkl", pickled=True):
            prefetch = buffer._load_prefetch_state(path)
        consume = metadata.get("consume_after_n_samples")
        return cls(
            batch_size=batch_size,
            consume=consume,
            rng=rng,
            prefetch=prefetch,
            transform=transform,
            sampled=(metadata.get("sample_calls", 0), metadata.get("sampled_items", 0)),
            buffer=buffer,
        )

    def plan(self, plan: Plan, buffer: Any) -> None:
        """Plans to take it over."""
        if self.transform is not None:
            load_part(plan, buffer._transform, "transform", Saved(self.transform))
        plan.install(lambda: self._install(buffer))

    def _install(self, buffer: Any) -> None:
        buffer._batch_size, buffer._consume_after_n_samples = self.batch_size, self.consume
        for name, count in zip(("_sample_call_count_value", "_sampled_item_count_value"), self.sampled, strict=True):
            if hasattr(buffer, name):
                buffer._set_counter(name, count)
        if self.rng is not None:
            buffer.set_rng(self.rng)
        # whatever was in flight is done: the futures lock has been held since
        buffer._prefetch_queue.clear()
        buffer._prefetch_queue.extend(self.queue or ())


def _generator(state: torch.Tensor, device: str) -> torch.Generator:
    made = torch.Generator(device=device)
    made.set_state(state.clone())
    return made


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
