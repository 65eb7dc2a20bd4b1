"""Both ends of a connection, for tests."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.security.challenge import answer_blocking
from miniray.wire.connection import Connection, Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.wire.io_loop import IOLoop

KEY = b"k" * 32


class End:
    """A connection that notes what happens to it."""

    def __init__(
        self,
        sock: socket.socket,
        loop: Any,
        *,
        server: bool,
        key: bytes = KEY,
        auth_timeout: float = 10.0,
        on_message: Callable[[Connection, tuple[Any, ...]], None] | None = None,
    ) -> None:
        self.messages: list[tuple[Any, ...]] = []
        self.closed = threading.Event()
        self.closes = 0
        self.threads: set[threading.Thread] = set()
        self._extra = on_message
        endpoint = Endpoint(
            loop,
            key,
            self._on_message,
            self._on_close,
            auth_timeout=auth_timeout,
            takes_fds=True,
        )
        self.conn = Connection(sock, endpoint, server=server)

    def _on_message(self, conn: Connection, message: tuple[Any, ...]) -> None:
        self.threads.add(threading.current_thread())
        self.messages.append(message)
        if self._extra is not None:
            self._extra(conn, message)

    def _on_close(self, _conn: Connection) -> None:
        self.threads.add(threading.current_thread())
        self.closes += 1
        self.closed.set()


def make_pair(loop: IOLoop, **how: Any) -> tuple[End, End]:
    ours, theirs = socket.socketpair()
    return End(ours, loop, server=True, **how), End(theirs, loop, server=False)


def raw_client(loop: IOLoop, **how: Any) -> tuple[End, socket.socket]:
    """A connection, and the other end of it as a plain socket that has passed the challenge."""
    ours, theirs = socket.socketpair()
    end = End(ours, loop, server=True, **how)
    answer_blocking(theirs, KEY, time.monotonic() + 10)
    return end, theirs


def fill(sock: socket.socket) -> None:
    """Make a socket full, so that its next write has to wait."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
