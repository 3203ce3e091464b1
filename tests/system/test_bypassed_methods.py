"""Methods of TorchRL that ours go past: whoever upgrades TorchRL reads those that have changed."""

from __future__ import annotations

import sys

import pytest
from bypassed import digest, known, replaced
from support import AFTER_0_14


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 writes a syntax tree in another way")
def test_methods_that_are_replaced_without_being_called_are_as_they_were_when_ours_were_written():
    found, before = replaced(), known()
    if AFTER_0_14:
        changed = [name for name, (method, _) in found.items() if before.get(name) != digest(method)]
        pytest.skip(f"of a later TorchRL, to be read: {changed}")
    assert sorted(found) == sorted(before), "run: python tests/helpers/bypassed.py"
    changed = {name: where for name, (method, where) in found.items() if before[name] != digest(method)}
    assert not changed, (
        f"TorchRL changed these methods, and ours stand in their place without calling them: {changed}. Read what is "
        "new there, let ours do it too, then run: python tests/helpers/bypassed.py"
    )
