"""mypy sees the methods: a misspelt one is an error in every class that stands in front of one of TorchRL's."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchrl_generational as g

ROOT = Path(__file__).parents[2]
SOURCE = Path(g.__file__).parent
CLASSES = {
    "buffers/base.py": "BufferBase",
    "buffers/checkpoints.py": "CheckedCheckpoints",
    "buffers/components.py": "BufferParts",
    "buffers/conditional_updates.py": "ConditionalUpdates",
    "buffers/field_updates.py": "FieldUpdates",
    "buffers/first_priorities.py": "FirstPriorities",
    "buffers/mixin.py": "GenerationalReplayBufferMixin",
    "buffers/sampling.py": "Sampling",
    "buffers/process_sharing.py": "SharedByProcesses",
    "buffers/tensordict_mixin.py": "GenerationalTensorDictReplayBufferMixin",
    "buffers/waiters.py": "WakesWaiters",
    "ensembles/base.py": "EnsembleBase",
    "ensembles/checkpoints.py": "EnsembleCheckpoints",
    "ensembles/ensemble.py": "GenerationalReplayBufferEnsemble",
    "ensembles/updates.py": "EnsembleUpdates",
    "samplers/prioritized.py": "GenerationalPrioritizedSampler",
    "samplers/prioritized_slices.py": "GenerationalPrioritizedSliceSampler",
    "storages/checked_writes.py": "CheckedWrites",
    "storages/max_value_writer.py": "GenerationalTensorDictMaxValueWriter",
    "storages/round_robin_writers.py": "GenerationalWriterMixin",
    "storages/first_write.py": "FirstWrites",
    "storages/shared_storage.py": "SharableStorage",
    "storages/storage_counters.py": "StorageCounters",
    "storages/tensor_storages.py": "GenerationalStorageMixin",
    "ray/actors.py": "_InActor",
}


def test_every_class_in_front_of_one_of_torchrls_is_tried():
    fronts = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if "TYPE_CHECKING else" in text or re.search(r"_(Buffer|Base|Ensemble)\b", text):
            fronts.add(str(path.relative_to(SOURCE)))
    assert fronts <= set(CLASSES)


@pytest.mark.system
def test_a_misspelt_method_is_an_error_in_every_class(tmp_path):
    pytest.importorskip("mypy")
    package = tmp_path / "src" / "torchrl_generational"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "typings", tmp_path / "typings")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, name in CLASSES.items():
        lines = (package / file).read_text().splitlines(keepends=True)
        (owner,) = (part for part in ast.parse("".join(lines)).body if getattr(part, "name", "") == name)
        lines.insert(owner.end_lineno, f"\n    def planted(self) -> None:\n        self._misspelt_{name}()\n")
        (package / file).write_text("".join(lines))
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert set(re.findall(r'has no attribute "_misspelt_(\w+)"', found.stdout)) == set(CLASSES.values()), found.stdout
