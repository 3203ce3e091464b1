"""Whether ``torch.compile`` has to do with the running frame: what may decide that a lock is left out, or a path taken.

``torch.compiler.is_compiling()``, which TorchRL and tensordict ask, is one flag of the process: it is true in every
thread while any of them compiles. The two questions here are about the frame and the thread that ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["is_traced", "runs_in_compiled_code", "untraced"]

#: Whether Dynamo traces the frame that asks, for ``torch.compile`` or a strict ``torch.export``. Dynamo answers with
#: True while it traces; what runs, in whichever thread, is told False. That a frame is not traced does not say that
#: those it calls are not: Dynamo gives up on frames, runs them, and tries again with each call in them.
is_traced = torch.compiler.is_dynamo_compiling

_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def runs_in_compiled_code() -> bool:
    """Whether Dynamo traces, or would trace, what this thread calls from here on. Not under :func:`untraced`."""
    return is_traced() or _callback() not in (None, False)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def untraced(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``call`` outside of any graph, and all that it calls.

    For what holds a lock, or goes through NumPy and the compiled priority trees: Dynamo would trace pieces of it, with
    the counters of a buffer as constants, and fail on others.
    """
    return call(*args, **kwargs)
