"""Connections to a mover that have not named a value yet, all of them in one thread.

A connection proves in TLS that it belongs to the cluster, on a Unix socket by its user, and says
what it comes for. Until then it costs a descriptor and no more, and only so many and for so long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import selectors
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.node.transfer.mover_ends import HELLO
from miniray.node.transfer.mover_sockets import same_user, watch_network
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
                if not same_user(sock):
                    self._refusals.add("a process of another user", "was refused")
                    sock.close()
                    return
                visitor = _Visitor(sock, "this machine", time.monotonic() + HELLO_WITHIN, True)
            else:
                watch_network(sock)
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                visitor = _Visitor(sock, address[0], time.monotonic() + HELLO_WITHIN, False)
        except OSError:  # it has left already
            sock.close()
            return
        if len(self._visitors) == MOST:
            self._refuse(next(iter(self._visitors)), f"{MOST} others came after it")
        self._visitors[visitor] = None
        self._selector.register(sock, selectors.EVENT_READ, visitor)

    def _hear(self, visitor: _Visitor) -> None:
        """Read from a connection."""
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
