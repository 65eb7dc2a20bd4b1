"""The mover: a process beside the daemon that carries large values between nodes.

The daemons agree over gRPC on who copies what from whom; the bytes go from mover to mover, out of
and into shared memory: over a socket of their own or, within a machine, out of the memory that one
shows the other. So no event loop waits behind a gigabyte, and the kernel can prefer calls to it:
movers run at a lower priority. Nothing is decided here.

A connection carries one value after another: its ticket and the offset to begin at go one way, its
bytes or where they are come back, and one byte more says that all of them were read. The two ends
of it are in ``mover_ends.py``, what comes before a ticket in ``mover_door.py``;
here is what the daemon says.
"""

from __future__ import annotations

import contextlib
import logging
import marshal
import os
import resource
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.node.base import control_socket
from miniray.node.transfer.mover_door import Door
from miniray.node.transfer.mover_ends import Receives, Sends
from miniray.node.transfer.moving import CutOffError
from miniray.security.certificates import Credentials, Identity
from miniray.security.tls import client_context, server_context

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: How much less the kernel prefers movers to other processes: a third of the processor time where
#: both want it, and whoever wakes for a call runs at once.
NICE = 5
_STACK = 512 * 1024


class Mover:
    """Serve a daemon until it is gone.

    Args:
        control: Of messages as tuples, with descriptors.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._sends = Sends(self._tell)
        self._fetches = Receives(self._tell)
        self._door = Door(self._serve)

    def run(self) -> None:
        """Do what the daemon says until it hangs up."""
        handlers: dict[str, Callable[..., object]] = {
            "listen": self._listen,
            "offer": self._offer,
            "withdraw": lambda _fds, ticket: self._sends.withdraw(ticket),
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
    def _offer(self, fds: list[int], ticket: bytes, size: int, job: int) -> None:
        """Offer a value to the holder of a ticket; what a job still receives, as it comes."""
        filling = self._fetches.filling(job)
        if fds and (filling is not None or not job):
            self._sends.offer(ticket, fds[0], size, filling)
            return
        control_socket.close_all(fds)
        self._tell("released", ticket, True)

    def _fetch(
        self, fds: list[int], number: int, target: str, ticket: bytes, offset: int, size: int
    ) -> None:
        if fds:
            self._fetches.begin(number, fds[0], target, ticket, offset, size)
        else:
            self._tell("ended", number, "no descriptors are left")

    # --- who knocks ------------------------------------------------------------------------
    def _listen(
        self, _fds: list[int], path: str, host: str, known: tuple[bytes, bytes, bytes] | None
    ) -> None:
        """Answer on a Unix socket and, if there is a network, on a port with TLS."""
        port = 0
        try:
            plain = socket.socket(socket.AF_UNIX)
            plain.bind(path)
            plain.listen(socket.SOMAXCONN)
            self._door.listen(plain, None)
            if known is not None:
                certificate, key, authority = known
                credentials = Credentials(Identity(certificate, key), authority)
                self._fetches.context = client_context(credentials)
            if known is not None and host:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                network = socket.create_server((host, 0), family=family)
                port = network.getsockname()[1]
                self._door.listen(network, server_context(credentials))
        except OSError as error:
            self._tell("failed", str(error))
        else:
            self._door.open()
            self._tell("listening", port)

    def _serve(self, sock: socket.socket, hello: bytes) -> None:
        """Serve a connection of another node."""
        try:
            self._sends.serve(sock, hello)
        except (OSError, CutOffError) as error:
            logger.info("a connection of another node ended: %s", error)


def serve(control: socket.socket) -> None:
    """Run the mover of the daemon at the other end."""
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
