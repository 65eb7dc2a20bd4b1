"""What every run of the tests begins with: ``tests/conftest.py``."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis

if TYPE_CHECKING:
    import pytest


def test_a_busy_machine_fails_no_property() -> None:
    assert hypothesis.settings().deadline is None


def test_what_a_shell_says_about_miniray_is_not_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = {"MINIRAY_ADDRESS": "10.0.0.1:6379", "MINIRAY_LEASE_IDLE": "9", "PATH": "/bin"}
    monkeypatch.setattr(os, "environ", shell)
    runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))
    assert shell == {"PATH": "/bin", "GRPC_ENABLE_FORK_SUPPORT": "0"}
