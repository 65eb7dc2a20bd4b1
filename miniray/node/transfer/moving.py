"""Connections between movers: their admission, and the bytes of values over them.

A connection carries one value after another: its key and the offset to begin at go one way, its
bytes or where they are come back, and one byte more says that all of them were read. ``Door`` lets
connections in and hands on those that have named a value. ``send`` and ``receive`` are the two ends
of a value, between a socket and shared memory, in blocking calls.

Through TLS the bytes go. Within a machine the sender shows its memory, and the other end copies it:
over the socket go a descriptor of that memory and how much of the value is there. For a value that
is still in flight the other end requests more when it has copied that, so no thread wakes too
early. A byte is copied once, by the one process that wants it, which is half the work of
sending it through the socket. The sender keeps the memory as it is until the other end has
confirmed that it has read all of it, or has left.

Both ends yield the processor after each piece. The kernel would interrupt them for another process
at its next tick only, so that a call beside a transfer would at times be late by up to 4 ms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import math
import mmap
import os
import selectors
import socket
import ssl
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.exceptions import AuthenticationError
from miniray.security.challenge import require_own_uid
from miniray.security.peer_log import PeerLog

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: First message of the receiving end: the value's key, the offset to begin at, and its node.
HELLO = struct.Struct("!8sQ8sQ8s")
#: Seconds after which waiters get what is there, so that they can leave a sender that stalls.
_LATEST = 1.0
#: Bytes between which others may run, some 50 µs of work.
PIECE = 256 << 10
#: How much of the value is there.
_THERE = struct.Struct("!Q")
#: The other end's message when it has copied that.
_MORE = b"\2"
#: Bytes of a value in flight that are shown to the other end at a time. Less would wake two threads
#: more often; more would keep a row of nodes from working at once.
_SHOWN_STEP = 4 << 20
#: Bytes after which a part is reported.
_PART = 1 << 20
_F_SETPIPE_SZ = 1031
#: Bytes that are sent at a time of a value that is still in flight to this node.
_STEP = 1 << 20
#: Milliseconds after which a machine without answers is taken for gone.
_GONE_AFTER = 20_000
#: Seconds that a connection has to prove itself and to name a value.
HELLO_WITHIN = 10.0
#: Connections that may be doing so at a time.
MOST = 64
#: Seconds to wait before a connection is accepted again when descriptors have run out.
_ACCEPT_AGAIN = 0.1


# --- accepting connections --------------------------------------------------------------------
def watch_network(sock: socket.socket) -> None:
    """Set options by which a machine that vanished is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _GONE_AFTER // 2000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_AFTER)


@dataclasses.dataclass(eq=False)
class _Visitor:
    """A connection that has not named a value."""

    sock: socket.socket
    host: str
    deadline: float
    #: Whether it belongs to the cluster.
    proven: bool
    hello: bytes = b""


class Door:
    """Listen, and hand on connections that have named a value.

    Args:
        serve: Called in a thread of its own with a connection and its first words, ``HELLO``. The
            connection is closed when that returns.
    """

    def __init__(self, serve: Callable[[socket.socket, bytes], None]) -> None:
        self._serve = serve
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        #: The earliest deadline first.
        self._visitors: dict[_Visitor, None] = {}
        self._refusals = PeerLog(logger.warning)
        self._over = False

    def __len__(self) -> int:
        return len(self._visitors)

    def listen(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        """Accept connections at a socket, through TLS or of this user, from ``open`` on."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, context)

    def open(self) -> None:
        """Begin to accept connections, in a thread."""
        _in_thread(self._run)

    def close(self) -> None:
        """Accept no more connections. Thread-safe."""
        self._over = True
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # the thread has closed it
                listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread

    def _run(self) -> None:
        while not self._over:
            earliest = next(iter(self._visitors), None)
            wait = None if earliest is None else max(0, earliest.deadline - time.monotonic())
            for key, _ in self._selector.select(wait):
                if isinstance(key.data, _Visitor):
                    if key.data in self._visitors:  # a newer one may have taken its place
                        self._on_readable(key.data)
                elif not self._over:
                    self._let_in(key.fileobj, key.data)
            now = time.monotonic()
            for visitor in [v for v in self._visitors if v.deadline <= now]:
                self._refuse(visitor, f"it did not say in {HELLO_WITHIN:g} s what it comes for")
        for sock in (*self._listeners, *(visitor.sock for visitor in self._visitors)):
            sock.close()
        self._selector.close()

    def _let_in(self, listener: Any, context: ssl.SSLContext | None) -> None:
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            return  # it has left already
        except OSError as error:
            if not self._over:
                logger.warning("a connection could not be accepted: %s", error)
                time.sleep(_ACCEPT_AGAIN)
            return
        try:
            sock.setblocking(False)
            if context is None:
                require_own_uid(sock)
                visitor = _Visitor(sock, "this machine", time.monotonic() + HELLO_WITHIN, True)
            else:
                watch_network(sock)
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                visitor = _Visitor(sock, address[0], time.monotonic() + HELLO_WITHIN, False)
        except AuthenticationError:
            self._refusals.add("a process of another user", "was refused")
            sock.close()
            return
        except OSError:  # it has left already
            sock.close()
            return
        if len(self._visitors) == MOST:
            self._refuse(next(iter(self._visitors)), f"{MOST} others came after it")
        self._visitors[visitor] = None
        self._selector.register(sock, selectors.EVENT_READ, visitor)

    def _on_readable(self, visitor: _Visitor) -> None:
        try:
            if not visitor.proven:
                assert isinstance(visitor.sock, ssl.SSLSocket)
                visitor.sock.do_handshake()
                visitor.proven = True
            while len(visitor.hello) < HELLO.size:
                more = visitor.sock.recv(HELLO.size - len(visitor.hello))
                if not more:
                    self._refuse(visitor, "it hung up")
                    return
                visitor.hello += more
        except (BlockingIOError, ssl.SSLWantReadError):
            self._selector.modify(visitor.sock, selectors.EVENT_READ, visitor)
        except ssl.SSLWantWriteError:
            self._selector.modify(visitor.sock, selectors.EVENT_WRITE, visitor)
        except OSError as error:
            self._refuse(visitor, str(error))
        else:
            self._hand_on(visitor)

    def _hand_on(self, visitor: _Visitor) -> None:
        self._forget(visitor)
        visitor.sock.settimeout(None)
        try:
            _in_thread(self._serve_and_close, visitor)
        except RuntimeError as error:
            logger.warning("a connection of %s could not be served: %s", visitor.host, error)
            visitor.sock.close()

    def _serve_and_close(self, visitor: _Visitor) -> None:
        with visitor.sock:
            self._serve(visitor.sock, visitor.hello)

    def _refuse(self, visitor: _Visitor, why: str) -> None:
        """Close a connection; log it if it did not prove that it belongs to the cluster."""
        self._forget(visitor)
        visitor.sock.close()
        if not visitor.proven:
            self._refusals.add(visitor.host, f"was refused at the port for large values: {why}")

    def _forget(self, visitor: _Visitor) -> None:
        del self._visitors[visitor]
        self._selector.unregister(visitor.sock)


def _in_thread(function: Callable[..., object], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


# --- memory that is being filled --------------------------------------------------------------
class CutOffError(Exception):
    """The other end left before the end, or the memory is filled no further."""


class Filling:
    """Memory that is being filled, from the front.

    Args:
        offset: Bytes that are there.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        #: The offset at which a waiter wakes; waking takes as long as copying 100 KB.
        self._wanted = math.inf
        self._ended = False
        self._moved = threading.Condition()

    def came(self, size: int) -> None:
        """Count bytes that have come."""
        self.offset += size
        if self.offset >= self._wanted:
            self._wake()

    def end(self) -> None:
        """Record that no more will come."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        with self._moved:
            self._wanted = math.inf  # waiters that go on set it again
            self._moved.notify_all()

    def beyond(self, offset: int, step: int) -> int:
        """Wait, a second at most, for ``step`` bytes behind ``offset``; return how many are here.

        Args:
            offset: What was read.
            step: Bytes that it is worth to wake for.

        Raises:
            CutOffError: no more will come.
        """
        woken = True
        with self._moved:
            while not self._ended:
                # Before the offset is read, as the thread that fills reads this after it.
                self._wanted = min(self._wanted, offset + step)
                if self.offset >= offset + (step if woken else 1):
                    break
                woken = self._moved.wait(_LATEST)
            if self.offset <= offset:
                raise CutOffError("its transfer to the node that passes it on ended")
            return self.offset


# --- the value --------------------------------------------------------------------------------
def send(
    sock: socket.socket,
    fd: int,
    offset: int,
    size: int,
    filling: Filling | None = None,
) -> None:
    """Send memory from an offset to its end; memory that is being filled, as bytes come.

    The other end of a plain socket still reads the memory when this returns.

    Args:
        sock: The connection.
        fd: Of the memory.
        offset: Where to begin.
        size: Where to end.
        filling: What fills the memory, if it is not whole.

    Raises:
        CutOffError: the memory is filled no further, or the other end left.
        OSError: the other end is gone.
    """
    if not isinstance(sock, ssl.SSLSocket):
        show(sock, fd, size, filling)
        return
    # It is unmapped with its last reference: an error keeps the part that could not be sent.
    view = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
    while offset < size:
        end = size if filling is None else filling.beyond(offset, _STEP)
        while offset < end:
            offset += sock.send(view[offset : min(offset + PIECE, end)])
            os.sched_yield()


def receive(
    sock: socket.socket, fd: int, offset: int, size: int, came: Callable[[int], object]
) -> None:
    """Fill memory from an offset to its end; ``came`` is called for each part.

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
    written = os.pwrite(fd, data, offset)
    while written < len(data):
        written += os.pwrite(fd, memoryview(data)[written:], offset + written)


# --- within a machine -------------------------------------------------------------------------
def show(sock: socket.socket, fd: int, size: int, filling: Filling | None) -> None:
    """Show memory to the other end; while it is being filled, report on request how much is there.

    Args:
        sock: The connection.
        fd: Of the memory.
        size: Of the value.
        filling: What fills the memory, if it is not whole.

    Raises:
        CutOffError: the memory is filled no further, or the other end left.
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
        there = filling.beyond(there, _SHOWN_STEP)
        sock.sendall(_THERE.pack(there))


def copy_shown(
    sock: socket.socket, fd: int, offset: int, size: int, came: Callable[[int], object]
) -> None:
    """Copy what the other end shows, from an offset to its end; ``came`` is called for each part.

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
    """Receive the other end's memory, and how much of the value is there."""
    word, fds, _, _ = socket.recv_fds(sock, _THERE.size, 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        raise CutOffError("no memory was shown, or no descriptors are left")
    return fds[0], _THERE.unpack(word)[0]


def _look_up(sock: socket.socket, there: int) -> None:
    """Check that the other end has not left, and does not want this one to leave.

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
    word = sock.recv(_THERE.size)  # sent at once: a word is too small to be split
    if len(word) != _THERE.size:
        raise _shown_no_further(there)
    more: int = _THERE.unpack(word)[0]
    return more


def _shown_no_further(there: int) -> CutOffError:
    return CutOffError(f"it was shown no further than {there} bytes")


class _Copier:
    """Copy from memory to memory, or to a file, once and in the kernel."""

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._target = target
        self._out, self._in = os.pipe()
        with contextlib.suppress(OSError):  # the number of large ones per user is limited
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
        while left:  # the pipe refers to the pages: this is the only copy
            count = os.splice(self._out, self._target, left, offset_dst=offset)
            offset += count
            left -= count
        return taken
