"""A process that SIGKILL does not end until the test lets it go, as one that hangs in a driver.

It is traced, and the kernel stops it on its way out, before it has closed a file or unmapped
anything; a further SIGKILL changes nothing. When the tracer goes, so does the process, so nothing
is left of a test that fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

_TRACER = """
import ctypes, os, sys, threading

SEIZE, CONTINUE, LISTEN = 0x4206, 7, 0x4208
STOP_AT_EXIT, EVENT_EXIT, EVENT_STOP = 0x40, 6, 128
ANY_CHILD = 0x40000000
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
pid = int(sys.argv[1])
if libc.ptrace(SEIZE, pid, None, STOP_AT_EXIT) != 0:
    sys.exit(f"cannot trace {pid}: {os.strerror(ctypes.get_errno())}")
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
print("traced", flush=True)
while True:
    _, status = os.waitpid(pid, ANY_CHILD)
    if not os.WIFSTOPPED(status):
        os._exit(0)
    event = status >> 16
    if event == EVENT_EXIT:
        continue  # it stays where it is
    number = 0 if event else os.WSTOPSIG(status)
    libc.ptrace(LISTEN if event == EVENT_STOP else CONTINUE, pid, None, number)
"""


class Unkillable:
    """Keeps a process of the same user from ending, from its beginning to ``release``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._tracer = subprocess.Popen(
            [sys.executable, "-c", _TRACER, str(pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._tracer.stdout is not None
        assert self._tracer.stdout.readline() == "traced\n", "the process cannot be traced"

    def release(self) -> None:
        """Let it end, if it was killed."""
        self._tracer.communicate()

    def __enter__(self) -> Unkillable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def is_dying(pid: int) -> bool:
    """Whether a process was killed and is held on its way out."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state == "t"


#: What user code runs to be traced where only descendants may be (Yama).
ALLOW_TRACING = "__import__('ctypes').CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)"
