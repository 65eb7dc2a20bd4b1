"""Programs that tests need. Where one is missing, its tests are skipped; in CI they fail."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn


def find_tool(name: str) -> str:
    """Return the path of a program."""
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if path is None:
        missing(f"{name} is not installed")
    return path


def missing(reason: str) -> NoReturn:
    """Skip the test; fail where all tools are promised."""
    import pytest  # benchmarks use what is missing here without it

    if os.environ.get("MISSING_TOOLS_FAIL"):
        pytest.fail(reason)
    pytest.skip(reason)
