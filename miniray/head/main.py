"""The head process: its gRPC service, from its start to its end.

Responsible for connections and for batching messages; their meaning is in ``head.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import signal
from typing import TYPE_CHECKING, Any

import grpc

from miniray._proto import head_pb2, head_pb2_grpc
from miniray.common.config import config
from miniray.common.host_port import join_host_port
from miniray.common.process_state import set_title
from miniray.common.series import COUNTED
from miniray.head.cluster import HeadIdentity
from miniray.head.head import Head
from miniray.head.storage import SqliteStorage, Storage
from miniray.security import certificates, channels
from miniray.security.channels import AddressInUseError, host_of, one_line
from miniray.security.token import JoinToken
from miniray.system.log_file import log_to

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from miniray.head.directories.nodes import ClusterNode

    SessionContext = grpc.aio.ServicerContext[head_pb2.FromNode, head_pb2.ToNode]

logger = logging.getLogger(__name__)

#: What reading an ended stream gives; the type stubs of gRPC lack it.
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
#: Bytes of the messages in one batch; one that is larger goes alone.
_BATCH_BYTES = 4 * 1024 * 1024


class SessionOutbox:
    """Messages for one daemon, written as fast as it reads."""

    def __init__(self) -> None:
        self._waiting: list[head_pb2.ToNode] = []
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, message: head_pb2.ToNode) -> None:
        self._waiting.append(message)
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def drain(self, context: SessionContext) -> None:
        while True:
            if not self._waiting:
                if self._closed:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            waiting, self._waiting = self._waiting, []
            for message in _in_batches(waiting):
                await context.write(message)


def _in_batches(messages: list[head_pb2.ToNode]) -> list[head_pb2.ToNode]:
    """Return the messages in order, in as few as the size of a batch allows."""
    if len(messages) == 1:
        return messages
    if messages[0].HasField("welcome"):  # the daemon reads it by itself, as answer to its hello
        return [messages[0], *_in_batches(messages[1:])]
    batches: list[head_pb2.ToNode] = []
    batch = head_pb2.ToNodeBatch()
    size = 0
    for message in messages:
        length = message.ByteSize()
        if size and size + length > _BATCH_BYTES:
            batches.append(head_pb2.ToNode(batch=batch))
            batch, size = head_pb2.ToNodeBatch(), 0
        batch.messages.append(message)
        size += length
    batches.append(head_pb2.ToNode(batch=batch))
    return batches


class HeadServicer(head_pb2_grpc.HeadServicer):
    def __init__(self, head: Head) -> None:
        self._head = head

    async def Session(  # noqa: N802 - gRPC's name
        self, _incoming: Any, context: SessionContext
    ) -> None:
        first: Any = await context.read()
        if first is _EOF or first.WhichOneof("kind") != "hello":
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "A session begins with the node's hello."
            )
        outbox = SessionOutbox()
        node = self._head.join(first.hello, outbox)
        if node is None:
            outbox.close()
            await outbox.drain(context)
            return
        where = host_of(context.peer())
        logger.info("node %s (%s) joined from %s", node.name, node.hostname, where)
        reader = asyncio.ensure_future(self._read(node, context))
        writer = asyncio.ensure_future(outbox.drain(context))
        reason = "its daemon ended unexpectedly"
        if where != "this machine":
            reason += ", or the network failed"
        try:
            done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            failures = [error for task in done if (error := task.exception()) is not None]
            if failures:
                reason = f"its session broke ({one_line(failures[0])})"
        finally:
            reader.cancel()
            writer.cancel()
            self._head.lose(node, reason)

    async def _read(self, node: ClusterNode, context: SessionContext) -> None:
        on_message = self._head.on_message
        while True:
            message: Any = await context.read()
            if message is _EOF:
                return
            on_message(node, message)


async def watch_liveness(head: Head) -> None:
    """Check for silent nodes, forever."""
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + config().heartbeat_interval
        await asyncio.sleep(config().heartbeat_interval)
        COUNTED.set("head_event_loop_lag_seconds", clock() - due)
        head.check_liveness()


@dataclasses.dataclass(eq=False, repr=False)
class HeadOptions:
    """Options of a head at its start."""

    #: Socket for the daemons of this machine; its folder is 0700.
    unix_path: str
    #: The cluster's secret, from which the keys of its connections are derived.
    secret: bytes
    session_dir: Path
    cluster_id: str
    #: Called once: with ``address`` and ``fingerprint``, or with ``error``.
    ready: Callable[[dict[str, Any]], None]
    #: Where other machines connect; None: an embedded cluster, which has no network.
    tcp_host: str | None = None
    tcp_port: int | None = None
    #: Seconds for which the port is tried again if another process has it: one that follows an
    #: earlier head has to be where that one was.
    port_patience: float = 0.0
    #: Address that other machines use instead of ``tcp_host``, which may be a wildcard.
    advertised_host: str | None = None
    #: Readable when the process that this head belongs to is gone.
    parent_pidfd: int | None = None


_NO_FINGERPRINT = bytes(32)
#: Seconds that daemons have to receive that the cluster ends.
_STOP_SECONDS = 0.2
#: Objects made since the last collection, and smaller collections before one of the next kind.
_COLLECT_AFTER = (50_000, 20, 100)
#: Seconds until a port that another process has is tried again.
_PORT_AGAIN_AFTER = 0.2


def run_head(options: HeadOptions) -> None:
    """Be the head until a signal, or until the process that it belongs to is gone.

    Never raises for what a user can cause: ``options.ready`` receives the error.
    """
    set_title("head")
    log_to(options.session_dir / "logs" / "head.log")
    # A full collection scans all of the head's state, which is a second at a million objects,
    # and frees nothing: reference counts free what is taken out of the tables.
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    gc.enable()  # the daemon that this is forked from imports without
    try:
        asyncio.run(_run(options))
    except Exception as error:
        if not isinstance(error, OSError):
            import sqlite3  # the heads of embedded clusters have no database

            if not isinstance(error, sqlite3.Error):
                raise
        logger.exception("the head could not start")
        options.ready({"error": getattr(error, "strerror", None) or str(error)})


async def _run(options: HeadOptions) -> None:
    stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    _stop_on_request(options, stop)
    token = JoinToken(_NO_FINGERPRINT, options.secret)
    server = channels.server(token.grpc_secret, lambda text: head.refused(text))  # noqa: PLW0108
    channels.listen_unix(server, options.unix_path)
    identity = _identity(options)
    address = await _listen_tcp(options, server, identity, token, stop)
    if stop.done():
        return
    storage = None
    if options.tcp_host is not None:  # else it is an embedded cluster, which ends with its head
        storage = SqliteStorage(
            options.session_dir / "head.db",
            lambda text: head.warn_drivers(text),  # noqa: PLW0108 - it is made next
        )
    head = _head(options, address, storage)
    head_pb2_grpc.add_HeadServicer_to_server(HeadServicer(head), server)  # type: ignore[no-untyped-call]
    await server.start()
    liveness = asyncio.ensure_future(watch_liveness(head))
    fingerprint = identity.fingerprint.hex() if identity is not None else ""
    options.ready({"address": address, "fingerprint": fingerprint})
    logger.info("the head listens at %s", address)
    logger.info("the head stops: %s", await stop)
    liveness.cancel()
    head.stop("the cluster was stopped")
    await server.stop(_STOP_SECONDS)
    if storage is not None:
        await storage.close()


def _stop_on_request(options: HeadOptions, stop: asyncio.Future[str]) -> None:
    """Give ``stop`` the reason when this process has to end."""
    loop = asyncio.get_running_loop()

    def end(reason: str) -> None:
        if not stop.done():
            stop.set_result(reason)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, f"signal {number.name}")
    if options.parent_pidfd is not None:
        loop.add_reader(options.parent_pidfd, _node_ended, loop, options.parent_pidfd, end)


def _node_ended(loop: asyncio.AbstractEventLoop, fd: int, end: Callable[[str], None]) -> None:
    """End the head: the daemon of its node is gone without having ended it."""
    loop.remove_reader(fd)
    logger.warning("the daemon of the head's node ended unexpectedly")
    end("its node is gone")


def _head(options: HeadOptions, address: str, storage: SqliteStorage | None) -> Head:
    """Make a new head, or one that continues where an earlier one of the cluster ended."""
    loop = asyncio.get_running_loop()
    if storage is None:
        return Head(HeadIdentity(options.cluster_id, 1, address), loop, Storage())
    saved = storage.start(options.cluster_id)
    head = Head(HeadIdentity(saved.cluster_id, saved.epoch, address, saved.started), loop, storage)
    head.recovery.restore(saved)
    return head


def _identity(options: HeadOptions) -> certificates.Identity | None:
    if options.tcp_host is None:
        return None
    try:
        return certificates.load_head_identity(options.session_dir)
    except OSError:
        identity = certificates.make_head_identity()
        certificates.save_head_identity(identity, options.session_dir)
        return identity


async def _listen_tcp(
    options: HeadOptions,
    server: grpc.aio.Server,
    identity: certificates.Identity | None,
    token: JoinToken,
    stop: asyncio.Future[str],
) -> str:
    """Listen on the network, if there is one; return the head's address.

    Raises AddressInUseError if another process kept the port for ``port_patience`` seconds.
    """
    if identity is None or options.tcp_host is None:
        return f"unix:{options.unix_path}"
    members = certificates.members_authority(token.members_key)
    host, port = options.tcp_host, options.tcp_port or 0
    clock = asyncio.get_running_loop().time
    deadline = clock() + options.port_patience
    refusal: AddressInUseError | None = None
    while refusal is None or (clock() < deadline and not stop.done()):
        if refusal is not None:  # there is no event for a port that comes free
            await asyncio.wait({stop}, timeout=_PORT_AGAIN_AFTER)
        try:
            bound = channels.listen_tcp(server, host, port, identity, members)
            return join_host_port(options.advertised_host or host, bound)
        except AddressInUseError as error:
            if refusal is None and options.port_patience:
                logger.warning("%s It is tried for %g s.", error, options.port_patience)
            refusal = error
    tried = f" It was tried for {options.port_patience:g} s." if options.port_patience else ""
    raise AddressInUseError(f"{refusal}{tried}")
