"""Where values go that do not fit into memory, and whether they can.

If nobody says, it is a folder on a disk.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from miniray.node.store.spill_files import DISK_IS_FULL, open_file
from miniray.system.boot_options import BootError

logger = logging.getLogger(__name__)

#: For files that are too large for a ``/tmp`` in memory (hier(7)).
_LARGE_FILES = Path("/var/tmp")  # noqa: S108 - what is made there has no name
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def spill_folder(wanted: str, session: Path, large_files: Path = _LARGE_FILES) -> tuple[Path, str]:
    """The folder for spilled values, made if need be.

    On many machines ``/tmp`` is memory: what went there would leave the object store and take as
    much memory as before, until the kernel kills somebody.

    Args:
        wanted: The configured one; empty: none.
        session: The session's folder.
        large_files: What serves instead if that is in memory.

    Returns:
        The folder, and why it cannot be used now, for who starts the node; empty if it can.

    Raises:
        BootError: The configured one cannot be used. That its disk is full may pass.
    """
    folder = _chosen(wanted, session, large_files)
    try:
        os.close(open_file(folder))
    except OSError as error:
        why = error.strerror or str(error)
        if wanted and error.errno not in DISK_IS_FULL:
            raise BootError(
                f"MINIRAY_SPILL_FOLDER is {wanted!r}, and no file can be made there: {why}. Set it "
                f"to a folder on a disk in which this user may make files, or leave it out."
            ) from None
        warning = (
            f"No file can be made in {folder}, where values go that do not fit into the object "
            f"store: {why}. What does not fit is refused as long as that is so; "
            f"MINIRAY_SPILL_FOLDER sets another folder."
        )
        logger.warning("%s", warning)
        return folder, warning
    if is_in_memory(folder):
        logger.warning(
            "%s, where values go that do not fit into the object store, is in memory too: set "
            "MINIRAY_SPILL_FOLDER to a folder on a disk",
            folder,
        )
    return folder, ""


def _chosen(wanted: str, session: Path, large_files: Path) -> Path:
    if wanted:
        return Path(wanted)
    if is_in_memory(session) and os.access(large_files, os.W_OK) and not is_in_memory(large_files):
        return large_files
    return session / "spilled"


def is_in_memory(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether files there take memory and no disk; of one that is not there, its parent counts."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw (proc_pid_mountinfo(5))
        mount, _, system = line.partition(" - ")
        if mount.split()[2] == number:
            return system.split()[0] in _IN_MEMORY
    return False
