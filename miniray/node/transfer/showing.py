"""One value between two processes of one machine: the sender shows its memory, the other copies it.

Over the socket go a descriptor of that memory and how much of the value is there. Of one that is
still on its way the other end asks for more when it has copied that, so nobody wakes for what is
not needed yet. A byte is copied once, by the one process that wants it, which is half the work of
sending it through the socket. The sender keeps the memory as it is until the other end has said
that it has read all of it, or has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from typing import TYPE_CHECKING

from miniray.node.transfer.filling import CutOffError

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.transfer.filling import Filling

#: Bytes between which others may run, some 50 µs of work.
PIECE = 256 << 10
#: How much of the value is there.
_THERE = struct.Struct("!Q")
#: What the other end says when it has copied that.
_MORE = b"\2"
#: Bytes of what is on its way that the other end is told of at a time. Less would wake two threads
#: more often; more would keep a row of nodes from working at once.
STEP = 4 << 20
#: Bytes after which others are told of them.
_PART = 1 << 20
_F_SETPIPE_SZ = 1031


def show(
    sock: socket.socket, fd: int, size: int, filling: Filling | None, is_over: Callable[[], bool]
) -> None:
    """Show memory to the other end; of what is being filled, say how much is there when asked.

    Args:
        sock: The connection.
        fd: Of the memory.
        size: Of the value.
        filling: What fills the memory, if it is not whole.
        is_over: Whether nobody wants what is yet to come of that.

    Raises:
        CutOffError: the memory is filled no further, or nobody wants it.
        OSError: the other end is gone.
    """
    there = size if filling is None else filling.offset
    shown = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # not to be written there
    try:
        socket.send_fds(sock, [_THERE.pack(there)], [shown])
    finally:
        os.close(shown)
    while filling is not None and there < size:
        if sock.recv(len(_MORE)) != _MORE:
            raise CutOffError("the other end left")
        there = filling.beyond(there, STEP, is_over)
        sock.sendall(_THERE.pack(there))


def copy_shown(
    sock: socket.socket, fd: int, offset: int, size: int, came: Callable[[int], object]
) -> None:
    """Copy what the other end shows, from an offset to its end; ``came`` hears of each part.

    Raises:
        CutOffError: the other end left before.
        OSError: the connection broke.
    """
    with contextlib.ExitStack() as stack:
        shown, there = _shown(sock)
        stack.callback(os.close, shown)
        copier = stack.enter_context(_Copier(shown, fd))
        while offset < size:
            _look_up(sock, there)
            while offset >= there:
                there = _more(sock, there)
            begin, end = offset, min(offset + _PART, there, size)
            while offset < end:
                offset += copier.copy(offset, min(PIECE, end - offset))
                os.sched_yield()
            came(offset - begin)


def _shown(sock: socket.socket) -> tuple[int, int]:
    """The other end's memory, and how much of it is there."""
    word, fds, _, _ = socket.recv_fds(sock, _THERE.size, 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        raise CutOffError("no memory was shown, or no descriptors are left")
    return fds[0], _THERE.unpack(word)[0]


def _look_up(sock: socket.socket, there: int) -> None:
    """Look whether the other end has left, or wants this one to; it says nothing unasked.

    Raises:
        CutOffError: it does.
    """
    try:
        sock.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return
    raise _shown_no_further(there)


def _more(sock: socket.socket, there: int) -> int:
    """Wait until more of the value is there than it was; returns how much.

    Raises:
        CutOffError: the other end has left, or wants this one to leave.
    """
    sock.sendall(_MORE)
    word = sock.recv(_THERE.size)  # sent at once, and what is small is not cut in two
    if len(word) != _THERE.size:
        raise _shown_no_further(there)
    more: int = _THERE.unpack(word)[0]
    return more


def _shown_no_further(there: int) -> CutOffError:
    return CutOffError(f"it was shown no further than {there} bytes")


class _Copier:
    """From memory to memory, or to a file: the kernel copies, once.

    Args:
        source: A descriptor of what is read.
        target: Of what is written.
    """

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._target = target
        self._out, self._in = os.pipe()
        with contextlib.suppress(OSError):  # a user may have so many large ones only
            fcntl.fcntl(self._in, _F_SETPIPE_SZ, PIECE)

    def __enter__(self) -> _Copier:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)

    def copy(self, offset: int, length: int) -> int:
        """Copy some bytes to the same offset; returns how many, at most what a pipe takes."""
        taken = os.splice(self._source, self._in, length, offset_src=offset)
        if not taken:
            raise CutOffError("the memory is gone")
        left = taken
        while left:  # the pipe refers to the pages, and nothing is copied until here
            count = os.splice(self._out, self._target, left, offset_dst=offset)
            offset += count
            left -= count
        return taken
