"""mypy sees the types of remote functions, classes and methods, and the mistakes in their use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
_ERROR = re.compile(r"^[^:]+:(\d+): error: (.*)  \[([a-z-]+)\]$", re.M)
_MARK = re.compile(r"# error: ([a-z-]+)$")
#: What the train layer imports: looking into all of PyTorch or NumPy would take most of the time.
OF_TRAIN = "torch.*,numpy.*,pyarrow.*,fsspec.*,jax.*,datasets.*,transformers.*,lightning.*"


def marked(file: Path) -> set[tuple[int, str]]:
    """Line and code of each error that the file says there is."""
    lines = enumerate(file.read_text().splitlines(), 1)
    return {(number, found[1]) for number, line in lines if (found := _MARK.search(line))}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "settings"),
    [("with_plugin.py", "plugins = miniray.mypy_plugin"), ("without_plugin.py", "")],
)
def test_mypy_finds_the_mistakes_and_nothing_else(
    name: str, settings: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    work = tmp_path_factory.mktemp("mypy")
    skip = "ignore_missing_imports = true\nfollow_imports = skip\nfollow_imports_for_stubs = true\n"
    (work / "mypy.ini").write_text(
        # No cache: the other run could not use it, and writing one takes as long as reading NumPy.
        f"[mypy]\nstrict = true\ncache_dir = /dev/null\n{settings}\n[mypy-{OF_TRAIN}]\n{skip}"
    )
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-pretty", HERE / name],
        cwd=work,
        env={**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = {(int(line), code): message for line, message, code in _ERROR.findall(result.stdout)}

    assert result.returncode in (0, 1), result.stdout + result.stderr
    assert set(found) == marked(HERE / name), result.stdout
