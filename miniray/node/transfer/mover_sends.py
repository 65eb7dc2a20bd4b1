"""The sending end of a mover: values that other nodes may come for, each with a ticket."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from typing import TYPE_CHECKING

from miniray.node.transfer import moving
from miniray.node.transfer.mover_sockets import cut, exactly, hang_up

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from miniray.node.transfer.moving import Filling

#: What the other end says first: the ticket, and the offset to begin at.
HELLO = struct.Struct("!16sQ")
#: What it says when it has read everything.
READ = b"\1"
#: Seconds for which a connection waits for the next value.
IDLE = 30.0
#: Seconds in which the other end has to stop reading after nobody waits for it.
_READ_WITHIN = 5.0


class _Offer:
    """A value that another node may come for."""

    def __init__(self, fd: int, size: int, filling: Filling | None) -> None:
        self.fd = fd
        self.size = size
        #: Its transfer to this node, if it is still on its way here.
        self.filling = filling
        #: The connection that it goes over, once the other node has come.
        self.sock: socket.socket | None = None
        #: Whether nothing more will be written to it.
        self.sent = False
        self.withdrawn = False
        #: Cuts a connection whose other end does not stop.
        self.timer: threading.Timer | None = None
        self.was_cut = False


class Sends:
    """All offers.

    Args:
        tell: Tells the daemon something.
    """

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._offers: dict[bytes, _Offer] = {}

    def offer(self, ticket: bytes, fd: int, size: int, filling: Filling | None) -> None:
        """Offer a value to the holder of a ticket; if it is still arriving here, as it comes."""
        with self._lock:
            self._offers[ticket] = _Offer(fd, size, filling)
        self._tell("offered", ticket)

    def withdraw(self, ticket: bytes) -> None:
        """End an offer; tell the daemon when nobody reads that memory any more."""
        with self._lock:
            offer = self._offers.get(ticket)
            if offer is None:
                return
            if offer.sock is None:
                del self._offers[ticket]
            else:
                self._end(offer, offer.sock)
                return
        self._release(ticket, offer, clean=True)

    @staticmethod
    def _end(offer: _Offer, sock: socket.socket) -> None:
        """End a transfer to the other node. Needs the lock."""
        offer.withdrawn = True
        hang_up(sock, all_sent=offer.sent)
        if offer.filling is not None:
            offer.filling.look()

        def lose_patience() -> None:
            offer.was_cut = True
            cut(sock)

        if offer.timer is None:
            offer.timer = threading.Timer(_READ_WITHIN, lose_patience)
            offer.timer.daemon = True
            try:
                offer.timer.start()
            except RuntimeError:  # the machine has no room for another thread
                lose_patience()

    def _release(self, ticket: bytes, offer: _Offer, *, clean: bool) -> None:
        """Close an offer, and tell the daemon.

        Args:
            ticket: What was offered.
            offer: The same; it is in no table any more.
            clean: Whether nobody reads that memory any more either.
        """
        os.close(offer.fd)
        self._tell("released", ticket, clean)

    def serve(self, sock: socket.socket, hello: bytes) -> None:
        """Serve a connection of another node until it has no more to ask.

        Args:
            sock: The connection.
            hello: What it said first.
        """
        while hello and self._serve_one(sock, hello):
            sock.settimeout(IDLE)
            try:
                hello = exactly(sock, HELLO.size)
            except TimeoutError:
                return

    def _serve_one(self, sock: socket.socket, hello: bytes) -> bool:
        """Serve one value; return whether the connection can serve another."""
        ticket, offset = HELLO.unpack(hello)
        with self._lock:
            offer = self._offers.get(ticket)
            if offer is None or offer.sock is not None or offset > offer.size:
                return False
            offer.sock = sock
        sock.settimeout(None)
        read = b""
        try:
            moving.send(sock, offer.fd, offset, offer.size, offer.filling, lambda: offer.withdrawn)
            offer.sent = True
        finally:
            if not offer.sent:
                with self._lock:
                    self._end(offer, sock)
            # What was shown is read out of the memory that is offered until the other end says so.
            with contextlib.suppress(OSError):
                read = sock.recv(1)
            with self._lock:
                del self._offers[ticket]
                if offer.timer is not None:
                    offer.timer.cancel()
            self._release(ticket, offer, clean=not offer.was_cut)
        return read == READ and not offer.withdrawn
