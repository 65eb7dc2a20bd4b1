"""The mover: a process beside the daemon that carries large values between nodes.

The daemons agree over gRPC on which node copies what from which; the bytes go from mover to mover,
out of and into shared memory: over a socket of their own or, within a machine, out of the memory
that one shows the other. So no event loop waits behind a gigabyte, and the kernel can prefer calls
to it: movers run at a lower priority. Decisions are the daemons'.

`Sends` gives values to the movers of other nodes; `Receives` fetches values from them. Both work in
threads. Their daemon opens each value that is requested, and gets a message at the end. The
connections, and the bytes on them, are in ``moving.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import marshal
import os
import queue
import resource
import signal
import socket
import ssl
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.common.process_state import set_title
from miniray.node.base import control_socket
from miniray.node.transfer.moving import (
    HELLO,
    CutOffError,
    Door,
    Filling,
    receive,
    send,
    watch_network,
)
from miniray.security.certificates import (
    NODE_NAME,
    Credentials,
    Identity,
    client_context,
    server_context,
)

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: First byte of the sending end: the value comes, or it is not there.
COMES, REFUSED = b"\1", b"\0"
#: Byte of the receiving end when it has read everything.
READ = b"\1"
#: Seconds for which a connection waits for the next value.
IDLE = 30.0
#: Seconds for a connection to be made.
_CONNECT_WITHIN = 3.0
#: Connections to one node that are kept for the next value.
_KEPT = 4
#: Seconds between two reports to the daemon of how much has come.
_TELL_EVERY = 0.1
#: How nice movers are: they get a third of the processor time where another process wants it too,
#: and a process that wakes for a call runs at once.
NICE = 5
_STACK = 512 * 1024


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
    """Stop receiving; a plain socket's other end notices when this end is closed.

    Until then this one may read memory, which the other end keeps as it is.
    """
    if not isinstance(sock, ssl.SSLSocket):
        _shut(sock, socket.SHUT_RD)
        return
    # Closed with a reset: the other end may wait until this one reads more.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    _shut(sock, socket.SHUT_RDWR)


def _shut(sock: socket.socket, how: int) -> None:
    # Not the method of an SSLSocket: another thread, which is about to use it, would find it plain
    # from there on, take cipher text for the value, or send the value as it is.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, how)


def address_of(target: str) -> tuple[int, Any]:
    """Return the family and the address of ``unix:PATH`` or ``HOST:PORT``."""
    if target.startswith("unix:"):
        return socket.AF_UNIX, target.removeprefix("unix:")
    host, _, port = target.rpartition(":")
    first, *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, _, _, _, address = first
    return family, address


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
    """Sends the values that other nodes fetch."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._send = tell
        self._numbers = itertools.count(1).__next__
        #: The daemon's answers to requests for values: None if one is not there.
        self._answers: dict[int, queue.SimpleQueue[Given | None]] = {}

    def give(self, number: int, given: Given | None) -> None:
        """Take the daemon's answer to "open"."""
        self._answers.pop(number).put(given)

    def serve(self, sock: socket.socket, hello: bytes) -> None:
        """Serve a connection of another node until it has no more requests."""
        while hello and self._serve_one(sock, hello):
            sock.settimeout(IDLE)
            try:
                hello = exactly(sock, HELLO.size)
            except TimeoutError:
                return

    def _serve_one(self, sock: socket.socket, hello: bytes) -> bool:
        """Serve one value; return whether the connection can serve another."""
        number, answer = self._numbers(), queue.SimpleQueue[Given | None]()
        self._answers[number] = answer
        self._send("open", number, hello)
        given = answer.get()
        sock.settimeout(None)
        if given is None:
            sock.sendall(REFUSED)
            return True
        clean = False
        try:
            sock.sendall(COMES)
            send(sock, *given)
            # The other end reads what was shown out of this node's memory until it confirms, or
            # leaves.
            read = sock.recv(1)
            clean = True
        finally:
            os.close(given.fd)
            self._send("closed", number, clean)
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
        self._send = tell
        #: For other machines; None in a cluster of one machine.
        self.context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        #: Connections to other movers that wait for the next value, by target, and since when.
        self._idle: dict[str, list[tuple[socket.socket, float]]] = {}

    def begin(
        self, number: int, fd: int, target: str, hello: bytes, offset: int, size: int
    ) -> None:
        """Fill memory from an offset to its end; report progress and the end to the daemon."""
        job = _Job(number, fd, size, Filling(offset), hello)
        with self._lock:
            self._jobs[number] = job
        run = threading.Thread(target=self._run, args=(job, target), daemon=True)
        try:
            run.start()
        except RuntimeError as error:  # the machine cannot run another thread
            self._end(job, str(error))

    def stop(self, number: int) -> None:
        """End a transfer; notify the daemon when its memory is no longer written."""
        with self._lock:
            job = self._jobs.get(number)
            if job is None:
                return
            job.stopped = True
            if job.sock is not None:
                hear_no_more(job.sock)

    def forget(self, number: int) -> None:
        """Forget a transfer whose end the daemon has received: the daemon names it no more."""
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
        except Exception as error:  # noqa: BLE001 - the daemon gets it
            reason, refused = str(error) or type(error).__name__, isinstance(error, NotThereError)
        self._end(job, reason, refused=refused)

    def _end(self, job: _Job, reason: str, *, refused: bool = False) -> None:
        """Notify the daemon that the memory is no longer written."""
        job.filling.end()
        os.close(job.fd)
        self._send("came", job.number, job.filling.offset)
        self._send("ended", job.number, reason, refused)

    def _receive(self, job: _Job, target: str) -> None:
        begun = job.filling.offset
        kept = self._kept(target)
        if kept is not None:
            try:
                self._receive_over(kept, job, target)
                return
            except (OSError, CutOffError):
                # The other end may have hung up between two requests.
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
                self._send("came", job.number, job.filling.offset)

        try:
            self._uses(job, sock)
            sock.settimeout(None)
            sock.sendall(job.hello)
            self._await_value(sock)
            receive(sock, job.fd, job.filling.offset, job.size, came)
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
                raise CutOffError("the transfer was stopped")
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


# --- the process ------------------------------------------------------------------------------
class Mover:
    """Serves a daemon until it is gone."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._sends = Sends(self._send)
        self._fetches = Receives(self._send)
        self._door = Door(self._serve)

    def run(self) -> None:
        """Carry out the daemon's messages until it hangs up."""
        handlers: dict[str, Callable[..., object]] = {
            "listen": self._listen,
            "opened": self._opened,
            "refused": lambda _fds, number: self._sends.give(number, None),
            "fetch": self._fetch,
            "stop": lambda _fds, number: self._fetches.stop(number),
            "forget": lambda _fds, number: self._fetches.forget(number),
            "there?": lambda _fds: self._send("there"),
        }
        while True:
            data, fds = control_socket.receive(self._control)
            if not data:
                self._door.close()
                self._control.close()
                return
            kind, *arguments = marshal.loads(data)
            handlers[kind](fds, *arguments)

    def _send(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # the daemon is gone, which ends this process
            self._control.send(marshal.dumps(message))

    # --- requests of the daemon ---------------------------------------------------
    def _opened(self, fds: list[int], number: int, offset: int, size: int, job: int) -> None:
        """Give a value to the node that requests it; what a job still receives, as it comes."""
        filling = self._fetches.filling(job)
        if fds and (filling is not None or not job):
            self._sends.give(number, Given(fds[0], offset, size, filling))
            return
        control_socket.close_all(fds)
        self._sends.give(number, None)
        self._send("closed", number, True)

    def _fetch(
        self, fds: list[int], number: int, target: str, hello: bytes, offset: int, size: int
    ) -> None:
        if fds:
            self._fetches.begin(number, fds[0], target, hello, offset, size)
        else:
            self._send("ended", number, "no descriptors are left", False)

    # --- connections of other movers ----------------------------------------------
    def _listen(self, fds: list[int], known: tuple[bytes, bytes, bytes] | None) -> None:
        """Answer at a Unix socket and, if there is a network, at a port with TLS."""
        contexts: list[ssl.SSLContext | None] = [None]
        if known is not None:
            certificate, key, authority = known
            credentials = Credentials(Identity(certificate, key), authority)
            self._fetches.context = client_context(credentials)
            contexts.append(server_context(credentials))
        for fd, context in zip(fds, contexts, strict=False):
            self._door.listen(socket.socket(fileno=fd), context)
        self._door.open()

    def _serve(self, sock: socket.socket, hello: bytes) -> None:
        """Serve a connection of another node."""
        try:
            self._sends.serve(sock, hello)
        except (OSError, CutOffError) as error:
            logger.info("a connection of another node ended: %s", error)


def serve(control: socket.socket) -> None:
    """Run the mover of the daemon at the other end."""
    set_title("mover")
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the daemon decides when it ends
    _give_way()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    threading.stack_size(_STACK)
    Mover(control).run()


def _give_way() -> None:
    """Lower the priority of this process."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    # Where the kernel shares time between sessions first, the session has to give way too.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICE), encoding="ascii")
