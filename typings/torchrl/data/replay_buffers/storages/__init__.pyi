from typing import Any

class Storage:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getstate__(self) -> Any: ...
    def __len__(self) -> int: ...
    __setstate__: Any
    _attached_entities: Any
    _bump_mutation_revision: Any
    _empty: Any
    _max_size_along_dim0: Any
    _set_last_cursor: Any
    checkpointer: Any
    dumps: Any
    get: Any
    load_state_dict: Any
    ndim: Any
    set: Any
    shape: Any
    state_dict: Any

class TensorStorage(Storage):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    _apply_conditional_patch: Any
    _compilable: Any
    _conditional_patch_leaf: Any
    _get_new_len: Any
    _init: Any
    _len_along_dim0: Any
    _set_tree_map: Any
    _storage: Any
    _total_shape: Any
    _wait_for_init: Any
    device: Any
    initialized: Any
    max_size: Any

class LazyTensorStorage(TensorStorage):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    _init_coordinator: Any
    _make_init_directory: Any

class LazyMemmapStorage(LazyTensorStorage):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    _scratch_dir_is_temp: Any
    cleanup: Any
