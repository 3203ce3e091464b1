"""Generational buffers in Ray actors, and the clients that share them. Needs the extra ``ray``.

Promises that handles do not outlive the restart of an actor, and that whatever is asked of a closed buffer is refused.
Knows buffers, and is imported by nobody who does not ask for Ray.
"""

from torchrl_generational.ray.actors import GenerationalRayReplayBuffer, in_actor, served

__all__ = ["GenerationalRayReplayBuffer", "in_actor", "served"]
