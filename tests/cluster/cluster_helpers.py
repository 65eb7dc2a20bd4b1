"""What the behaviour tests share: waiting for conditions, and traces of a cluster.

Tasks import this module too, so it must not import miniray or pytest.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    timeout: float = 60.0,
    *,
    told: Callable[[], object] = str,
) -> None:
    """Return when the condition holds; fail when it does not in time, with what ``told`` says.

    The longer it has not held, and the longer a look takes, the less often it is looked at: many
    conditions ask a cluster, or read what the kernel has on every process, which costs those
    processor time that have to act.
    """
    looked = began = time.monotonic()
    while not condition():
        now = time.monotonic()
        waited, took = now - began, now - looked
        if waited > timeout:
            name = getattr(condition, "__name__", "")
            raise AssertionError(f"not within {timeout} s: {name} {told()}")
        time.sleep(min(max(waited / 10, 2 * took, 0.01), 0.1))
        looked = time.monotonic()


def undisturbed_clock() -> float:
    """Seconds, but for those in which a process of this machine has waited for a processor.

    So what is to be done in time may take longer while other tests run. A kernel that does not tell
    of such waits counts all seconds.
    """
    waited = 0
    with contextlib.suppress(OSError):
        waited = int(Path("/proc/pressure/cpu").read_text().partition("total=")[2].split()[0])
    return time.monotonic() - waited / 1e6


def takes_less_than(limit: float, attempt: Callable[[], float], patience: float = 60.0) -> None:
    """Repeat an attempt until it has taken less than `limit` seconds; fail if none does in time.

    What else runs on the machine makes single times longer, never shorter.

    Args:
        limit: Seconds.
        attempt: Returns how many seconds it took.
        patience: Seconds for all attempts.
    """
    deadline = time.monotonic() + patience
    taken = [attempt()]
    while taken[-1] >= limit:
        assert time.monotonic() < deadline, f"no attempt took less than {limit} s: {taken}"
        taken.append(attempt())


def wait_for_file(path: Path, timeout: float = 60.0) -> None:
    """Return when the file exists: how a test holds a task until it may go on."""
    wait_until(path.exists, timeout)


def wait_for_text(path: Path, timeout: float = 60.0) -> str:
    """What a process writes to a file at once; there is a moment between making it and that."""
    wait_until(lambda: path.exists() and path.stat().st_size, timeout)
    return path.read_text()


def count_up(path: Path) -> int:
    """Add one to the number of runs kept in a file, and return it; survives the process."""
    with path.open("ab") as file:
        file.write(b".")
    return path.stat().st_size


def square(number: int) -> int:
    """What processes of multiprocessing run: they import the module of a function."""
    return number * number


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        # Of a process that was killed, the first thread may be gone before the others are.
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_with(variable: str, value: str) -> set[int]:
    """Ids of the other living processes that have this environment variable."""
    wanted = f"\0{variable}={value}\0".encode()
    found = set()
    for name in os.listdir("/proc"):  # all of them, many times a second: without a Path for each
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environment = b"\0" + file.read()
        except OSError:  # it ended while we looked, or is another user's
            continue
        pid = int(name)
        if wanted in environment and pid != os.getpid() and is_alive(pid):
            found.add(pid)
    return found


def socket_paths(pids: set[int]) -> set[Path]:
    """Paths of the Unix sockets that these processes have open."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended while we looked
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed while we looked
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if target.startswith("socket:["):
                        inodes.add(target[len("socket:[") : -1])
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {
        Path(row[7]) for row in rows if len(row) > 7 and row[6] in inodes and row[7].startswith("/")
    }
