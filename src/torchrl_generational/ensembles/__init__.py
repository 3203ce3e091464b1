"""The same promises over several buffers: each row of a batch says which member it is from.

Knows buffers by their public methods and the few private ones that sampling and updates of members share with them.
"""
