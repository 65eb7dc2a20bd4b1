"""What a connection needs from the loop that watches its socket, whichever loop that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bytes that a loop's buffer has: what one read takes at most.
READ_SIZE = 256 * 1024


class Posted(Protocol):
    """What keeps messages for a moment so that they leave together."""

    def flush_posted(self) -> None:
        """Write what is kept."""


class Poller(Protocol):
    """A loop that watches sockets."""

    #: Where connections read into, one after the other.
    buffer: bytearray
    buffer_view: memoryview

    def add(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call ``on_readable`` in the loop's thread whenever fd has data."""

    def watch_writable(self, fd: int, callback: Callable[[], None] | None) -> None:
        """Call ``callback`` whenever fd can be written; None ends that. Thread-safe."""

    def remove(self, fd: int) -> None:
        """Forget fd. Only in the loop's thread."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run a callback in the loop's thread. Thread-safe."""

    def flush_soon(self, connection: Posted) -> None:
        """Call ``flush_posted`` of a connection in the loop's next turn. Thread-safe."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Run a callback in the loop's thread after ``delay`` seconds; returns a cancel."""
