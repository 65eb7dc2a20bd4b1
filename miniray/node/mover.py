"""The mover: a process beside the daemon that carries large values between nodes.

The daemons agree over gRPC on who copies what from whom; the bytes go from mover to mover, over a
socket of their own, out of and into shared memory. So no event loop waits behind a gigabyte, and
the kernel can prefer calls to it: movers run at a lower priority. Nothing is decided here.

A connection carries one value after another: its ticket and the offset to begin at go one way, the
bytes come back, and one byte more says that all of them were read.
"""

from __future__ import annotations

import contextlib
import logging
import marshal
import os
import resource
import signal
import socket
import ssl
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.node import control_socket, moving
from miniray.node.moving import CutOffError, Filling
from miniray.security.certificates import NODE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: How much less the kernel prefers movers to other processes: a third of the processor time where
#: both want it, and whoever wakes for a call runs at once.
NICE = 5
#: Seconds for a connection to be made, in which it has to name a value, and the next one.
_CONNECT_WITHIN = 3.0
_HELLO_WITHIN = 10.0
_IDLE = 30.0
#: Connections to one node that are kept for the next value.
_KEPT = 4
#: Seconds after which the daemon is told again how much has come.
_TELL_EVERY = 0.1
#: Milliseconds after which a machine that answers nothing is taken for gone.
_GONE_AFTER = 20_000
#: Seconds to wait before a connection is accepted again when descriptors have run out.
_ACCEPT_AGAIN = 0.1
_STACK = 512 * 1024
#: Bytes that a sender may be ahead of its reader on one machine.
_IN_FLIGHT = 4 << 20
_SO_SNDBUFFORCE = 32
_HELLO = struct.Struct("!16sQ")
_READ = b"\1"


class _Offer:
    """A value that another node may come for, with a ticket."""

    def __init__(self, fd: int, size: int, filling: Filling | None) -> None:
        self.fd = fd
        self.size = size
        self.filling = filling
        #: The connection that it goes over, once the other node has come.
        self.sock: socket.socket | None = None
        self.sent = False


class _Job:
    """A value that comes from another node."""

    def __init__(self, number: int, fd: int, offset: int, size: int) -> None:
        self.number = number
        self.fd = fd
        self.size = size
        self.filling = Filling(offset)
        self.sock: socket.socket | None = None
        self.stopped = False


class Mover:
    """Serves its daemon until that is gone.

    Args:
        control: Of messages as tuples, with descriptors.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._offers: dict[bytes, _Offer] = {}
        self._jobs: dict[int, _Job] = {}
        #: Connections to other movers that wait for the next value, by target, and since when.
        self._idle: dict[str, list[tuple[socket.socket, float]]] = {}
        self._client_context: ssl.SSLContext | None = None
        self._listeners: list[socket.socket] = []
        self._over = False

    def run(self) -> None:
        """Do what the daemon says until it hangs up."""
        handlers: dict[str, Callable[..., object]] = {
            "listen": self._listen,
            "offer": self._offer,
            "withdraw": self._withdraw,
            "fetch": self._fetch,
            "stop": self._stop,
            "forget": self._forget,
        }
        while True:
            data, fds = control_socket.receive(self._control)
            if not data:
                self._over = True
                for listener in self._listeners:
                    listener.shutdown(socket.SHUT_RDWR)
                self._control.close()
                return
            kind, *arguments = marshal.loads(data)
            handlers[kind](fds, *arguments)

    def _tell(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # the daemon is gone, which ends this process
            self._control.send(marshal.dumps(message))

    # --- listening ---------------------------------------------------------------------
    def _listen(
        self, _fds: list[int], path: str, host: str, identity: bytes, authority: bytes
    ) -> None:
        """Answer on a Unix socket and, if there is a network, on a port with TLS."""
        port = 0
        try:
            plain = socket.socket(socket.AF_UNIX)
            plain.bind(path)
            plain.listen(socket.SOMAXCONN)
            self._listeners.append(plain)
            _in_thread(self._accept, plain, None)
            if authority:
                self._client_context = _client_context(authority)
            if identity:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                network = socket.create_server((host, 0), family=family)
                port = network.getsockname()[1]
                self._listeners.append(network)
                _in_thread(self._accept, network, _server_context(identity))
        except OSError as error:
            self._tell("failed", str(error))
        else:
            self._tell("listening", port)

    def _accept(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._over:
                    listener.close()
                    return
                logger.warning("a connection could not be accepted: %s", error)
                time.sleep(_ACCEPT_AGAIN)
                continue
            _in_thread(self._serve, sock, context)

    # --- sending -----------------------------------------------------------------------
    def _offer(self, fds: list[int], ticket: bytes, size: int, job: int) -> None:
        """Let whoever has the ticket read a value; that of a job as it comes."""
        with self._lock:
            filling = self._jobs[job].filling if job in self._jobs else None
            if fds and (filling is not None or not job):
                self._offers[ticket] = _Offer(fds[0], size, filling)
        if ticket in self._offers:
            self._tell("offered", ticket)
            return
        control_socket.close_all(fds)
        self._tell("released", ticket)

    def _withdraw(self, _fds: list[int], ticket: bytes) -> None:
        """End what is offered. The daemon is told when nobody reads that memory any more."""
        with self._lock:
            offer = self._offers.get(ticket)
            if offer is None:
                return
            if offer.sock is not None:
                if not offer.sent:
                    _hang_up(offer.sock)
                if offer.filling is not None:
                    offer.filling.end()
                return
        self._release(ticket, offer)

    def _release(self, ticket: bytes, offer: _Offer) -> None:
        with self._lock:
            if self._offers.pop(ticket, None) is None:
                return
        os.close(offer.fd)
        self._tell("released", ticket)

    def _serve(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        """One connection of another node."""
        try:
            sock.settimeout(_HELLO_WITHIN)
            if context is not None:
                _watch_network(sock)
                sock = context.wrap_socket(sock, server_side=True)
            elif not _same_user(sock):
                return
            else:
                _widen(sock)
            while self._serve_one(sock):
                sock.settimeout(_IDLE)
        except (OSError, CutOffError) as error:
            logger.info("a connection of another node ended: %s", error)
        finally:
            sock.close()

    def _serve_one(self, sock: socket.socket) -> bool:
        """Serve one value; False if there is no more to do."""
        try:
            hello = _exactly(sock, _HELLO.size)
        except TimeoutError:
            return False
        if not hello:
            return False
        ticket, offset = _HELLO.unpack(hello)
        with self._lock:
            offer = self._offers.get(ticket)
            if offer is None or offer.sock is not None or offset > offer.size:
                return False
            offer.sock = sock
        sock.settimeout(None)
        read = b""
        try:
            moving.send(sock, offer.fd, offset, offer.size, offer.filling)
            offer.sent = True
        finally:
            if not offer.sent:
                _hang_up(sock)
            # What was sent may still be in the memory that is offered, until it is read.
            with contextlib.suppress(OSError):
                read = sock.recv(1)
            self._release(ticket, offer)
        return read == _READ

    # --- receiving ---------------------------------------------------------------------
    def _fetch(
        self, fds: list[int], number: int, target: str, ticket: bytes, offset: int, size: int
    ) -> None:
        if not fds:
            self._tell("ended", number, "no descriptors are left")
            return
        job = _Job(number, fds[0], offset, size)
        with self._lock:
            self._jobs[number] = job
        _in_thread(self._run, job, target, ticket)

    def _stop(self, _fds: list[int], number: int) -> None:
        """End a transfer; the daemon is told when its memory is not written any more."""
        with self._lock:
            job = self._jobs.get(number)
            if job is None:
                return
            job.stopped = True
            if job.sock is not None:
                with contextlib.suppress(OSError):
                    job.sock.shutdown(socket.SHUT_RDWR)

    def _forget(self, _fds: list[int], number: int) -> None:
        """The daemon has heard that a transfer ended, and offers it no more as one that comes."""
        with self._lock:
            self._jobs.pop(number, None)

    def _run(self, job: _Job, target: str, ticket: bytes) -> None:
        reason = ""
        try:
            self._receive(job, target, ticket)
        except Exception as error:  # noqa: BLE001 - the daemon is told
            reason = str(error) or type(error).__name__
        with self._lock:
            job.sock = None
        job.filling.end()
        os.close(job.fd)
        self._tell("came", job.number, job.filling.offset)
        self._tell("ended", job.number, reason)

    def _receive(self, job: _Job, target: str, ticket: bytes) -> None:
        hello = _HELLO.pack(ticket, job.filling.offset)
        kept = self._kept(target)
        if kept is not None:
            begun = job.filling.offset
            try:
                self._receive_over(kept, job, hello)
            except (OSError, CutOffError):
                kept.close()
                # The other end may have hung up while nothing was asked of it.
                if job.filling.offset != begun or job.stopped:
                    raise
            else:
                self._keep(target, kept)
                return
        sock = self._connect(job, target)
        try:
            self._receive_over(sock, job, hello)
        except BaseException:
            sock.close()
            raise
        self._keep(target, sock)

    def _connect(self, job: _Job, target: str) -> socket.socket:
        family, address = _address(target)
        sock = socket.socket(family)
        try:
            self._uses(job, sock)
            sock.settimeout(_CONNECT_WITHIN)
            sock.connect(address)
            if family == socket.AF_UNIX:
                return sock
            _watch_network(sock)
            if self._client_context is None:
                raise OSError("this node does not know the authority of its cluster")
            return self._client_context.wrap_socket(sock, server_hostname=NODE_NAME)
        except BaseException:
            sock.close()
            raise

    def _receive_over(self, sock: socket.socket, job: _Job, hello: bytes) -> None:
        self._uses(job, sock)
        sock.settimeout(None)
        told = 0.0

        def came(count: int) -> None:
            nonlocal told
            job.filling.came(count)
            now = time.monotonic()
            if now - told >= _TELL_EVERY:
                told = now
                self._tell("came", job.number, job.filling.offset)

        sock.sendall(hello)
        moving.receive(sock, job.fd, job.filling.offset, job.size, came)
        sock.sendall(_READ)

    def _uses(self, job: _Job, sock: socket.socket) -> None:
        with self._lock:
            if job.stopped:
                raise CutOffError("nobody waits for it any more")
            job.sock = sock

    def _kept(self, target: str) -> socket.socket | None:
        now = time.monotonic()
        with self._lock:
            for name, kept in list(self._idle.items()):
                while kept and now - kept[0][1] > _IDLE:
                    kept.pop(0)[0].close()
                if not kept:
                    del self._idle[name]
            of_target = self._idle.get(target)
            return of_target.pop()[0] if of_target else None

    def _keep(self, target: str, sock: socket.socket) -> None:
        with self._lock:
            kept = self._idle.setdefault(target, [])
            if len(kept) < _KEPT:
                kept.append((sock, time.monotonic()))
                return
        sock.close()


def serve(control: socket.socket) -> None:
    """Be the mover of the daemon at the other end."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the daemon decides when it ends
    _give_way()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    threading.stack_size(_STACK)
    Mover(control).run()


def _give_way() -> None:
    """Let the kernel prefer other processes to this one."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    # Where the kernel shares time between sessions first, the session has to give way too.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICE), encoding="ascii")


def _in_thread(function: Callable[..., object], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes, or none if the other end hung up."""
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data


def _hang_up(sock: socket.socket) -> None:
    """Send no more, and on a plain socket hear yet when the other end has read what was sent."""
    how = socket.SHUT_RDWR if isinstance(sock, ssl.SSLSocket) else socket.SHUT_WR
    with contextlib.suppress(OSError):
        sock.shutdown(how)


def _widen(sock: socket.socket) -> None:
    """Let the sender be further ahead: the two wake each other less often."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _IN_FLIGHT)
    except PermissionError:  # then as much as the machine allows everybody
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _IN_FLIGHT)


def _same_user(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


def _watch_network(sock: socket.socket) -> None:
    """Notice a machine that vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _GONE_AFTER // 2000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_AFTER)


def _address(target: str) -> tuple[int, Any]:
    """The family and the address of ``unix:PATH`` or ``HOST:PORT``."""
    if target.startswith("unix:"):
        return socket.AF_UNIX, target.removeprefix("unix:")
    host, _, port = target.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return found[0][0], found[0][4]


def _server_context(identity: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # OpenSSL reads keys from files only; this one has no name.
    fd = os.memfd_create("miniray-identity", os.MFD_CLOEXEC)
    try:
        os.write(fd, identity)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def _client_context(authority: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority.decode("ascii"))
    return context
