"""A package that pip can install without an index."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def tiny_wheel(folder: Path, value: int = 1, requires: str = "") -> Path:
    """Make a wheel of the package ``tiny``, whose ``VALUE`` is the value."""
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("tiny/__init__.py", f"VALUE = {value}\n")
        info = "tiny-1.0.dist-info"
        metadata = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
        made.writestr(f"{info}/METADATA", metadata + requires)
        made.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        made.writestr(f"{info}/RECORD", "")
    return path
