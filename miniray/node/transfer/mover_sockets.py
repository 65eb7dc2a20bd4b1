"""The sockets of movers: Unix sockets within a machine, TLS between machines."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
from typing import Any

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


def hang_up(sock: socket.socket, *, all_sent: bool) -> None:
    """Stop the other end; a plain socket still tells when it has stopped reading.

    Args:
        sock: The connection.
        all_sent: Whether nothing more will be written to it. What was sent through TLS is read.
    """
    if not isinstance(sock, ssl.SSLSocket):
        _shut(sock, socket.SHUT_WR)
    elif not all_sent:
        _shut(sock, socket.SHUT_RDWR)


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


def cut(sock: socket.socket) -> None:
    """Shut a connection down both ways."""
    _shut(sock, socket.SHUT_RDWR)


def _shut(sock: socket.socket, how: int) -> None:
    # Not the method of an SSLSocket: another thread, which is about to use it, would find it plain
    # from there on, take cipher text for the value, or send the value as it is.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, how)


def same_user(sock: socket.socket) -> bool:
    """Return whether the other end of a Unix socket is a process of this user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


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
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return found[0][0], found[0][4]
