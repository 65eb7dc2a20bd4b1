"""What the kernel says of processes, read so that one that hangs does not hang its reader.

Responsible for reading below /proc. A process that hangs in a driver may hold the lock of its
memory, and who reads its environment or command line waits for that lock; ``stat`` takes none.
"""

from __future__ import annotations

import os
import signal

#: Flag of a thread that has begun to end (PF_EXITING in the kernel's linux/sched.h).
_EXITING = 0x4
_KILLED = 1 << (signal.SIGKILL - 1)
#: Places in stat after the name, from proc(5): state, flags, signals pending for the thread.
_STATE, _FLAGS, _PENDING = 0, 6, 28


def is_dying(pid: int) -> bool:
    """Whether a process has begun to end, or was killed, and is not gone.

    Most are gone a moment later. One that is not hangs on its way, maybe with its files open.
    """
    fields = _stat(f"/proc/{pid}/stat")
    if fields is None:
        return False
    # A fatal signal to a process is put down for each of its threads.
    return bool(int(fields[_FLAGS]) & _EXITING or int(fields[_PENDING]) & _KILLED)


def may_hang_readers(pid: int) -> bool:
    """Whether a thread of a process waits in the kernel, so that it may hold the memory's lock."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return False
    stats = (_stat(f"/proc/{pid}/task/{thread}/stat") for thread in threads)
    return any(fields is not None and fields[_STATE] == "D" for fields in stats)


def variable_of(pid: int, name: str) -> str | None:
    """Value of a variable in the environment that a process was started with; None if it has none.

    Raises:
        OSError: it is gone, or its environment may not be read.
    """
    with open(f"/proc/{pid}/environ", "rb") as file:
        variables = file.read().split(b"\0")
    prefix = f"{name}=".encode()
    for variable in variables:
        if variable.startswith(prefix):
            return variable[len(prefix) :].decode("utf-8", "replace")
    return None


def _stat(path: str) -> list[str] | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may contain anything.
    return text.rpartition(")")[2].split()
