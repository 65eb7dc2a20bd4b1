"""Real tools behind the seam of detection."""

from __future__ import annotations

import os
import select
import sys
import time
from typing import TYPE_CHECKING

import pytest

from miniray.accelerators.host import DetectionError, Host, ToolNotFoundError, run_tool
from miniray.accelerators.npu import _ASK_LIBRARY

if TYPE_CHECKING:
    from pathlib import Path


def test_a_tool_gives_what_it_prints() -> None:
    assert run_tool([sys.executable, "-c", "print('0, HL-225')"], 10) == "0, HL-225\n"


def test_a_missing_tool_is_told_apart_from_a_broken_one() -> None:
    with pytest.raises(ToolNotFoundError, match="no-such-tool is not installed"):
        run_tool(["no-such-tool"], 10)


def test_a_failing_tool_is_named_with_what_it_said() -> None:
    code = "import sys; sys.exit('driver\\nnot loaded')"
    with pytest.raises(DetectionError, match="failed with exit code 1: driver not loaded"):
        run_tool([sys.executable, "-c", code], 10)


def test_a_tool_that_can_not_be_run_is_broken(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("no program")
    tool.chmod(0o755)
    with pytest.raises(DetectionError, match="can't be run"):
        run_tool([str(tool)], 10)


def _ends(pid: int) -> bool:
    """Whether a process is gone, or goes within ten seconds."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 10)[0])
    finally:
        os.close(fd)


def test_a_slow_tool_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid_file}; wait"
    start = time.monotonic()
    with pytest.raises(DetectionError, match="gave no answer within 1 s"):
        run_tool(["sh", "-c", script], 1)
    assert time.monotonic() - start < 30
    assert _ends(int(pid_file.read_text()))


def test_without_the_library_nothing_names_the_chip(tmp_path: Path) -> None:
    host = Host(tmp_path, {})
    assert host.run(_ASK_LIBRARY, 60) == ""
