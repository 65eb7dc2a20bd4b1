"""The bytes of one value between a socket and shared memory, in blocking calls.

Processes of one machine show each other the memory (``showing.py``); through TLS the bytes go.
What is still being filled here can be sent already.

Both ends let others run after each piece. The kernel would interrupt them for whoever waits only at
its next tick, so that a call beside a transfer would now and then be late by up to 4 ms.
"""

from __future__ import annotations

import mmap
import os
import ssl
from typing import TYPE_CHECKING

from miniray.node.transfer.filling import CutOffError
from miniray.node.transfer.showing import PIECE, copy_shown, show

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from miniray.node.transfer.filling import Filling

#: Bytes that are sent at a time of what is still on its way here.
STEP = 1 << 20


def send(
    sock: socket.socket,
    fd: int,
    offset: int,
    size: int,
    filling: Filling | None = None,
    is_over: Callable[[], bool] = bool,
) -> None:
    """Send memory from an offset to its end; what is being filled, as it comes.

    The other end of a plain socket still reads the memory when this returns.

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
    if not isinstance(sock, ssl.SSLSocket):
        show(sock, fd, size, filling, is_over)
        return
    # It is unmapped when nobody refers to it: an error keeps the part that could not be sent.
    view = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
    while offset < size:
        end = size if filling is None else filling.beyond(offset, STEP, is_over)
        while offset < end:
            offset += sock.send(view[offset : min(offset + PIECE, end)])
            os.sched_yield()


def receive(
    sock: socket.socket, fd: int, offset: int, size: int, came: Callable[[int], object]
) -> None:
    """Fill memory from an offset to its end; ``came`` hears of each part.

    Raises:
        CutOffError: the other end left before.
        OSError: the connection broke.
    """
    if not isinstance(sock, ssl.SSLSocket):
        copy_shown(sock, fd, offset, size, came)
        return
    # By way of a small buffer, which stays in the processor's cache: memory that is written to by
    # a system call need not be mapped, which would cost more than this copy.
    buffer = memoryview(bytearray(min(PIECE, size - offset)))
    while offset < size:
        count = _read(sock, buffer[: size - offset])
        if not count:
            raise CutOffError(f"{offset} of {size} bytes came")
        write_all(fd, buffer[:count], offset)
        offset += count
        came(count)
        os.sched_yield()


def _read(sock: ssl.SSLSocket, buffer: memoryview) -> int:
    """Fill a buffer, or as much of it as comes until the other end leaves."""
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
