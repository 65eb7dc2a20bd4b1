"""Processes of a node and of a head: settings of the C library and of gRPC, signals, their end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
from typing import TYPE_CHECKING

from miniray.common.process_state import children_of, ends_within

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MIB = 1024 * 1024
#: With gRPC's newer "event engine", a message on a stream passes three or four threads of its own
#: before it reaches the one that waits for it; without, that thread reads the socket itself. That
#: makes a call between nodes a third faster, and a transfer too.
_OFF = (
    "event_engine_client",
    "event_engine_listener",
    "event_engine_for_all_other_endpoints",
)


def keep_freed_buffers() -> None:
    """Reuse freed buffers of megabytes, instead of giving each one back to the kernel.

    Objects pass through a daemon in such buffers; taking fresh pages for each costs a quarter of
    the speed of a transfer. Has an effect with glibc only.
    """
    _set(_M_MMAP_THRESHOLD, 8 * _MIB)
    _set(_M_TRIM_THRESHOLD, 32 * _MIB)


def return_freed_buffers() -> None:
    """Give buffers of megabytes back to the kernel when they are freed, as the code of jobs is."""
    _set(_M_MMAP_THRESHOLD, _MIB)


def trim() -> None:
    """Give freed memory back to the kernel that the C library keeps, after much was freed."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


def set_up_core() -> None:
    """Have gRPC's core use only the threads that wait for it, without logging.

    Before gRPC is imported. Variables that the user has set stay.
    """
    # Strangers could fill the disk with lines about their handshakes, which name no address. A
    # failure of this cluster's own connections is an exception where they are used.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_EXPERIMENTS", ",".join(f"-{name}" for name in _OFF))


logger = logging.getLogger(__name__)


def stop_on_signals(stop: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, f"signal {signal.Signals(number).name}")


def when_exits(pid: int, callback: Callable[[], None]) -> Callable[[], None]:
    """Call back once when a process ends; return a function that cancels this."""
    loop = asyncio.get_running_loop()
    try:
        fds = [os.pidfd_open(pid)]
    except ProcessLookupError:
        callback()
        return lambda: None

    def cancel() -> None:
        while fds:
            fd = fds.pop()
            loop.remove_reader(fd)
            os.close(fd)

    def ended() -> None:
        cancel()
        callback()

    loop.add_reader(fds[0], ended)
    return cancel


def end_children(spare: Collection[int], timeout: float) -> None:
    """Kill the children of this process, and theirs as they fall to it, if it is a subreaper.

    Children in ``spare`` stay. One that takes longer than ``timeout`` seconds is left, and logged.
    """
    left: set[int] = set()
    while True:
        found = set(children_of(os.getpid())) - left - set(spare)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            if not reap(pid, timeout):
                logger.error("process %d does not end even when killed", pid)
                left.add(pid)


def reap(pid: int, timeout: float | None) -> bool:
    """Wait for the end of a child; return False after ``timeout`` seconds, None: never."""
    if not ends_within(pid, timeout):
        return False
    with contextlib.suppress(ChildProcessError):  # it was reaped elsewhere
        os.waitpid(pid, 0)
    return True
