"""From the priority that a caller hands in to the leaves of the trees, and from the trees to a draw.

Promises that a priority is checked before the first leaf changes, that both trees agree, and that the running maximum
is what was really stored. The only room that touches TorchRL's trees. Knows indices, and no buffer.
"""
