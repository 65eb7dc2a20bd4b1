"""``benchmarks/gpu_check.py`` where the driver's files tell of GPUs that PyTorch cannot use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator_helpers import FakeMachine, add_nvidia

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"


@pytest.mark.slow  # PyTorch is imported in a process of its own
@pytest.mark.usefixtures("session_root")
def test_detection_is_checked_and_the_rest_is_skipped_with_the_reason(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    add_nvidia(machine, 2, "NVIDIA H200")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "MINIRAY_DEVICE_ROOT": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=110
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0].startswith(
        "ok       detection: 2 of family nvidia, accelerator_type:H200; not compared with PyTorch"
    )
    assert {line.split()[0] for line in lines[1:-1]} == {"skipped"}
    assert lines[-1].endswith(": 1 ok, 11 skipped, 0 FAILED")
