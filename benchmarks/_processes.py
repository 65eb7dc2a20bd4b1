"""The processes of a benchmark's cluster: which they are, what they use, when they end.

Works from /proc alone, so that it measures every engine in the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from pathlib import Path

#: Every process that a benchmark starts has this variable, with a value of its own.
TAG = "BENCHMARK_TAG"
#: The process that a benchmark's program was started by.
STARTER = "BENCHMARK_STARTER"

_PR_SET_PDEATHSIG = 1


def end_with_starter() -> None:
    """See to it that this process is killed when the one that started it ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(STARTER, os.getppid())):  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and parent of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])


def _has_tag(pid: int, wanted: bytes) -> bool:
    try:
        return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False


def tagged(tag: str) -> set[int]:
    """Living processes that have the tag, or descend from one that has.

    The descendants count because a process may overwrite its own environment, as
    those do that set their title.
    """
    wanted = f"{TAG}={tag}".encode()
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(folder.name))
        if stat is not None and stat[0] != "Z":
            parents[int(folder.name)] = stat[1]
    found = {pid for pid in parents if _has_tag(pid, wanted)}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        grown = bool(more)
        found |= more
    return found


def cluster_processes() -> set[int]:
    """The processes of this benchmark without the driver, which is the caller."""
    return tagged(os.environ[TAG]) - {os.getpid()}


def pss(pids: set[int]) -> int:
    """Proportional memory of these processes in bytes: shared pages count in parts."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def processor_seconds(pids: set[int]) -> float:
    """Processor time of these processes so far, in ticks of a hundredth of a second."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def settled(timeout: float = 30.0, quiet: float = 2.0) -> set[int]:
    """The cluster's processes once none has come or gone for ``quiet`` seconds."""
    deadline = time.monotonic() + timeout
    last, since = cluster_processes(), time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < quiet:
        time.sleep(0.1)
        now = cluster_processes()
        if now != last:
            last, since = now, time.monotonic()
    return last


def wait_for_end(pids: set[int], timeout: float) -> bool:
    """Wait until all of these have ended; whether they did in time."""
    poll = select.poll()
    fds = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            fds.add(fd)
            poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + timeout
    while fds and (left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            poll.unregister(fd)
            fds.discard(fd)
            os.close(fd)
    for fd in fds:
        os.close(fd)
    return not fds


def end(tag: str, grace: float) -> int:
    """Kill what a benchmark left behind after ``grace`` seconds; how many those were."""
    if wait_for_end(tagged(tag), grace):
        return 0
    left = tagged(tag)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for_end(left, 10)
    return len(left)
