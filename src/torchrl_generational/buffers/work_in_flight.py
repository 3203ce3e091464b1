"""Work of a buffer or an ensemble in flight: batches drawn ahead, and updates that were submitted.

All of it runs on threads of TorchRL's; the futures lock guards the two queues.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torchrl_generational.generations.update_result import UpdateResult

__all__ = [
    "drop_failed_batches",
    "drop_prefetched",
    "is_failed_draw",
    "refuse_in_own_draw",
    "renew_after_fork",
    "submit_in_order",
]


def is_failed_draw(error: BaseException | None) -> bool:
    """Whether a draw ended because there was nothing to draw."""
    return str(error).startswith("Cannot sample")  # TorchRL's words, and ours


def drop_prefetched(buffer: Any) -> None:
    """Drops prefetched batches when all work in flight is done. Futures lock held, storage's lock not.

    Nothing is cancelled: a submitted update may wait for a batch.
    """
    wait((*buffer._prefetch_queue, *buffer._pending_update_futures))
    buffer._prefetch_queue.clear()
    buffer._sample_dependency = None


def drop_failed_batches(buffer: Any) -> None:
    """Drops draws that ended because there was nothing to draw. Futures lock held."""
    queue = buffer._prefetch_queue
    for future in [future for future in queue if future.done() and is_failed_draw(future.exception())]:
        queue.remove(future)


def refuse_in_own_draw(buffer: Any, method: str) -> None:
    """Refuses to wait for all prefetched draws in one of them, where a transform calls back."""
    threads = getattr(getattr(buffer, "_prefetch_executor", None), "_threads", ())
    if threading.current_thread() in threads:
        raise RuntimeError(
            f"{type(buffer).__name__}.{method} waits for the draws that are made ahead, and was called in one of "
            "them, by a transform or a collate_fn: it would wait for good. Call it outside of them, or make the "
            "buffer with prefetch=0."
        )


def submit_in_order(
    rb: Any, submit: Callable[..., Future[UpdateResult]], update: dict[str, Any]
) -> Future[UpdateResult]:
    """Submits an update of ``rb`` by TorchRL's ``submit``, which leaves it out where a draw before it failed."""
    done: Future[UpdateResult] = Future()
    done.set_running_or_notify_cancel()

    def settle(ended: Future[UpdateResult]) -> None:
        try:
            error = None if ended.cancelled() else ended.exception()
            done.set_result(rb.update_if_present(**update) if is_failed_draw(error) else ended.result())
        except BaseException as raised:
            done.set_exception(raised)

    with rb._futures_lock:
        submitted = submit(**update)
        rb._pending_update_futures[-1] = rb._sample_dependency = done  # for what is submitted or drawn later
    submitted.add_done_callback(settle)
    return done


def renew_after_fork(buffer: Any) -> None:
    """Gives a buffer in a forked child locks and executors of its own: the threads of the parent's do not exist.

    What those had drawn ahead, and updates that they had not made, are the parent's.
    """
    buffer._futures_lock = threading.RLock()
    buffer._replay_lock = threading.RLock()
    buffer._prefetch_queue = deque()
    buffer._pending_update_futures = deque()
    buffer._sample_dependency = buffer._update_executor = buffer._iterator = None
    if getattr(buffer, "_prefetch_executor", None) is not None:  # None where it was shut down
        buffer._prefetch_executor = ThreadPoolExecutor(max_workers=buffer._prefetch_cap)
