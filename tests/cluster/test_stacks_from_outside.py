"""A process that does not answer is looked at from outside, whatever rights there are."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from miniray.profiling import outside

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: As a worker, and then native code that holds Python's lock for longer than any test.
PROGRAM = """
import os
from miniray.worker.main import _be_seen
_be_seen(os.getppid(), os.memfd_create("miniray-worker", os.MFD_CLOEXEC))
def native():
    print("ready", flush=True)
    sum(range(1 << 60))
native()
"""


pytestmark = pytest.mark.engine("miniray")


@pytest.fixture
def busy() -> Iterator[int]:
    """The pid of a process in native code."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel lets py-spy see nothing, as for a user without the rights of ptrace."""
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho 'Permission Denied: ptrace' >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(outside, "py_spy", lambda: str(program))


def functions(stacks: list[outside.Stack]) -> list[str]:
    return [frame.partition(" (")[0] for each in stacks for frame in each["stack"]]


def test_native_code_that_holds_the_lock_is_seen_by_py_spy(busy: int) -> None:
    way, stacks, note = asyncio.run(outside.stacks(busy))
    assert way == "py-spy"
    assert functions(stacks)[-1] == "native"
    assert "native code holds Python's lock" in note


@pytest.mark.usefixtures("denied")
def test_without_rights_a_signal_shows_the_stacks_and_the_process_goes_on(busy: int) -> None:
    for _ in range(2):
        way, stacks, _ = asyncio.run(outside.stacks(busy))
        assert way == "a signal (faulthandler)"
        assert functions(stacks)[-1] == "native"
    os.kill(busy, 0)


@pytest.mark.usefixtures("denied")
def test_a_stopped_process_is_named_where_nothing_shows_its_stacks(busy: int) -> None:
    os.kill(busy, signal.SIGSTOP)
    os.waitid(os.P_PID, busy, os.WSTOPPED | os.WNOWAIT)
    way, stacks, note = asyncio.run(outside.stacks(busy))
    assert (way, stacks) == ("", [])
    assert "it is stopped (SIGSTOP)" in note
    assert "Permission Denied" in note


def test_a_stopped_process_is_seen_by_py_spy(busy: int) -> None:
    os.kill(busy, signal.SIGSTOP)
    os.waitid(os.P_PID, busy, os.WSTOPPED | os.WNOWAIT)
    way, stacks, note = asyncio.run(outside.stacks(busy))
    assert (way, functions(stacks)[-1]) == ("py-spy", "native")
    assert "it is stopped (SIGSTOP)" in note


@pytest.mark.usefixtures("denied")
def test_a_process_that_does_not_know_the_signal_is_not_sent_it() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        way, _, _ = asyncio.run(outside.stacks(process.pid))
        assert way == ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(0.1) is None
        process.kill()
