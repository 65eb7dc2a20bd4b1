"""Requests between the processes of one run in local mode: rank 0 answers those of the others.

Each thread of a rank has a connection of its own, on which it waits for one answer after the other;
one more has no requests; its end shows rank 0 that the process has ended. Both ends prove that they
have the run's secret before anything is unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from miniray.security.challenge import answer_blocking, demand_blocking
from miniray.train.base.exceptions import ControllerLostError, WorkerFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds that rank 0 gives the other side of a new connection to prove itself.
PROOF_TIMEOUT = 5.0

_ends: weakref.WeakSet[Connection | socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    # A child that held a connection or a listener open would hide the death of its parent.
    for end in list(_ends):
        end.close()


os.register_at_fork(after_in_child=_close_in_child)


def _use(connected: socket.socket) -> Connection:
    """Return a connection of messages over a socket that has proved itself."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.settimeout(None)
    connection = Connection(connected.detach())
    _ends.add(connection)
    return connection


class LinkServer:
    """Rank 0's end of the connections, with a thread for each.

    Args:
        timeout: Seconds that the other ranks get to connect.
    """

    def __init__(self, listener: socket.socket, secret: bytes, timeout: float) -> None:
        self._listener = listener
        _ends.add(listener)
        self._secret = secret
        self.timeout = timeout
        self._closed = False
        self._lock = threading.Lock()
        #: What ``close`` ends: connections, and answers that are waited for.
        self._open: set[Connection | socket.socket | Future[Any]] = set()
        self._threads: list[threading.Thread] = []

    def serve(self, answer: Callable[..., Future[Any]], lost: Callable[[int], None]) -> None:
        """Answer the other ranks from now on.

        Args:
            answer: Called with a rank, the kind of its request and the arguments.
            lost: Called with a rank whose process has ended.
        """
        self._answer, self._lost = answer, lost
        self._start(self._accept)

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._closed = True
            ends = [self._listener, *self._open]
        for end in ends:  # wakes the threads that wait there
            if isinstance(end, Future):
                end.cancel()
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(end.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads[:1]:  # it starts the others
            thread.join()
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="train-link", daemon=True)
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connected, _ = self._listener.accept()
                self._start(functools.partial(self._serve, connected))

    def _serve(self, connected: socket.socket) -> None:
        # The other end fails the challenge, or is gone, or the run is over.
        with contextlib.suppress(EOFError, OSError, CancelledError):
            with connected, self._entered(connected):
                demand_blocking(connected, self._secret, time.monotonic() + PROOF_TIMEOUT)
                connection = _use(connected)
            with connection, self._entered(connection):
                self._serve_rank(connection, *connection.recv())

    @contextlib.contextmanager
    def _entered(self, end: Connection | socket.socket | Future[Any]) -> Iterator[None]:
        """Let ``close`` end this, as long as the block lasts."""
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("The run has ended.")
            self._open.add(end)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(end)

    def _serve_rank(self, connection: Connection, rank: int, requests: bool) -> None:
        try:
            while True:
                kind, arguments = connection.recv()
                connection.send(self._ask(rank, kind, arguments))
        finally:
            if not requests:
                self._lost(rank)

    def _ask(
        self, rank: int, kind: str, arguments: tuple[Any, ...]
    ) -> tuple[Any, WorkerFailure | None]:
        """Wait for an answer; return it, or why there is none."""
        try:
            answer = self._answer(rank, kind, *arguments)
            with self._entered(answer):
                return answer.result(), None
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - raised at the requester
            return None, WorkerFailure.of(error)


class LinkClient:
    """Another rank's end of its connections with rank 0. Thread-safe."""

    def __init__(self, address: tuple[str, int], secret: bytes, rank: int, timeout: float) -> None:
        """Connect this rank with rank 0, within ``timeout`` seconds."""
        self._address, self._secret, self._rank, self._timeout = address, secret, rank, timeout
        self._own = threading.local()
        self._presence = self._connect(requests=False)

    def ask(self, kind: str, *arguments: Any) -> Future[Any]:
        """Send rank 0 a request, and wait for the answer.

        Raises:
            ControllerLostError: Rank 0 is gone.
        """
        answer: Future[Any] = Future()
        # A signal handler that sends a request meanwhile takes another one.
        connection = vars(self._own).pop("connection", None)
        try:
            if connection is None:
                connection = self._connect(requests=True)
            connection.send((kind, arguments))
            value, failure = connection.recv()
        except (EOFError, OSError) as error:
            raise ControllerLostError(
                "Rank 0, which has the controller of the run, is gone: its process has ended, or "
                "its machine can't be reached."
            ) from error
        self._own.connection = connection  # not after Ctrl-C: a late answer will come on it
        if failure is None:
            answer.set_result(value)
        else:
            answer.set_exception(failure.exception())
        return answer

    def close(self) -> None:
        self._presence.close()

    def _connect(self, *, requests: bool) -> Connection:
        connected = socket.create_connection(self._address, self._timeout)
        try:
            answer_blocking(connected, self._secret, time.monotonic() + self._timeout)
        except BaseException:
            connected.close()
            raise
        connection = _use(connected)
        connection.send((self._rank, requests))
        return connection
