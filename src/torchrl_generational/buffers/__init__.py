"""One buffer: its sections, samples, writes, conditional updates, checkpoints, and the processes that share it.

Promises what the user is promised: a TD error reaches the record that it was computed for, or none. The mixin stands
in front of a TorchRL buffer, overrides, and hands over to the modules beside it. Knows every room below.
"""
