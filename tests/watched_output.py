"""What is printed while a test looks on."""

from __future__ import annotations

import io
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


class Watched(io.StringIO):
    """A stand-in for ``sys.stdout`` or ``sys.stderr``, to be read while other threads write.

    ``capsys`` and ``capfd`` read and then empty what they caught: what a thread writes in
    between is lost.
    """

    def wait_for(self, text: str, *, seconds: float = 10) -> None:
        """Return as soon as the text has been printed; fail after so many seconds."""
        deadline = time.monotonic() + seconds
        while text not in self.getvalue():
            assert time.monotonic() < deadline, f"{text!r} is not in {self.getvalue()!r}"
            time.sleep(0.001)


def watch(monkeypatch: pytest.MonkeyPatch, name: str) -> Watched:
    """Replace ``sys.<name>``. For a test's body: pytest sets both streams anew before that."""
    stream = Watched()
    monkeypatch.setattr(sys, name, stream)
    return stream
