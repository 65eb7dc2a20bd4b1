"""Messages with descriptors to a process of the node that its daemon has started.

Both ends read whole messages. The daemon's end never blocks: it queues what the socket refuses.
"""

from __future__ import annotations

import array
import asyncio
import collections
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Bytes of the largest message.
MESSAGE_LIMIT = 1 << 20
_MOST_DESCRIPTORS = 16


def control_pair() -> tuple[socket.socket, socket.socket]:
    """Make a control socket; return the daemon's end and the other one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_LIMIT)
    return ours, theirs


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next message with its descriptors; it is empty once the other end is gone."""
    try:
        data, ancillary, _, _ = control.recvmsg(
            MESSAGE_LIMIT, socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        return b"", []
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


class ControlSender:
    """The daemon's sending end."""

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)
        self._control = control
        self._loop = asyncio.get_running_loop()
        #: Messages that the socket has not taken: data, descriptors, and a callback for failures.
        self._queue: collections.deque[
            tuple[bytes, list[int], Callable[[OSError], object] | None]
        ] = collections.deque()

    def send(
        self,
        data: bytes,
        fds: Iterable[int] = (),
        on_error: Callable[[OSError], object] | None = None,
    ) -> None:
        """Send a message; its descriptors are closed here in any case.

        ``on_error`` is called if it cannot be sent; reading shows too that the other end is gone.
        """
        self._queue.append((data, list(fds), on_error))
        if len(self._queue) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._queue:
            data, fds, on_error = self._queue[0]
            try:
                socket.send_fds(self._control, [data], fds)
            except BlockingIOError:
                self._loop.add_writer(self._control.fileno(), self._flush)
                return
            except OSError as error:
                failure: OSError | None = error
            else:
                failure = None
            self._queue.popleft()
            close_all(fds)
            if failure is not None and on_error is not None:
                on_error(failure)
        self._loop.remove_writer(self._control.fileno())

    def close(self) -> None:
        self._loop.remove_writer(self._control.fileno())
        for _, fds, _ in self._queue:
            close_all(fds)
        self._queue.clear()


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
