"""The mover: a process beside the daemon that carries large values between nodes.

The daemons agree over gRPC on who copies what from whom; the bytes go from mover to mover, out of
and into shared memory: over a socket of their own or, within a machine, out of the memory that one
shows the other. So no event loop waits behind a gigabyte, and the kernel can prefer calls to it:
movers run at a lower priority. Nothing is decided here.

A connection carries one value after another: its key and the offset to begin at go one way, its
bytes or where they are come back, and one byte more says that all of them were read. The daemon
opens the value when its key has come. The two ends of a connection are in ``mover_ends.py``; here
is what comes before a key, and what the daemon says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import marshal
import os
import resource
import selectors
import signal
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.common.process_state import set_title
from miniray.exceptions import AuthenticationError
from miniray.node.base import control_socket
from miniray.node.transfer.mover_ends import Given, Receives, Sends, watch_network
from miniray.node.transfer.moving import HELLO, CutOffError
from miniray.security.certificates import Credentials, Identity, client_context, server_context
from miniray.security.challenge import require_own_uid
from miniray.security.peer_log import PeerLog

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: Seconds that a connection has to prove itself and to name a value.
HELLO_WITHIN = 10.0
#: Connections that may be about it at the same time.
MOST = 64
#: Seconds to wait before a connection is accepted again when descriptors have run out.
_ACCEPT_AGAIN = 0.1


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
                    if key.data in self._visitors:  # it may just have made room for another one
                        self._hear(key.data)
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

    def _hear(self, visitor: _Visitor) -> None:
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


#: How nice movers are: they get a third of the processor time where another process wants it too,
#: and a process that wakes for a call runs at once.
NICE = 5
_STACK = 512 * 1024


class Mover:
    """Serve a daemon until it is gone."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._sends = Sends(self._tell)
        self._fetches = Receives(self._tell)
        self._door = Door(self._serve)

    def run(self) -> None:
        """Do what the daemon says until it hangs up."""
        handlers: dict[str, Callable[..., object]] = {
            "listen": self._listen,
            "opened": self._opened,
            "refused": lambda _fds, number: self._sends.give(number, None),
            "fetch": self._fetch,
            "stop": lambda _fds, number: self._fetches.stop(number),
            "forget": lambda _fds, number: self._fetches.forget(number),
            "there?": lambda _fds: self._tell("there"),
        }
        while True:
            data, fds = control_socket.receive(self._control)
            if not data:
                self._door.close()
                self._control.close()
                return
            kind, *arguments = marshal.loads(data)
            handlers[kind](fds, *arguments)

    def _tell(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # the daemon is gone, which ends this process
            self._control.send(marshal.dumps(message))

    # --- what the daemon wants -----------------------------------------------------------
    def _opened(self, fds: list[int], number: int, offset: int, size: int, job: int) -> None:
        """Give a value to the node that asks for it; what a job still receives, as it comes."""
        filling = self._fetches.filling(job)
        if fds and (filling is not None or not job):
            self._sends.give(number, Given(fds[0], offset, size, filling))
            return
        control_socket.close_all(fds)
        self._sends.give(number, None)
        self._tell("closed", number, True)

    def _fetch(
        self, fds: list[int], number: int, target: str, hello: bytes, offset: int, size: int
    ) -> None:
        if fds:
            self._fetches.begin(number, fds[0], target, hello, offset, size)
        else:
            self._tell("ended", number, "no descriptors are left", False)

    # --- who knocks ------------------------------------------------------------------------
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
