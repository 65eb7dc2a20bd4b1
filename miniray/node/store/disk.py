"""How full the disk is that values are moved to, in a sentence for the error of a put.

``look_at`` asks the system, and may wait for a slow disk: it runs in a thread.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.sizes import format_bytes

if TYPE_CHECKING:
    from pathlib import Path


class Disk(NamedTuple):
    """A file system; bytes."""

    size: int
    #: What users other than root may still take.
    free: int


def look_at(folder: Path) -> Disk | None:
    """The file system that a folder is on; None if it does not say."""
    try:
        found = os.statvfs(folder)
    except OSError:  # the error that this is to explain is told in any case
        return None
    return Disk(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def describe_disk(disk: Disk, values: int) -> str:
    """Who has taken how much of a disk.

    Args:
        disk: As it is.
        values: Bytes of it that values of this node take, those that are being written included.
    """
    taken = disk.size - disk.free
    values = min(values, taken)
    return (
        f"Of the {format_bytes(disk.size)} of that disk, values of this node take "
        f"{format_bytes(values)}, other files take {format_bytes(taken - values)}, and "
        f"{format_bytes(disk.free)} are free."
    )
