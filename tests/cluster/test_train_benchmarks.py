"""``benchmarks/train_step.py`` runs: each row gives its figures, in sizes that mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "train_step.py"

pytestmark = pytest.mark.slow


@pytest.mark.timeout(200)
@pytest.mark.parametrize("row", ["step", "start", "checkpoint", "upload", "recovery"])
def test_a_row_gives_all_its_figures(row: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--tiny", "--repeats", "1", "--only", row, "--json", str(file)]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())["figures"]
    runs = {figure["figure"]: figure["runs"]["miniray"][0] for figure in figures}
    assert runs
    failed = {title: value for title, value in runs.items() if not isinstance(value, float | int)}
    assert not failed, done.stderr
