"""The drivers and workers that are connected to this daemon, and their requests.

Sockets are read in turns of the daemon's asyncio loop; what has to wait is a task of that loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from typing import TYPE_CHECKING, Any, Protocol

from miniray.common.config import config
from miniray.common.names import format_bytes
from miniray.messages import plain
from miniray.messages import protocol as p
from miniray.messages.plain import Arguments
from miniray.messages.value import encode_error
from miniray.wire.connection import Connection, Endpoint
from miniray.wire.poller import READ_SIZE
from miniray.wire.sockets import Listener

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from miniray.wire.poller import Posted

logger = logging.getLogger(__name__)

#: The result of a request, and a descriptor that goes with it or -1.
Answer = tuple[Any, int]


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Client:
    """A connected process."""

    conn: Connection
    process_id: bytes
    #: "driver", "command" (as `miniray status` is), or "worker".
    role: str
    pid: int
    job_id: bytes
    details: dict[str, Any]

    @property
    def is_driver(self) -> bool:
        return self.role == "driver"

    @property
    def is_command(self) -> bool:
        return self.role == "command"

    def __str__(self) -> str:
        return f"process {self.process_id.hex()} (pid {self.pid})"


#: The fields of a process's first message.
_HELLO = Arguments(Client, 1)


class ClientEvents(Protocol):
    """Handlers of the daemon for events of its clients."""

    def expects(self, process_id: bytes, role: str) -> bool:
        """Return whether a process of this id may run."""

    def welcome(self, client: Client) -> dict[str, Any]:
        """Take in a process that has introduced itself; return the facts that it needs."""

    def gone(self, client: Client, refused: str) -> None:
        """Handle the end of a connection: the process ended, or its socket broke.

        ``refused`` says why this daemon has closed the connection; empty if it has not.
        """


class ClientServer:
    """The daemon's socket for processes of this machine."""

    def __init__(self, path: str, key: bytes, events: ClientEvents) -> None:
        poller = AsyncPoller(asyncio.get_running_loop())
        self._events = events
        self._endpoint = Endpoint(
            poller,
            key,
            self._received,
            self._closed,
            limit=config().unread_limit,
            on_overflow=self._refuse,
            loads=plain.loads,
        )
        self.clients: dict[bytes, Client] = {}
        self._unnamed: set[Connection] = set()
        #: Messages: kind → function (client, *fields).
        self.kinds: dict[int, Callable[..., None]] = {
            p.NODE_REQUEST: self._request,
            p.NODE_NOTICE: self._notice,
        }
        #: Requests: method → function (client, *args) that returns (result, fd), or a coroutine
        #: that does if it has to wait; fd is -1 if no descriptor goes with the result.
        self.requests: dict[str, Callable[..., Answer | Awaitable[Answer]]] = {}
        #: Notices: method → function (client, *args).
        self.notices: dict[str, Callable[..., None]] = {}
        self._arguments: dict[Callable[..., Any], Arguments] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = Listener(path, poller, self._accepted)

    def _accepted(self, sock: socket.socket) -> None:
        self._unnamed.add(Connection(sock, self._endpoint, server=True))

    def _received(self, conn: Connection, message: tuple[Any, ...]) -> None:
        client: Client | None = conn.peer
        if client is None:
            self._introduce(conn, message)
            return
        try:
            self._take(client, message)
        except Exception as error:
            logger.exception("a message of kind %.40r of %s was not handled", message[0], client)
            _refuse(client, message, error)

    def _take(self, client: Client, message: tuple[Any, ...]) -> None:
        kind, *fields = message
        handler = self.kinds.get(kind) if isinstance(kind, int) else None
        if handler is None:
            logger.error("%s sent a message of kind %.40r", client, kind)
        else:
            handler(client, *fields)

    def _notice(self, client: Client, method: str, args: tuple[Any, ...]) -> None:
        self._checked(method, self.notices, args)(client, *args)

    def _introduce(self, conn: Connection, message: tuple[Any, ...]) -> None:
        try:
            kind, *hello = message
            if kind != p.NODE_HELLO:
                raise ValueError(f"it is of kind {kind!r:.40}")
            _HELLO.check(tuple(hello))
        except ValueError as error:
            logger.error("the first message of a process is not its name: %.80s", error)  # noqa: TRY400
            conn.close()
            return
        self._unnamed.discard(conn)
        client = Client(conn, *hello)
        if not self._events.expects(client.process_id, client.role):
            conn.close()  # it has ended since
            return
        conn.peer = client
        self.clients[client.process_id] = client
        conn.send((p.NODE_WELCOME, self._events.welcome(client)))

    def _checked(
        self, method: str, handlers: Mapping[str, Callable[..., Any]], args: tuple[Any, ...]
    ) -> Callable[..., Any]:
        """Return the handler of a request or notice; raise ValueError if these do not fit it."""
        handler = handlers.get(method)
        if handler is None:
            raise ValueError(f"A node has no request {method!r}.")
        arguments = self._arguments.get(handler)
        if arguments is None:
            arguments = self._arguments[handler] = Arguments(handler, 1)
        arguments.check(args)
        return handler

    def _request(self, client: Client, number: int, method: str, args: tuple[Any, ...]) -> None:
        handler = self._checked(method, self.requests, args)
        try:
            answer = handler(client, *args)
        except Exception as error:  # noqa: BLE001 - it is the answer
            _answer_error(client, p.NODE_REPLY, number, error)
            return
        if isinstance(answer, tuple):
            self._reply(client, number, *answer)
            return
        run_in(self._tasks, self._answer(client, number, answer))

    async def _answer(self, client: Client, number: int, answer: Awaitable[Answer]) -> None:
        try:
            self._reply(client, number, *await answer)
        except Exception as error:  # noqa: BLE001 - it is the answer
            _answer_error(client, p.NODE_REPLY, number, error)

    @staticmethod
    def _reply(client: Client, number: int, result: Any, fd: int) -> None:
        if fd < 0:
            client.conn.send((p.NODE_REPLY, number, None, result, False))
            return
        try:
            client.conn.send_with_fds((p.NODE_REPLY, number, None, result, True), [os.dup(fd)])
        except OSError as error:  # this process has too many files open
            client.conn.send((p.NODE_REPLY, number, encode_error(error), result, False))

    def _closed(self, conn: Connection, refused: str = "") -> None:
        self._unnamed.discard(conn)
        client: Client | None = conn.peer
        if client is not None and self.clients.get(client.process_id) is client:
            del self.clients[client.process_id]
            self._events.gone(client, refused)

    def _refuse(self, conn: Connection) -> None:
        """Disconnect a process whose unread messages exceed this daemon's bound."""
        waiting, limit = format_bytes(conn.backlog()), format_bytes(config().unread_limit)
        reason = (
            f"its daemon disconnected this process, which left {waiting} unread that were sent to "
            f"it (MINIRAY_UNREAD_LIMIT is {limit})"
        )
        pid = getattr(conn.peer, "pid", 0)
        logger.error("process %d is disconnected: it left %s unread", pid, waiting)
        conn.refuse((p.NODE_REFUSAL, reason))
        self._closed(conn, reason)

    def ended(self, process_id: bytes) -> None:
        """Handle what a process that is gone had sent, and stop sending to it."""
        client = self.clients.get(process_id)
        if client is not None:
            client.conn.read_to_end()
            self.clients.pop(process_id, None)

    def push(self, process_id: bytes, topic: str, body: tuple[Any, ...]) -> bool:
        """Send a push to a process; return False if it is not connected."""
        client = self.clients.get(process_id)
        if client is None:
            return False
        client.conn.send((p.NODE_PUSH, topic, body))
        return True

    def close(self) -> None:
        self._listener.close()
        for client in list(self.clients.values()):
            client.conn.close()
        for conn in list(self._unnamed):
            conn.close()


class AsyncPoller:
    """The poller of ``wire/poller.py`` over an asyncio loop; for the loop's own thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.buffer = memoryview(bytearray(READ_SIZE))

    def add(self, fd: int, on_readable: Callable[[], None]) -> None:
        self._loop.add_reader(fd, on_readable)

    def watch_writable(self, fd: int, callback: Callable[[], None] | None) -> None:
        if callback is None:
            self._loop.remove_writer(fd)
        else:
            self._loop.add_writer(fd, callback)

    def remove(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon(callback)

    def flush_soon(self, connection: Posted) -> None:
        self._loop.call_soon(connection.flush_posted)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Callable[[], None]:
        return self._loop.call_later(delay, callback).cancel


def _refuse(client: Client, message: tuple[Any, ...], error: Exception) -> None:
    """Answer a request that could not be handled, if it has a number."""
    kind, *fields = message
    reply = {p.NODE_REQUEST: p.NODE_REPLY, p.HEAD_REQUEST: p.HEAD_REPLY}.get(kind)
    if reply is not None and fields:
        _answer_error(client, reply, fields[0], error)


def _answer_error(client: Client, kind: int, number: int, error: Exception) -> None:
    rest = (None, False) if kind == p.NODE_REPLY else (None,)
    client.conn.send((kind, number, encode_error(error), *rest))


# --- tasks of the loop ---------------------------------------------------------------------
def run_in(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a coroutine in a task that ``tasks`` holds until it ends: the loop does not hold it."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def first_of(*parts: Coroutine[Any, Any, object]) -> int:
    """Run all until one ends; return its place, or raise its error, and cancel the others."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [place for place, task in enumerate(tasks) if task.done()]
        for place in ended:
            if not tasks[place].cancelled():
                tasks[place].result()  # an error explains more than a cancellation
        if any(task.cancelled() for task in tasks):  # gRPC does that if a part of a call fails
            raise asyncio.InvalidStateError("The stream was cancelled.")
        return ended[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ended(work: asyncio.Future[Any]) -> None:
    """Wait until a task has ended, however it ends; raise a cancellation of the wait after that."""
    cancelled = False
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({work})
            break
        cancelled = True
    if not work.cancelled():
        work.exception()  # its result may not be read
    if cancelled:
        raise asyncio.CancelledError
