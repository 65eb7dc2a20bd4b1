"""Parts of connections: Unix sockets, frames, queues, passed descriptors.

The kernel says whose process is at the other end; only this user's are let in.
"""

from __future__ import annotations

import array
import collections
import contextlib
import errno
import itertools
import logging
import marshal
import os
import socket
import struct
from typing import TYPE_CHECKING, Any

from miniray.common.names import format_bytes
from miniray.exceptions import AuthenticationError
from miniray.messages import plain
from miniray.security.challenge import require_own_uid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.wire.poller import Poller

logger = logging.getLogger(__name__)

#: Accepting failed for want of something that others may give back; it is tried again later.
_SHORT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ACCEPT_AGAIN = 0.5


class Listener:
    """Accepts connections on a Unix socket of this user's folder."""

    def __init__(
        self,
        path: str,
        poller: Poller,
        on_accept: Callable[[socket.socket], None],
        *,
        backlog: int = 512,
    ) -> None:
        self.path = path
        self._poller = poller
        self._on_accept = on_accept
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._sock.bind(path)
        self._sock.listen(backlog)
        self._closed = False
        self._watch()

    def _watch(self) -> None:
        if not self._closed:
            self._poller.add(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.exception("could not accept a connection on %s", self.path)
                if error.errno in _SHORT_OF:
                    # The caller waits in the backlog meanwhile, and the loop must not spin.
                    self._poller.remove(self._sock.fileno())
                    self._poller.call_later(_ACCEPT_AGAIN, self._watch)
                return
            try:
                require_own_uid(sock)
            except AuthenticationError as error:
                logger.warning("%s", error)
                sock.close()
                continue
            self._on_accept(sock)

    def close(self) -> None:
        """Stop listening and remove the socket. Only in the loop's thread."""
        self._closed = True
        self._poller.remove(self._sock.fileno())
        self._sock.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def abandon(self) -> None:
        self._sock.close()


def connect(path: str) -> socket.socket:
    """Connect to a Unix socket of this user; OSError if no process listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
        require_own_uid(sock)
    except (OSError, AuthenticationError):
        sock.close()
        raise
    return sock


LENGTH = struct.Struct("<I")
#: Bytes of one message: large values do not travel in messages, so only a mistake is above this.
MAX_MESSAGE = 1 << 30
#: Bytes of one frame. One that is relayed holds a message and what waited beside it.
MAX_FRAME = MAX_MESSAGE + (256 << 20)


def encode(message: tuple[Any, ...]) -> bytes:
    """Encode a message as one frame.

    Raises:
        ValueError: The message is too large.
    """
    body = marshal.dumps(message, plain.VERSION)  # as `dumps`: each message passes here
    if len(body) > MAX_FRAME:
        raise too_large(len(body), MAX_FRAME)
    return LENGTH.pack(len(body)) + body


def too_large(size: int, limit: int, what: str = "A message to another process") -> ValueError:
    """Make the error of a sender whose frame the receiver would refuse."""
    return ValueError(
        f"{what} takes {format_bytes(size)}; it may take {format_bytes(limit)}. Pass large values "
        f"as arguments of calls, through miniray.put()."
    )


#: Buffers handed to one sendmsg; the kernel allows 1024.
_GATHER = 256


class SendQueue:
    """Frames that wait for a socket, and open descriptors that go with some. Not thread-safe."""

    __slots__ = ("_items", "_with_fds", "size")

    def __init__(self) -> None:
        #: An empty item stands for the next frame that has descriptors.
        self._items: collections.deque[memoryview | bytes] = collections.deque()
        self._with_fds: collections.deque[tuple[bytes, list[int]]] = collections.deque()
        #: Bytes that wait.
        self.size = 0

    def append(self, data: bytes) -> None:
        self._items.append(data)
        self.size += len(data)

    def append_with_fds(self, data: bytes, fds: list[int]) -> None:
        """Add a frame with descriptors, which are closed when they are sent or dropped."""
        self._with_fds.append((data, fds))
        self._items.append(b"")
        self.size += len(data)

    def put_back(self, data: memoryview | bytes) -> None:
        """Put back what the socket did not take, before everything else."""
        self._items.appendleft(data)
        self.size += len(data)

    def write_to(self, sock: socket.socket) -> None:
        """Write everything that is queued.

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
        """Return the rest of a frame whose beginning was sent; empty if there is none."""
        begun = bool(self._items) and isinstance(self._items[0], memoryview)
        return bytes(self._items[0]) if begun else b""

    def clear(self) -> None:
        self._items.clear()
        self.size = 0
        while self._with_fds:
            _, fds = self._with_fds.popleft()
            close_all(fds)


class LastWords:
    """Writes the end of a conversation to a socket whose connection is closed, and closes it.

    Args:
        sock: The socket, which is this object's from now on.
        poller: The loop that serves it.
        data: What to write once the other end reads again; dropped if it never does.
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
            logger.debug("could not send a process why its connection was closed: %s", error)
            self._data = memoryview(b"")
        if not self._data:
            self._poller.remove(self._sock.fileno())
            self._sock.close()


_FD_SIZE = array.array("i").itemsize
_ANCILLARY = socket.CMSG_SPACE(16 * _FD_SIZE)


class PassedDescriptors:
    """Open descriptors that came with messages, in order, until they are taken."""

    __slots__ = ("_fds",)

    def __init__(self) -> None:
        self._fds: collections.deque[int] = collections.deque()

    def receive(self, sock: socket.socket, buffer: memoryview) -> int:
        """Read bytes into a buffer, and keep descriptors; return how many bytes came."""
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
        """Return the descriptor that came with the message being handled.

        Raises:
            OSError: this process had too many open files to receive it.
        """
        fd = self._fds.popleft() if self._fds else -1
        if fd < 0:
            raise OSError(errno.EMFILE, "this process has too many open files to receive another")
        return fd

    def close(self) -> None:
        """Close the descriptors that were not taken."""
        close_all(fd for fd in self._fds if fd >= 0)
        self._fds.clear()


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
