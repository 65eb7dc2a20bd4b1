"""What an installation that is not editable has in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: In a process of its own: setuptools replaces distutils, which another test may have imported.
BUILD = """
import runpy, sys
import setuptools
from setuptools.command.build_py import build_py

built = []
setuptools.setup = lambda **_: None
build_py.run = lambda self: built.extend(self.packages)
module = runpy.run_path(sys.argv[1])
module["BuildWithProto"].run.__globals__["generate"] = lambda: None
build = module["BuildWithProto"](setuptools.Distribution({"packages": ["miniray"]}))
build.finalize_options()
build.run()
print(*built)
"""


def test_a_wheel_has_the_generated_code_also_if_it_was_not_there_before_the_build() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(ROOT / "setup.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["miniray", "miniray._proto"]
