"""Checkpoints in a store that is not the machine's own filesystem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fsspec

if TYPE_CHECKING:
    from pathlib import Path


def store_of_two(root: Path) -> Any:
    """A store below a folder, with the checkpoints ``one`` and ``two``."""
    for name in ("one", "two"):
        folder = root / name / "inner"
        folder.mkdir(parents=True)
        (folder / "weights").write_text(name)
    return fsspec.filesystem("dir", path=str(root), target_protocol="file")
