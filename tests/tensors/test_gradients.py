"""Records that need a gradient are stored detached, whatever writes them: nothing drawn later hangs in their graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import filled, prioritized, records
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection, tensorclass
from torch.utils._pytree import tree_leaves

import torchrl_generational as g


@tensorclass
class Point:
    x: torch.Tensor


def points(x: torch.Tensor) -> Any:
    return Point(x=x, batch_size=[len(x)])


#: Records of every layout, made of one number each.
LAYOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensordict": lambda x: TensorDict({"x": x, "nested": {"y": x * 1}}, [len(x)]),
    "memmap": lambda x: TensorDict({"x": x}, [len(x)]),
    "tensorclass": points,
    "lazy stack": lambda x: LazyStackedTensorDict(*(TensorDict({"x": number}, []) for number in x)),
    "a list": lambda x: [TensorDict({"x": number}, []) for number in x],
    "tensor": lambda x: x * 1,
    "a tuple": lambda x: (x * 1, x * 2),
    "a dict": lambda x: {"x": x * 1},
    "trajectories": lambda x: TensorDict({"x": x[:, None] * torch.ones(2)}, [len(x), 2]),
    "two dimensions": lambda x: TensorDict({"x": torch.stack([x, x])}, [2, len(x)]),
}


def buffer_for(layout: str) -> Any:
    plain = layout in ("tensor", "a tuple", "a dict", "a list", "tensorclass")
    storage = {
        "memmap": lambda: g.GenerationalLazyMemmapStorage(8),
        "two dimensions": lambda: g.GenerationalLazyTensorStorage(16, ndim=2),
    }.get(layout, lambda: g.GenerationalLazyTensorStorage(8))()
    cls = g.GenerationalReplayBuffer if plain else g.GenerationalTensorDictReplayBuffer
    return cls(storage=storage, batch_size=4, **({"dim_extend": 1} if layout == "two dimensions" else {}))


def leaves(data: Any) -> list[torch.Tensor]:
    if is_tensor_collection(data):
        return list(data.values(True, True))
    return tree_leaves(data)


def assert_detached(rb: Any) -> None:
    drawn, _ = rb.sample(return_info=True)
    for data in (rb.storage._storage, drawn, rb[:]):
        assert leaves(data)
        assert [leaf for leaf in leaves(data) if leaf.requires_grad or leaf.grad_fn is not None] == []


def with_gradient(count: int, start: float = 0.0) -> torch.Tensor:
    """Not a leaf of the graph, as a network's output."""
    return torch.arange(start, start + count).requires_grad_() * 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_of_every_layout_are_stored_detached(layout):
    rb, make = buffer_for(layout), LAYOUTS[layout]
    for count, start in ((3, 0.0), (5, 10.0), (4, 20.0)):  # first write, filling, over the seam
        rb.extend(make(with_gradient(count, start)))
        assert_detached(rb)
    assert {float(number) for number in leaves(rb[:])[0].flatten()} >= {20.0, 23.0}


@pytest.mark.parametrize("layout", ["tensordict", "memmap", "tensorclass", "lazy stack", "tensor", "trajectories"])
def test_single_records_are_stored_detached(layout):
    rb, make = buffer_for(layout), LAYOUTS[layout]
    for start in (0.0, 1.0):
        rb.add(make(with_gradient(1, start))[0])
        assert_detached(rb)


SETS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a row": lambda rb, x: rb.__setitem__(0, TensorDict({"x": x[0], "index": torch.tensor(0)}, [])),
    "a slice": lambda rb, x: rb.__setitem__(slice(0, 4), one_each(x)),
    "a list": lambda rb, x: rb.__setitem__([0, 1, 2, 3], one_each(x)),
    "a tensor": lambda rb, x: rb.__setitem__(torch.arange(4), one_each(x)),
    "a mask": lambda rb, x: rb.__setitem__(torch.arange(8) < 4, one_each(x)),
    "a tuple": lambda rb, x: rb.__setitem__((slice(0, 4), ...), one_each(x)),
    "an entry": lambda rb, x: rb.__setitem__("x", torch.cat([x, x])),
    "write_all": lambda rb, x: rb.write_all(TensorDict({"x": torch.cat([x, x]), "index": torch.arange(8)}, [8])),
    "set_": lambda rb, x: rb.set_("x", torch.cat([x, x])),
    "set_at_": lambda rb, x: rb.set_at_("x", x, torch.arange(4)),
    "update_": lambda rb, x: rb.update_(TensorDict({"x": torch.cat([x, x])}, [8])),
    "storage.set": lambda rb, x: rb.storage.set(torch.arange(4), one_each(x)),
    "storage[...] =": lambda rb, x: rb.storage.__setitem__(slice(0, 4), one_each(x)),
}


def one_each(x: torch.Tensor) -> TensorDict:
    return TensorDict({"x": x, "index": torch.arange(len(x))}, [len(x)])


@pytest.mark.parametrize("how", SETS)
def test_records_and_fields_that_are_set_are_stored_detached(how):
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=8)
    rb.extend(TensorDict({"x": torch.zeros(8)}, [8]))
    SETS[how](rb, with_gradient(4, 5.0))
    assert_detached(rb)
    assert 5.0 in rb[:]["x"]


@pytest.mark.parametrize("ndim", [1, 2])
def test_patches_are_stored_detached(ndim):
    rb = buffer_for("two dimensions" if ndim == 2 else "tensordict")
    rb.extend(LAYOUTS["two dimensions" if ndim == 2 else "tensordict"](torch.arange(4.0)))
    _, info = rb.sample(return_info=True)
    result = rb.update_if_present(
        index=info["index"], generation=info["index_generation"], patch={"x": with_gradient(4, 5.0)}
    )
    assert result.num_updated == 4
    assert_detached(rb)


def test_the_best_records_are_stored_detached():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(4),
        writer=g.GenerationalTensorDictMaxValueWriter(rank_key="x"),
        batch_size=4,
    )
    for start in (0.0, 10.0):
        rb.extend(TensorDict({"x": with_gradient(6, start)}, [6]))
        assert_detached(rb)
    rb.add(TensorDict({"x": with_gradient(1, 50.0)[0]}, []))
    assert_detached(rb)


def test_records_that_a_storage_is_made_around_or_loads_are_detached():
    held = TensorDict({"x": with_gradient(4)}, [4])
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalTensorStorage(held), batch_size=4)
    assert_detached(rb)
    rb = buffer_for("tensordict")
    rb.extend(TensorDict({"x": torch.zeros(4)}, [4]))
    state = rb.state_dict()
    state["_storage"]["_storage"]["x"] = with_gradient(8, 3.0)
    rb.load_state_dict(state)
    assert rb[:]["x"].tolist() == [3, 4, 5, 6]
    assert_detached(rb)


def test_td_errors_that_need_a_gradient_are_priorities_like_others():
    rb = filled()
    sample = rb.sample()
    sample["td_error"] = with_gradient(8, 1.0)
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 8
    rb.update_priority_if_present(
        index=sample["index"], generation=sample["index_generation"], priority=with_gradient(8, 2.0)
    )
    fresh = prioritized()
    fresh.extend(records(8).set("td_error", with_gradient(8, 1.0)))
    for one in (rb, fresh):
        assert all(not torch.as_tensor(part).requires_grad for part in one.sampler._max_priority)
        assert_detached(one)


def test_the_graph_of_what_was_written_is_let_go():
    rb = buffer_for("tensordict")
    weight = torch.ones(3, requires_grad=True)
    saved = weakref.WeakSet()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.clone()
        saved.add(copied)
        return copied

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = weight * weight.detach()
    rb.extend(TensorDict({"x": output, "nested": {"y": output}}, [3]))
    assert len(saved) > 0
    del output
    gc.collect()
    assert len(saved) == 0
