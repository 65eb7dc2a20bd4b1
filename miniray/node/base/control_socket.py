"""Messages with descriptors to a process of the node that its daemon has started.

Both ends read whole messages. The daemon's end never blocks: it queues what the socket refuses.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import marshal
import os
import socket
from typing import TYPE_CHECKING, Any

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
        data, fds, _, _ = socket.recv_fds(
            control, MESSAGE_LIMIT, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        return b"", []
    return data, fds


class Control:
    """The daemon's end.

    ``on_message`` gets the messages, one in a turn of the loop; ``on_end`` is called when the other
    end is gone.
    """

    def __init__(
        self,
        control: socket.socket,
        on_message: Callable[[Any], object],
        on_end: Callable[[], object],
    ) -> None:
        control.setblocking(False)
        self._control = control
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        #: Messages that the socket has not taken: data, descriptors, and a callback for failures.
        self._queue: collections.deque[
            tuple[bytes, list[int], Callable[[OSError], object] | None]
        ] = collections.deque()
        self._loop.add_reader(control.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = self._control.recv(MESSAGE_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._on_message(marshal.loads(data))
        else:
            self._on_end()

    def send(
        self,
        message: Any,
        fds: Iterable[int] = (),
        on_error: Callable[[OSError], object] | None = None,
    ) -> None:
        """Send a message; its descriptors are closed here in any case.

        ``on_error`` is called if it cannot be sent; ``on_end`` instead if the other end is gone.
        """
        self._queue.append((marshal.dumps(message), list(fds), on_error))
        if len(self._queue) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._queue:
            data, fds, on_error = self._queue[0]
            failure: OSError | None = None
            try:
                socket.send_fds(self._control, [data], fds)
            except BlockingIOError:
                self._loop.add_writer(self._control.fileno(), self._flush)
                return
            except ConnectionError:
                pass  # reading reports the end
            except OSError as error:
                failure = error
            self._queue.popleft()
            close_all(fds)
            if failure is not None and on_error is not None:
                on_error(failure)
        self._loop.remove_writer(self._control.fileno())

    def close(self, farewell: Any = None) -> None:
        """Hang up; what waits is dropped, and a ``farewell`` is sent if the socket takes it."""
        if farewell is not None:
            with contextlib.suppress(OSError):
                self._control.send(marshal.dumps(farewell))
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_writer(self._control.fileno())
        for _, fds, _ in self._queue:
            close_all(fds)
        self._queue.clear()
        self._control.close()


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
