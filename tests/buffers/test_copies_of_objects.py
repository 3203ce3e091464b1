"""Copies of buffers whose records have texts, dicts or None that differ, which share nothing with the original."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

import torchrl_generational as g

VALUES = {
    "texts": ["a", "b", "c", "d", "e", "f"],
    "dicts": [{"k": [number]} for number in range(6)],
    "None": [None, "b", None, "d", "e", None],
    "of several types": [1, "b", None, {"k": 1}, [2.5], (1, 2)],
}


def stack(values):
    return NonTensorStack(*(NonTensorData(value) for value in values))


LAYOUTS = {
    "flat": lambda values: TensorDict({"x": torch.arange(6), "t": stack(values)}, [6]),
    "nested": lambda values: TensorDict({"a": {"x": torch.arange(6), "t": stack(values)}}, [6]),
    "lazy": lambda values: LazyStackedTensorDict(
        *(TensorDict({"x": torch.tensor(place), "t": NonTensorData(value)}) for place, value in enumerate(values))
    ),
}


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value)), "save": saved}


def texts(storage):
    data = storage.get(slice(None))
    entry = data.get(("a", "t") if "a" in data.keys() else "t")  # noqa: SIM118  a tensordict
    return entry.tolist()


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("values", VALUES)
def test_a_copy_has_the_objects_of_the_records_and_goes_its_own_way(values, layout, how):
    rb = g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(8), batch_size=4)
    rb.extend(LAYOUTS[layout](VALUES[values]))
    for twin in (COPIES[how](rb).storage, COPIES[how](rb.storage)):
        assert texts(twin) == VALUES[values]
        row = rb.storage.get(slice(0, 1)).clone()
        twin[0] = row[0].set(("a", "t") if layout == "nested" else "t", NonTensorData("new"))
        assert texts(twin)[0] == "new"
        assert texts(rb.storage) == VALUES[values]
    rb.extend(LAYOUTS[layout](VALUES[values]))
