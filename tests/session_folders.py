"""Sessions of a test: their folders, and what they leave beside these."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from miniray.system import session as sessions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


@contextlib.contextmanager
def session_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have sessions made below a folder; their folders of sockets go at the end."""
    monkeypatch.setenv("MINIRAY_TMPDIR", str(tmp_path))
    before = set(Path("/tmp").glob(f"mr-{os.getuid()}-*"))
    created: list[Path] = []
    make = sessions._make_socket_dir

    def remember() -> Path:
        created.append(make())
        return created[-1]

    monkeypatch.setattr(sessions, "_make_socket_dir", remember)
    yield tmp_path
    for path in created:
        if path not in before:
            sessions._remove_tree(path)
