"""The way of an actor's call is the one that ARCHITECTURE.md shows, file by file."""

from __future__ import annotations

import collections
import gc
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import miniray

pytestmark = pytest.mark.usefixtures("cluster")

ROOT = Path(__file__).parents[2]
CALLS = 50


def trace() -> list[set[str]]:
    """Note, in the last set of the list, in which files of miniray this thread calls functions."""
    walks: list[set[str]] = [set()]
    gc.disable()  # which may end anything here
    package = f"{Path(miniray.__file__).parent}/"

    def note(frame: Any, event: str, _arg: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(package):
            walks[-1].add(path.removeprefix(package))

    sys.setprofile(note)
    return walks


def usual(walks: list[set[str]]) -> set[str]:
    """Leave out what one call in many does: it took long, or another thread read the reply."""
    counts = collections.Counter(path for walk in walks for path in walk)
    return {path for path, count in counts.items() if count > len(walks) / 2}


@miniray.remote
class Traced:
    def begin(self) -> None:
        self.walks = trace()

    def call(self, value: int) -> int:
        self.walks.append(set())  # from here to the next call: answer, wait, receive and begin
        return value

    def usual(self) -> set[str]:
        sys.setprofile(None)
        return usual(self.walks)


def test_a_call_passes_the_files_that_the_architecture_shows() -> None:
    actor = Traced.remote()
    miniray.get(actor.begin.remote())
    walks = trace()
    try:
        for number in range(CALLS):
            walks.append(set())
            assert miniray.get(actor.call.remote(number)) == number
    finally:
        sys.setprofile(None)
        gc.enable()
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("## One call, file by file")[2].partition("\n## ")[0]
    shown = re.findall(r"^\d+\. `(.+?)`", section, re.MULTILINE)
    assert sorted(usual(walks) | miniray.get(actor.usual.remote())) == sorted(shown)
    assert f"{len(shown)} files" in section
