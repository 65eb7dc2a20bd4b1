"""Processes that fall to this one because their parent ended: found, killed and reaped."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
from typing import TYPE_CHECKING

from miniray.common.process_state import children_of

if TYPE_CHECKING:
    from collections.abc import Collection

logger = logging.getLogger(__name__)


def end_children(spare: Collection[int], timeout: float) -> None:
    """Kill the children of this process, and theirs as they fall to it, if it is a subreaper.

    Args:
        spare: pids that stay.
        timeout: seconds that one may take to end; one that takes longer is left, and logged.
    """
    left: set[int] = set()
    while True:
        found = set(children_of(os.getpid())) - left - set(spare)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left |= {pid for pid in found if not reap(pid, timeout)}


def reap(pid: int, timeout: float) -> bool:
    """Wait for the end of a child; False, and it is logged, if it takes longer, in seconds."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended, _, _ = select.select([fd], [], [], timeout)
    finally:
        os.close(fd)
    if ended:
        with contextlib.suppress(ChildProcessError):  # somebody else waited for it
            os.waitpid(pid, 0)
    else:
        logger.error("process %d does not end even when killed", pid)
    return bool(ended)
