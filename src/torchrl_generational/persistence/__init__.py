"""Saved state: files and state dicts, read and checked as a whole before anything is replaced.

Promises that whatever is damaged is refused by a ``ValueError`` or ``FileNotFoundError`` that names the file, and that
a checkpoint directory holds the old state or the new one. Knows files and formats, and neither storages nor samplers:
they hand in what they expect.
"""
