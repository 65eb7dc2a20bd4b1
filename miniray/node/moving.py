"""The bytes of one value between a socket and shared memory, in blocking calls.

Between processes of one machine the kernel passes the sender's pages on as they are; through TLS
they are copied. What is still being filled here can be sent already.
"""

from __future__ import annotations

import mmap
import os
import socket
import ssl
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bytes that are asked of the socket at once.
PIECE = 4 << 20
#: Bytes that are read before they are written.
_BUFFER = 1 << 20


class CutOffError(Exception):
    """The other end left before the end, or the memory is filled no further."""


class Filling:
    """Memory that is being filled, from the front.

    Args:
        offset: Bytes that are there.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._ended = False
        self._moved = threading.Condition()

    def came(self, size: int) -> None:
        """So many more bytes are there."""
        with self._moved:
            self.offset += size
            self._moved.notify_all()

    def end(self) -> None:
        """Nothing more will come."""
        with self._moved:
            self._ended = True
            self._moved.notify_all()

    def look(self) -> None:
        """Who reads may have been told to go."""
        with self._moved:
            self._moved.notify_all()

    def beyond(self, offset: int, is_over: Callable[[], bool]) -> int:
        """How much is there, once it is more than ``offset``.

        Args:
            offset: What was read.
            is_over: Whether this reader is to go; see ``look``.

        Raises:
            CutOffError: it is, or nothing more will come.
        """
        with self._moved:
            self._moved.wait_for(lambda: self.offset > offset or self._ended or is_over())
            if is_over():
                raise CutOffError("nobody waits for it any more")
            if self.offset <= offset:
                raise CutOffError("its transfer to the node that passes it on ended")
            return self.offset


def send(
    sock: socket.socket,
    fd: int,
    offset: int,
    size: int,
    filling: Filling | None = None,
    is_over: Callable[[], bool] = bool,
) -> None:
    """Send memory from an offset to its end; what is being filled, as it comes.

    Plain sockets of one machine may still refer to the pages when this returns.

    Args:
        sock: The connection.
        fd: Of the memory.
        offset: Where to begin.
        size: Where to end.
        filling: What fills the memory, if it is not whole.
        is_over: Whether nobody wants what is yet to come of that.

    Raises:
        CutOffError: the memory is filled no further, or nobody wants it.
        OSError: the other end is gone.
    """
    send_some = _sender(sock, fd, size)
    while offset < size:
        end = size if filling is None else filling.beyond(offset, is_over)
        while offset < end:
            offset += send_some(offset, min(PIECE, end - offset))


def _sender(sock: socket.socket, fd: int, size: int) -> Callable[[int, int], int]:
    if not isinstance(sock, ssl.SSLSocket):
        return lambda offset, length: _send_pages(sock, fd, offset, length)
    # It is unmapped when nobody refers to it: an error keeps the part that could not be sent.
    view = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
    return lambda offset, length: sock.send(view[offset : offset + length])


def _send_pages(sock: socket.socket, fd: int, offset: int, length: int) -> int:
    sent = os.sendfile(sock.fileno(), fd, offset, length)
    if not sent:
        raise CutOffError("the memory is gone")
    return sent


def receive(
    sock: socket.socket, fd: int, offset: int, size: int, came: Callable[[int], object]
) -> None:
    """Fill memory from an offset to its end; ``came`` hears of each part.

    Raises:
        CutOffError: the other end left before.
        OSError: the connection broke.
    """
    # By way of a small buffer, which stays in the processor's cache: memory that is written to by
    # a system call need not be mapped, which would cost more than this copy.
    buffer = memoryview(bytearray(min(_BUFFER, size - offset)))
    while offset < size:
        part = buffer[: _fill(sock, buffer[: size - offset])]
        if not part:
            raise CutOffError(f"{offset} of {size} bytes came")
        write_all(fd, part, offset)
        offset += len(part)
        came(len(part))


def _fill(sock: socket.socket, buffer: memoryview) -> int:
    """Read until the buffer is full or the other end has left; returns how much was read."""
    if not isinstance(sock, ssl.SSLSocket):
        return sock.recv_into(buffer, 0, socket.MSG_WAITALL)
    filled = 0
    while filled < len(buffer):
        count = sock.recv_into(buffer[filled:])
        if not count:
            break
        filled += count
    return filled


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of it at an offset."""
    written = os.pwrite(fd, data, offset)
    while written < len(data):
        written += os.pwrite(fd, memoryview(data)[written:], offset + written)
