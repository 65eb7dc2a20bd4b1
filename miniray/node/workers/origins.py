"""Which worker a child of the template descends from, as its environment tells.

Responsible for reading that of a process which may hang, without hanging in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select

from miniray.common.process_state import may_hang_readers, variable_of

#: Workers and their children carry this variable, so that strays can be told apart.
WORKER_VARIABLE = "MINIRAY_WORKER_ID"
#: Seconds that a child of ours has to read, and between such attempts at first and at most.
_PATIENCE, _FIRST_DELAY, _LONGEST_DELAY = 0.1, 0.2, 5.0


@dataclasses.dataclass(slots=True)
class Unsure:
    """A process that may be a child of an ended worker, or of a living one."""

    #: The ended workers whose child it may be.
    workers: set[int]
    #: When it is tried to read whose it is, by the monotonic clock, and how long after again.
    again: float = 0.0
    delay: float = _FIRST_DELAY

    def is_due(self, now: float) -> bool:
        """Whether to try now; the next time is later then, at growing intervals."""
        if now < self.again:
            return False
        self.again = now + self.delay
        self.delay = min(2 * self.delay, _LONGEST_DELAY)
        return True


def worker_of(pid: int) -> str | None:
    """The id of the worker that a process descends from, or "" if it hides it; None: not now."""
    if may_hang_readers(pid):
        return None
    try:
        return _read(pid)
    except BlockingIOError:
        return None


def read_apart(pid: int) -> tuple[str | None, int]:
    """Have a child of ours read ``worker_of``, as it may hang in it.

    Returns:
        The answer, None if there is none; and the pid of the child, which is to be killed, 0 if
        there is none.
    """
    try:
        answer, written = os.pipe()
    except OSError:
        return None, 0
    try:
        reader = os.fork()
    except OSError:
        os.close(answer)
        os.close(written)
        return None, 0
    if reader == 0:
        with contextlib.suppress(BaseException):
            os.write(written, _read(pid).encode() + b"\n")
        os._exit(0)
    os.close(written)
    poller = select.poll()
    poller.register(answer, select.POLLIN)
    told = os.read(answer, 4096) if poller.poll(_PATIENCE * 1000) else b""
    os.close(answer)
    return (told[:-1].decode() if told.endswith(b"\n") else None), reader


def _read(pid: int) -> str:
    try:
        return variable_of(pid, WORKER_VARIABLE) or ""
    except BlockingIOError:
        raise  # it is between two programs: whose it is can be read soon
    except OSError:
        return ""
