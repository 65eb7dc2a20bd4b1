"""The programs in ``benchmarks/`` leave no process behind, however they end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import is_alive, processes_with, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
#: The program of a row, the head, the daemon and the template.
PROCESSES = 4


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: sockets with a path of more than 107 bytes would be elsewhere, and stay.
    path = Path(tempfile.mkdtemp(prefix="mr-test-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_none_of_its_processes(
    number: signal.Signals, folder: Path
) -> None:
    def started() -> set[int]:
        return {pid for at in folder.iterdir() for pid in processes_with("MINIRAY_TMPDIR", str(at))}

    runner = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "micro.py"), "--only", "idle"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(started()) >= PROCESSES or runner.poll() is not None, 60)
        pids = started()
        assert len(pids) >= PROCESSES
    finally:
        runner.send_signal(number)
        code = runner.wait(30)
    assert code == {signal.SIGTERM: 128 + signal.SIGTERM}.get(number, -number)
    wait_until(lambda: not any(map(is_alive, pids)))
    if number != signal.SIGKILL:
        assert not list(folder.iterdir())
