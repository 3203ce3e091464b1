"""A batch on its way to the members of an ensemble: all of them take their rows, or none is written to."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules

from torchrl_generational.buffers.tensordict_mixin import GenerationalTensorDictReplayBufferMixin
from torchrl_generational.records.incoming import Inverted

__all__ = ["Routed"]


class Routed:
    """A flat batch, and the member of each of its rows.

    Rows of members with a transform go through its inverse here, once and before any lock is taken: only then is it
    known what their member would be given.
    """

    def __init__(self, members: tuple[Any, ...], data: TensorDictBase, buffer_ids: torch.Tensor) -> None:
        self.buffer_ids = buffer_ids
        self._members, self._data = members, data
        self._inverted: dict[int, Any] = {}
        for number in sorted(set(buffer_ids.tolist())):
            rb = members[number] if 0 <= number < len(members) else None  # others TorchRL refuses
            if rb is not None and rb.transform is not None and len(rb.transform):
                rows = self._rows(number)
                with _set_dispatch_td_nn_modules(True):
                    data_then = rb.transform.inv(data[rows])
                if data_then is None or len(data_then) != len(rows):
                    left = "none" if data_then is None else len(data_then)
                    raise RuntimeError(
                        f"The transform of member {number} makes {left} of {len(rows)} rows, which have no handles "
                        "then. Nothing was written to any member. Transform the batch before it is routed."
                    )
                self._inverted[number] = data_then

    def __getitem__(self, rows: torch.Tensor) -> Any:
        """What a member is given of its rows, which are all of those routed to it."""
        number = int(self.buffer_ids[rows[0]])
        return Inverted(self._inverted[number]) if number in self._inverted else self._data[rows]

    def check(self) -> None:
        """Refuses what a member would refuse, before the first member is written to. All locks held."""
        for number in sorted(set(self.buffer_ids.tolist())):
            rb, rows = self._members[number], self._rows(number)
            data = self._inverted[number] if number in self._inverted else self._data[rows]
            rb._refuse_write()
            try:
                if isinstance(rb, GenerationalTensorDictReplayBufferMixin):
                    rb._check_incoming(data)
                if rb.storage.ndim == 1 and hasattr(rb.storage, "check"):
                    rb.storage.check(data, len(rows))
            except (ValueError, RuntimeError, TypeError) as error:
                raise type(error)(
                    f"{error} Member {number} would be given the rows {rows.tolist()} of the batch, in this order. "
                    "Nothing was written to any member."
                ) from error

    def _rows(self, number: int) -> torch.Tensor:
        return (self.buffer_ids == number).nonzero()[:, 0]
