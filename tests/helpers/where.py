"""Where generations work: one row for each component of TorchRL, beside what happens when it meets one of ours.

``system/test_where_it_works.py`` runs every row that claims something and compares the rows with what TorchRL exports;
``docs/where_it_works.py`` prints them as a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ROWS", "Row", "markdown"]


@dataclass(frozen=True)
class Row:
    """What one component does.

    Attributes:
        kind: what it is.
        component: TorchRL's name, a comma and what is particular about this row.
        verdict: ``works``: handles name exactly the records of a sample, and conditional updates exactly the live
            ones. ``refused``: an error says what to do. ``untested``: not by these tests.
        note: for ``refused`` the words of the error, for ``untested`` the reason, else what there is to know.
        error: the exception of a refusal.
        tried_in: the test that tries it, where that is no check of ``system/test_where_it_works.py``.
    """

    kind: str
    component: str
    verdict: Literal["works", "refused", "untested"]
    note: str = ""
    error: type[Exception] = TypeError
    tried_in: str = ""


_STORAGE = "needs a storage that carries slot generations"
_WRITER = "needs a writer that tracks generations"
_NO_GPU = "tests/system/test_devices.py needs a GPU, and none was at hand"

_READY_MADE = (
    "integrations/test_trainer.py::test_a_ready_made_trainer_reaches_no_other_record_once_the_buffer_compares_handles"
)

ROWS: list[Row] = [
    # ---------------------------------------------------------------- samplers
    Row("sampler", "Sampler, a subclass of one's own", "works", "stamps are looked up for the index that it draws"),
    Row(
        "sampler",
        "Sampler, a flat index into 2 dimensions",
        "refused",
        "does not say where the records are in the 2 dimensions of the storage",
    ),
    Row("sampler", "RandomSampler", "works"),
    Row("sampler", "SamplerWithoutReplacement", "works", "also by epochs, `drop_last` and while the ring turns"),
    Row("sampler", "SliceSampler", "works", "with `cache_values`, `strict_length=False`, `pad_output`, `span`"),
    Row("sampler", "SliceSamplerWithoutReplacement", "works"),
    Row("sampler", "PrioritizedSampler", "works"),
    Row("sampler", "GenerationalPrioritizedSampler", "works"),
    Row("sampler", "PrioritizedSliceSampler", "works"),
    Row("sampler", "GenerationalPrioritizedSliceSampler", "works"),
    Row("sampler", "ConsumingSampler", "works", "and `consume_after_n_samples`; slots are reused out of turn"),
    Row(
        "sampler",
        "ConsumingSampler, 2 dimensions",
        "refused",
        "ConsumingSampler only supports 1-dimensional storages",
        error=ValueError,
    ),
    Row("sampler", "StreamingSliceSampler", "works"),
    Row(
        "sampler",
        "StreamingSliceSampler, 2 dimensions",
        "refused",
        "StreamingSliceSampler requires a one-dimensional storage",
        error=RuntimeError,
    ),
    Row("sampler", "StalenessAwareSampler", "works"),
    Row(
        "sampler",
        "StalenessAwareSampler, 2 dimensions",
        "refused",
        "does not say where the records are in the 2 dimensions of the storage",
    ),
    Row("sampler", "PromptGroupSampler", "works", "all four strategies"),
    Row(
        "sampler",
        "PromptGroupSampler, 2 dimensions",
        "refused",
        "PromptGroupSampler only supports single-dimensional storages",
        error=NotImplementedError,
    ),
    Row("sampler", "SamplerEnsemble, in one buffer", "refused", "SamplerEnsemble requires a StorageEnsemble"),
    Row(
        "sampler",
        "RandomSampler, priorities updated",
        "refused",
        "needs a sampler with priorities, got RandomSampler. Build the buffer with "
        "sampler=GenerationalPrioritizedSampler(...)",
    ),
    Row("sampler", "SumSegmentTreeFp32", "works", "as a part of PrioritizedSampler"),
    Row("sampler", "MinSegmentTreeFp32", "works", "as a part of both prioritized samplers"),
    Row("sampler", "SumSegmentTreeFp64", "works", "as a part of GenerationalPrioritizedSampler, whatever its dtype"),
    Row("sampler", "MinSegmentTreeFp64", "works", "as a part of GenerationalPrioritizedSampler(dtype=torch.float64)"),
    Row("sampler", "CudaSumSegmentTreeFp32", "untested", _NO_GPU),
    Row("sampler", "CudaMinSegmentTreeFp32", "untested", _NO_GPU),
    Row("sampler", "CudaSumSegmentTreeFp64", "untested", _NO_GPU),
    Row("sampler", "CudaMinSegmentTreeFp64", "untested", _NO_GPU),
    # ---------------------------------------------------------------- what an anchor expands into
    Row("sample unit", "Transition", "works"),
    Row("sample unit", "Sequence", "works", "`anchor_generation` beside `anchor_index`; updates go to the anchors"),
    Row("sample unit", "Sequence, of the slices of a slice sampler", "works"),
    Row("sample unit", "SampleUnit, a subclass of one's own", "works"),
    # ---------------------------------------------------------------- storages
    Row("storage", "GenerationalLazyTensorStorage", "works"),
    Row("storage", "GenerationalLazyMemmapStorage", "works"),
    Row("storage", "GenerationalTensorStorage", "works"),
    Row("storage", "TensorStorage", "refused", f"{_STORAGE}, got TensorStorage. Use GenerationalLazyTensorStorage"),
    Row("storage", "LazyTensorStorage", "refused", f"{_STORAGE}, got LazyTensorStorage. Use Generational"),
    Row("storage", "LazyMemmapStorage", "refused", f"{_STORAGE}, got LazyMemmapStorage. Use Generational"),
    Row("storage", "ListStorage", "refused", f"{_STORAGE}, got ListStorage. Use GenerationalLazyTensorStorage"),
    Row("storage", "LazyStackStorage", "refused", f"{_STORAGE}, got LazyStackStorage. Use Generational"),
    Row("storage", "CompressedListStorage", "refused", f"{_STORAGE}, got CompressedListStorage. Use Generational"),
    Row("storage", "StorageEnsemble", "refused", f"{_STORAGE}, got StorageEnsemble. Use GenerationalLazyTensorStorage"),
    Row("storage", "Storage, a subclass of one's own", "refused", f"{_STORAGE}, got OwnStorage. Use Generational"),
    Row(
        "storage",
        "StoreStorage",
        "untested",
        "needs a Redis server; refused for its lack of generations",
    ),
    # ---------------------------------------------------------------- writers
    Row("writer", "GenerationalRoundRobinWriter", "works"),
    Row("writer", "GenerationalTensorDictRoundRobinWriter", "works"),
    Row("writer", "GenerationalTensorDictMaxValueWriter", "works"),
    Row("writer", "RoundRobinWriter", "refused", f"{_WRITER}, got RoundRobinWriter. Use GenerationalRoundRobinWriter"),
    Row("writer", "TensorDictRoundRobinWriter", "refused", f"{_WRITER}, got TensorDictRoundRobinWriter. Use Gen"),
    Row("writer", "TensorDictMaxValueWriter", "refused", f"{_WRITER}, got TensorDictMaxValueWriter. Use Generational"),
    Row("writer", "ImmutableDatasetWriter", "refused", f"{_WRITER}, got ImmutableDatasetWriter. Use Generational"),
    Row("writer", "WriterEnsemble", "refused", f"{_WRITER}, got WriterEnsemble. Use GenerationalRoundRobinWriter"),
    Row("writer", "Writer, a subclass of one's own", "refused", f"{_WRITER}, got OwnWriter. Use Generational"),
    # ---------------------------------------------------------------- buffers
    Row("buffer", "ReplayBuffer", "works", "as GenerationalReplayBuffer; handles in the info"),
    Row("buffer", "TensorDictReplayBuffer", "works", "as GenerationalTensorDictReplayBuffer"),
    Row("buffer", "PrioritizedReplayBuffer", "works", "as GenerationalPrioritizedReplayBuffer; handles in the info"),
    Row("buffer", "TensorDictPrioritizedReplayBuffer", "works", "as GenerationalTensorDictPrioritizedReplayBuffer"),
    Row("buffer", "ConditionalUpdateResult", "works", "UpdateResult has all that it has"),
    Row(
        "buffer",
        "HERReplayBuffer",
        "works",
        "`class Mine(HERReplayBuffer, GenerationalTensorDictReplayBuffer)`: handles and priorities. *Its goals are of "
        "another episode*, as in TorchRL alone, for rows of an episode that goes on over the end of a full ring "
        "(`final`, `episode`), and for any row after exactly one turn of the ring since the last sample (not `random`)",
    ),
    Row(
        "buffer",
        "HERReplayBuffer, behind the mixin",
        "refused",
        "the mixin replaces _sample, and HERReplayBuffer has one of its own that would be skipped",
    ),
    Row(
        "buffer",
        "OfflineToOnlineReplayBuffer",
        "refused",
        "has no attribute 'update_priority_if_present'",
        error=AttributeError,
    ),
    Row("buffer", "prefill_replay_buffer", "works", "handles of the data set are not stored"),
    Row("buffer", "InPlaceSampler", "refused", "This class has been removed without replacement", error=RuntimeError),
    Row(
        "buffer",
        "ReplayBufferEnsemble",
        "works",
        "as GenerationalReplayBufferEnsemble",
        tried_in="ensembles/test_ensemble.py::test_td_errors_reach_the_records_of_their_members_or_none",
    ),
    Row(
        "buffer",
        "ReplayBufferEnsemble, of TorchRL's class",
        "works",
        "members keep their promise; the ensemble itself only warns when priorities are updated",
        tried_in="ensembles/test_ensemble.py::test_torchrls_ensemble_only_warns_when_priorities_are_updated",
    ),
    Row(
        "buffer",
        "RemoteTensorDictReplayBuffer, behind the mixin",
        "refused",
        "torch.distributed.rpc.remote(worker, GenerationalTensorDictReplayBuffer, kwargs=...)",
    ),
    Row(
        "buffer",
        "RemoteTensorDictReplayBuffer",
        "works",
        "as any buffer of this package made by `torch.distributed.rpc.remote`",
        tried_in="integrations/test_rpc.py::test_a_buffer_in_another_process_says_which_records_were_there",
    ),
    Row(
        "buffer",
        "RayReplayBuffer",
        "works",
        "as GenerationalRayReplayBuffer",
        tried_in="integrations/test_ray.py::test_no_td_error_of_any_client_reaches_another_record",
    ),
    # ---------------------------------------------------------------- transforms
    Row("transform", "MultiStepTransform", "works", "also while it holds records back"),
    Row("transform", "Reward2GoTransform", "works"),
    Row("transform", "FlattenTensorDict", "works", "on writing and on reading"),
    Row("transform", "BurnInTransform", "works", "on stored trajectories"),
    Row("transform", "RandomCropTensorDict", "works", "on stored trajectories"),
    Row("transform", "CatFrames", "works"),
    Row("transform", "RenameTransform", "works", "of `index` too: the handle stays under its own name as well"),
    Row("transform", "SelectTransform", "works", "handles come back behind it"),
    Row("transform", "ExcludeTransform", "works", "of `index_generation` too: it comes back behind it"),
    Row("transform", "FlattenObservation", "works"),
    Row("transform", "VecNorm", "works"),
    Row("transform", "ObservationNorm", "works"),
    Row("transform", "RewardScaling", "works"),
    Row("transform", "DTypeCastTransform", "works", "of all integers too: handles stay int64"),
    Row("transform", "ActionChunkTransform", "works", "on stored trajectories"),
    Row("transform", "ModuleTransform", "works"),
    Row("transform", "NextStateReconstructor", "works"),
    Row("transform", "PolicyAgeFilter", "works", "drops records on reading and on writing"),
    Row("transform", "a function that reorders, drops or repeats records", "works"),
    Row("transform", "a function that reshapes the batch", "works"),
    Row("transform", "a second step that crops what the first reshaped", "works"),
    Row("transform", "a second step that reorders what the first reshaped", "works"),
    Row("transform", "a second step that flattens what the first reshaped", "works"),
    Row("transform", "a second step that moves cropped trajectories", "works"),
    Row(
        "transform",
        "a function that rebuilds all entries",
        "refused",
        "so that it cannot be told where each record went. Return that one as well",
        error=RuntimeError,
    ),
    Row(
        "transform",
        "a function that rebuilds all entries but an empty one",
        "refused",
        "so that it cannot be told where each record went. Return that one as well",
        error=RuntimeError,
    ),
    Row("transform", "a function of tensors that keeps records in place", "works", "that it does is not checked"),
    Row(
        "transform",
        "a function of tensors that drops records",
        "refused",
        "in a Tensor records cannot carry their handles. Store and return tensordicts",
        error=RuntimeError,
    ),
    # ---------------------------------------------------------------- what a record is
    Row("data", "stored trajectories", "works", "a handle for each, repeated along its steps"),
    Row("data", "stored trajectories, flattened", "works", "steps of one trajectory make one priority"),
    Row("data", "stored trajectories, their last step", "works"),
    Row("data", "stored trajectories, time first", "works"),
    Row("data", "stored trajectories, fields patched by one handle for each", "works"),
    Row(
        "data",
        "stored trajectories, in a storage of 2 dimensions",
        "refused",
        "coordinates do not fit into their samples",
        error=ValueError,
    ),
    Row("data", "tensorclass", "works", "in GenerationalReplayBuffer and GenerationalPrioritizedReplayBuffer"),
    Row("data", "tensorclass, extending a tensordict buffer", "refused", "Please use a regular", error=ValueError),
    Row("data", "tensorclass, added to a tensordict buffer", "refused", "Use Generational", error=ValueError),
    Row("data", "tensors and dicts of tensors", "works"),
    Row("data", "LazyStackedTensorDict", "works"),
    Row(
        "data",
        "LazyStackedTensorDict, records of several shapes",
        "refused",
        "Give every record the shapes of the first one",
        error=RuntimeError,
    ),
    Row("data", "entries that are no tensors", "works", "in memory"),
    Row("data", "entries that are no tensors, in memory-mapped files", "works", "the same one for all records"),
    Row(
        "data",
        "entries that are no tensors and differ, in memory-mapped files",
        "refused",
        "Store it as a tensor, or use GenerationalLazyTensorStorage",
    ),
    Row("data", "nested priority keys", "works"),
    Row("storage", "GenerationalLazyTensorStorage, on a GPU", "untested", _NO_GPU),
    # ---------------------------------------------------------------- delivery
    Row("delivery", "return_info", "works"),
    Row("delivery", "iteration", "works", "`for batch in rb` and `rb.next()`"),
    Row("delivery", "prefetch", "works", "stamps are those of the draw"),
    Row("delivery", "pickle, torch.save, memmap, numpy", "works"),
    Row(
        "delivery",
        "a cast of the handles to another dtype",
        "refused",
        "generation must hold integers of dtype int64, got a tensor of",
    ),
    Row(
        "delivery",
        "a sample without its generations",
        "refused",
        "reads the entry 'index_generation', and the data has only",
        error=KeyError,
    ),
    Row("delivery", "pin_memory, without a GPU", "refused", "Found no NVIDIA driver", error=RuntimeError),
    Row("delivery", "pin_memory", "untested", _NO_GPU),
    Row("delivery", "delayed_init, transform_factory", "works"),
    Row("delivery", "torch.compile, compilable=True", "works", "no new graphs from the third call on"),
    Row("delivery", "torch.compile, compilable=False", "works", "the write itself is not traced"),
    # ---------------------------------------------------------------- trainers
    Row("trainer", "DQNTrainer", "works", "with `conditional_updates=True`", tried_in=_READY_MADE),
    Row("trainer", "DDPGTrainer", "works", "with `conditional_updates=True`", tried_in=_READY_MADE),
    Row("trainer", "SACTrainer", "works", "with `conditional_updates=True`", tried_in=_READY_MADE),
    Row("trainer", "TD3Trainer", "works", "with `conditional_updates=True`", tried_in=_READY_MADE),
    Row("trainer", "IQLTrainer", "works", "with `conditional_updates=True`", tried_in=_READY_MADE),
    Row(
        "trainer",
        "CQLTrainer",
        "works",
        "with `conditional_updates=True`; it asks for no update, so register one: see `use_conditional_updates`",
        tried_in=_READY_MADE,
    ),
    Row("trainer", "OfflineToOnlineTrainer", "untested", "trains on an OfflineToOnlineReplayBuffer, which is refused"),
    Row(
        "trainer",
        "Trainer, with ReplayBufferTrainer",
        "works",
        "as GenerationalReplayBufferTrainer, or with `conditional_updates=True`",
        tried_in="integrations/test_trainer.py::test_the_hook_updates_by_handles_in_a_trainer_with_and_without_an_optimization_stepper",
    ),
    Row("trainer", "A2CTrainer, PPOTrainer, ReinforceTrainer, GRPOTrainer", "untested", "on-policy: no priorities"),
    Row("trainer", "DreamerV3OptimizationStepper", "untested", "samples slices by time, and updates no priorities"),
    # ---------------------------------------------------------------- collectors
    Row(
        "collector",
        "Collector",
        "works",
        "",
        tried_in=_READY_MADE,
    ),
    Row(
        "collector",
        "Collector, started in a thread",
        "works",
        "`async_collection=True` of a trainer",
        tried_in="integrations/test_trainer.py::test_a_writer_in_another_thread_and_a_trainer_that_collects_asynchronously_get_on",
    ),
    Row(
        "collector",
        "MultiSyncCollector",
        "works",
        "also over batched environments, and into a storage that no one has written to",
        tried_in="system/test_collectors.py::test_workers_in_step_make_an_unwritten_storage_and_wrap_its_ring",
    ),
    Row(
        "collector",
        "MultiAsyncCollector",
        "works",
        "also with `extend_buffer=False`",
        tried_in="system/test_collectors.py::test_workers_out_of_step_write_to_a_buffer_that_the_collector_shared_and_emptied",
    ),
    Row("collector", "AsyncCollector", "untested", "one worker of MultiAsyncCollector"),
    Row("collector", "AsyncBatchedCollector", "untested", "writes in the process of the buffer, as Collector"),
    Row("collector", "RayCollector", "untested", "writes by a client of GenerationalRayReplayBuffer, which is tested"),
    Row(
        "collector",
        "DistributedCollector, DistributedSyncCollector, RPCCollector",
        "untested",
        "hand batches to the process that iterates, which writes them itself",
    ),
    # ---------------------------------------------------------------- transports
    Row("transport", "threads", "works", "", tried_in="system/test_races.py"),
    Row(
        "transport", "processes, shared=True", "works", "spawned and forked", tried_in="buffers/test_process_sharing.py"
    ),
    Row(
        "transport",
        "service_backend=ray, transport=ray",
        "works",
        "",
        tried_in="integrations/test_ray.py::test_an_update_brings_back_which_records_were_there",
    ),
    Row(
        "transport",
        "service_backend=ray, transport=distributed",
        "works",
        "conditional updates go through Ray",
        tried_in="integrations/test_ray.py::test_the_option_service_backend_makes_this_buffer_on_both_transports",
    ),
    Row(
        "transport",
        "a Ray cluster of two nodes",
        "works",
        "both on one machine",
        tried_in="integrations/test_ray.py::nodes",
    ),
    Row(
        "transport",
        "torch.distributed.rpc",
        "works",
        "`rref.rpc_sync()`",
        tried_in="integrations/test_rpc.py::test_a_buffer_in_another_process_says_which_records_were_there",
    ),
]


def markdown(rows: list[Row] = ROWS) -> str:
    """The rows as a table."""
    lines = ["| | component | | |", "| --- | --- | --- | --- |"]
    for row in rows:
        note = f"`{row.error.__name__}`: “{row.note}”" if row.verdict == "refused" else row.note
        lines.append(f"| {row.kind} | {row.component} | {row.verdict} | {note.replace('|', '&#124;')} |")
    return "\n".join(lines) + "\n"
