"""What waits to be written to a socket: frames, and open descriptors that go with some of them.

Not thread-safe: its connection has a lock. Knows nothing of when the socket takes more.
"""

from __future__ import annotations

import collections
import itertools
import logging
import socket
from typing import TYPE_CHECKING

from miniray.wire.passed_descriptors import close_all

if TYPE_CHECKING:
    from miniray.wire.poller import Poller

logger = logging.getLogger(__name__)

#: Buffers handed to one sendmsg; the kernel allows 1024.
_GATHER = 256


class SendQueue:
    """Frames in order."""

    __slots__ = ("_items", "_with_fds", "size")

    def __init__(self) -> None:
        #: An empty item stands for the next frame that has descriptors.
        self._items: collections.deque[memoryview | bytes] = collections.deque()
        self._with_fds: collections.deque[tuple[bytes, list[int]]] = collections.deque()
        #: Bytes that wait.
        self.size = 0

    def append(self, data: bytes) -> None:
        """Add frames."""
        self._items.append(data)
        self.size += len(data)

    def append_with_fds(self, data: bytes, fds: list[int]) -> None:
        """Add a frame with descriptors, which are closed when they are sent or dropped."""
        self._with_fds.append((data, fds))
        self._items.append(b"")
        self.size += len(data)

    def put_back(self, data: memoryview | bytes) -> None:
        """The socket did not take this; it comes before everything else."""
        self._items.appendleft(data)
        self.size += len(data)

    def write_to(self, sock: socket.socket) -> None:
        """Write until nothing is left.

        Raises:
            BlockingIOError: The socket is full.
            OSError: It can't be written to.
        """
        items = self._items
        while items:
            if not len(items[0]):
                data, fds = self._with_fds[0]
                sent = socket.send_fds(sock, [data], fds)
                self._with_fds.popleft()
                self.size -= sent
                if sent < len(data):
                    items[0] = memoryview(data)[sent:]
                else:
                    items.popleft()
                close_all(fds)
                continue
            batch = list(itertools.takewhile(len, list(itertools.islice(items, _GATHER))))
            sent = sock.sendmsg(batch)
            self.size -= sent
            while sent:
                head = items[0]
                if sent < len(head):
                    items[0] = memoryview(head)[sent:]
                    break
                sent -= len(head)
                items.popleft()

    def rest_of_begun(self) -> bytes:
        """What is left of a frame of which the other end has the beginning."""
        begun = bool(self._items) and isinstance(self._items[0], memoryview)
        return bytes(self._items[0]) if begun else b""

    def clear(self) -> None:
        """Drop everything."""
        self._items.clear()
        self.size = 0
        while self._with_fds:
            close_all(self._with_fds.popleft()[1])


class LastWords:
    """Writes the end of a conversation to a socket whose connection is closed, and closes it.

    Args:
        sock: The socket, which is this object's from now on.
        poller: The loop that serves it.
        data: What to write, when the other end reads again; nothing if it never does.
    """

    def __init__(self, sock: socket.socket, poller: Poller, data: bytes) -> None:
        self._sock = sock
        self._poller = poller
        self._data = memoryview(data)
        poller.watch_writable(sock.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        try:
            self._data = self._data[self._sock.send(self._data) :]
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("a process was not told why its connection was closed: %s", error)
            self._data = memoryview(b"")
        if not self._data:
            self._poller.remove(self._sock.fileno())
            self._sock.close()
