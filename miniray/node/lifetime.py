"""What ends a daemon from outside, and how it ends the processes that are left to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
from typing import TYPE_CHECKING

from miniray.common.process_state import children_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

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
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended, _, _ = select.select([fd], [], [], timeout)
    finally:
        os.close(fd)
    if ended:
        with contextlib.suppress(ChildProcessError):  # it was waited for elsewhere
            os.waitpid(pid, 0)
    return bool(ended)
