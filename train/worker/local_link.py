"""Requests between the processes of one run in local mode: rank 0 answers those of the others.

One connection for each other rank. Both ends prove that they know the run's secret before
anything is unpickled. The end of a process ends its connection, which the other end notices at
once. What is asked, and what follows from a loss, is not decided here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import pickle
import socket
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from miniray.exceptions import AuthenticationError
from miniray.security.challenge import DIGEST_SIZE, NONCE_SIZE, ServerChallenge, answer_blocking
from miniray.train.base.exceptions import ControllerLostError
from miniray.train.base.failures import WorkerFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

#: Seconds that rank 0 gives the other side of a new connection to prove itself.
PROOF_TIMEOUT = 5.0

#: Before each message, which is a pickle: its length.
_LENGTH = struct.Struct("!Q")

#: What is raised when the other end is gone, or is no rank.
_GONE = (EOFError, OSError, AuthenticationError, asyncio.TimeoutError)

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    # A child that held a connection open would hide the death of its parent.
    for connected in list(_sockets):
        if (number := connected.detach()) >= 0:  # close() would wait for files made of it
            os.close(number)


os.register_at_fork(after_in_child=_close_in_child)


def _use(connected: socket.socket) -> socket.socket:
    _sockets.add(connected)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def _framed(message: Any) -> bytes:
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


class LinkServer:
    """Rank 0's end of the connections; from ``serve`` on in the controller's event loop.

    The other ranks get ``timeout`` seconds to connect.
    """

    def __init__(
        self, listener: socket.socket, secret: bytes, ranks: Collection[int], timeout: float
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._timeout = timeout
        self._missing = set(ranks)
        self._complete = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(
        self,
        answer: Callable[[int, str, tuple[Any, ...]], Coroutine[Any, Any, Any]],
        lost: Callable[[int], None],
    ) -> None:
        """Answer the other ranks from now on.

        Args:
            answer: Called with a rank, what it asks for and with which arguments. Those of one
                rank begin in the order sent.
            lost: Called with a rank whose connection has ended.
        """
        self._answer, self._lost = answer, lost
        self._accepting = self._start(self._accept())

    async def wait_connected(self) -> None:
        """Wait until all ranks have connected.

        Raises:
            TimeoutError: Some did not in time.
        """
        try:
            await asyncio.wait_for(self._complete.wait(), self._timeout)
        except asyncio.TimeoutError:
            raise TimeoutError(
                f"Ranks {sorted(self._missing)} did not connect with rank 0 in {self._timeout:g} s."
            ) from None

    async def end(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for all ranks to hang up, then end the connections."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self._listener.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        self._listener.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            while True:
                connected, _ = await loop.sock_accept(self._listener)
                self._start(self._serve_rank(_use(connected)))
        finally:
            self.close()

    async def _serve_rank(self, connected: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connected)
        calls: set[asyncio.Task[None]] = set()
        rank: int | None = None
        try:
            rank = await asyncio.wait_for(self._admit(reader, writer), PROOF_TIMEOUT)
            while True:
                number, kind, arguments = await _read(reader)
                call = asyncio.ensure_future(
                    _reply(writer, number, self._answer(rank, kind, arguments))
                )
                calls.add(call)
                call.add_done_callback(calls.discard)
        except _GONE:
            if rank is not None:
                self._lost(rank)
        finally:
            for call in calls:
                call.cancel()
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """Let the other end prove itself; its rank."""
        challenge = ServerChallenge(self._secret)
        writer.write(challenge.greeting)
        proof, _ = challenge.feed(await reader.readexactly(DIGEST_SIZE + NONCE_SIZE))
        writer.write(proof)
        rank: int = await _read(reader)
        self._missing.discard(rank)
        if not self._missing:
            self._complete.set()
            self._accepting.cancel()
        return rank


async def _read(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


async def _reply(
    writer: asyncio.StreamWriter, number: int, answer: Coroutine[Any, Any, Any]
) -> None:
    value, failure = None, None
    try:
        value = await answer
    except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
        failure = WorkerFailure.of(error)
    writer.write(_framed((number, value, failure)))


class LinkClient:
    """Another rank's end of its connection with rank 0. Thread-safe."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._receive, name="train-link", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls, address: tuple[str, int], secret: bytes, rank: int, timeout: float
    ) -> LinkClient:
        """Connect this rank with rank 0, within so many seconds."""
        deadline = time.monotonic() + timeout
        connected = _use(socket.create_connection(address, timeout))
        try:
            answer_blocking(connected, secret, deadline)
            connected.settimeout(None)
            connected.sendall(_framed(rank))
        except BaseException:
            connected.close()
            raise
        return cls(connected)

    def ask(self, kind: str, *arguments: Any) -> concurrent.futures.Future[Any]:
        """Ask rank 0 for something.

        Raises:
            ControllerLostError: It is gone. The future raises this if it is lost meanwhile.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._sending:
            number = next(self._numbers)
            request = _framed((number, kind, arguments))
            with self._lock:
                if self._closed:
                    raise _lost()
                self._waiting[number] = future
            try:
                self._socket.sendall(request)
            except OSError:
                self._lose()
        return future

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _receive(self) -> None:
        try:
            with contextlib.suppress(EOFError, OSError), self._socket.makefile("rb") as stream:
                while len(header := stream.read(_LENGTH.size)) == _LENGTH.size:
                    (length,) = _LENGTH.unpack(header)
                    data = stream.read(length)
                    if len(data) < length:
                        break  # rank 0 ended while it sent this
                    number, value, failure = pickle.loads(data)
                    with self._lock:
                        future = self._waiting.pop(number)
                    if failure is None:
                        future.set_result(value)
                    else:
                        future.set_exception(failure.exception())
        finally:
            self._lose()

    def _lose(self) -> None:
        """Fail all requests that wait for an answer."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(_lost())


def _lost() -> ControllerLostError:
    return ControllerLostError(
        "Rank 0, which has the controller of the run, is gone: its process has ended, or its "
        "machine can't be reached."
    )
