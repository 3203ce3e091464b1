"""Records of every type of number that torch has are written and drawn right, on every path, or refused at first."""

from __future__ import annotations

import io

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

import torchrl_generational as g

WRITTEN = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e5m2, torch.float8_e4m3fn, torch.complex64, torch.complex128),
]
REFUSED = [torch.bits8, torch.bits16, torch.quint8]
LARGE = {torch.uint16: 2**16 - 1, torch.uint32: 2**32 - 1, torch.uint64: 2**63 + 5}


def numbers(count: int, start: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a type, the largest among them."""
    values = [(start + place) % 2 if dtype == torch.bool else start + place for place in range(count)]
    if dtype in LARGE:
        values[0] = LARGE[dtype]
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values).to(dtype)


def bits(values: torch.Tensor) -> list[int]:
    return values.as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8).tolist()


def data_of(count: int, start: int, dtype: torch.dtype) -> TensorDict:
    values = numbers(count, start, dtype)
    return TensorDict({"x": values, "below": {"y": values.unsqueeze(-1).repeat(1, 2)}}, [count])


LAYOUTS = {
    "dense": lambda data: data,
    "lazy": lambda data: LazyStackedTensorDict(*data.unbind(0)),
    "with a device": lambda data: data.to("cpu"),
    "a new entry": lambda data: data,
}
STORAGES = {"memory": g.GenerationalLazyTensorStorage, "files": g.GenerationalLazyMemmapStorage}


ODD = (torch.uint16, torch.uint64, torch.float8_e5m2)  # those that torch writes nowhere by a tensor, or only in part


@pytest.mark.parametrize(
    ("dtype", "memory", "layout"),
    [(dtype, memory, layout) for dtype in ODD for memory in STORAGES for layout in LAYOUTS]
    + [(dtype, memory, "dense") for dtype in WRITTEN if dtype not in ODD for memory in STORAGES],
    ids=str,
)
def test_numbers_of_a_type_are_written_and_drawn_bit_for_bit(dtype, memory, layout):
    if dtype.is_complex and memory == "files":
        pytest.skip("tensordict keeps no complex numbers in files")
    rb = g.GenerationalTensorDictReplayBuffer(storage=STORAGES[memory](8), batch_size=64)
    expected: dict[int, list[int]] = {}

    def wrote(rows, data):
        expected.update((row, bits(data["x"][place])) for place, row in enumerate(rows))
        stored = rb[:]
        for row, value in expected.items():
            assert bits(stored["x"][row]) == value
            assert bits(stored["below", "y"][row]) == value * 2

    def make(count, start):
        return LAYOUTS[layout](data_of(count, start, dtype))

    start = 0
    for count in (6, 5, 1, 20):  # a run, around the end, one, longer than the ring
        data = make(count, start)
        if layout == "a new entry" and count == 5 and memory == "memory":
            rb.storage._storage["w"] = torch.zeros(8)
        if layout == "a new entry" and memory == "memory" and start:
            data["w"] = torch.ones(count)
        rows = rb.extend(data).tolist()
        wrote(rows[-8:], data[-8:])
        start += count
    one = make(1, 40)[0].exclude("w")
    more = {"w": torch.ones(())} if layout == "a new entry" and memory == "memory" else {}
    row = rb.add(one.update(more))
    wrote([row], make(1, 40))
    wide = {key: torch.ones(3) for key in more}
    for index in (
        torch.tensor([5, 1, 3]),
        [5, 1, 3],
        slice(2, 5),
        slice(0, 6, 2),
        torch.tensor([True, False] * 3 + [False] * 2),
    ):
        data = make(3, 50)
        rb[index] = data.update(wide)
        rows = torch.arange(8)[index].tolist()
        wrote(rows, data)
    for row in (2, -1):
        rb[row] = make(1, 60)[0].update(more)
        wrote([row % 8], make(1, 60))
    sample = rb.sample()
    for place, row in enumerate(sample["index"].tolist()):
        assert bits(sample["x"][place]) == expected[row]
    torch.save(rb.storage, file := io.BytesIO())  # torch itself cannot unpickle all of these
    file.seek(0)
    assert bits(torch.load(file, weights_only=False)[:]["x"]) == bits(rb[:]["x"])
    patch = {"x": numbers(3, 70, dtype)}
    index = torch.tensor([6, 0, 2])
    result = rb.update_if_present(index=index, generation=rb.writer.generations_of(index), patch=patch)
    assert result.num_updated == 3
    assert bits(rb[:]["x"][index]) == bits(patch["x"])
    rb.set_at_("x", numbers(3, 80, dtype), index)
    assert bits(rb[:]["x"][index]) == bits(numbers(3, 80, dtype))


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("kind", ["tensor", "dict", "tensordict"])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_numbers_go_to_coordinates(dtype, kind, ndim):
    layouts = {
        "tensor": lambda x: x,
        "dict": lambda x: {"x": x},
        "tensordict": lambda x: TensorDict({"x": x}, x.shape),
    }
    make = layouts[kind]
    values = numbers(6, 1, dtype).reshape(3, 2)
    rb = g.GenerationalReplayBuffer(storage=g.GenerationalLazyTensorStorage(6, ndim=ndim), batch_size=4, dim_extend=0)
    for _ in range(3):  # around the end
        rb.extend(make(values))
    places = (torch.tensor([0, 2]), torch.tensor([1, 0]))
    (rb.storage if kind == "dict" else rb)[places] = make(numbers(2, 7, dtype))
    held = rb[:]
    held = held if kind == "tensor" else held["x"]
    assert bits(held[places]) == bits(numbers(2, 7, dtype))
    if kind != "dict":
        mask = torch.zeros(held.shape, dtype=torch.bool)
        mask[1] = True
        rb[(mask, ...)] = make(numbers(2, 9, dtype))
        held = rb[:]
        assert bits((held if kind == "tensor" else held["x"])[1]) == bits(numbers(2, 9, dtype))


@pytest.mark.parametrize("memory", STORAGES)
@pytest.mark.parametrize("dtype", REFUSED, ids=str)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_numbers_that_torch_cannot_draw_are_refused_at_the_first_write(dtype, memory):
    if dtype == torch.quint8:
        values = torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, dtype)
    else:
        values = torch.zeros(3, dtype=torch.int8 if dtype.itemsize == 1 else torch.int16).view(dtype)
    rb = g.GenerationalTensorDictReplayBuffer(storage=STORAGES[memory](8), batch_size=4)
    with pytest.raises(
        TypeError, match=f"The entry 'x' has dtype {dtype}.*Nothing was written. Store it as an integer"
    ):
        rb.extend(TensorDict({"x": values}, [3]))
    assert not rb.storage.initialized
    assert rb.storage.generations.tolist() == [-1] * 8
