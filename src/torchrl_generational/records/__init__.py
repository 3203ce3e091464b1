"""Records as data: on their way into a storage, out of it, and through the transforms of a sample.

Promises that what does not fit is refused before anything is written, and that handles follow their records. Knows
tensors, indices and stamps, and no storage.
"""
