from typing import Any

class Sampler:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getstate__(self) -> Any: ...
    _empty: Any
    default_priority: Any
    load_state_dict: Any
    loads: Any
    mark_update: Any
    sample: Any
    update_priority: Any

class ConsumingSampler(Sampler):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    _known_storage_len: Any

class PrioritizedSampler(Sampler):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    _STATE_SCHEMA_VERSION: Any
    _alpha: Any
    _beta: Any
    _device: Any
    _eps: Any
    _init: Any
    _max_capacity: Any
    _max_priority: Any
    _max_priority_within_buffer: Any
    _maybe_init_from_storage: Any
    _sum_tree: Any
    device: Any
    dtype: Any
    reduction: Any

class SliceSampler(Sampler):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    _adjusted_batch_size: Any
    _cache: Any
    _fetch_traj: Any
    _resolve_traj_key: Any
    _traj_key_auto: Any
    _used_traj_key: Any
    cache_values: Any
    end_key: Any
    end_keys: Any
    init_key: Any
    num_slices: Any
    slice_len: Any
    span: Any
    strict_length: Any
    traj_key: Any
    truncated_key: Any

class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    compile: Any

class SamplerEnsemble(Sampler):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

class SamplerWithoutReplacement(Sampler):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    _sample_list: Any
    len_storage: Any

class StreamingSliceSampler(SliceSampler):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
