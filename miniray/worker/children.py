"""The processes that user code started in this worker."""

from __future__ import annotations

import contextlib
import os
import signal


def kill_descendants() -> None:
    """Kill all processes below this one. Opens /proc only: safe in any thread."""
    pending = [os.getpid()]
    found: list[int] = []
    while pending:
        for child in _children(pending.pop()):
            found.append(child)
            pending.append(child)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return children
    for thread in threads:
        # A thread may end between the two looks.
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file,
        ):
            children.extend(int(child) for child in file.read().split())
    return children
