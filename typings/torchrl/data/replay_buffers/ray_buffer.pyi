from typing import Any

from torchrl.data.replay_buffers import ReplayBuffer

class RayReplayBuffer(ReplayBuffer):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    close: Any

class _LazyDistributedReplayClient:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

class _RayReplayBufferClient:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
