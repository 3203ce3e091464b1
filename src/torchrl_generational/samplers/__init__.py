"""Who is drawn: TorchRL's samplers, which hand out the generation of every record.

Promises TorchRL's probabilities, and that a slot whose last write did not end is never drawn. Knows priorities and
stamps, and of a storage what its protocol says.
"""
