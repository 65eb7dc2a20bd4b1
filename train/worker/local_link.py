"""Requests between the processes of one run in local mode: rank 0 answers those of the others.

One connection for each other rank. Both ends prove that they know the run's secret before
anything is unpickled. When a process is gone, the other end of its connection hears of it at
once. What is asked, and what follows from a loss, is not decided here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import multiprocessing
import os
import queue
import socket
import struct
import threading
import time
import weakref
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any, TypeAlias

from miniray.train.base.exceptions import ControllerLostError
from miniray.train.base.failures import WorkerFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

#: Seconds that rank 0 gives the other side of a new connection for each part of its proof.
PROOF_TIMEOUT = 5.0

#: What a connection raises when its other end is gone, or when it was closed here.
_GONE = (EOFError, OSError)


#: Numbers of requests with what becomes of them; None at the end.
_Answers: TypeAlias = "queue.SimpleQueue[tuple[int, concurrent.futures.Future[Any]] | None]"


class _Channel:
    """A connection whose other end knows the secret."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._connection = Connection(os.dup(connected.fileno()))
        self._sending = threading.Lock()
        _channels.add(self)

    @classmethod
    def accepted(cls, connected: socket.socket, secret: bytes) -> _Channel:
        """The end of rank 0.

        Raises:
            multiprocessing.AuthenticationError, EOFError, OSError: The other end is no rank.
        """
        steps = (deliver_challenge, answer_challenge)
        return cls._proven(connected, secret, steps, PROOF_TIMEOUT)

    @classmethod
    def connected(cls, address: tuple[str, int], secret: bytes, timeout: float) -> _Channel:
        """The end of another rank; waits at most ``timeout`` seconds for rank 0."""
        connected = socket.create_connection(address, timeout)
        # Rank 0 may be busy with others, and with strangers that say nothing, one at a time.
        return cls._proven(connected, secret, (answer_challenge, deliver_challenge), timeout)

    @classmethod
    def _proven(
        cls,
        connected: socket.socket,
        secret: bytes,
        steps: tuple[Callable[[Connection, bytes], None], ...],
        limit: float,
    ) -> _Channel:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = cls(connected)
        try:
            _limit_reads(connected, limit)
            for step in steps:
                step(channel._connection, secret)
            _limit_reads(connected, 0)
        except BaseException:
            channel.close()
            raise
        return channel

    def send(self, message: Any) -> None:
        """Send a message; from any thread."""
        with self._sending:
            self._connection.send(message)

    def receive(self) -> Any:
        """Wait for the next message; in one thread only."""
        return self._connection.recv()

    def shut_down(self) -> None:
        """End the connection; who waits for a message here or there gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and close its files, when no thread uses them any more."""
        self.shut_down()
        self.forget()

    def forget(self) -> None:
        """Close the files only: in a child of this process, where the connection is not ours."""
        self._socket.close()
        with contextlib.suppress(OSError):
            self._connection.close()


_channels: weakref.WeakSet[_Channel] = weakref.WeakSet()


def _forget_all() -> None:
    # A child that held a connection open would hide the death of its parent.
    for channel in list(_channels):
        channel.forget()


os.register_at_fork(after_in_child=_forget_all)


class LinkServer:
    """Rank 0's end of the connections.

    Args:
        channels: A connection to each other rank.
    """

    def __init__(self, channels: dict[int, _Channel]) -> None:
        self._channels = channels
        self._threads: list[threading.Thread] = []

    @classmethod
    def accept(
        cls, listener: socket.socket, secret: bytes, ranks: Collection[int], timeout: float
    ) -> LinkServer:
        """Wait for all other ranks to connect.

        Args:
            listener: Where they connect; closed by this.
            secret: What they have to know.
            ranks: Their world ranks.
            timeout: Seconds that they get.

        Raises:
            TimeoutError: Some did not come.
        """
        deadline = time.monotonic() + timeout
        channels: dict[int, _Channel] = {}
        with listener:
            while missing := sorted(set(ranks) - channels.keys()):
                try:
                    listener.settimeout(max(0.0, deadline - time.monotonic()))
                    connected, _ = listener.accept()
                except (TimeoutError, BlockingIOError):
                    for channel in channels.values():
                        channel.close()
                    raise TimeoutError(
                        f"Ranks {missing} did not connect with rank 0 in {timeout:g} s."
                    ) from None
                with contextlib.suppress(multiprocessing.AuthenticationError, *_GONE):
                    channel = _Channel.accepted(connected, secret)
                    channels[channel.receive()] = channel
        return cls(channels)

    def serve(
        self,
        answer: Callable[[int, str, tuple[Any, ...]], concurrent.futures.Future[Any]],
        lost: Callable[[int], None],
    ) -> None:
        """Answer the other ranks from now on, in threads.

        Args:
            answer: Called with a rank, what it asks for and with which arguments; gives the answer
                when there is one. Must not block.
            lost: Called with a rank whose connection has ended; it asks for nothing more.
        """
        for rank, channel in self._channels.items():
            arguments = [rank, channel, answer, lost]
            thread = threading.Thread(
                target=_answer_rank, args=arguments, name=f"train-rank-{rank}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def wait_closed(self, timeout: float) -> None:
        """Wait until all ranks have ended their connections, at most so many seconds."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End the connections."""
        for channel in self._channels.values():
            channel.shut_down()
        for thread in self._threads:
            thread.join()
        for channel in self._channels.values():
            channel.forget()


def _answer_rank(
    rank: int,
    channel: _Channel,
    answer: Callable[[int, str, tuple[Any, ...]], concurrent.futures.Future[Any]],
    lost: Callable[[int], None],
) -> None:
    """Answer one rank until its connection ends."""
    # Answers go out in a thread of their own: whoever has one never waits for a slow rank.
    outgoing: _Answers = queue.SimpleQueue()
    writer = threading.Thread(
        target=_send_answers, args=[channel, outgoing], name=f"train-answer-{rank}", daemon=True
    )
    writer.start()
    try:
        while True:
            number, kind, arguments = channel.receive()
            future = answer(rank, kind, arguments)
            future.add_done_callback(functools.partial(_put_answer, outgoing, number))
    except _GONE:
        lost(rank)
    finally:
        outgoing.put(None)
        channel.shut_down()
        writer.join()


def _put_answer(outgoing: _Answers, number: int, future: concurrent.futures.Future[Any]) -> None:
    outgoing.put((number, future))


def _send_answers(channel: _Channel, outgoing: _Answers) -> None:
    with contextlib.suppress(*_GONE):  # the reader notices too, and tells
        while (item := outgoing.get()) is not None:
            number, future = item
            value, failure = None, None
            try:
                value = future.result()
            except BaseException as error:  # noqa: BLE001 - raised by who waits for the answer
                failure = WorkerFailure.of(error)
            channel.send((number, value, failure))


class LinkClient:
    """Another rank's end of its connection with rank 0. Thread-safe.

    Args:
        channel: The connection.
    """

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="train-link", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls, address: tuple[str, int], secret: bytes, rank: int, timeout: float
    ) -> LinkClient:
        """Connect this rank with rank 0, within so many seconds."""
        channel = _Channel.connected(address, secret, timeout)
        channel.send(rank)
        return cls(channel)

    def ask(self, kind: str, *arguments: Any) -> concurrent.futures.Future[Any]:
        """Ask rank 0 for something; the answer comes, or ``ControllerLostError`` if it is gone."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            number = next(self._numbers)
            if self._closed:
                future.set_exception(_lost())
                return future
            self._waiting[number] = future
        try:
            self._channel.send((number, kind, arguments))
        except _GONE:
            self._lose()
        return future

    def close(self) -> None:
        """End the connection."""
        self._channel.shut_down()
        self._thread.join()
        self._channel.forget()

    def _read(self) -> None:
        with contextlib.suppress(*_GONE):
            while True:
                number, value, failure = self._channel.receive()
                with self._lock:
                    future = self._waiting.pop(number)
                if failure is None:
                    future.set_result(value)
                else:
                    future.set_exception(failure.exception())
        self._lose()

    def _lose(self) -> None:
        """Let everybody know who waits for an answer."""
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


def _limit_reads(connected: socket.socket, seconds: float) -> None:
    """Let reads fail after so many seconds; 0 is no limit."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
