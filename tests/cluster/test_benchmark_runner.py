"""The programs in ``benchmarks/`` leave no process behind, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_helpers import is_alive, processes_with, wait_until

ROOT = Path(__file__).resolve().parents[2]
#: The program of a row, the head, the daemon and the template.
PROCESSES = 4


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_none_of_its_processes(
    number: signal.Signals, tmp_path: Path
) -> None:
    def started() -> set[int]:
        return {
            pid for at in tmp_path.iterdir() for pid in processes_with("MINIRAY_TMPDIR", str(at))
        }

    runner = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "micro.py"), "--only", "idle"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
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
        assert not list(tmp_path.iterdir())
