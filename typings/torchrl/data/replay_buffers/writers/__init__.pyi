from typing import Any

class Writer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getstate__(self) -> Any: ...
    _empty: Any
    add: Any
    dumps: Any
    extend: Any
    generations_of: Any
    loads: Any
    register_storage: Any
    state_dict: Any

class RoundRobinWriter(Writer):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    __setstate__: Any
    _storage: Any
    _update_storage_len_for_write_at: Any
    write_at: Any

class TensorDictMaxValueWriter(Writer):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    __setstate__: Any
    _current_top_values: Any
    _mark_update_entities: Any
    _rank_key: Any
    _reduction: Any
    _storage: Any

class TensorDictRoundRobinWriter(RoundRobinWriter):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
