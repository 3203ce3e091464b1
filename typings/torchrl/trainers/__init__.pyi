from typing import Any

class TrainerHookBase:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    load_state_dict: Any
    state_dict: Any

class ReplayBufferTrainer(TrainerHookBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    extend: Any
    replay_buffer: Any
    sample: Any

class Trainer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    _last_log: Any
    _log_interval: Any
    collected_frames: Any
    optimization_stepper: Any
    register_module: Any
    register_op: Any
    replay_buffer: Any
