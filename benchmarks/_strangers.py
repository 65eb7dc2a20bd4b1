"""What somebody without the secret can send to a cluster's ports.

    python _strangers.py KIND HOST:PORT SECONDS CONNECTIONS

Floods use four connections at 400 KB/s in all; what is silent uses as many as are said. Ends after
its time. Only for clusters on loopback.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECTIONS = 4
#: Bytes per second of all of them together.
RATE = 400_000
#: What a connection and a handshake that is refused cost on the wire, for the rate.
_HANDSHAKE = 500
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, 4.1)."""
    return struct.pack("!I", len(body))[1:] + struct.pack("!BBI", kind, flags, stream) + body


_SETTINGS = _frame(4, 0, 0, b"")
_PING = _frame(6, 0, 0, bytes(8))
#: POST, https, /, in HPACK's static table; ends headers and stream.
_HEADERS = b"\x83\x87\x84"


class Strangers:
    """Connections to one port until the time is over."""

    def __init__(self, host: str, port: int, seconds: float, silent: int) -> None:
        self._where = (host, port)
        self._silent = silent
        self._end = time.monotonic() + seconds

    # --- floods ------------------------------------------------------------------------
    def pings(self) -> None:
        """PING frames without end."""
        self._flood(lambda _: _PING * 600)

    def headers(self) -> None:
        """Requests that are never answered: each opens a stream."""
        self._flood(
            lambda first: b"".join(
                _frame(1, 5, 2 * (first + number) + 1, _HEADERS) for number in range(500)
            )
        )

    def hellos(self) -> None:
        """Handshakes of TLS that are hung up on, one after another."""
        hello = self._hello()

        def connect() -> int:
            with self._dial() as sock:
                sock.sendall(hello)
                with contextlib.suppress(TimeoutError, ConnectionError):
                    sock.recv(1 << 16)
            return len(hello)

        self._in_threads(connect)

    def garbage(self) -> None:
        """Bytes that are no TLS."""

        def connect() -> int:
            with self._dial() as sock, contextlib.suppress(TimeoutError, ConnectionError):
                sock.sendall(os.urandom(_HANDSHAKE))
                sock.recv(1)
            return _HANDSHAKE

        self._in_threads(connect)

    def _flood(self, piece: Callable[[int], bytes]) -> None:
        def connect() -> int:
            with self._tls() as sock, contextlib.suppress(OSError):
                sock.sendall(_PREFACE + _SETTINGS)
                number = 0
                while time.monotonic() < self._end:
                    data = piece(number)
                    number += 500
                    sock.sendall(data)
                    self._pace(len(data))
            return _HANDSHAKE

        self._in_threads(connect)

    def _in_threads(self, connect: Callable[[], int]) -> None:
        def run() -> None:
            while time.monotonic() < self._end:
                try:
                    self._pace(connect())
                except OSError:  # noqa: PERF203 - refused, as it should be
                    self._pace(_HANDSHAKE)

        threads = [threading.Thread(target=run) for _ in range(CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _pace(self, count: int) -> None:
        wait = min(count * CONNECTIONS / RATE, self._end - time.monotonic())
        time.sleep(max(0, wait))

    # --- silence -----------------------------------------------------------------------
    def idle(self) -> None:
        """Connections on which nothing is sent."""
        self._hold(self._dial)

    def hung(self) -> None:
        """Handshakes of TLS that stop after the first message."""
        hello = self._hello()

        def connect() -> socket.socket:
            sock = self._dial()
            sock.sendall(hello)
            return sock

        self._hold(connect)

    def tls(self) -> None:
        """TLS, and then nothing."""
        self._hold(self._tls)

    def _hold(self, connect: Callable[[], socket.socket]) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        held: list[socket.socket] = []
        while time.monotonic() < self._end:
            if len(held) < self._silent:
                with contextlib.suppress(OSError):
                    held.append(connect())
                    continue
            time.sleep(0.05)
        for sock in held:
            sock.close()

    # --- connections -------------------------------------------------------------------
    def _dial(self) -> socket.socket:
        return socket.create_connection(self._where, timeout=5)

    def _tls(self) -> ssl.SSLSocket:
        return _context().wrap_socket(self._dial(), server_hostname="miniray-head")

    def _hello(self) -> bytes:
        """The first message of a handshake."""
        outgoing = ssl.MemoryBIO()
        made = _context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="miniray-head")
        with contextlib.suppress(ssl.SSLWantReadError):
            made.do_handshake()
        return outgoing.read()


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


KINDS = ("pings", "headers", "hellos", "garbage", "idle", "hung", "tls")


def main() -> None:
    kind, where, seconds, silent = sys.argv[1:]
    if kind not in KINDS:
        raise SystemExit(f"There is no kind {kind!r}. Kinds: {', '.join(KINDS)}")
    host, _, port = where.rpartition(":")
    os.nice(10)  # a stranger's own machine would do this work
    if host != "127.0.0.1":
        raise SystemExit(f"Only for clusters on loopback, not for {host}.")
    getattr(Strangers(host, int(port), float(seconds), int(silent)), kind)()


if __name__ == "__main__":
    main()
