"""Buffers to save and to load into, everything that a load could change in one, and ways to damage a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import stat
import zlib
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from support import prioritized
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection
from torch.utils._pytree import tree_leaves
from torchrl.data import (
    LazyTensorStorage,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, SliceSampler
from torchrl.envs.transforms import RewardScaling

import torchrl_generational as g

CAPACITY = 8
MANIFEST = "generational.json"


def data(start: int = 0, count: int = 11, **more: Any) -> TensorDict:
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[3::4] = True
    return TensorDict(
        {
            "x": torch.arange(start, start + count),
            "rank": torch.arange(start, start + count).float(),
            "episode": torch.arange(count) // 4,
            "next": TensorDict({"done": done, "x": torch.rand(count, 2)}, [count]),
            **more,
        },
        [count],
    )


def td_buffer(sampler: Any, **kwargs: Any) -> Any:
    kwargs.setdefault("storage", g.GenerationalLazyTensorStorage(CAPACITY))
    generator = torch.Generator().manual_seed(0)
    return g.GenerationalTensorDictReplayBuffer(sampler=sampler, batch_size=4, generator=generator, **kwargs)


def objects(start: int, count: int = 11) -> dict[str, Any]:
    texts = [f"text {number}" for number in range(start, start + count)]
    return {"text": NonTensorStack(*texts), "all": NonTensorData({"k": [1]}, batch_size=[count])}


def ensemble() -> Any:
    return g.GenerationalReplayBufferEnsemble(
        prioritized(CAPACITY), td_buffer(SamplerWithoutReplacement()), sample_from_all=True, batch_size=4
    )


def pytree() -> Any:
    return g.GenerationalReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(CAPACITY),
        sampler=g.GenerationalPrioritizedSampler(CAPACITY, 1.0, 1.0),
        batch_size=4,
    )


def stock() -> Any:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=PrioritizedSampler(CAPACITY, 1.0, 1.0),
        writer=TensorDictRoundRobinWriter(track_generations=True),
        batch_size=4,
    )


def fill(rb: Any, start: int = 0, count: int = 11, kind: str = "tensors") -> Any:
    """Writes ``count`` records that depend on ``start``."""
    if kind == "ensemble":
        for member in rb._rbs:
            member.extend(data(start, count))
    elif kind == "pytree":
        rb.extend((torch.arange(start, start + count), {"a": torch.rand(count, 2)}))
    else:
        rb.extend(data(start, count, **(objects(start, count) if kind == "objects" else {})))
    if kind != "ensemble" and hasattr(rb.sampler, "_sum_tree"):
        rb.update_priority(torch.arange(CAPACITY), torch.arange(1.0, 1.0 + CAPACITY) + start)
    if kind in ("transform", "prefetch", "without replacement"):
        rb.sample()
    return rb


MAKE: dict[str, Callable[[], Any]] = {
    "tensors": lambda: prioritized(CAPACITY),
    "objects": lambda: prioritized(CAPACITY),
    "memmap": lambda: prioritized(CAPACITY, storage=g.GenerationalLazyMemmapStorage(CAPACITY)),
    "shared": lambda: prioritized(CAPACITY, shared=True),
    "max value": lambda: td_buffer(
        g.GenerationalPrioritizedSampler(CAPACITY, 1.0, 1.0),
        writer=g.GenerationalTensorDictMaxValueWriter(rank_key="rank"),
    ),
    "slices": lambda: td_buffer(
        g.GenerationalPrioritizedSliceSampler(CAPACITY, 1.0, 1.0, slice_len=2, traj_key="episode", strict_length=False)
    ),
    "plain slices": lambda: td_buffer(SliceSampler(slice_len=2, traj_key="episode", strict_length=False)),
    "without replacement": lambda: td_buffer(SamplerWithoutReplacement()),
    "transform": lambda: prioritized(CAPACITY, transform=RewardScaling(loc=0.0, scale=2.0, in_keys=["rank"])),
    "prefetch": lambda: prioritized(CAPACITY, prefetch=2),
    "pytree": pytree,
    "ensemble": ensemble,
    "stock": lambda: prioritized(CAPACITY),
}


def source(kind: str) -> Any:
    """A buffer of that kind to be saved."""
    return fill(stock() if kind == "stock" else MAKE[kind](), kind=kind)


def target(kind: str) -> Any:
    """A buffer of that kind in use, to be loaded into."""
    return fill(MAKE[kind](), start=1000, count=13, kind=kind)


# ------------------------------------------------------------------ what a load could change


def seen(value: Any) -> Any:
    """A value in terms that compare."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().contiguous().reshape(-1).tolist())
    if is_tensor_collection(value):
        return seen(value.to_dict())
    if isinstance(value, dict):
        return {key: seen(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [seen(entry) for entry in value]
    return repr(value) if type(value).__module__ != "builtins" else value


def everything(rb: Any) -> Any:
    """Records, stamps, priorities, counters, generator, transform, queue: bit for bit."""
    if hasattr(rb, "_rbs"):
        return [everything(member) for member in rb._rbs]
    wait(rb._prefetch_queue)  # draws in flight
    storage, sampler = rb.storage, rb.sampler
    trees = None
    if hasattr(sampler, "_sum_tree"):
        cells = torch.arange(sampler._max_capacity)
        trees = [tree[cells] for tree in (sampler._sum_tree, sampler._min_tree)]
        trees += [sampler._max_priority, sampler._alpha, sampler._beta, sampler._eps]
    held = storage._storage
    return seen(
        {
            "records": held if is_tensor_collection(held) else tree_leaves(held),
            "stamps": storage.generations,
            "incarnation": storage.slot_generations.incarnation,
            "newest": storage._last_cursor,
            "length": len(rb),
            "trees": trees,
            "sampler": vars(sampler).get("_sample_list"),
            "writer": (rb.writer._cursor if hasattr(rb.writer, "_cursor") else None, rb.write_count),
            "batch size": rb._batch_size,
            "generator": None if rb._rng is None else rb._rng.get_state(),
            "transform": dict(rb._transform.state_dict()),
            "queue": len(rb._prefetch_queue),
        }
    )


def tree(folder: Path) -> dict[str, Any]:
    """Every file, link and folder with what is in it, besides the lock file."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        mode = os.lstat(path).st_mode
        name = str(path.relative_to(folder))
        if stat.S_ISLNK(mode):
            found[name] = f"-> {os.readlink(path)}"
        elif stat.S_ISREG(mode):
            found[name] = path.read_bytes()
        else:
            found[name] = stat.S_IFMT(mode)
    return {name: content for name, content in found.items() if name != "generational.lock"}


# ------------------------------------------------------------------ damage

ODD = [None, True, False, -1, 0, 1, 3, 7, 9, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "",
       "x", "..", "../beside", "/", "../beside/keep.txt", "storage", "torch.float64", "torch.bool", "cuda:7", "nowhere",
       "<class 'tensordict.tensorclass.NonTensorData'>", "<class 'tensordict._lazy.LazyStackedTensorDict'>",
       "pickle.pkl", "\ud800", [], [0], [8, 8], [-1], [2**40, 2**40], [10**30], [[1]], {}, {"type": "TensorDict"},
       {"shape": [8], "dtype": "torch.int64", "is_nested": True}]  # fmt: skip

PATHS = st.lists(st.integers(0, 30), min_size=1, max_size=5)
BYTES = st.sampled_from(["flip", "truncate", "extend", "empty", "remove", "folder", "link", "noise", "pipe", "swap"])
JSON = st.sampled_from(["replace", "replace", "replace", "delete", "add"])
DAMAGE = st.fixed_dictionaries(
    {
        "file": st.integers(0, 200),
        "how": st.one_of(st.tuples(st.just("bytes"), BYTES), st.tuples(st.just("json"), JSON)),
        "where": PATHS,
        "value": st.sampled_from(ODD),
        "number": st.integers(0, 2**32),
    }
)
DAMAGES = st.lists(DAMAGE, min_size=1, max_size=2)
#: Whether the manifest is made to agree with what was damaged, left as it is, or taken away as if TorchRL had saved.
MANIFESTS = st.sampled_from(["agrees", "agrees", "stays", "none"])


def damage(folder: Path, beside: Path, damages: list[dict[str, Any]], manifest: str) -> None:
    """Damages some files of a checkpoint; see the strategies above."""
    for one in damages:
        names = [name for name, content in tree(folder).items() if isinstance(content, bytes)]
        kind, how = one["how"]
        if kind == "json":
            names = [name for name in names if name.endswith(".json")] or names
        file = folder / names[one["file"] % len(names)]
        if kind == "json" and file.suffix == ".json":
            _damage_json(file, how, one["where"], one["value"])
        elif kind == "bytes":
            _damage_bytes(file, beside, how, one["number"], folder / names[one["number"] % len(names)])
    if manifest == "agrees":
        _make_agree(folder)
    elif manifest == "none":
        for file in [*folder.rglob(MANIFEST), *folder.rglob(".generational-dump")]:
            if file.is_file() or file.is_symlink():
                file.unlink()


def _damage_json(file: Path, how: str, where: list[int], value: Any) -> None:
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return
    whole: Any = {"": found}
    holder, key = whole, ""
    for step in where:
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner:
            break
        holder, key = inner, list(inner)[step % len(inner)] if isinstance(inner, dict) else step % len(inner)
    if how == "replace":
        holder[key] = value
    elif how == "delete" and holder is not whole:
        del holder[key]
    elif how == "add" and isinstance(holder[key], dict):
        holder[key][str(value)] = value
    elif how == "add" and isinstance(holder[key], list):
        holder[key].append(value)
    file.write_text(json.dumps(whole[""]))


def _damage_bytes(file: Path, beside: Path, how: str, number: int, other: Path) -> None:
    content = file.read_bytes()
    if how in ("remove", "folder", "link", "pipe"):
        file.unlink()
        if how == "folder":
            file.mkdir()
        elif how == "link":
            file.symlink_to(beside / "keep.txt")
        elif how == "pipe":
            os.mkfifo(file)
        return
    if how == "flip" and content:
        place = number % len(content)
        content = content[:place] + bytes([content[place] ^ (1 << number % 8)]) + content[place + 1 :]
    elif how == "truncate":
        content = content[: number % (len(content) + 1)]
    elif how == "extend":
        content += bytes(number % 17 + 1)
    elif how == "empty":
        content = b""
    elif how == "noise":
        noise = number.to_bytes(8, "little") * (len(content) // 8 + 1)
        content = noise[: len(content)]
    elif how == "swap" and other.is_file() and not other.is_symlink():
        content = other.read_bytes()
    file.write_bytes(content)


def _make_agree(folder: Path) -> None:
    """Gives the manifest the sizes and checksums of the files that are there, as whoever means harm would."""
    file = folder / MANIFEST
    if not file.is_file():  # opening a pipe would wait for a writer
        return
    try:
        manifest = json.loads(file.read_bytes())
        files = manifest["files"]
        sums = manifest["checksums"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return
    if not isinstance(files, dict) or not isinstance(sums, dict):
        return
    for name in list(files):
        path = folder / name
        try:
            regular = stat.S_ISREG(os.lstat(path).st_mode)
        except (OSError, ValueError):
            regular = False
        if ".." in name or not regular:
            sums.pop(name, None)
            if not os.path.lexists(path):
                files.pop(name)
            continue
        files[name] = path.stat().st_size
        if name in sums:
            sums[name] = zlib.crc32(path.read_bytes())
    file.write_text(json.dumps(manifest))


def copy_of(saved: Path, place: Path) -> Path:
    shutil.copytree(saved, place / "checkpoint")
    return place / "checkpoint"
