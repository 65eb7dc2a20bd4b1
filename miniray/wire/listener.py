"""Unix sockets of this user's folder: listening there, and connecting to them.

The kernel says whose process is at the other end; only this user's are let in.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from typing import TYPE_CHECKING

from miniray.security.challenge import require_own_uid
from miniray.security.errors import AuthenticationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.wire.poller import Poller

logger = logging.getLogger(__name__)

#: Accepting failed for want of something that others may give back; it is tried again later.
_SHORT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ACCEPT_AGAIN = 0.5


class Listener:
    """Accepts connections on a Unix socket of this user's folder."""

    def __init__(
        self,
        path: str,
        poller: Poller,
        on_accept: Callable[[socket.socket], None],
        *,
        backlog: int = 512,
    ) -> None:
        self.path = path
        self._poller = poller
        self._on_accept = on_accept
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._sock.bind(path)
        self._sock.listen(backlog)
        self._closed = False
        self._watch()

    def _watch(self) -> None:
        if not self._closed:
            self._poller.add(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.exception("could not accept a connection on %s", self.path)
                if error.errno in _SHORT_OF:
                    # The caller waits in the backlog meanwhile, and the loop must not spin.
                    self._poller.remove(self._sock.fileno())
                    self._poller.call_later(_ACCEPT_AGAIN, self._watch)
                return
            try:
                require_own_uid(sock)
            except AuthenticationError as error:
                logger.warning("%s", error)
                sock.close()
                continue
            self._on_accept(sock)

    def close(self) -> None:
        """Stop listening and remove the socket. Only in the loop's thread."""
        self._closed = True
        self._poller.remove(self._sock.fileno())
        self._sock.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def abandon(self) -> None:
        """Close the descriptor only: for a forked child."""
        self._sock.close()


def connect(path: str) -> socket.socket:
    """Connect to a Unix socket of this user; OSError if nobody listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
        require_own_uid(sock)
    except (OSError, AuthenticationError):
        sock.close()
        raise
    return sock
