"""What a generation is, and the only code that reads or changes the stamps of slots.

Promises that a handle, ``(index, generation)``, names the record that it was handed out for, or none. Also what else
concerns handles alone: the one normaliser of indices, handles that occur twice, the result of an update, and the
protocols by which storages and writers of others join. Knows the locks' room, and no storage.
"""
