"""What every run of the tests begins with: ``tests/conftest.py``."""

from __future__ import annotations

import hypothesis


def test_a_busy_machine_fails_no_property() -> None:
    assert hypothesis.settings().deadline is None
