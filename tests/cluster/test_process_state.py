"""What is read of processes below /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from miniray.common import process_state
from miniray.common.process_state import command_of, is_dying, may_hang_readers, variable_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: A line of /proc/<pid>/stat (Linux 6.1) of a process whose name has a parenthesis and a space.
STAT = (
    "4242 (a) b) {state} 1 4242 4242 0 -1 {flags} 103 0 0 0 0 0 0 0 20 0 1 0 12345 2400256 200 "
    "18446744073709551615 1 1 0 0 0 {pending} 0 0 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 7 {end} 0\n"
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "MINIRAY_TEST_MARK": "a=b"}
    program = [sys.executable, "-c", "print(flush=True), input()"]
    with subprocess.Popen(program, stdin=-1, stdout=-1, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has left this interpreter, whose copy it was, for its own
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("state", "flags", "pending", "dying"),
    [
        ("S", 0x400000, 0, False),
        ("D", 0x400000, 0, False),
        ("D", 0x400004, 0, True),  # PF_EXITING
        ("D", 0x400000, 1 << (signal.SIGKILL - 1), True),
        ("D", 0x400000, 1 << (signal.SIGTERM - 1), False),
        ("Z", 0x400004, 0, True),
    ],
)
def test_a_process_is_dying_from_its_first_step_on_or_once_it_was_killed(
    monkeypatch: pytest.MonkeyPatch, state: str, flags: int, pending: int, dying: bool
) -> None:
    line = STAT.format(state=state, flags=flags, pending=pending, end=8)
    fields = line.rpartition(")")[2].split()
    monkeypatch.setattr(process_state, "stat_of", lambda _process: fields)
    assert is_dying(4242) is dying


def test_a_living_process_is_not_dying_and_one_that_is_gone_is_not_either(
    child: subprocess.Popen[bytes],
) -> None:
    assert not is_dying(child.pid)
    child.kill()
    child.wait()
    assert not is_dying(child.pid)
    assert not may_hang_readers(child.pid)


def test_a_process_whose_thread_waits_in_the_kernel_may_hang_its_readers(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    states = iter("SD")
    monkeypatch.setattr(os, "listdir", lambda path: ["1", "2"])
    monkeypatch.setattr(process_state, "stat_of", lambda _process: [next(states)])
    assert may_hang_readers(child.pid)


def test_a_variable_of_another_process_is_read(child: subprocess.Popen[bytes]) -> None:
    assert variable_of(child.pid, "MINIRAY_TEST_MARK") == "a=b"
    assert variable_of(child.pid, "MINIRAY_TEST") is None
    child.kill()
    child.wait()
    with pytest.raises(FileNotFoundError):
        variable_of(child.pid, "MINIRAY_TEST_MARK")


@pytest.mark.parametrize(
    ("flags", "end", "error"),
    [
        (0x400000, 0, BlockingIOError),  # its memory is new, and has no environment yet
        (0x400004, 0, ProcessLookupError),  # PF_EXITING: its memory is gone
        (0x400000, 7, None),  # started with no variable at all
        (0x200000, 0, None),  # PF_KTHREAD
    ],
)
def test_a_process_between_two_programs_is_told_from_one_without_variables(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: int,
    end: int,
    error: type[OSError] | None,
) -> None:
    monkeypatch.setattr(process_state, "_PROC", str(tmp_path))
    (tmp_path / "4242").mkdir()
    (tmp_path / "4242/environ").write_bytes(b"")
    (tmp_path / "4242/stat").write_text(STAT.format(state="R", flags=flags, pending=0, end=end))
    if error is None:
        assert variable_of(4242, "MINIRAY_TEST_MARK") is None
    else:
        with pytest.raises(error, match="4242"):
            variable_of(4242, "MINIRAY_TEST_MARK")


def test_the_command_line_of_a_process_is_told_until_it_has_ended(
    child: subprocess.Popen[bytes],
) -> None:
    assert command_of(child.pid) == child.args
    child.kill()
    child.wait()
    assert command_of(child.pid) == []


def test_the_command_line_of_a_process_that_hangs_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process_state, "_PROC", str(tmp_path))
    (tmp_path / "4242/task/4242").mkdir(parents=True)
    (tmp_path / "4242/cmdline").write_bytes(b"python\0train.py\0")
    stat = tmp_path / "4242/task/4242/stat"
    stat.write_text(STAT.format(state="R", flags=0, pending=0, end=7))
    assert command_of(4242) == ["python", "train.py"]
    stat.write_text(STAT.format(state="D", flags=0, pending=0, end=7))
    assert command_of(4242) == []
