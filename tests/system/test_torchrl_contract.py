"""What this package relies on in TorchRL beyond its public interface, one test each.

If one of these fails after an upgrade of TorchRL, its message says which part of the package to look at.
"""

from __future__ import annotations

import inspect
import sys
import warnings

import numpy as np
import pytest
import torch
from support import AFTER_0_14
from tensordict import NonTensorStack, TensorDict, tensorclass
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.data.replay_buffers import SamplerEnsemble
from torchrl.envs.transforms import Compose, RewardSum

import torchrl_generational as g

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.trainers import Trainer
    from torchrl.trainers.algorithms.td3 import TD3OptimizationStepper


@tensorclass
class Point:
    x: torch.Tensor
    name: str


def relies(condition: bool, on: str, used_in: str) -> None:
    assert condition, f"TorchRL no longer has {on}, which torchrl_generational.{used_in} relies on."


@pytest.mark.parametrize(
    ("owner", "names", "used_in"),
    [
        (
            ReplayBuffer,
            ["_init", "_sample", "_maybe_make_storage", "_maybe_make_sampler", "_maybe_make_writer"],
            "mixin",
        ),
        (ReplayBuffer, ["_clear_prefetch_queue_locked", "share", "mark_update", "set_storage"], "mixin"),
        (ReplayBuffer, ["_add", "_extend"], "tensordict_mixin"),
        (TensorDictReplayBuffer, ["_set_index_in_td", "update_tensordict_priority"], "tensordict_mixin"),
        (TensorDictPrioritizedReplayBuffer, ["_catch_up_prioritized_sampler", "prioritized_sampler"], "conditional"),
        (PrioritizedReplayBuffer, ["_catch_up_prioritized_sampler", "prioritized_sampler"], "conditional"),
        (TensorStorage, ["_total_shape", "_len_along_dim0", "_max_size_along_dim0", "_empty", "set"], "storages"),
        (RoundRobinWriter, ["_bump_generation", "_generation", "_cursor", "_write_count", "_empty"], "writers"),
        (
            PrioritizedSampler,
            ["_maybe_init_from_storage", "_init", "_max_priority", "_maybe_erase_max_priority"],
            "samplers",
        ),
        (PrioritizedSampler, ["_STATE_SCHEMA_VERSION"], "trees"),
        (SliceSampler, ["_adjusted_batch_size", "_resolve_traj_key", "_used_traj_key", "_sampleable_count"], "slices"),
        (LazyTensorStorage, ["_is_full", "_last_cursor_index"], "boundaries"),
        (
            ReplayBuffer,
            [
                "_clone_prefetch_result",
                "_validate_prefetch_state",
                "_load_prefetch_state",
                "set_rng",
                "write_all",
                "_synchronize_futures_locked",
            ],
            "checkpoints",
        ),
        (ReplayBuffer, ["_ServiceClass", "as_remote", "_getattr", "__setstate__"], "mixin, ray and conversion"),
        (ReplayBufferEnsemble, ["_sample", "_init", "__getitem__", "can_sample", "end_streams"], "ensembles"),
        (SamplerEnsemble, ["sample", "can_sample", "p"], "ensembles"),
        (PrioritizedSampler, ["_sampleable_count"], "ensemble_draws"),
        (Trainer, ["register_op", "register_module", "_log"], "trainer"),
        (TD3OptimizationStepper, ["updates_replay_priority"], "trainer"),
    ],
)
def test_the_hooks_that_are_overridden_or_called_exist(owner, names, used_in):
    for name in names:
        relies(hasattr(owner, name), f"{owner.__name__}.{name}", used_in)


def test_a_slice_sampler_remembers_where_trajectories_end_under_the_names_used_here():
    sampler = PrioritizedSliceSampler(4, 0.7, 0.5, slice_len=2, ends=torch.tensor([[0], [1]]).bool(), cache_values=True)
    relies("static-stop-and-length" in sampler._cache, "_cache['static-stop-and-length']", "slices")
    sampler = PrioritizedSliceSampler(4, 0.7, 0.5, slice_len=2)
    for name in ("_fetch_traj", "_traj_key_auto"):
        relies(hasattr(sampler, name), f"SliceSampler.{name}", "slices")


def test_the_arguments_of_the_slice_sampler_have_the_order_and_defaults_used_here():
    theirs = inspect.signature(PrioritizedSliceSampler.__init__)
    ours = inspect.signature(g.GenerationalPrioritizedSliceSampler.__init__)
    wanted, found = ([(p.name, p.kind, p.default) for p in s.parameters.values()] for s in (theirs, ours))
    relies(wanted == found, f"the arguments {found} of PrioritizedSliceSampler, but {wanted}", "slices")


def test_a_plain_tensordict_keeps_its_entries_in_a_dict():
    data = TensorDict({"x": torch.zeros(2), "nested": {"y": torch.zeros(2)}}, [2])
    kept = getattr(data, "_tensordict", None)
    relies(isinstance(kept, dict) and set(kept) == {"x", "nested"}, "TensorDict._tensordict (of tensordict)", "records")
    relies(type(kept["nested"]) is TensorDict, "nested TensorDicts in TensorDict._tensordict", "records")
    relies(hasattr(data, "_td_dim_names"), "TensorDict._td_dim_names (of tensordict)", "records")
    made = TensorDict._new_unsafe(source=dict(kept), batch_size=data.batch_size, device=None, names=None, nested=False)
    relies(made["nested", "y"] is data["nested", "y"], "TensorDict._new_unsafe (of tensordict)", "records")


def test_a_buffer_keeps_its_parts_under_the_names_used_here():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    names = [
        "_storage",
        "_sampler",
        "_writer",
        "_transform",
        "_collate_fn",
        "_sample_unit",
        "_initialized",
        "_replay_lock",
    ]
    for name in [*names, "_write_lock", "_futures_lock", "_prefetch_queue", "_init_storage", "_init_sampler"]:
        relies(name in vars(rb), f"the buffer attribute {name}", "mixin")


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_a_buffer_that_is_converted_has_the_attributes_known_here(cls):
    priorities = {"alpha": 1.0, "beta": 1.0, "sync": False} if cls is TensorDictPrioritizedReplayBuffer else {}
    rb = cls(storage=LazyTensorStorage(4), batch_size=2, prefetch=1, **priorities)
    for name in (
        *("_storage", "_sampler", "_writer", "_transform", "_collate_fn", "_rng", "_replay_lock"),
        *("_futures_lock", "_prefetch_queue", "_prefetch_executor", "_update_executor", "_pending_update_futures"),
        *("_sample_dependency", "_service_shutdown", *(("_sync", "_prioritized_sampler") if priorities else ())),
    ):
        relies(name in vars(rb), f"an attribute {name} of {cls.__name__}", "conversion")
    for owner, name in (
        (rb._storage, "_attached_entities_list"),
        (rb._writer, "_cursor"),
        (rb._writer, "_write_count"),
    ):
        relies(hasattr(owner, name), f"{type(owner).__name__}.{name}", "conversion")
    rb.shutdown()


def test_a_trainer_counts_the_frames_of_its_logs_under_the_names_used_here():
    trainer = Trainer(
        collector=None, loss_module=None, total_frames=1, frame_skip=1, optim_steps_per_batch=1, log_interval=7
    )
    trainer.collected_frames = 8
    trainer._log(num_stale=3)
    relies(getattr(trainer, "_last_log", None) == {"num_stale": 8}, "Trainer._last_log, frames by name,", "trainer")
    relies(vars(trainer).get("optimization_stepper", 1) is None, "Trainer.optimization_stepper", "trainer")
    relies(vars(trainer).get("_log_interval") == 7, "Trainer._log_interval", "trainer")
    for stage in ("post_optim_log", "post_steps_log", "batch_process", "process_optim_batch"):
        trainer.register_op(stage, lambda *_: None)


def test_an_ensemble_keeps_its_parts_under_the_names_used_here():
    rb = ReplayBufferEnsemble(*(TensorDictReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2)), batch_size=2)
    for owner, names in (
        (rb, ("_rbs", "_storage", "_sampler", "_writer", "_collate_fns", "_collate_fn_val", "_replay_lock")),
        (rb._storage, ("_storages", "_transforms")),
        (rb._sampler, ("_samplers", "p", "sample_from_all", "num_buffer_sampled")),
        (rb._writer, ("_writers",)),
    ):
        for name in names:
            relies(hasattr(owner, name), f"{type(owner).__name__}.{name}", "ensembles")
    state = rb.state_dict()
    relies(
        set(state["_storage"]) == {"0", "1"}, "members by number in the state of an ensemble", "ensemble_checkpoints"
    )


@pytest.mark.ray
def test_ray_buffers_have_the_parts_known_here():
    from torchrl.data.replay_buffers import ray_buffer

    for name in ("_RayReplayBufferClient", "_LazyDistributedReplayClient", "RayReplayBuffer"):
        relies(hasattr(ray_buffer, name), f"ray_buffer.{name}", "ray")
    source = inspect.getsource(ray_buffer)
    for name in ("self._rb", "self._client", "self._service_cls", "self._distributed_batch_size", "_getattr.remote"):
        relies(name in source, f"{name} in RayReplayBuffer", "ray")


def test_a_ray_buffer_is_closed_and_its_actor_changed_by_the_names_used_here():
    from torchrl.data.replay_buffers import ray_buffer

    source = inspect.getsource(ray_buffer)
    relies("_runtime_lease.release()" in source, "RayReplayBuffer._runtime_lease", "ray.actors")
    relies("_setattr.remote(" in source, "_setattr of an actor", "ray.actors")


def test_stacks_and_files_of_tensordict_have_the_names_used_here(tmp_path):
    data = TensorDict({"x": torch.zeros(2)}, [2]).memmap(tmp_path)
    relies(
        str(data["x"]._filename).startswith(str(tmp_path)), "MemoryMappedTensor._filename", "storages.shared_storage"
    )
    stack = NonTensorStack._from_list(["a", "b"], device=None)
    relies(stack.tolist() == ["a", "b"], "NonTensorStack._from_list (of tensordict)", "persistence.kept_objects")
    held = Point(x=torch.zeros(2), name="a", batch_size=[2])
    relies(held._non_tensordict == {}, "_non_tensordict of a tensorclass", "records.record_io")
    again = held._from_tensordict(held._tensordict, {})
    relies(again.name == "a", "_from_tensordict of a tensorclass", "records.record_io")


def test_modules_keep_their_hooks_under_the_names_used_here():
    module = torch.nn.Identity()
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        relies(not getattr(module, name), f"Module.{name} (of torch)", "records.row_tracking")
    inside = Compose()._modules["transforms"]._modules
    relies(inside == {}, "the transforms of a Compose among its _modules", "buffers.tensordict_mixin")
    inside = Compose(RewardSum())._modules["transforms"]._modules
    relies(len(inside) == 1, "the transforms of a Compose among its _modules", "buffers.tensordict_mixin")


def test_prefetching_buffers_keep_their_threads_under_the_names_used_here():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2, prefetch=3)
    relies(rb._prefetch_cap == 3, "ReplayBuffer._prefetch_cap", "buffers.work_in_flight")
    relies(hasattr(rb, "_iterator"), "ReplayBuffer._iterator", "buffers.work_in_flight")


def test_python_gives_a_handler_the_frame_that_is_running():
    relies(sys._getframe().f_code.co_name.startswith("test_"), "sys._getframe", "concurrency.deferred_signals")


def test_a_checkpoint_of_a_buffer_has_the_parts_known_here(tmp_path):
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(4), batch_size=2, prefetch=1, generator=torch.Generator()
    )
    rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
    rb.sample()
    rb.dumps(tmp_path)
    known = {"storage", "sampler", "writer", "rng_state", "buffer_metadata.json", "prefetch.pkl"}
    found = {entry.name for entry in tmp_path.iterdir()}
    relies(found == known, f"checkpoints of {sorted(known)}", "manifest")
    relies((tmp_path / "storage" / "storage_metadata.json").exists(), "storage_metadata.json", "storages")
    state = rb.state_dict()
    parts = {"_storage", "_sampler", "_writer", "_transforms", "_batch_size", "_rng", "_prefetch_state"}
    relies(parts < set(state), f"state dicts of {sorted(parts)}", "checkpoints")
    relies({"queue", "capacity", "version"} == set(state["_prefetch_state"]), "a prefetch state", "checkpoints")
    rb.shutdown()


def test_a_double_sum_tree_exists_and_scans_to_the_first_cell_whose_cumulative_sum_reaches_the_mass():
    from torchrl._torchrl import SumSegmentTreeFp64

    tree = SumSegmentTreeFp64(5)
    tree[np.arange(5)] = np.array([0.0, 1.0, 0.0, 2.0, 0.0])
    landed = tree.scan_lower_bound(np.array([1e-300, 1.0, 1.5, 3.0, 3.5])).tolist()
    relies(landed == [1, 1, 3, 3, 5], "a sum tree whose scan never stops at a leaf of zero", "draws.draw")


def test_a_buffer_asks_for_its_parts_through_the_makers():
    asked = []

    class Asking(ReplayBuffer):
        def _maybe_make_storage(self, storage, compilable):
            asked.append("storage")
            return super()._maybe_make_storage(storage, compilable)

        def _maybe_make_sampler(self, sampler):
            asked.append("sampler")
            return super()._maybe_make_sampler(sampler)

        def _maybe_make_writer(self, writer):
            asked.append("writer")
            return super()._maybe_make_writer(writer)

    Asking(storage=LazyTensorStorage(4))
    relies(asked == ["storage", "sampler", "writer"], "the order storage, sampler, writer of construction", "mixin")


def test_a_sampler_keeps_its_configuration_under_the_names_used_here():
    sampler = PrioritizedSampler(4, 1.0, 1.0)
    names = ["_max_capacity", "_alpha", "_beta", "_eps", "dtype", "reduction", "_max_priority_within_buffer", "_device"]
    for name in [*names, "_sum_tree", "_min_tree"]:
        relies(hasattr(sampler, name), f"PrioritizedSampler.{name}", "samplers")
    parameters = list(inspect.signature(PrioritizedSampler.__init__).parameters)[1:]
    order = ["max_capacity", "alpha", "beta", "eps", "dtype", "reduction", "max_priority_within_buffer", "device"]
    relies(
        parameters == order,
        f"the sampler arguments {order} in this order",
        "samplers.GenerationalPrioritizedSampler.like",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tree_takes_the_last_of_repeated_writes_and_recomputes_its_total(dtype):
    sampler = PrioritizedSampler(8, 1.0, 1.0, eps=0.0, dtype=dtype)
    sampler._sum_tree[torch.tensor([1, 1, 2])] = torch.tensor([9.0, 3.0, 4.0], dtype=dtype)
    held = sampler._sum_tree[torch.arange(4)].tolist()
    relies(held == [0, 3, 4, 0], "trees in which the last of several writes to a leaf wins", "leaves.store_priorities")
    relies(sampler._sum_tree.query(0, 8) == 7, "a root that is the sum of the leaves", "leaves.store_priorities")


def test_raw_maximum_and_transformed_leaf_keep_their_domains():
    sampler = PrioritizedSampler(8, 0.5, 1.0, eps=0.0)
    sampler.update_priority(torch.tensor([1]), torch.tensor([4.0]))
    relies(float(sampler._max_priority[0]) == 4.0, "a raw running maximum", "leaves.store_priorities")
    relies(float(sampler._sum_tree[1]) == 2.0, "leaves (priority + eps) ** alpha", "leaves.store_priorities")


def test_a_writer_finds_its_stamps_on_the_storage_under_the_name_used_here():
    storage = LazyTensorStorage(4)
    writer = RoundRobinWriter(track_generations=True)
    writer.register_storage(storage)
    writer.extend(torch.arange(3))
    relies(hasattr(storage, "_slot_generations"), "the storage attribute _slot_generations", "storages")
    relies(set(writer.state_dict()) == {"_cursor", "_write_count", "_generation"}, "the writer's state keys", "writers")


def test_every_write_of_a_writer_reaches_the_storage_through_set():
    seen = []

    class Seeing(LazyTensorStorage):
        def set(self, cursor, data, *, set_cursor=True):
            seen.append(np.atleast_1d(np.asarray(cursor)).tolist())
            super().set(cursor, data, set_cursor=set_cursor)

    writer = RoundRobinWriter()
    writer.register_storage(Seeing(4))
    writer.extend(torch.arange(3))
    writer.add(torch.tensor(7))
    writer.write_at(torch.tensor([2]), torch.tensor([8]))
    relies(seen == [[0, 1, 2], [3], [2]], "writers that write through storage.set", "storages")


def test_writers_mark_every_buffer_on_their_storage():
    storage = LazyTensorStorage(4)
    rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(4, 1.0, 1.0), batch_size=2)
    relies(storage._attached_entities == [rb], "the list _attached_entities of a storage", "mixin.set_storage")
    rb.extend(torch.arange(3))
    relies(
        rb.sampler._sum_tree.query(0, 4) == 3.0, "writers that mark new records in the samplers", "mixin.mark_update"
    )


def test_the_helpers_imported_from_private_places_exist():
    from tensordict.nn.utils import _set_dispatch_td_nn_modules
    from torchrl.data.replay_buffers.utils import _reduce, pin_memory_output

    relies(callable(pin_memory_output), "pin_memory_output", "mixin")
    relies(_reduce(torch.tensor([[1.0, 3.0]]), "max", dim=-1).tolist() == [3.0], "_reduce", "tensordict_mixin")
    with _set_dispatch_td_nn_modules(True):
        pass


def test_a_sampled_tensordict_takes_entries_from_the_info():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
    sample, info = rb.sample(return_info=True)
    relies(torch.equal(sample["index"], info["index"]), "samples that carry the entries of the info", "carrier")


@pytest.mark.parametrize("cls", [LazyTensorStorage, LazyMemmapStorage])
def test_lazy_storages_are_made_by_one_process_for_all_in_a_directory(cls):
    storage = cls(4, shared_init=True)
    for name in ("_init_lock", "_init_event", "_init_directory", "scratch_dir"):
        relies(hasattr(storage, name), f"{cls.__name__}.{name}", "sharing")
    for name in ("_make_init_directory", "_init_coordinator", "_wait_for_init", "_init"):
        relies(callable(getattr(cls, name, None)), f"{cls.__name__}.{name}", "sharing")
    storage.set(range(2), TensorDict({"x": torch.arange(2)}, [2]))
    there = TensorDict.load_memmap(storage._init_directory)
    relies(there["x"][:2].tolist() == [0, 1], "storages whose records load_memmap reads", "sharing")


def test_storages_and_writers_count_in_objects_with_a_value():
    storage = LazyTensorStorage(4)
    rb = ReplayBuffer(storage=storage, batch_size=2)
    rb.extend(torch.arange(3))
    found = [getattr(storage, name).value for name in ("_len_value", "_last_cursor_index_value")]
    relies(found == [3, 2], "storages that count in _len_value and _last_cursor_index_value", "sharing")
    relies(storage._mutation_revision_value.value > 0, "_mutation_revision_value", "sharing")
    found = [getattr(rb.writer, name).value for name in ("_cursor_value", "_write_count_value")]
    relies(found == [3, 3], "writers that count in _cursor_value and _write_count_value", "writers")


def test_conditional_patches_go_through_the_storage():
    relies(hasattr(TensorStorage, "_apply_conditional_patch"), "TensorStorage._apply_conditional_patch", "storages")


def test_tensordicts_can_be_made_of_entries_that_are_known_to_fit():
    data = TensorDict({"x": torch.arange(2)}, [2])
    relies(data._td_dim_names is None, "TensorDict._td_dim_names", "records")
    made = TensorDict._new_unsafe(source={"x": torch.arange(3)}, batch_size=torch.Size([3]), device=None)
    made._set_str("y", torch.ones(3), inplace=False, validated=True, non_blocking=False)
    relies(sorted(made.keys()) == ["x", "y"] and made.shape == (3,), "_new_unsafe and _set_str", "records")


def test_multiprocessing_says_when_it_pickles_for_a_process_that_it_starts():
    from multiprocessing.context import get_spawning_popen
    from multiprocessing.reduction import DupFd

    relies(get_spawning_popen() is None, "get_spawning_popen of multiprocessing", "process_locks")
    relies(callable(DupFd), "DupFd of multiprocessing", "process_locks")


def test_torch_says_of_a_thread_whether_it_compiles_and_which_modes_it_is_in():
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    relies(callback is not None, "get_eval_frame_callback (of torch)", "tracing")
    relies(callback() in (None, False), "a callback of None or False outside of compiled code", "tracing")
    modes = getattr(torch._C, "_len_torch_function_stack", None)
    relies(modes is not None, "_len_torch_function_stack (of torch)", "devices")
    before = modes()
    with torch.device("meta"):
        relies(modes() == before + 1, "a mode for a default device", "devices")


def test_python_lets_an_object_of_slots_be_a_signal_handler_without_a_frame():
    import _signal
    import signal

    relies(_signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGINT), "_signal (of Python)", "interrupts")

    class Handler:
        __slots__ = ("__call__",)

    handler = Handler()
    handler.__call__ = signal.default_int_handler
    with pytest.raises(KeyboardInterrupt) as raised:
        handler(signal.SIGINT, None)
    relies(len(raised.traceback) == 1, "calls through a slot (of Python)", "interrupts")


def test_tensordict_writes_the_metadata_of_objects_by_the_function_used_here():
    from tensordict import utils

    relies(callable(getattr(utils, "_json_dumps", None)), "utils._json_dumps (of tensordict)", "kept")


@pytest.mark.skipif(not AFTER_0_14, reason="this TorchRL has no waiters")
def test_waiters_wait_on_the_condition_and_samples_are_counted_under_the_names_used_here():
    names = ["_notify_replay_state_change", "_increment_counter", "_set_counter", "_counter_value"]
    for name in names:
        relies(hasattr(ReplayBuffer, name), f"ReplayBuffer.{name}", "waiters")
    rb = ReplayBuffer(storage=LazyTensorStorage(2))
    fields = ["_readiness_condition", "_sample_call_count_value", "_sampled_item_count_value"]
    for name in fields:
        relies(name in vars(rb), f"a buffer's {name}", "waiters")
