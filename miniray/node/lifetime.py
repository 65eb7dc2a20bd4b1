"""What ends a daemon from outside: signals, and the end of the process that it belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def stop_on_signals(stop: Callable[[str], None]) -> None:
    """SIGTERM and SIGINT end the node gently; ``stop`` is called with the reason."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, f"signal {signal.Signals(number).name}")


def when_exits(pid: int, callback: Callable[[], None]) -> None:
    """Call back when a process that is not our child ends."""
    loop = asyncio.get_running_loop()
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        callback()
        return

    def ended() -> None:
        loop.remove_reader(fd)
        with contextlib.suppress(OSError):
            os.close(fd)
        callback()

    loop.add_reader(fd, ended)
