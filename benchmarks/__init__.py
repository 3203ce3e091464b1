"""Benchmarks: `python -m benchmarks.compare`, `python -m pytest benchmarks`, `python benchmarks/processes.py`."""
