"""The connection of a driver or worker to the daemon of its node.

Requests to the daemon and, through it, to the head; pushes from both; messages to
processes of other nodes. The meaning of a push is the business of its subscriber.
"""

from __future__ import annotations

import contextlib
import itertools
import marshal
import os
import threading
from typing import TYPE_CHECKING, Any

from miniray.exceptions import NodeDiedError
from miniray.messages import plain
from miniray.messages import protocol as p
from miniray.messages.value import rebuild_error
from miniray.wire.connection import Connection, Endpoint
from miniray.wire.interrupts import uncut
from miniray.wire.io_loop import Gate
from miniray.wire.sockets import connect, too_large

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.wire.io_loop import IOLoop

    #: Sends a request, a method and its arguments, and gives the answer to the last argument.
    _Asks = Callable[[str, tuple[Any, ...], Callable[[Any, Any, int], None]], None]

#: Seconds that the daemon may take to put a report together, beyond its wait for others.
_PATIENCE = 10.0


class NodeLostError(ConnectionError):
    """The daemon of this node cannot be attached to."""


def _head_body(method: str, args: tuple[Any, ...]) -> bytes:
    """Encode the arguments of a request to the head; one that is too large raises ValueError."""
    body = plain.dumps(args)
    if len(body) > p.MAX_HEAD_REQUEST:
        raise too_large(len(body), p.MAX_HEAD_REQUEST, f"The request {method!r} to the head")
    return body


class _Answer:
    """An answer, for a thread or a coroutine that waits for it; or has given up."""

    def __init__(
        self, arrived: Callable[[], object], undo: Callable[[Any], None] | None = None
    ) -> None:
        self._arrived = arrived
        self._undo = undo
        self._error: Any = None
        self._result: Any = None
        self._fd = -1
        self._lock = threading.RLock()
        self._here = False
        self._abandoned = False

    def came(self, error: Any, result: Any, fd: int) -> None:
        """Keep the answer for ``take``."""
        with self._lock:
            self._error, self._result, self._fd = error, result, fd
            self._here = True
            if error is not None:  # here or there, too many files were open for its descriptor
                self._undo_result()
            if self._abandoned:
                self._discard()
        self._arrived()

    def abandon(self) -> None:
        """Undo the answer, now or when it comes: it will not be taken."""
        with self._lock:
            self._abandoned = True
            if self._here:
                self._discard()

    def take(self) -> tuple[Any, int]:
        """Return the result and a descriptor, or -1; raise the error that came instead."""
        if self._error is not None:
            raise rebuild_error(self._error)
        return self._result, self._fd

    def _discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        if self._error is None:  # else it is undone
            self._undo_result()

    def _undo_result(self) -> None:
        if self._result is not None and self._undo is not None:
            self._undo(self._result)


class NodeLink:
    """Requests, notices and pushes over the daemon's socket."""

    def __init__(
        self,
        path: str,
        loop: IOLoop,
        key: bytes,
        hello: tuple[Any, ...],
        *,
        on_lost: Callable[[], object] | None = None,
    ) -> None:
        """Connect to the daemon, and introduce this process.

        Args:
            path: The daemon's socket.
            loop: The loop that serves it.
            key: The cluster's socket key.
            hello: The fields of NODE_HELLO.
            on_lost: Called when the daemon is gone, even before ``begin``.

        Raises:
            OSError: No process listens at the socket.
        """
        self.loop = loop
        self.key = key
        #: Of the sockets of this node's processes.
        self.folder = os.path.dirname(path)
        self.process_id, role, *_ = hello
        self._is_driver = role == "driver"
        self._numbers = itertools.count(1).__next__
        self._answers: dict[int, Callable[[Any, Any, int], None]] = {}
        #: As given to ``begin``, and what came before that; used in the loop's turns only.
        self._on_push: Callable[[str, tuple[Any, ...]], None]
        self._on_relayed: Callable[[bytes, bytes, list[bytes]], None]
        self._when_lost: list[Callable[[], object]] = [] if on_lost is None else [on_lost]
        self._early: list[tuple[Any, ...]] | None = []
        #: The daemon is gone.
        self.lost = False
        #: Why the daemon ends.
        self._reason = "its daemon ended unexpectedly"
        #: Whether this process ends with its node, whose end was requested.
        self.ends_as_asked = False
        self._welcome: dict[str, Any] | None = None
        self._welcomed = threading.Event()
        endpoint = Endpoint(loop, key, self._on_message, self._on_close, takes_fds=True)
        self._conn = Connection(connect(path), endpoint, server=False)
        self._conn.send((p.NODE_HELLO, *hello))

    def wait_welcome(self, timeout: float) -> dict[str, Any]:
        """Wait for the daemon's facts about the cluster and this process."""
        if not self._welcomed.wait(timeout) or self._welcome is None:
            raise NodeLostError(
                f"The node daemon of this machine did not answer within {timeout:g} s: it stands "
                f"still. `miniray stop` ends it, with all that it has started."
                if not self.lost
                else "The node daemon refused or closed the connection."
            )
        return self._welcome

    def node_stops(self, reason: str, asked: bool) -> None:
        """Record why the daemon is about to end, and whether that was requested."""
        self._reason = reason
        self.ends_as_asked = asked and not self._is_driver

    def end(self) -> NodeDiedError:
        """Return the error of all that needs the daemon once it is gone."""
        node = self._welcome["node_id"].hex() if self._welcome else "of this process"
        hint = ". The driver can go on with miniray.shutdown() and init()"
        return NodeDiedError(node, self._reason + hint * self._is_driver)

    # --- requests ----------------------------------------------------------------
    def node_request_async(
        self, method: str, args: tuple[Any, ...], answer: Callable[[Any, Any, int], None]
    ) -> None:
        """Send the daemon a request; ``answer(error, result, fd)`` runs in the I/O thread."""
        self._ask(answer, p.NODE_REQUEST, method, args)

    def head_request_async(
        self, method: str, args: tuple[Any, ...], answer: Callable[[Any, Any, int], None]
    ) -> None:
        """Send the head a request; ``answer(error, result, -1)`` runs in the I/O thread."""
        self._ask(answer, p.HEAD_REQUEST, method, _head_body(method, args))

    @uncut  # half a message on the socket would end the connection
    def _ask(
        self, answer: Callable[[Any, Any, int], None], kind: int, method: str, body: object
    ) -> None:
        number = self._numbers()
        self._answers[number] = answer
        try:
            self._conn.send((kind, number, method, body))
        except ValueError:  # it is too large: there will be no answer
            self._answers.pop(number, None)
            raise
        if self.lost:
            self._fail(number)

    def node_request(
        self,
        method: str,
        args: tuple[Any, ...],
        timeout: float | None = None,
        undo: Callable[[Any], None] | None = None,
    ) -> tuple[Any, int]:
        """Send the daemon a request and wait: (result, descriptor or -1).

        Args:
            method: The request's name.
            args: Its arguments.
            timeout: Seconds, None for no limit.
            undo: Called with the result if the wait was given up (Ctrl-C) before it came.
        """
        return self._wait(self.node_request_async, method, args, timeout, undo)

    async def node_request_later(
        self,
        method: str,
        args: tuple[Any, ...],
        undo: Callable[[Any], None] | None = None,
    ) -> tuple[Any, int]:
        """Do as ``node_request`` without blocking the event loop; it can be cancelled.

        ``undo`` is called with the result if it is not taken.
        """
        return await self._later(self.node_request_async, method, args, undo)

    async def head_request_later(self, method: str, *args: Any) -> Any:
        """Do as ``head_request`` without blocking the event loop; it can be cancelled."""
        return (await self._later(self.head_request_async, method, args))[0]

    async def _later(
        self,
        ask: _Asks,
        method: str,
        args: tuple[Any, ...],
        undo: Callable[[Any], None] | None = None,
    ) -> tuple[Any, int]:
        import asyncio

        loop = asyncio.get_running_loop()
        here = asyncio.Event()

        def arrived() -> None:
            try:
                loop.call_soon_threadsafe(here.set)
            except RuntimeError:  # the event loop was closed meanwhile
                answer.abandon()

        answer = _Answer(arrived, undo)
        ask(method, args, answer.came)
        try:
            await here.wait()
        except asyncio.CancelledError:
            answer.abandon()
            raise
        return answer.take()

    def head_request(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        return self._wait(self.head_request_async, method, args, timeout)[0]

    def _wait(
        self,
        ask: _Asks,
        method: str,
        args: tuple[Any, ...],
        timeout: float | None,
        undo: Callable[[Any], None] | None = None,
    ) -> tuple[Any, int]:
        gate = Gate(self.loop)
        answer = _Answer(gate.arrived, undo)
        try:
            ask(method, args, answer.came)
            if not gate.wait(timeout):
                raise TimeoutError(f"No answer to {method!r} within {timeout} s.")
        except BaseException:
            answer.abandon()
            raise
        return answer.take()

    def ask_nodes(
        self, what: str, arguments: tuple[Any, ...], seconds: float, nodes: Any = None
    ) -> list[tuple[bytes, Any, str]]:
        """Send nodes a question that their ``Questions.answers`` has (node/relay/questions.py).

        Args:
            what: The name of the question.
            arguments: Of its handler.
            seconds: That their processes have to answer.
            nodes: Ids of the nodes; None: all.

        Returns:
            Of each its id, the answer, and why there is none (empty if there is one).
        """
        question = (what, arguments, float(seconds), nodes)
        told, _ = self.node_request("ask_nodes", question, seconds + _PATIENCE)
        return [tuple(each) for each in told]

    # --- notices -----------------------------------------------------------------
    @uncut
    def node_notice(self, method: str, *args: Any) -> None:
        """Send the daemon a message that needs no answer."""
        self._conn.send((p.NODE_NOTICE, method, args))

    @uncut
    def head_notice(self, method: str, *args: Any) -> None:
        """Send the head a message that needs no answer; ValueError if it is too large."""
        self._conn.send((p.HEAD_NOTICE, method, _head_body(method, args)))

    def relay(self, node_id: bytes, process_id: bytes, messages: list[bytes]) -> None:
        """Send messages to a process of another node; ``RelaySender`` makes the batches."""
        self._conn.send((p.NODE_RELAY, node_id, process_id, messages))

    # --- what the daemon sends ---------------------------------------------------
    def begin(
        self,
        on_push: Callable[[str, tuple[Any, ...]], None],
        on_relayed: Callable[[bytes, bytes, list[bytes]], None],
        on_lost: Callable[[], object],
    ) -> None:
        """Pass messages on, beginning with the ones that have come already. In the loop's turn.

        Args:
            on_push: Called with topic and body of a push.
            on_relayed: Called with what a process of another node has sent: its node and id, and
                the messages.
            on_lost: Called when the daemon is gone.
        """
        self._on_push, self._on_relayed = on_push, on_relayed
        self._when_lost.insert(0, on_lost)
        early, self._early = self._early or [], None
        with contextlib.ExitStack() as all_of_them:  # whatever one raises
            if self.lost:
                all_of_them.callback(on_lost)
            for message in reversed(early):
                all_of_them.callback(self._on_message, self._conn, message)

    def _on_message(self, conn: Connection, message: tuple[Any, ...]) -> None:
        kind, *fields = message
        if self._early is not None and kind in (p.NODE_PUSH, p.NODE_RELAYED):
            self._early.append(message)
        elif kind == p.NODE_RELAYED:
            self._on_relayed(*fields)
        elif kind == p.NODE_REPLY:
            number, error, result, has_fd = fields
            answer = self._answers.pop(number, None)
            try:
                fd = conn.take_fd() if has_fd else -1
            except OSError as too_many_open:
                error, fd = too_many_open, -1
            if answer is not None:
                answer(error, result, fd)
            elif fd >= 0:
                os.close(fd)
        elif kind == p.HEAD_REPLY:
            number, error, body = fields
            answer = self._answers.pop(number, None)
            if answer is not None:
                answer(error, marshal.loads(body) if error is None else None, -1)
        elif kind == p.NODE_PUSH:
            self._on_push(*fields)
        elif kind == p.NODE_REFUSAL:
            (self._reason,) = fields
        elif kind == p.NODE_WELCOME:
            (self._welcome,) = fields
            self._welcomed.set()

    def _fail(self, number: int) -> None:
        answer = self._answers.pop(number, None)
        if answer is not None:
            answer(self.end(), None, -1)

    def _on_close(self, conn: Connection) -> None:
        self.lost = True
        self._welcomed.set()
        for number in list(self._answers):
            self._fail(number)
        for handle in self._when_lost:
            handle()

    # --- ending ------------------------------------------------------------------
    def close(self, flush: float = 1.0) -> None:
        """Write what waits, then close."""
        self._conn.flush_blocking(flush)
        self._conn.close()

    def flush(self, timeout: float = 1.0) -> bool:
        """Wait until everything sent is written to the socket."""
        return self._conn.flush_blocking(timeout)

    def abandon(self) -> None:
        self._conn.abandon()
