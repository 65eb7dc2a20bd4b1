"""Fixtures of the tests of the head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from restart_harness import Restarts

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def restarts(tmp_path: Path) -> Restarts:
    """Heads of one cluster, one after another."""
    return Restarts(tmp_path / "head.db")
