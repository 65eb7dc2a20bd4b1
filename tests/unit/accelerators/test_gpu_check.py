"""``benchmarks/gpu_check.py`` on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_check.py"


def test_a_machine_without_a_gpu_is_told_and_is_no_failure(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "MINIRAY_DEVICE_ROOT": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "no GPU\n", "")
