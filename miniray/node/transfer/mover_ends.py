"""The two ends of a transfer between movers, and their sockets: Unix, or TLS between machines.

`Sends` gives values to the movers of other nodes; `Receives` fetches values from them. Both work in
threads. Their daemon opens each value that is asked for, and is told of the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import queue
import socket
import ssl
import struct
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.node.transfer import moving
from miniray.node.transfer.moving import CutOffError, Filling
from miniray.security.certificates import NODE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

#: Milliseconds after which a machine that answers nothing is taken for gone.
_GONE_AFTER = 20_000


def exactly(sock: socket.socket, size: int) -> bytes:
    """Read ``size`` bytes; returns none if the other end hung up."""
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data


def hear_no_more(sock: socket.socket) -> None:
    """Stop receiving; a plain socket's other end notices when this one is closed.

    Until then this one may read memory, which the other end keeps as it is.
    """
    if not isinstance(sock, ssl.SSLSocket):
        _shut(sock, socket.SHUT_RD)
        return
    # Closed with a reset: the other end may wait for this one to make room for more.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    _shut(sock, socket.SHUT_RDWR)


def _shut(sock: socket.socket, how: int) -> None:
    # Not the method of an SSLSocket: another thread, which is about to use it, would find it plain
    # from there on, take cipher text for the value, or send the value as it is.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, how)


def watch_network(sock: socket.socket) -> None:
    """Set options by which a machine that vanished is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _GONE_AFTER // 2000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_AFTER)


def address_of(target: str) -> tuple[int, Any]:
    """Return the family and the address of ``unix:PATH`` or ``HOST:PORT``."""
    if target.startswith("unix:"):
        return socket.AF_UNIX, target.removeprefix("unix:")
    host, _, port = target.rpartition(":")
    first, *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, _, _, _, address = first
    return family, address


#: What the sending end says first: the value comes, or it is not there.
COMES, REFUSED = b"\1", b"\0"
#: What the receiving end says when it has read everything.
READ = b"\1"
#: Seconds for which a connection waits for the next value.
IDLE = 30.0
#: Seconds for a connection to be made.
_CONNECT_WITHIN = 3.0
#: Connections to one node that are kept for the next value.
_KEPT = 4
#: Seconds after which the daemon is told again how much has come.
_TELL_EVERY = 0.1


class NotThereError(Exception):
    """The other node does not have the value in memory."""


class Given(NamedTuple):
    """A value that the daemon has opened for another node."""

    fd: int
    offset: int
    size: int
    #: Its transfer to this node, if it is still on its way here.
    filling: Filling | None


class Sends:
    """The values that other nodes fetch."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._numbers = itertools.count(1).__next__
        #: The daemon's answers to what is asked for: None if it is not there.
        self._answers: dict[int, queue.SimpleQueue[Given | None]] = {}

    def give(self, number: int, given: Given | None) -> None:
        """Take the daemon's answer to "open"."""
        self._answers.pop(number).put(given)

    def serve(self, sock: socket.socket, hello: bytes) -> None:
        """Serve a connection of another node until it has no more to ask."""
        while hello and self._serve_one(sock, hello):
            sock.settimeout(IDLE)
            try:
                hello = exactly(sock, moving.HELLO.size)
            except TimeoutError:
                return

    def _serve_one(self, sock: socket.socket, hello: bytes) -> bool:
        """Serve one value; return whether the connection can serve another."""
        number, answer = self._numbers(), queue.SimpleQueue[Given | None]()
        self._answers[number] = answer
        self._tell("open", number, hello)
        given = answer.get()
        sock.settimeout(None)
        if given is None:
            sock.sendall(REFUSED)
            return True
        clean = False
        try:
            sock.sendall(COMES)
            moving.send(sock, *given)
            # What was shown is read out of this node's memory until the other end says so, or
            # leaves.
            read = sock.recv(1)
            clean = True
        finally:
            os.close(given.fd)
            self._tell("closed", number, clean)
        return read == READ


@dataclasses.dataclass(eq=False, slots=True)
class _Job:
    """A value that comes from another node."""

    number: int
    fd: int
    size: int
    filling: Filling
    #: Names it there, and where to begin.
    hello: bytes
    #: What it comes over.
    sock: socket.socket | None = None
    stopped: bool = False


class Receives:
    """The transfers to this node."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        #: For other machines; None if there is nobody to trust.
        self.context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        #: Connections to other movers that wait for the next value, by target, and since when.
        self._idle: dict[str, list[tuple[socket.socket, float]]] = {}

    def begin(
        self, number: int, fd: int, target: str, hello: bytes, offset: int, size: int
    ) -> None:
        """Fill memory from an offset to its end; tell the daemon of progress and the end."""
        job = _Job(number, fd, size, Filling(offset), hello)
        with self._lock:
            self._jobs[number] = job
        run = threading.Thread(target=self._run, args=(job, target), daemon=True)
        try:
            run.start()
        except RuntimeError as error:  # the machine has no room for another thread
            self._end(job, str(error))

    def stop(self, number: int) -> None:
        """End a transfer; tell the daemon when its memory is no longer written."""
        with self._lock:
            job = self._jobs.get(number)
            if job is None:
                return
            job.stopped = True
            if job.sock is not None:
                hear_no_more(job.sock)

    def forget(self, number: int) -> None:
        """Forget a transfer whose end the daemon knows: the daemon names it no more."""
        with self._lock:
            self._jobs.pop(number, None)

    def filling(self, number: int) -> Filling | None:
        with self._lock:
            job = self._jobs.get(number)
        return job.filling if job is not None else None

    def _run(self, job: _Job, target: str) -> None:
        reason, refused = "", False
        try:
            self._receive(job, target)
        except Exception as error:  # noqa: BLE001 - the daemon is told
            reason, refused = str(error) or type(error).__name__, isinstance(error, NotThereError)
        self._end(job, reason, refused=refused)

    def _end(self, job: _Job, reason: str, *, refused: bool = False) -> None:
        """Tell the daemon that nothing more is written."""
        job.filling.end()
        os.close(job.fd)
        self._tell("came", job.number, job.filling.offset)
        self._tell("ended", job.number, reason, refused)

    def _receive(self, job: _Job, target: str) -> None:
        begun = job.filling.offset
        kept = self._kept(target)
        if kept is not None:
            try:
                self._receive_over(kept, job, target)
                return
            except (OSError, CutOffError):
                # The other end may have hung up while nothing was asked of it.
                if job.filling.offset != begun or job.stopped:
                    raise
        self._receive_over(self._connect(job, target), job, target)

    def _connect(self, job: _Job, target: str) -> socket.socket:
        family, address = address_of(target)
        sock = socket.socket(family)
        try:
            self._uses(job, sock)
            sock.settimeout(_CONNECT_WITHIN)
            sock.connect(address)
            if family == socket.AF_UNIX:
                return sock
            watch_network(sock)
            if self.context is None:
                raise OSError("this node does not know the authority of its cluster")
            sock = self.context.wrap_socket(
                sock, server_hostname=NODE_NAME, do_handshake_on_connect=False
            )
            self._uses(job, sock)
            sock.do_handshake()
            return sock
        except BaseException:
            self._uses_no_more(job)
            sock.close()
            raise

    def _receive_over(self, sock: socket.socket, job: _Job, target: str) -> None:
        """Receive a value over a connection, which is closed or kept for the next one."""
        told = 0.0

        def came(count: int) -> None:
            nonlocal told
            job.filling.came(count)
            now = time.monotonic()
            if now - told >= _TELL_EVERY:
                told = now
                self._tell("came", job.number, job.filling.offset)

        try:
            self._uses(job, sock)
            sock.settimeout(None)
            sock.sendall(job.hello)
            self._await_value(sock)
            moving.receive(sock, job.fd, job.filling.offset, job.size, came)
            sock.sendall(READ)
        except BaseException:
            self._uses_no_more(job)
            sock.close()
            raise
        self._uses_no_more(job)  # before it is another's
        self._keep(job, target, sock)

    @staticmethod
    def _await_value(sock: socket.socket) -> None:
        said = sock.recv(1)
        if said == REFUSED:
            raise NotThereError("it is not there, or not in memory")
        if said != COMES:
            raise CutOffError("the other end hung up")

    def _uses(self, job: _Job, sock: socket.socket) -> None:
        with self._lock:
            if job.stopped:
                raise CutOffError("nobody waits for it any more")
            job.sock = sock

    def _uses_no_more(self, job: _Job) -> None:
        with self._lock:
            job.sock = None

    def _kept(self, target: str) -> socket.socket | None:
        now = time.monotonic()
        with self._lock:
            for name, kept in list(self._idle.items()):
                for sock, since in list(kept):
                    if now - since > IDLE:
                        kept.remove((sock, since))
                        sock.close()
                if not kept:
                    del self._idle[name]
            of_target = self._idle.get(target)
            return of_target.pop()[0] if of_target else None

    def _keep(self, job: _Job, target: str, sock: socket.socket) -> None:
        with self._lock:
            kept = self._idle.setdefault(target, [])
            # A job that was stopped when all had come reads no more from it.
            if len(kept) < _KEPT and not job.stopped:
                kept.append((sock, time.monotonic()))
                return
        sock.close()
