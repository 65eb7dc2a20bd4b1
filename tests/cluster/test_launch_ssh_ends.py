"""`miniray ssh` with a program that stands for ssh, and hosts that do not do what they should."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from miniray.launch import ssh

if TYPE_CHECKING:
    from pathlib import Path

#: Each host does what its name says.
SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
case $2 in
fails) exit 3 ;;
hangs) exec sleep 60 ;;
cut) printf 'no end of line'; exit 1 ;;
trace) printf 'Traceback:\\n  File "a\\303'; sleep 0.2; printf '\\244.py"\\n\\n'; exit 1 ;;
esac
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_a_host_whose_ssh_hangs_does_not_keep_a_run_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ssh, "_LAST_SECONDS", 0.2)
    began = time.monotonic()
    assert ssh.run_over_ssh(ssh.SshRun(("fails", "hangs"), ("true",)), print) == 3
    assert time.monotonic() - began < 30


def test_a_last_line_that_a_host_has_not_ended_is_told() -> None:
    told: list[str] = []
    ssh.run_over_ssh(ssh.SshRun(("fails", "cut"), ("true",)), told.append)
    assert told == ["cut: no end of line"]


def test_lines_of_a_host_are_told_as_they_are_indented_and_whole() -> None:
    told: list[str] = []
    ssh.run_over_ssh(ssh.SshRun(("fails", "trace"), ("true",)), told.append)
    assert told == ["trace: Traceback:", 'trace:   File "aä.py"']
