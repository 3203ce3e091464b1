"""Writes the page *Where it works* from the rows that the tests try: ``python docs/where_it_works.py``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))

from where import markdown  # noqa: E402

PAGE = """# Where it works

What each component of TorchRL 0.14.1 does where it meets a buffer of this package. *works*: handles name exactly the
records of a sample, and conditional updates reach exactly the live ones, while the ring turns. *refused*: an error of
that kind, with those words, says what to do instead. *untested*: not by the tests of this project, for that reason.

`tests/system/test_where_it_works.py` tries every line that claims something against an oracle that knows nothing but
the order of writes, or names the test that does, and fails if TorchRL exports a component that has no line.

"""

if __name__ == "__main__":
    (HERE / "where_it_works.md").write_text(PAGE + markdown())
