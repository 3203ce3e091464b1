"""The race suite on a storage of one's own: ``pytest examples/test_half_storage.py``."""

from half_storage import HalfStorage

from torchrl_generational.testing import RaceSuite


class TestHalfStorage(RaceSuite):
    """Nothing but the class to test; a writer, a sampler or a buffer would come in by ``buffer``."""

    def storage(self, capacity):
        """A new storage for every run."""
        return HalfStorage(capacity)
