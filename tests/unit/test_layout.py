"""What the tests rely on of each other's files."""

from __future__ import annotations

import collections
from pathlib import Path


def test_no_two_test_files_have_the_same_name() -> None:
    """The second would be refused, and what workers get of the first would be looked for in it."""
    tests = Path(__file__).parents[1]
    names = collections.Counter(path.name for path in tests.rglob("*.py"))
    shared = {name for name, count in names.items() if count > 1}
    assert shared <= {"conftest.py", "__init__.py"}
