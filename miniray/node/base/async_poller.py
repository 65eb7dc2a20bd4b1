"""``core.poller.Poller`` over the daemon's asyncio loop. Only for the loop's own thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.wire.poller import READ_SIZE

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from miniray.wire.poller import Posted


class AsyncPoller:
    """Watches sockets with the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.buffer = bytearray(READ_SIZE)
        self.buffer_view = memoryview(self.buffer)

    def add(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Watch a descriptor for input."""
        self._loop.add_reader(fd, on_readable)

    def watch_writable(self, fd: int, callback: Callable[[], None] | None) -> None:
        """Watch, or stop watching, a descriptor for room to write."""
        if callback is None:
            self._loop.remove_writer(fd)
        else:
            self._loop.add_writer(fd, callback)

    def remove(self, fd: int) -> None:
        """Forget a descriptor."""
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run a callback in the next turn of the loop."""
        self._loop.call_soon(callback)

    def flush_soon(self, connection: Posted) -> None:
        """Write what a connection keeps, in the next turn of the loop."""
        self._loop.call_soon(connection.flush_posted)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Run a callback after a delay; returns a cancel."""
        return self._loop.call_later(delay, callback).cancel
