"""Connections over Unix sockets: how two processes of one machine exchange frames.

Each end proves itself before a frame is read. This module moves frames; their meaning is the
business of its callers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import marshal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.exceptions import AuthenticationError
from miniray.security.challenge import ClientChallenge, ServerChallenge
from miniray.wire.sockets import (
    LENGTH,
    MAX_FRAME,
    LastWords,
    PassedDescriptors,
    SendQueue,
    close_all,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.wire.poller import Poller

logger = logging.getLogger(__name__)

#: A write failed because the other end is gone: the loop reads what it still sent, then its end.
_HUNG_UP = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN})

#: Frames posted within this many seconds of each other are written together ...
_CLOSE_BY = 50e-6
#: ... up to this many, and not beyond a frame of this size.
_BATCH = 16
_LARGE = 16 * 1024
_SEND_ROOM = 1 << 20
_now = time.perf_counter


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Endpoint:
    """Settings that the connections of one part of a process share."""

    #: The loop that serves them.
    poller: Poller
    #: What both ends prove that they know.
    key: bytes
    #: Called with each message.
    on_message: Callable[[Connection, tuple[Any, ...]], None]
    #: Called once, at the end of each.
    on_close: Callable[[Connection], None]
    #: Seconds that a process which has dialled has to prove itself.
    auth_timeout: float = dataclasses.field(default_factory=lambda: config().auth_timeout)
    #: Whether descriptors may come along.
    takes_fds: bool = False
    #: Bytes that may wait because the other end does not read ...
    limit: int = sys.maxsize
    #: ... and what is called, once and in the loop, when more do.
    on_overflow: Callable[[Connection], None] | None = None
    #: Reads a frame: ``plain.loads`` in a process that others rely on too.
    loads: Callable[[memoryview], Any] = marshal.loads


class Connection:
    """One authenticated, non-blocking stream of frames.

    ``send`` may be called from any thread and never blocks: it writes to the
    socket at once if its queue is empty, and what the socket does not take waits
    in memory for the loop. ``on_message`` and ``on_close`` run in the loop's
    thread; ``on_close`` runs exactly once.
    """

    __slots__ = (
        "_batch",
        "_buffer",
        "_cancel_deadline",
        "_challenge",
        "_closed",
        "_drained",
        "_endpoint",
        "_expected",
        "_fds",
        "_lock",
        "_out",
        "_overflowed",
        "_passed",
        "_poller",
        "_posted",
        "_ready",
        "_sock",
        "_writing",
        "peer",
    )

    def __init__(self, sock: socket.socket, endpoint: Endpoint, *, server: bool) -> None:
        """Begin the challenge.

        Args:
            sock: The connected socket.
            endpoint: What this connection has in common with others of this process.
            server: Whether this end was dialled.
        """
        sock.setblocking(False)
        # Holds a few large frames, so that their writer need not wait for the reader's turns.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_ROOM)
        self._sock = sock
        self._endpoint = endpoint
        self._poller = poller = endpoint.poller
        #: For the user of the connection: its record of the other end.
        self.peer: Any = None
        # Reentrant, as is `_write`: a garbage collection may run user code anywhere, and
        # that may send on this very connection.
        self._lock = threading.RLock()
        self._writing = False
        self._out = SendQueue()
        self._overflowed = False
        self._drained: Callable[[], None] | None = None
        #: The beginning of a frame whose rest has not come, and how long that frame is.
        self._buffer = bytearray()
        self._expected = 0
        self._fds = PassedDescriptors()
        #: Frames that ``post`` keeps for a moment, and when it last wrote or began to keep.
        self._batch: list[bytes] = []
        self._posted = 0.0
        self._closed = False
        self._ready = False  # only the challenge is written before it is passed
        self._passed = threading.Event()  # `_ready`, or closed
        self._challenge: ServerChallenge | ClientChallenge | None
        self._cancel_deadline: Callable[[], None] | None = None
        if server:
            self._challenge = challenge = ServerChallenge(endpoint.key)
            self._cancel_deadline = poller.call_later(endpoint.auth_timeout, self._auth_expired)
            with contextlib.suppress(OSError):  # it hung up already: that is read next
                self._sock.send(challenge.greeting)  # an empty socket takes these few bytes
        else:
            # No deadline: the kernel has shown who listens, and user code there may keep
            # its I/O thread from answering for minutes. Its end closes the socket.
            self._challenge = ClientChallenge(endpoint.key)
        poller.add(sock.fileno(), self._on_readable)

    # --- writing -----------------------------------------------------------------
    def send(self, message: tuple[Any, ...]) -> bool:
        """Send one frame; False, and it is dropped, if the connection is closed.

        Raises:
            ValueError: The message is too large. The connection goes on.
        """
        data = encode(message)
        with self._lock:
            if self._closed:
                return False
            if self._batch:
                self._batch.append(data)
                data = self._take_batch()
            self._write(data)
        return True

    def post(self, message: tuple[Any, ...]) -> None:
        """Send one frame, perhaps together with those that follow it closely.

        A lone frame leaves at once. One that comes within microseconds of another waits
        for at most a few more, for the sender's next wait, or for the loop's next turn:
        a system call for each of thousands would cost more than all the rest.

        Raises:
            ValueError: The message is too large. The connection goes on.
        """
        data = encode(message)
        with self._lock:
            if self._closed:
                return
            batch = self._batch
            if not batch:
                if _now() - self._posted > _CLOSE_BY or len(data) > _LARGE:
                    self._write(data)
                    self._posted = _now()  # not before: a slow write would part what is close
                    return
                batch.append(data)
                self._poller.flush_soon(self)
                return
            batch.append(data)
            if len(batch) < _BATCH and len(data) <= _LARGE:
                return
            self._batch = []
            self._write(b"".join(batch))
            self._posted = _now()

    def flush_posted(self) -> None:
        """Write what ``post`` has kept."""
        with self._lock:
            if self._batch and not self._closed:
                self._write(self._take_batch())

    def _take_batch(self) -> bytes:
        batch, self._batch = self._batch, []
        return b"".join(batch)

    def _write(self, data: bytes) -> None:
        """Write, or queue what the socket does not take. Needs the lock."""
        out = self._out
        waiting = out.size
        if not self._ready or waiting or self._writing:
            out.append(data)
            on_overflow = self._endpoint.on_overflow
            if on_overflow is not None and out.size > self._endpoint.limit and not self._overflowed:
                self._overflowed = True
                self._poller.call_soon(functools.partial(on_overflow, self))
            return
        self._writing = True
        try:
            sent = self._sock.send(data)
            if sent < len(data):
                out.put_back(memoryview(data)[sent:])
        except BlockingIOError:
            out.put_back(data)
        except OSError as error:
            self._write_failed(error)
        finally:
            self._writing = False
        if out.size:
            self._poller.watch_writable(self._sock.fileno(), self._on_writable)

    def _write_failed(self, error: OSError) -> None:
        """Close, unless the loop is about to read that the other end is gone. Needs the lock."""
        if error.errno not in _HUNG_UP:
            logger.error("writing to a peer failed, its connection is closed: %s", error)
            self._poller.call_soon(self.close)

    def send_with_fds(self, message: tuple[Any, ...], fds: list[int]) -> None:
        """Send one frame with open descriptors; this takes ownership of ``fds``."""
        data = encode(message)
        with self._lock:
            if self._closed:
                close_all(fds)
                return
            if self._batch:
                self._write(self._take_batch())
            alone = not self._out.size
            self._out.append_with_fds(data, fds)
            if self._ready and alone and not self._writing:
                self._on_writable()
                if self._out.size:
                    self._poller.watch_writable(self._sock.fileno(), self._on_writable)

    def backlog(self) -> int:
        """Return the bytes that wait in memory because the peer does not read."""
        return self._out.size

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call back once, in the loop's thread, when all that waits now has been written.

        Not called if the connection is closed before; the latest callback counts.
        """
        with self._lock:
            if self._out.size:
                self._drained = callback
            else:
                self._poller.call_soon(callback)

    def _on_writable(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                self._out.write_to(self._sock)
            except BlockingIOError:
                return
            except OSError as error:
                self._out.clear()
                self._write_failed(error)
            self._poller.watch_writable(self._sock.fileno(), None)
            drained, self._drained = self._drained, None
        if drained is not None:
            self._poller.call_soon(drained)

    # --- reading -----------------------------------------------------------------
    def take_fd(self) -> int:
        """Return the descriptor that came with the message being handled.

        Raises:
            OSError: this process had too many open files to receive it.
        """
        return self._fds.take()

    def _receive(self) -> int:
        """Read into the loop's buffer; return how many bytes came."""
        if not self._endpoint.takes_fds:
            return self._sock.recv_into(self._poller.buffer)
        return self._fds.receive(self._sock, self._poller.buffer)

    def _on_readable(self) -> None:
        try:
            size = self._receive()
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            # The other end may only have closed its sending side, and still read.
            if self._ready:
                self.flush_posted()
                self._on_writable()
            self.close()
            return
        view = self._poller.buffer
        if self._challenge is not None:
            surplus = self._authenticate(bytes(view[:size]))
            size = len(surplus)
            if not size:
                return
            view[:size] = surplus
        buffer = self._buffer
        if buffer:
            buffer += view[:size]
            if len(buffer) < self._expected:
                return
            with memoryview(buffer) as whole:
                consumed = self._dispatch(whole, len(buffer))
            if not self._closed:
                del buffer[:consumed]
        else:
            consumed = self._dispatch(view, size)
            if consumed < size and not self._closed:
                buffer += view[consumed:size]

    def _dispatch(self, view: memoryview, total: int) -> int:
        """Handle the whole frames in a buffer; return how many bytes they were."""
        position = 0
        on_message = self._endpoint.on_message
        unpack = LENGTH.unpack_from
        loads = self._endpoint.loads
        self._expected = 0
        while total - position >= 4 and not self._closed:
            (length,) = unpack(view, position)
            end = position + 4 + length
            if end > total:
                if length > MAX_FRAME:
                    logger.error("a frame of %d bytes was announced; closing", length)
                    self.close()
                self._expected = end - position
                break
            try:
                message = loads(view[position + 4 : end])
                kind = message[0]
            except (ValueError, EOFError, TypeError, LookupError, MemoryError):
                logger.exception(
                    "a frame of %d bytes of %s cannot be read; closing", length, self.peer
                )
                self.close()
                break
            position = end
            try:
                on_message(self, message)
            except Exception:
                # One bad message must not end the loop that serves all sockets.
                logger.exception("handling message kind %r failed", kind)
        return position

    # --- the challenge -------------------------------------------------------------
    def _authenticate(self, data: bytes) -> bytes:
        """Feed the challenge; return what came after it."""
        challenge = self._challenge
        assert challenge is not None
        try:
            reply, done = challenge.feed(data)
        except AuthenticationError as error:
            logger.warning("%s", error)
            self.close()
            return b""
        with self._lock:
            if self._closed:
                return b""
            # It may have hung up already: what it has sent behind its proof counts all the same.
            with contextlib.suppress(OSError):
                if reply:
                    self._sock.send(reply)
            # A client's frames may follow its own proof: the kernel has shown whose
            # process listens, and replies are read only after the server's proof.
            if not self._ready and (done or reply):
                self._ready = True
                self._passed.set()
                if self._out.size:
                    self._poller.watch_writable(self._sock.fileno(), self._on_writable)
        if not done:
            return b""
        self._challenge = None
        if self._cancel_deadline is not None:
            self._cancel_deadline()
            self._cancel_deadline = None
        return challenge.surplus

    def _auth_expired(self) -> None:
        if self._challenge is not None and not self._closed:
            logger.warning("a peer did not prove itself in time; closing its connection")
            self.close()

    # --- closing -----------------------------------------------------------------
    @property
    def closed(self) -> bool:
        return self._closed

    def flush_blocking(self, timeout: float | None) -> bool:
        """Wait until everything queued is written; False on timeout."""
        import select

        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._passed.wait(timeout):
            return False  # what is written before the challenge is passed breaks it
        while True:
            with self._lock:
                if self._closed:
                    return False
                if self._batch:
                    self._write(self._take_batch())
                try:
                    self._out.write_to(self._sock)
                except BlockingIOError:
                    pass
                except OSError:
                    return False
                if not self._out.size:
                    return True
                writable = select.poll()  # select() takes no descriptors above 1023
                writable.register(self._sock.fileno(), select.POLLOUT)
            if deadline is None:
                writable.poll()
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            writable.poll(left * 1000)

    def end_writing(self) -> None:
        """Close the sending side; what the other end sends is still handled."""
        with self._lock, contextlib.suppress(OSError):  # it has hung up already
            if not self._closed:
                self._sock.shutdown(socket.SHUT_WR)

    def read_to_end(self) -> None:
        """Handle all that the other end, which is gone, has sent, and close.

        What it sent comes before whatever its end brings about, so this must not wait for
        the turn of its socket.
        """
        import select

        unread = select.poll()
        unread.register(self._sock.fileno(), select.POLLIN)
        while not self._closed and unread.poll(0):
            self._on_readable()
        self.close()

    def close(self) -> None:
        """Close; ``on_close`` runs in the loop's thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._out.clear()
            self._batch = []
        self._passed.set()
        self._poller.call_soon(self._finish_close)

    def refuse(self, message: tuple[Any, ...]) -> None:
        """Drop what waits and close; ``message`` is the last that the other end reads."""
        with self._lock:
            if self._closed:
                return
            data = self._out.rest_of_begun() + encode(message)
            LastWords(self._sock.dup(), self._poller, data)
            self.close()

    def _finish_close(self) -> None:
        if self._cancel_deadline is not None:
            self._cancel_deadline()
            self._cancel_deadline = None
        self._poller.remove(self._sock.fileno())
        self._sock.close()
        self._fds.close()
        self._endpoint.on_close(self)

    def abandon(self) -> None:
        """Close the descriptors without sending anything, for a forked child."""
        self._closed = True
        self._sock.close()
        self._fds.close()
