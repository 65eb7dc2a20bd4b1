"""The bytes of one value between a socket and shared memory, in blocking calls.

Between processes of one machine the kernel passes the sender's pages on as they are; through TLS
they are copied. What is still being filled here can be sent already.

Both ends let others run after each piece. The kernel would interrupt them for whoever waits only at
its next tick, so that a call beside a transfer would now and then be late by up to 4 ms.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import ssl
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

#: Bytes between which others may run, some 50 µs of work: what is asked of the socket at once, and
#: what is read before it is written.
PIECE = 256 << 10
_F_SETPIPE_SZ = 1031


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
            os.sched_yield()


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
    with contextlib.ExitStack() as stack:
        if isinstance(sock, ssl.SSLSocket):
            receive_some = _reader(sock, fd, size - offset)
        else:
            receive_some = stack.enter_context(_Pipe(sock, fd)).receive
        while offset < size:
            count = receive_some(offset, size - offset)
            if not count:
                raise CutOffError(f"{offset} of {size} bytes came")
            offset += count
            came(count)
            os.sched_yield()


def _reader(sock: ssl.SSLSocket, fd: int, size: int) -> Callable[[int, int], int]:
    # By way of a small buffer, which stays in the processor's cache: memory that is written to by
    # a system call need not be mapped, which would cost more than this copy.
    buffer = memoryview(bytearray(min(PIECE, size)))

    def read(offset: int, length: int) -> int:
        filled = 0
        while filled < min(len(buffer), length):
            count = sock.recv_into(buffer[filled:length])
            if not count:
                break
            filled += count
        write_all(fd, buffer[:filled], offset)
        return filled

    return read


class _Pipe:
    """From a plain socket to memory: the kernel copies the sender's pages, once.

    Args:
        sock: The connection.
        fd: Of the memory.
    """

    def __init__(self, sock: socket.socket, fd: int) -> None:
        self._sock = sock
        self._fd = fd
        self._out, self._in = os.pipe()
        with contextlib.suppress(OSError):  # a user may have so many large ones only
            fcntl.fcntl(self._in, _F_SETPIPE_SZ, PIECE)

    def __enter__(self) -> _Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)

    def receive(self, offset: int, length: int) -> int:
        """Take what is there, at most the pipe's size; 0 if the other end has left."""
        taken = os.splice(self._sock.fileno(), self._in, min(PIECE, length))
        left = taken
        while left:
            count = os.splice(self._out, self._fd, left, offset_dst=offset)
            offset += count
            left -= count
        return taken


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of it at an offset."""
    written = os.pwrite(fd, data, offset)
    while written < len(data):
        written += os.pwrite(fd, memoryview(data)[written:], offset + written)
