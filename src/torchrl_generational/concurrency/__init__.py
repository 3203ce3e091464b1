"""Locks and counters that threads and processes share, and who may write.

Promises that nothing stays locked: not by an exception, Ctrl-C, a fork or a killed process. Knows threads, processes,
signals and files, and nothing of what the locks guard.
"""
