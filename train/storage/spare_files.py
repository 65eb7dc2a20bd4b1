"""Gives files that are about to be deleted a place elsewhere on their disk, without copying them.

What was stored must be what a copy would have been: a file of its own, with the owner and the
mode of a new one, that nobody can reach by another name.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)


def give_name(folder: Path, file: str, name: Path) -> bool:
    """Give a file of a folder that is about to be deleted a further name.

    It keeps its old name until then: if the caller fails before, the folder is as it was.

    Args:
        folder: The folder.
        file: Path of the file in it.
        name: The new name, which no file has; on failure it may be that of an empty file.

    Returns:
        Whether that was possible. If not, the file has to be copied.

    Raises:
        FileNotFoundError: One of the folders does not exist.
    """
    # Exclusive, and with the permissions that copying would give it.
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        fresh = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not _goes_with(folder, file) or not _is_like(Path(folder, file).lstat(), fresh):
        return False
    name.unlink()
    try:
        os.link(Path(folder, file), name)
    except OSError as error:  # this filesystem, or the kernel's rules, have no links
        logger.debug("%s is copied, since it can't be linked: %s", file, error)
        return False
    return True


def _goes_with(folder: Path, file: str) -> bool:
    """Whether deleting the folder deletes the file itself: no symbolic link leads out of it."""
    inside = os.path.realpath(folder / file) == os.path.join(os.path.realpath(folder), file)  # noqa: PTH118 - as text
    return inside and os.access((folder / file).parent, os.W_OK)


def _is_like(own: os.stat_result, fresh: os.stat_result) -> bool:
    """Whether a file is what a copy in place of a fresh one would be."""
    return (
        stat.S_ISREG(own.st_mode)
        and own.st_nlink == 1
        and (own.st_dev, own.st_uid, own.st_gid, own.st_mode)
        == (fresh.st_dev, fresh.st_uid, fresh.st_gid, fresh.st_mode)
    )
