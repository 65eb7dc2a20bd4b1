"""Open descriptors that come along with messages over a Unix socket, until they are taken."""

from __future__ import annotations

import array
import collections
import errno
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_FD_SIZE = array.array("i").itemsize
_ANCILLARY = socket.CMSG_SPACE(16 * _FD_SIZE)


class PassedDescriptors:
    """Those of one connection, in the order in which they came."""

    __slots__ = ("_fds",)

    def __init__(self) -> None:
        self._fds: collections.deque[int] = collections.deque()

    def receive(self, sock: socket.socket, buffer: bytearray) -> int:
        """Read bytes into a buffer, and keep the descriptors; returns how many bytes came."""
        size, ancillary, flags, _ = sock.recvmsg_into(
            (buffer,), _ANCILLARY, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % _FD_SIZE])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            self._fds.append(-1)  # keeps the place of the one that the kernel dropped
        return size

    def take(self) -> int:
        """The descriptor that came with the message being handled.

        Raises:
            OSError: this process had too many open files to receive it.
        """
        fd = self._fds.popleft() if self._fds else -1
        if fd < 0:
            raise OSError(errno.EMFILE, "this process has too many open files to receive another")
        return fd

    def close(self) -> None:
        """Close those that nobody took."""
        close_all(fd for fd in self._fds if fd >= 0)
        self._fds.clear()


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
