"""Autograd's modes: what a buffer keeps are normal tensors without a graph, in whichever mode it is made or used.

A tensor made inside ``torch.inference_mode`` can never be changed outside of it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch.utils._pytree import tree_leaves, tree_map

from torchrl_generational.tensors.default_devices import without_default_device

__all__ = ["as_normal", "kept", "making_what_is_kept"]


@contextlib.contextmanager
def making_what_is_kept() -> Iterator[None]:
    """What is made meanwhile are normal tensors, without a graph, and not on a default device."""
    with contextlib.ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        modes.enter_context(without_default_device())
        yield


def as_normal(value: Any) -> Any:
    """``value``, or a copy of a tensor that was made inside ``torch.inference_mode``."""
    if isinstance(value, torch.Tensor) and value.is_inference():
        with making_what_is_kept():
            return value.clone()
    return value


def kept(data: Any) -> Any:
    """Records as a storage keeps them: themselves, or a copy if autograd has to do with them."""
    if is_tensor_collection(data):
        leaves = [leaf for leaf in data.values(True, True) if isinstance(leaf, torch.Tensor)]
    else:
        leaves = [leaf for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor)]
    inference = any(leaf.is_inference() for leaf in leaves)
    if not inference and not any(leaf.requires_grad for leaf in leaves):
        return data

    def own(leaf: Any) -> Any:
        return leaf.detach().clone() if inference else leaf.detach()

    with making_what_is_kept():
        if is_tensor_collection(data):
            return own(data)
        return tree_map(lambda leaf: own(leaf) if isinstance(leaf, torch.Tensor) else leaf, data)
