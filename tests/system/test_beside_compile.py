"""While a thread compiles, and in code that is compiled: every method holds the lock, and does what it does elsewhere.

``torch.compiler.is_compiling()`` is true in every thread of the process then, and TorchRL leaves out its locks by it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import where_batches  # noqa: F401  fills CHECKS
import where_parts  # noqa: F401  fills CHECKS
from compiling import another_thread_compiles
from support import (
    AFTER_0_14,
    TIMEOUT,
    announce_blocked,
    filled,
    prioritized,
    records,
    sampler_state,
    until_blocked_or_done,
)
from tensordict import is_tensor_collection
from test_lock_discipline import ACTS, CALLS, HARMLESS, names_of, prepared
from test_where_it_works import TORCHRLS_WARNINGS, cases

import torchrl_generational as g
from torchrl_generational.tensors.compilation import is_traced, runs_in_compiled_code

ORDINARY = [call for call in CALLS if call[0] in ("plain", "tensordict prioritized")]
TENSORCLASS = "dynamo doesn't support arguments when building a tensorclass"
# Until TorchRL 0.14: it makes trajectories by position, which tensordict refuses meanwhile.
REFUSED = {} if AFTER_0_14 else {"query": TENSORCLASS}


@pytest.fixture(autouse=True)
def _quietly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo says where graphs end, and what it traces is forgotten again."""
    logger = torch._logging._internal.logging.getLogger("torch._dynamo")
    monkeypatch.setattr(logger, "level", 40)
    yield
    torch._dynamo.reset()


# ------------------------------------------------------------------ the question that is asked


def told_by(compile_it: Callable[[Any], Any]) -> bool:
    """What ``is_traced`` says in a function that is compiled or exported that way."""
    return int(compile_it(lambda x: x + 1 if is_traced() else x - 1)(torch.zeros(1))) == 1


class Module(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def exported(function: Any, *, strict: bool) -> Any:
    return torch.export.export(Module(function), (torch.zeros(1),), strict=strict).module()


def test_a_frame_is_traced_where_dynamo_compiles_it():
    assert told_by(lambda function: torch.compile(function, backend="eager"))
    assert told_by(lambda function: torch.compile(function, backend="aot_eager"))
    assert told_by(lambda function: exported(function, strict=True))
    nested = torch.compile(lambda x: x + 1 if is_traced() else x - 1, backend="eager")
    assert told_by(lambda function: torch.compile(lambda x: nested(x), backend="eager"))


def test_a_frame_that_runs_is_not_traced():
    assert not told_by(lambda function: function)
    assert not told_by(lambda function: exported(function, strict=False))
    assert not told_by(torch.compiler.disable)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.trace` is deprecated", FutureWarning)
        assert not told_by(lambda function: torch.jit.trace(function, torch.zeros(1), check_trace=False))


def test_neither_a_backend_nor_another_thread_is_traced(actors):
    answers: list[bool] = []

    def ask() -> None:
        answers.extend([is_traced(), runs_in_compiled_code()])

    def backend(graph: Any, *example: Any) -> Any:
        ask()
        actors.other(ask)
        return graph  # compiled autograd passes no example, and does not count as compiling

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    with torch._dynamo.compiled_autograd._enable(backend):
        (torch.ones(2, requires_grad=True) * 2).sum().backward()
    assert answers == [False] * 8


def test_code_between_graphs_is_not_traced_and_yet_runs_in_compiled_code():
    answers = []

    @torch._dynamo.disable(recursive=False)
    def between() -> None:
        answers.append((is_traced(), runs_in_compiled_code()))

    def broken(x: torch.Tensor) -> torch.Tensor:
        between()
        return x + 1

    torch.compile(broken, backend="eager")(torch.ones(2))
    assert answers == [(False, True)]


# ------------------------------------------------------------------ all methods


def plain(value: Any) -> Any:
    """``value`` for a comparison."""
    if isinstance(value, torch.Tensor):
        stamped = value.dtype == torch.int64
        return (
            str(value.dtype),
            tuple(value.shape),
            (value % 2**32 if stamped else value).tolist(),
        )  # without incarnations
    if is_tensor_collection(value) or isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items() if "lineage" not in str(key)}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, g.UpdateResult):
        return plain(value.updated_mask)
    return value if isinstance(value, int | float | str) else type(value).__name__


def state(rb: Any) -> Any:
    """All that a method can change."""
    storage, writer = rb.storage, rb.writer
    held = rb[:] if len(rb) else None
    counts = [len(rb), rb.write_count, writer._cursor, storage._mutation_revision]
    return plain([sampler_state(rb), storage.generations, held, counts])


def effects(rb: Any, call: Callable[[], Any]) -> Any:
    """What a call returns and changes, and what the buffer does afterwards."""
    torch.manual_seed(0)
    return plain(call()), state(rb), plain(rb.extend(records(3, 70))), plain(rb.sample(4)), state(rb)


def blocks_and_does_the_same(kind: str, name: str, tmp_path: Any, actors: Any) -> None:
    twin, info, td = prepared(kind, tmp_path)
    expected = effects(twin, lambda: ACTS[name](twin, info, td, tmp_path))
    (tmp_path / "other").mkdir()
    rb, info, td = prepared(kind, tmp_path / "other")
    with another_thread_compiles():
        if name in REFUSED:
            before = state(rb)
            with pytest.raises(RuntimeError, match=REFUSED[name]):
                ACTS[name](rb, info, td, tmp_path / "other")
            assert state(rb) == before
            return
        with rb.storage.lock:
            blocked = announce_blocked(rb.storage.lock, "")
            future = actors.start("caller", lambda: effects(rb, lambda: ACTS[name](rb, info, td, tmp_path / "other")))
            until_blocked_or_done(blocked, future)
            assert not future.done()
        found = future.result(TIMEOUT)
    assert found == expected
    rb.shutdown()


def test_every_public_method_is_tried():
    assert names_of(filled()) - HARMLESS.keys() == {name for _, name in ORDINARY}


@pytest.mark.parametrize(("kind", "name"), ORDINARY)
def test_while_a_thread_compiles_a_method_waits_for_the_lock_and_does_the_same(kind, name, tmp_path, actors):
    blocks_and_does_the_same(kind, name, tmp_path, actors)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [call for call in CALLS if call not in ORDINARY])
def test_while_a_thread_compiles_so_do_the_other_buffers(kind, name, tmp_path, actors):
    blocks_and_does_the_same(kind, name, tmp_path, actors)


LAYOUTS = [row for row in cases("works") if "torch.compile" not in row.id]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "try_it"), LAYOUTS)
def test_while_a_thread_compiles_handles_name_the_records_of_every_component(row, try_it):
    with warnings.catch_warnings(), another_thread_compiles():
        for message in (*TORCHRLS_WARNINGS, r"Using lock_\(\) inside a compiled graph"):
            warnings.filterwarnings("ignore", message)
        if row.component == "entries that are no tensors, in memory-mapped files":
            with pytest.raises(RuntimeError, match=TENSORCLASS):  # of what is stored there, by whoever makes it
                try_it()
        else:
            try_it()


@pytest.mark.parametrize(
    "make",
    [
        lambda: prioritized(batch_size=4),
        lambda: prioritized(batch_size=4, storage=g.GenerationalLazyTensorStorage(8, compilable=True)),
        lambda: prioritized(batch_size=4, storage=g.GenerationalLazyMemmapStorage(8)),
        lambda: prioritized(batch_size=4, prefetch=2),
        lambda: g.GenerationalReplayBuffer(storage=g.GenerationalLazyTensorStorage(16, ndim=2), batch_size=4),
        lambda: g.GenerationalReplayBuffer(
            storage=g.GenerationalLazyTensorStorage(8), writer=g.GenerationalTensorDictMaxValueWriter(rank_key="x")
        ),
    ],
    ids=["memory", "compilable", "memmap", "prefetch", "ndim 2", "max value"],
)
def test_a_buffer_that_is_made_and_filled_while_a_thread_compiles_goes_on_afterwards(make):
    def steps(compiling: Any) -> Any:
        torch.manual_seed(0)
        with compiling:
            rb = make()
            ndim = rb.storage.ndim
            rb.extend(records(4) if ndim == 1 else records(8).reshape(2, 4))
        found = [plain(rb.sample(4)), len(rb), rb.write_count]
        with compiling:
            rb.extend(records(6, 50) if ndim == 1 else records(6, 50).reshape(2, 3))
            found += [rb.storage._last_cursor_index, plain(rb.sample(4))]
        found += [rb.storage._mutation_revision, len(rb), plain(rb.storage.generations), plain(rb[:])]
        rb.shutdown()
        return found

    class Again(contextlib.AbstractContextManager):  # type: ignore[type-arg]
        def __enter__(self) -> None:
            self.inner = another_thread_compiles()
            self.inner.__enter__()

        def __exit__(self, *exc: Any) -> None:
            self.inner.__exit__(*exc)

    found = steps(Again())
    assert found == steps(contextlib.nullcontext())
    assert [type(number) for number in found if not isinstance(number, list | tuple | dict)] == [int] * 5


# ------------------------------------------------------------------ ensembles


ENSEMBLE_ACTS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda ensemble, sample: ensemble.add(records(1, buffer_ids=torch.tensor([1]))[0]),
    "can_sample": lambda ensemble, sample: ensemble.can_sample(4),
    "empty": lambda ensemble, sample: ensemble.empty(),
    "extend": lambda ensemble, sample: ensemble.extend(records(4, 20, buffer_ids=torch.tensor([0, 1, 1, 0]))),
    "sample": lambda ensemble, sample: ensemble.sample(),
    "state_dict": lambda ensemble, sample: ensemble.state_dict(),
    "update_tensordict_priority_if_present": lambda ensemble, sample: ensemble.update_tensordict_priority_if_present(
        sample
    ),
}


@pytest.mark.parametrize("name", ENSEMBLE_ACTS)
def test_while_a_thread_compiles_an_ensemble_waits_for_its_members_and_does_the_same(name, actors):
    def build() -> Any:
        ensemble = g.GenerationalReplayBufferEnsemble(
            filled(seed=1), filled(seed=2), batch_size=8, generator=torch.Generator().manual_seed(0)
        )
        sample = ensemble.sample()
        return ensemble, sample.set("td_error", torch.full(sample.shape, 3.0))

    def all_effects(ensemble: Any, sample: Any) -> Any:
        try:
            done = plain(ENSEMBLE_ACTS[name](ensemble, sample))
        except Exception as error:
            done = repr(error)
        return done, [state(member) for member in (ensemble[0], ensemble[1])]

    expected = all_effects(*build())
    ensemble, sample = build()
    lock = ensemble[1].storage.lock
    with another_thread_compiles():
        with lock:
            blocked = announce_blocked(lock, "")
            future = actors.start("caller", lambda: all_effects(ensemble, sample))
            until_blocked_or_done(blocked, future)
            assert not future.done()
        assert future.result(TIMEOUT) == expected
