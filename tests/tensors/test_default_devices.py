"""``torch.set_default_device`` speaks of the program around a buffer: in the buffer nothing moves by it.

The device of the tests is ``meta``, whose tensors hold no numbers: whatever is made there by mistake cannot be read.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ledger
import pytest
import torch
import where_batches  # noqa: F401  fills CHECKS
import where_parts  # noqa: F401  fills CHECKS
from support import filled, plain_prioritized, prioritized, records, transfer
from tensordict import TensorDict
from test_beside_compile import plain
from test_where_it_works import TORCHRLS_WARNINGS, cases
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

import torchrl_generational as g

Step = Callable[[], Any]


@contextlib.contextmanager
def set_default() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


SCOPES: dict[str, Callable[[], Any]] = {"a scope": lambda: torch.device("meta"), "set": set_default}


def slices() -> Any:
    return g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8),
        sampler=g.GenerationalPrioritizedSliceSampler(8, 1.0, 1.0, slice_len=2, end_key="end", strict_length=False),
        batch_size=8,
    )


def cells() -> Any:
    return plain_prioritized(16, ndim=2)


def best() -> Any:
    return g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8),
        sampler=g.GenerationalPrioritizedSampler(8, 1.0, 1.0),
        writer=g.GenerationalTensorDictMaxValueWriter(rank_key="rank"),
        batch_size=8,
    )


def uniform(sampler: Any = None) -> Any:
    storage = g.GenerationalLazyTensorStorage(8)
    return g.GenerationalTensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=8)


BUFFERS: dict[str, Callable[[], Any]] = {
    "memory": prioritized,
    "memmap": lambda: prioritized(storage=g.GenerationalLazyMemmapStorage(8)),
    "compilable": lambda: prioritized(storage=g.GenerationalLazyTensorStorage(8, compilable=True)),
    "prefetch": lambda: prioritized(prefetch=2),
    "maximum within the buffer": lambda: plain_prioritized(max_priority_within_buffer=True, dtype=torch.float64),
    "slices": slices,
    "two dimensions": cells,
    "the best": best,
    "uniform": uniform,
    "without replacement": lambda: uniform(SamplerWithoutReplacement()),
    "shared": lambda: prioritized(shared=True),
    "sync=False": lambda: g.GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=g.GenerationalLazyTensorStorage(8), batch_size=8, sync=False
    ),
}


def steps_of(ndim: int, count: int, start: int) -> TensorDict:
    ids = torch.arange(start, start + count * ndim).float()
    data = TensorDict({"x": ids.long(), "rank": ids, "end": (ids % 3 == 0)[:, None]}, [len(ids)])
    return data.reshape(2, count) if ndim == 2 else data


def life(make: Callable[[], Any], folder: Path, scope: Callable[[], Any]) -> list[Any]:
    """What a buffer does from its construction to a copy of a restored one. Only its methods run in the scope."""
    torch.manual_seed(0)
    seen: list[Any] = []

    def see(step: Step) -> Any:
        with scope():
            found = step()
        seen.append(plain(found))
        return found

    with scope():
        rb, other = make(), make()
    other.extend(steps_of(other.storage.ndim, 1, 90))
    rb.set_rng(torch.Generator().manual_seed(1))
    ndim = rb.storage.ndim
    for count, start in ((3, 0), (5, 20), (3, 40)):
        see(lambda count=count, start=start: rb.extend(steps_of_(ndim, count, start)))
    if ndim == 1:
        see(lambda: rb.add(one))
    _, info = see(lambda: rb.sample(return_info=True))
    index, generation = info["index"], info["index_generation"]
    rows = generation.numel()
    if rb.keeps_priorities:
        priority = torch.rand(rows)
        see(lambda: rb.update_priority_if_present(index=index, generation=generation, priority=priority.tolist()))
        see(lambda: rb.update_priority_if_present(index=index, generation=generation, priority=priority))
        see(lambda: rb.update_priority(index, priority) if ndim == 1 else None)
    patch = {"rank": torch.zeros(rows)}
    see(lambda: rb.update_if_present(index=index, generation=generation, patch=patch))
    replaced = rb[:2].clone()
    see(lambda: rb.__setitem__(slice(0, 2), replaced))
    see(lambda: rb.mark_update(torch_rows))
    see(lambda: rb.sample())
    for how in ("state_dict", "dumps"):
        with scope():
            transfer(rb, other, how, folder)
        priorities = plain(other.sampler.state_dict()) if rb.keeps_priorities else None
        seen.append([len(other), plain(other[:]), priorities])
    if not rb.storage.lock.is_shared:
        for copied in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
            with scope():
                twin = copied(other)
            seen.append([plain(twin[:]), plain(twin.storage.generations)])
    see(lambda: rb.empty())
    see(lambda: rb.extend(later if ndim == 1 else later_cells))
    see(lambda: rb.sample())
    seen.append([plain(rb[:]), plain(rb.storage.generations)])
    rb.shutdown()
    other.shutdown()
    return seen


one, later, later_cells, torch_rows = steps_of(1, 1, 60)[0], steps_of(1, 8, 70), steps_of(2, 4, 70), torch.tensor([1])


def steps_of_(ndim: int, count: int, start: int) -> TensorDict:
    """Made outside of the scope that the call is in."""
    with torch.device("cpu"):
        return steps_of(ndim, count, start)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_does_the_same_with_any_default_device(kind, scope, tmp_path):
    expected = life(BUFFERS[kind], tmp_path / "a", contextlib.nullcontext)
    assert life(BUFFERS[kind], tmp_path / "b", SCOPES[scope]) == expected


def test_an_ensemble_does_the_same_with_any_default_device():
    def lived(scope: Callable[[], Any]) -> Any:
        torch.manual_seed(0)
        with scope():
            ensemble = g.GenerationalReplayBufferEnsemble(filled_, filled_too, batch_size=8, routing_key="member")
        ensemble.set_rng(torch.Generator().manual_seed(0))
        routed = records(4, 20, member=torch.tensor([0, 1, 1, 0]))
        with scope():
            written = ensemble.extend(routed.clone())
            sample, info = ensemble.sample(return_info=True)
        seen = [written, sample.clone()]
        sample["td_error"] = torch.full(sample.shape, 3.0)
        handles = {"index": info["index"], "generation": info["index_generation"]}
        patch = {"x": sample["x"] + 1}
        with scope():
            seen.append(ensemble.update_tensordict_priority_if_present(sample))
            seen.append(ensemble.update_if_present(**handles, patch=patch))
            seen.append(ensemble.state_dict()["_storage"])
            ensemble.empty()
        return plain(seen)

    filled_, filled_too = filled(seed=1), filled(seed=2)
    expected = lived(contextlib.nullcontext)
    filled_, filled_too = filled(seed=1), filled(seed=2)
    assert lived(lambda: torch.device("meta")) == expected


def test_a_conversion_does_the_same_with_any_default_device():
    def converted(scope: Callable[[], Any]) -> Any:
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
        rb.extend(records(8))
        with scope():
            made = g.convert(rb)
        return plain([made[:], made.storage.generations])

    assert converted(lambda: torch.device("meta")) == converted(contextlib.nullcontext)


# ------------------------------------------------------------------ every component


class Scoped:
    """A buffer whose methods run with another default device."""

    def __init__(self, rb: Any) -> None:
        object.__setattr__(self, "_rb", rb)

    @property
    def __class__(self) -> Any:
        return type(self._rb)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._rb, name)
        if not callable(value) or name in ("storage", "sampler", "writer"):
            return value

        @functools.wraps(value)
        def scoped(*args: Any, **kwargs: Any) -> Any:
            with torch.device("meta"):
                return value(*args, **kwargs)

        return scoped

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._rb, name, value)

    def __len__(self) -> int:
        return len(self._rb)


TRANSFORMS = "entries that are no tensors"  # moved by a lambda of the test, which tensordict indexes with the default


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "try_it"),
    [row for row in cases("works") if "torch.compile" not in row.id and row.values[0].component != TRANSFORMS],
)
def test_handles_name_the_records_of_every_component_with_any_default_device(row, try_it, monkeypatch):
    made = ledger.Ledger.__init__
    monkeypatch.setattr(ledger.Ledger, "__init__", lambda self, rb, **kwargs: made(self, Scoped(rb), **kwargs))
    with warnings.catch_warnings():
        for message in TORCHRLS_WARNINGS:
            warnings.filterwarnings("ignore", message)
        try_it()


# ------------------------------------------------------------------ the source


FACTORIES = {"arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"}
FACTORIES |= {"randperm", "scalar_tensor", "tensor", "zeros"}
SOURCE = Path(g.__file__).parent


def unnamed(source: str) -> list[int]:
    """The lines that make a tensor without saying where."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in FACTORIES) == ("torch", True)
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]


@pytest.mark.parametrize(
    "path",
    sorted(set(SOURCE.rglob("*.py")) - set(SOURCE.glob("testing/*"))),
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_every_tensor_that_is_made_names_its_device(path):
    assert unnamed(path.read_text()) == []


def test_a_tensor_without_a_device_is_found():
    assert unnamed("torch.zeros(3)\ntorch.zeros(3, device='cpu')\ntorch.from_numpy(x)\nx.new_zeros(3)") == [1]
