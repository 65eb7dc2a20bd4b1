from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from accelerator_helpers import FakeMachine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    """A machine without accelerators."""
    return FakeMachine(tmp_path)
