"""Prints the table *Where it works* from the rows that the tests run: ``python docs/where_it_works.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from where import markdown

if __name__ == "__main__":
    print(markdown(), end="")
