"""What a user's terminal shows of errors that are raised at a call, or at `get`."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import miniray

UNPICKLABLE = """
import threading, traceback
import miniray
miniray.init("local", num_cpus=1)

@miniray.remote
def f(n, x): ...

@miniray.remote
class A:
    def __init__(self, x=None): ...
    def g(self, x, *more): ...

def said(call):
    try:
        call()
    except TypeError:
        print(traceback.format_exc(), end="=====")

bad = {"lock": threading.Lock()}
a = A.remote()
said(lambda: f.remote(1, bad))
said(lambda: f.remote(1, x=bad))
said(lambda: a.g.remote(1, 2, bad))
said(lambda: A.remote(bad))
"""

FAILING = """
import miniray
miniray.init("local", num_cpus=1)
@miniray.remote
def fails():
    raise ValueError("no")
miniray.get(fails.remote())
"""


def run(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_error_of_an_unpicklable_argument_begins_at_the_call_and_names_the_parameter() -> None:
    done = run(UNPICKLABLE)
    said = done.stdout.split("=====")[:-1]
    names = ["`x` of f()", "`x` of f()", "3 of A.g()", "`x` of A()"]
    for text, name in zip(said, names, strict=True):
        expected = f"argument {name}, a value of type dict, cannot be pickled: ['lock'] is a lock"
        assert f"\nTypeError: {expected}" in text
        assert text.count("Traceback") == 1
        files = [line for line in text.splitlines() if line.startswith("  File")]
        assert all("<string>" in line for line in files[:-1])  # the last one raises it


def test_a_traceback_of_get_shows_no_remark_of_the_linter() -> None:
    done = run(FAILING)
    assert "ValueError: no" in done.stderr
    assert "noqa" not in done.stderr


def test_no_line_that_raises_has_a_remark_of_the_linter() -> None:
    root = pathlib.Path(miniray.__file__).parent
    files = [*root.rglob("*.py"), *(root / "train").resolve().rglob("*.py")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(files) > 200
    assert not [line for line in lines if re.match(r"\s*raise\b.*# (noqa|type:)", line)]
