from typing import Any

class TensorStorageCheckpointer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    _load_hooks: Any

class H5StorageCheckpointer(TensorStorageCheckpointer):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
