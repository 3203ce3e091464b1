from typing import Any

from torchrl.data.replay_buffers.ray_buffer import RayReplayBuffer as RayReplayBuffer
from torchrl.data.replay_buffers.storages import TensorStorage as TensorStorage

class ReplayBuffer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getstate__(self) -> Any: ...
    def __len__(self) -> int: ...
    _ServiceClass: Any
    __getitem__: Any
    __setitem__: Any
    __setstate__: Any
    _add: Any
    _batch_size: Any
    _collate_fn: Any
    _extend: Any
    _futures_lock: Any
    _get_batch_size: Any
    _get_collate_fn: Any
    _init: Any
    _init_compilable: Any
    _initialized: Any
    _is_consuming: Any
    _load_prefetch_state: Any
    _maybe_make_sampler: Any
    _maybe_make_storage: Any
    _maybe_make_writer: Any
    _pending_update_futures: Any
    _pin_memory: Any
    _prefetch: Any
    _prefetch_queue: Any
    _replay_lock: Any
    _rng: Any
    _sample_dependency: Any
    _sample_unit: Any
    _sampler: Any
    _service_shutdown: Any
    _storage: Any
    _synchronize_futures_locked: Any
    _transform: Any
    _writer: Any
    append_transform: Any
    as_remote: Any
    can_sample: Any
    dim_extend: Any
    dumps: Any
    empty: Any
    extend: Any
    initialized: Any
    insert_transform: Any
    mark_update: Any
    sample: Any
    set_: Any
    set_at_: Any
    set_rng: Any
    set_sampler: Any
    set_storage: Any
    set_writer: Any
    share: Any
    shared: Any
    state_dict: Any
    stats: Any
    storage: Any
    submit_update_if_present: Any
    synchronize: Any
    update_: Any
    update_if_present: Any
    update_priority: Any
    write_all: Any
    write_count: Any
    writer: Any

class PrioritizedReplayBuffer(ReplayBuffer):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

class TensorDictReplayBuffer(ReplayBuffer):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    _get_priority_item: Any
    _set_index_in_td: Any
    priority_key: Any
    update_tensordict_priority: Any

class RemoteTensorDictReplayBuffer(TensorDictReplayBuffer):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

class ReplayBufferEnsemble(ReplayBuffer):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    _collate_fn_val: Any
    _collate_fns: Any
    _rbs: Any
    _route: Any
    end_streams: Any

class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
