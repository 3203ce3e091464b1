"""Records go in and out as with TorchRL, whatever path they take inside."""

from __future__ import annotations

import pytest
import torch
from support import records
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, TensorStorage

import torchrl_generational as g
from torchrl_generational.records import record_io as fast


@tensorclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


def spread(count: int, start: int) -> torch.Tensor:
    return torch.arange(start, start + count)


LAYOUTS = {
    "flat": lambda n, s: records(n, s, y=torch.rand(n, 3)),
    "nested": lambda n, s: TensorDict({"a": {"b": spread(n, s), "c": {"d": torch.rand(n, 2, 2)}}}, [n]),
    "nested deeper": lambda n, s: TensorDict({"a": TensorDict({"b": torch.rand(n, 4)}, [n, 4])}, [n]),
    "kinds of numbers": lambda n, s: TensorDict(
        {
            str(dtype): spread(n, s).to(dtype)
            for dtype in (torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float64)
        },
        [n],
    ),
    "complex": lambda n, s: TensorDict({"x": torch.rand(n, 2, dtype=torch.complex64)}, [n]),
    "float8": lambda n, s: TensorDict({"x": spread(n, s).float().to(torch.float8_e5m2)}, [n]),
    "with a device": lambda n, s: TensorDict({"x": spread(n, s)}, [n], device="cpu"),
    "with names": lambda n, s: TensorDict({"x": spread(n, s)}, [n], names=["time"]),
    "locked": lambda n, s: records(n, s).lock_(),
    "not contiguous": lambda n, s: TensorDict({"x": torch.rand(3, n).T}, [n]),
    "expanded": lambda n, s: TensorDict({"x": torch.rand(1, 3).expand(n, 3)}, [n]),
    "objects": lambda n, s: TensorDict({"x": spread(n, s), "name": NonTensorData("n", batch_size=[n])}, [n]),
    "a lazy stack": lambda n, s: LazyStackedTensorDict(*(records(1, s + row)[0] for row in range(n))),
    "a tensorclass inside": lambda n, s: TensorDict(
        {"pair": Pair(left=spread(n, s), right=torch.rand(n, 2), batch_size=[n])}, [n]
    ),
    "a trajectory in each": lambda n, s: TensorDict({"x": torch.rand(n, 5)}, [n, 5]),
}
WRITES = {"in one run": [6], "around the end": [6, 6], "longer than the ring": [20], "one by one": [1] * 10}


def pair(lazy) -> tuple[TensorDictReplayBuffer, TensorDictReplayBuffer]:
    ours, stock = {
        "memory": (g.GenerationalLazyTensorStorage, LazyTensorStorage),
        "files": (g.GenerationalLazyMemmapStorage, LazyMemmapStorage),
    }[lazy]
    return (
        g.GenerationalTensorDictReplayBuffer(storage=ours(8), batch_size=4),
        TensorDictReplayBuffer(storage=stock(8), batch_size=4),
    )


def described(data):
    """All that a caller can see of a batch, entry by entry."""
    if isinstance(data, torch.Tensor):
        return type(data), data.dtype, data.device, data.shape, data.tolist() if data.dtype.itemsize > 1 else None
    entries = {key: described(entry) for key, entry in sorted(data.items())} if hasattr(data, "items") else str(data)
    return type(data), data.batch_size, data.device, data.names, data.is_locked, entries


@pytest.mark.parametrize("lazy", ["memory", "files"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_of_every_layout_are_stored_and_read_as_with_torchrl(layout, write, lazy):
    if (layout, lazy) == ("complex", "files"):
        return  # tensordict keeps no complex numbers in files
    ours, stock = pair(lazy)
    start = 0
    for count in WRITES[write]:
        torch.manual_seed(start)
        data = LAYOUTS[layout](count, start)
        copies = data.clone(), data.clone()
        if data.is_locked:
            copies = tuple(twin.lock_() for twin in copies)
        for rb, twin in zip((ours, stock), copies, strict=True):
            rb.extend(twin)
        assert described(copies[0]) == described(copies[1])  # what becomes of the caller's data
        start += count
    index = torch.tensor([3, 0, 3, 5])
    for ask in (index, index[:1], slice(0, 3), 2):
        if write == "longer than the ring":
            break  # torch does not say which record of a slot stays
        assert described(ours.storage.get(ask)) == described(stock.storage.get(ask))


PYTREES = {
    "tensors": lambda n, s: spread(n, s),
    "matrices": lambda n, s: torch.rand(n, 3),
    "dicts": lambda n, s: {"x": spread(n, s), "deeper": {"y": torch.rand(n, 2)}},
    "tuples": lambda n, s: (spread(n, s), torch.rand(n, 2)),
    "lists in dicts": lambda n, s: {"x": [spread(n, s), torch.rand(n, 2)]},
    "tensorclasses": lambda n, s: Pair(left=spread(n, s), right=torch.rand(n, 2), batch_size=[n]),
    "tensorclasses of tensordicts": lambda n, s: Pair(
        left=TensorDict({"x": spread(n, s)}, [n]), right=torch.rand(n, 2), batch_size=[n]
    ),
}


def seen(data):
    """All that a caller can see of records that are no tensordicts."""
    if isinstance(data, dict):
        return {key: seen(part) for key, part in data.items()}
    if isinstance(data, tuple | list):
        return type(data)(map(seen, data))
    if isinstance(data, Pair):
        return type(data), described(data.to_tensordict())
    return described(data)


@pytest.mark.parametrize("layout", PYTREES)
def test_records_that_are_no_tensordicts_are_stored_and_read_as_with_torchrl(layout):
    ours = g.GenerationalReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=4)
    stock = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    for start in (0, 6):  # the second goes around the end
        torch.manual_seed(start)
        data = PYTREES[layout](6, start)
        for rb in (ours, stock):
            rb.extend(data)
    for ask in (torch.tensor([3, 0, 3, 5]), torch.tensor([1]), slice(0, 3)):
        assert seen(ours.storage.get(ask)) == seen(stock.storage.get(ask))


def two_dimensional(kind: str) -> tuple[TensorDictReplayBuffer, TensorDictReplayBuffer]:
    """Ours and TorchRL's, with room for four steps of three lanes."""
    if kind == "around what is there":
        x = torch.arange(24).reshape(2, 3, 4).movedim(0, -1)  # in another order in memory
        data = TensorDict({"x": x.mT.contiguous().mT, "nested": {"y": torch.rand(3, 4)}}, [3, 4]).transpose(0, 1)
        storages = [kind(data.clone(), ndim=2) for kind in (g.GenerationalTensorStorage, TensorStorage)]
    else:
        storages = [kind(12, ndim=2) for kind in (g.GenerationalLazyTensorStorage, LazyTensorStorage)]
    ours = g.GenerationalTensorDictReplayBuffer(storage=storages[0], batch_size=4)
    stock = TensorDictReplayBuffer(storage=storages[1], batch_size=4)
    steps = {"half full": 2, "full": 4}.get(kind)
    if steps:
        x = torch.arange(3 * steps * 2).reshape(3, steps, 2)
        nested = TensorDict({"y": x.float(), "name": NonTensorData("n", batch_size=[3, steps])}, [3, steps])
        for rb in (ours, stock):
            rb.extend(TensorDict({"x": x, "nested": nested}, [3, steps]))
    return ours, stock


@pytest.mark.parametrize("kind", ["half full", "full", "around what is there"])
def test_records_of_two_dimensions_are_read_as_with_torchrl(kind):
    ours, stock = two_dimensional(kind)
    rows = ours.storage.generations.shape[0]
    place = (torch.tensor([1, 0, 1]), torch.tensor([2, 2, 0]))
    for ask in (place, (place[0][:1], place[1][:1]), (place[0],), place[0], (place[0], slice(None)), (1, 2)):
        assert described(ours.storage.get(ask)) == described(stock.storage.get(ask))
    outside = (torch.tensor([rows]), torch.tensor([0]))
    for rb in (ours, stock):
        with pytest.raises(IndexError):
            rb.storage.get(outside)


@pytest.mark.parametrize("change", ["extra", "dtype", "shape"])
@pytest.mark.parametrize("count", [1, 3], ids=["add", "extend"])
def test_records_that_differ_from_the_first_are_taken_or_refused_as_with_torchrl(change, count):
    outcomes = []
    for rb in pair("memory"):
        rb.extend(records(8, y=torch.zeros(8, 2)))
        data = records(count, 50, y=torch.ones(count, 2))
        if change == "extra":
            data["z"] = torch.ones(count)
        elif change == "dtype":
            data["y"] = data["y"].double()
        else:
            data["y"] = torch.ones(count, 3)
        try:
            rb.extend(data) if count > 1 else rb.add(data[0])
        except Exception:
            outcomes.append("refused")
        else:
            outcomes.append({key: value.tolist() for key, value in rb.storage._storage.items() if key != "index"})
    assert outcomes[0] == outcomes[1]


def test_a_plain_layout_takes_the_short_path(monkeypatch):
    taken = []
    monkeypatch.setattr(fast, "copy", lambda *args, original=fast.copy: (taken.append("in"), original(*args)))
    monkeypatch.setattr(fast, "select", lambda *args, original=fast.select: (taken.append("out"), original(*args))[1])
    rb, _ = pair("files")
    rb.extend(LAYOUTS["nested"](3, 0))
    rb.extend(LAYOUTS["nested"](3, 3))
    rb.storage.get(torch.tensor([1, 4]))
    assert taken[:2] == ["in", "in"]
    assert set(taken[2:]) == {"out"}


def test_a_sample_is_the_same_on_both_paths(monkeypatch):
    def sample(plain: bool):
        rb = g.GenerationalTensorDictPrioritizedReplayBuffer(
            alpha=0.7,
            beta=0.5,
            storage=g.GenerationalLazyTensorStorage(8),
            batch_size=5,
            generator=torch.Generator().manual_seed(0),
        )
        rb.extend(LAYOUTS["nested"](8, 0).set("td_error", torch.arange(8) + 1.0))
        assert rb._samples_are_plain()
        if not plain:
            monkeypatch.setattr(rb, "_samples_are_plain", lambda: False)
        return rb.sample()

    torch.manual_seed(0)
    short = sample(True)
    torch.manual_seed(0)
    assert described(short) == described(sample(False))


def test_a_class_in_front_of_the_mixin_is_asked_for_its_samples():
    class Front(g.GenerationalTensorDictPrioritizedReplayBuffer):
        def _sample(self, batch_size):
            data, info = super()._sample(batch_size)
            return data.lock_(), info | {"number": 1.0}

    rb = Front(alpha=0.7, beta=0.5, storage=g.GenerationalLazyTensorStorage(8), batch_size=4)
    rb.extend(records(8))
    sample = rb.sample()
    assert sample.is_locked
    assert torch.equal(sample["number"], torch.ones(4))


def test_an_index_outside_is_refused_as_with_torchrl():
    for rb in pair("memory"):
        rb.extend(records(5))
        for index in (torch.tensor([5]), torch.tensor([-6])):
            with pytest.raises(IndexError):
                rb.storage.get(index)
        assert rb.storage.get(torch.tensor([-1]))["x"].tolist() == [4]


@pytest.mark.parametrize("cls", [g.GenerationalLazyTensorStorage, g.GenerationalLazyMemmapStorage])
def test_records_whose_parts_have_several_shapes_are_stored_as_torchrl_stores_them(cls):
    parts = [TensorDict({"x": torch.rand(5, size, 8)}, [5]) for size in (4, 3)]
    rb = g.GenerationalReplayBuffer(storage=cls(6), batch_size=2)
    rb.extend(LazyStackedTensorDict(*parts, stack_dim=1))
    assert len(rb) == 5
    for number, part in enumerate(parts):
        assert torch.equal(rb[:][:, number]["x"], part["x"])
