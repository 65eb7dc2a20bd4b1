"""What a start that fails tells, and that it leaves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from miniray.system import launch
from miniray.system.boot_options import BootError, BootOptions

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MINIRAY_TMPDIR", str(tmp_path))
    return tmp_path


def run_instead(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """What the new process is to run instead of a node."""
    monkeypatch.setattr(launch, "python_command", lambda _module: source)


def is_empty(base: Path) -> bool:
    return not [path for path in base.rglob("*") if path.name.startswith(("session_", "mr-"))]


def test_a_node_that_ends_without_a_word_is_told_with_the_last_line_of_its_log(
    monkeypatch: pytest.MonkeyPatch, base: Path
) -> None:
    run_instead(monkeypatch, "import sys; print('first', flush=True); sys.exit('no room left')")
    with pytest.raises(BootError) as failure:
        launch.launch(BootOptions(head=True))
    assert str(failure.value) == (
        "The node ended while it started (exit code 1). The last line of its log: no room left"
    )
    assert is_empty(base)


def test_a_node_that_ends_and_wrote_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, base: Path
) -> None:
    run_instead(monkeypatch, "import os; os._exit(7)")
    with pytest.raises(BootError, match=r"^The node ended while it started \(exit code 7\)\.$"):
        launch.launch(BootOptions(head=True))
    assert is_empty(base)


def test_a_node_that_is_not_ready_in_time_is_killed(
    monkeypatch: pytest.MonkeyPatch, base: Path
) -> None:
    monkeypatch.setattr(launch, "_UNTIL_STARTED", 0.1 - launch.config().start_timeout)
    run_instead(monkeypatch, "import time; time.sleep(1000)")
    with pytest.raises(BootError, match=r"not ready within 0\.1 s"):
        launch.launch(BootOptions(head=True))
    assert is_empty(base)
