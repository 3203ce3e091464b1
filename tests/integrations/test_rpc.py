"""A buffer in another process, reached by ``torch.distributed.rpc``; TorchRL's RPC buffer is refused."""

from __future__ import annotations

import multiprocessing as mp
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TIMEOUT, records
from torchrl.data import RemoteTensorDictReplayBuffer

import torchrl_generational as g


def worker(rank: int, meeting: Path, answers: Any) -> None:
    """Two of these: the second has the buffer, the first uses it."""
    from torch.distributed import rpc

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}", rpc_timeout=TIMEOUT)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        parts = {
            "storage": g.GenerationalLazyTensorStorage(8),
            "sampler": g.GenerationalPrioritizedSampler(8, 1.0, 1.0),
        }
        remote = rpc.remote("worker1", g.GenerationalTensorDictReplayBuffer, kwargs={**parts, "batch_size": 8})
        rb = remote.rpc_sync(TIMEOUT)
        rb.extend(records(8))
        sample = rb.sample()
        rb.extend(records(3, 100))
        sample["td_error"] = torch.ones(8)
        handles = {"index": sample["index"], "generation": sample["index_generation"]}
        results = [
            rb.update_tensordict_priority_if_present(sample),
            rb.update_priority_if_present(**handles, priority=2.0),
            remote.rpc_async(TIMEOUT).update_if_present(**handles, patch={"x": sample["x"] + 50}).wait(),
        ]
        try:
            rb.update_priority_if_present(**handles, priority=-1.0)
        except ValueError as error:
            refusal = str(error)
        totals = rb.stats()["conditional_updated"], rb.stats()["conditional_stale"]
        answers.put((sample["x"].tolist(), [result.updated_mask.tolist() for result in results], totals, refusal))
    rpc.shutdown()


@pytest.mark.system
def test_a_buffer_in_another_process_says_which_records_were_there(tmp_path):
    context = mp.get_context("spawn")
    answers = context.Queue()
    workers = [context.Process(target=worker, args=(rank, tmp_path / "meeting", answers)) for rank in range(2)]
    for process in workers:
        process.start()
    try:
        drawn, masks, totals, refusal = answers.get(timeout=TIMEOUT)
        for process in workers:
            process.join(TIMEOUT)
            assert process.exitcode == 0
    finally:
        for process in workers:
            process.kill()
    live = [record >= 3 for record in drawn]
    assert set(live) == {True, False}
    assert masks == [live] * 3
    assert totals == (3 * sum(live), 3 * (8 - sum(live)))
    assert "priority must be finite and >= 0" in refusal


@pytest.mark.parametrize("mixin", [g.GenerationalReplayBufferMixin, g.GenerationalTensorDictReplayBufferMixin])
def test_torchrls_rpc_buffer_behind_the_mixin_is_refused_with_the_remedy(mixin):
    with pytest.raises(TypeError, match=r"by torch.distributed.rpc.remote\(worker, Generational"):
        type("Remote", (mixin, RemoteTensorDictReplayBuffer), {})
