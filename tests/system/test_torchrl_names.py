"""Every name of TorchRL that this package uses is declared in ``typings/``, and every declared one is there.

mypy refuses a name of TorchRL's buffers, storages, samplers and writers that is not declared; so what is declared is
what an upgrade of TorchRL may not take away.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
    samplers,
    writers,
)

import torchrl_generational as g

ROOT = Path(__file__).parents[2]
TYPINGS = ROOT / "typings"
SOURCE = Path(g.__file__).parent


def declared() -> list[tuple[str, str, str]]:
    """Module, class and name of everything that is declared of TorchRL's classes."""
    found = []
    for path in sorted(TYPINGS.rglob("*.pyi")):
        module = ".".join(path.relative_to(TYPINGS).with_suffix("").parts).removesuffix(".__init__")
        for owner in ast.parse(path.read_text()).body:
            if isinstance(owner, ast.ClassDef):
                names = [part.target.id for part in owner.body if isinstance(part, ast.AnnAssign)]
                names += [part.name for part in owner.body if isinstance(part, ast.FunctionDef)]
                found += [(module, owner.name, name) for name in names]
    return found


def _written(writer: Any) -> Any:
    storage = LazyTensorStorage(4)
    storage.set(range(2), TensorDict({"x": torch.zeros(2)}, [2]))
    writer.register_storage(storage)
    return writer


def _buffer(cls: Any, **kwargs: Any) -> Any:
    return cls(storage=LazyTensorStorage(4), batch_size=2, **kwargs)


#: Instances, for what TorchRL gives its classes where they are made.
MAKERS: dict[str, Any] = {
    "ReplayBuffer": lambda: _buffer(ReplayBuffer),
    "TensorDictReplayBuffer": lambda: _buffer(TensorDictReplayBuffer),
    "PrioritizedReplayBuffer": lambda: _buffer(PrioritizedReplayBuffer, alpha=0.5, beta=0.5),
    "TensorDictPrioritizedReplayBuffer": lambda: _buffer(TensorDictPrioritizedReplayBuffer, alpha=0.5, beta=0.5),
    "ReplayBufferEnsemble": lambda: ReplayBufferEnsemble(_buffer(TensorDictReplayBuffer), batch_size=2),
    "LazyTensorStorage": lambda: LazyTensorStorage(4),
    "LazyMemmapStorage": lambda: LazyMemmapStorage(4),
    "TensorStorage": lambda: TensorStorage(torch.zeros(4)),
    "Storage": lambda: TensorStorage(torch.zeros(4)),
    "PrioritizedSampler": lambda: samplers.PrioritizedSampler(4, 0.5, 0.5),
    "PrioritizedSliceSampler": lambda: samplers.PrioritizedSliceSampler(4, 0.5, 0.5, slice_len=2),
    "Sampler": lambda: samplers.RandomSampler(),
    "SamplerWithoutReplacement": lambda: samplers.SamplerWithoutReplacement(),
    "ConsumingSampler": lambda: samplers.ConsumingSampler(2),
    "SliceSampler": lambda: samplers.SliceSampler(slice_len=2),
    "StreamingSliceSampler": lambda: samplers.StreamingSliceSampler(slice_len=2),
    "SamplerEnsemble": lambda: samplers.SamplerEnsemble(samplers.RandomSampler()),
    "Writer": lambda: _written(writers.RoundRobinWriter()),
    "RoundRobinWriter": lambda: _written(writers.RoundRobinWriter()),
    "TensorDictRoundRobinWriter": lambda: _written(writers.TensorDictRoundRobinWriter()),
    "TensorDictMaxValueWriter": lambda: _written(writers.TensorDictMaxValueWriter(rank_key="x")),
}


@pytest.mark.parametrize(("module", "owner"), sorted({(module, owner) for module, owner, _ in declared()}))
def test_what_is_declared_of_a_class_of_torchrl_is_there(module: str, owner: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchRL's, of modules that it will move
        try:
            cls = getattr(importlib.import_module(module), owner)
        except ImportError as error:  # of a package that is not installed
            pytest.skip(str(error))
    names = {name for at, by, name in declared() if (at, by) == (module, owner)}
    made = MAKERS[owner]() if owner in MAKERS else None
    missing = {name for name in names if not hasattr(cls, name) and not hasattr(made, name)}
    if made is None:  # one that cannot be made here: its source says what it sets
        missing = {name for name in missing if f"self.{name}" not in inspect.getsource(cls)}
    where = {name: sorted(foreign().get(name, ())) for name in missing}
    assert not missing, f"TorchRL's {module}.{owner} no longer has {where}; these modules of ours use them."


def foreign() -> dict[str, set[str]]:
    """Private names of others, and the modules that use them: those that nothing here defines."""
    used: dict[str, set[str]] = defaultdict(set)
    own: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                used[node.attr].add(str(path.relative_to(SOURCE)))
                if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    own.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                own.add(node.value)  # of slots
    return {name: where for name, where in used.items() if name not in own}


def test_every_private_name_of_others_is_declared_or_has_a_contract_test() -> None:
    contracts = (Path(__file__).with_name("test_torchrl_contract.py")).read_text()
    held = {name for _, _, name in declared()} | set(re.findall(r"\b_\w+", contracts))
    missing = {name: sorted(where) for name, where in foreign().items() if name not in held}
    assert not missing, (
        f"These private names of other packages are used here: {missing}. Declare them in typings/, or write a test "
        "of what is relied on into tests/system/test_torchrl_contract.py."
    )
