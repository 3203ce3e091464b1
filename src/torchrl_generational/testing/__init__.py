"""The race suite: threads in every order, and what a generational buffer promises in each of them.

``pytest --pyargs torchrl_generational.testing`` runs it on the installed classes. To run it on a storage, a writer, a
sampler or a buffer of your own, make a subclass of :class:`RaceSuite`; to explore a program of your own, give
:func:`explore` a :class:`BufferScene` or any other :class:`Scene`.
"""

from torchrl_generational.testing.explorer import RaceError, Report, Scene, explore, replay
from torchrl_generational.testing.scene import BufferScene
from torchrl_generational.testing.sequencer import Sequencer, SteppedLock, StuckError
from torchrl_generational.testing.suite import RaceSuite

__all__ = [
    "BufferScene",
    "RaceError",
    "RaceSuite",
    "Report",
    "Scene",
    "Sequencer",
    "SteppedLock",
    "StuckError",
    "explore",
    "replay",
]
