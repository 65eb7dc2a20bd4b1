"""The head process: starts the server, says that it is ready, ends when asked."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import signal
from typing import TYPE_CHECKING, Any

from miniray._proto import head_pb2_grpc
from miniray.common.host_port import join_host_port
from miniray.head.cluster import HeadIdentity
from miniray.head.head import Head
from miniray.head.server import HeadServicer, watch_liveness
from miniray.head.storage import Storage
from miniray.security import certificates, channels
from miniray.security.channels import AddressInUseError
from miniray.security.token import JoinToken
from miniray.system.log_file import log_to

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import grpc

    from miniray.head.sqlite_storage import SqliteStorage


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    #: Socket for the daemons of this machine; its folder is 0700.
    unix_path: str
    #: The cluster's secret, from which the keys of its connections are derived.
    secret: bytes = dataclasses.field(repr=False)
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
    #: What other machines are told instead of ``tcp_host``, which may be a wildcard.
    advertised_host: str | None = None
    #: Readable when the process that this head belongs to is gone.
    parent_pidfd: int | None = None


logger = logging.getLogger(__name__)

_NO_FINGERPRINT = bytes(32)
#: Seconds that daemons have to read that the cluster ends.
_STOP_SECONDS = 0.2
#: Objects made since the last collection, and smaller collections before one of the next kind.
_COLLECT_AFTER = (50_000, 20, 100)
#: Seconds until a port that another process has is tried again.
_PORT_AGAIN_AFTER = 0.2


def run_head(options: HeadOptions) -> None:
    """Be the head until a signal, or until the process that it belongs to is gone.

    Never raises for what a user can cause: ``options.ready`` is told.
    """
    log_to(options.session_dir / "logs" / "head.log")
    # A full collection looks at all of the head's state, which is a second at a million objects,
    # and finds nothing: what is taken out of the tables goes by itself.
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    try:
        asyncio.run(_run(options))
    except OSError as error:
        logger.exception("the head could not start")
        options.ready({"error": error.strerror or str(error)})


async def _run(options: HeadOptions) -> None:
    stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    _stop_on_request(options, stop)
    token = JoinToken(_NO_FINGERPRINT, options.secret)
    server = channels.server(token.grpc_secret)
    channels.listen_unix(server, options.unix_path)
    identity = _identity(options)
    address = await _listen_tcp(options, server, identity, token, stop)
    if stop.done():
        return
    storage = _storage(options, lambda text: head.warn_drivers(text))  # noqa: PLW0108 - made next
    head = _head(options, address, storage)
    head_pb2_grpc.add_HeadServicer_to_server(HeadServicer(head), server)  # type: ignore[no-untyped-call]
    await server.start()
    liveness = asyncio.ensure_future(watch_liveness(head))
    fingerprint = identity.fingerprint.hex() if identity is not None else ""
    options.ready({"address": address, "fingerprint": fingerprint})
    logger.info("the head listens at %s", address)
    logger.info("the head stops: %s", await stop)
    liveness.cancel()
    await _stop(head, server)
    if storage is not None:
        await storage.close()


def _stop_on_request(options: HeadOptions, stop: asyncio.Future[str]) -> None:
    """Give ``stop`` the reason when this process is to end."""
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


def _storage(options: HeadOptions, warn: Callable[[str], object]) -> SqliteStorage | None:
    """Return where state is kept; None for an embedded cluster, which ends with its head."""
    if options.tcp_host is None:
        return None
    from miniray.head.sqlite_storage import SqliteStorage

    return SqliteStorage(options.session_dir / "head.db", warn)


def _head(options: HeadOptions, address: str, storage: SqliteStorage | None) -> Head:
    """Make a new head, or one that continues where an earlier one of the cluster ended."""
    loop = asyncio.get_running_loop()
    if storage is None:
        return Head(HeadIdentity(options.cluster_id, 1, address), loop, Storage())
    saved = storage.start(options.cluster_id)
    head = Head(HeadIdentity(saved.cluster_id, saved.epoch, address, saved.started), loop, storage)
    head.restore(saved)
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
        if refusal is not None:  # nothing announces that a port is free
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


async def _stop(head: Head, server: grpc.aio.Server) -> None:
    head.stop("the cluster was stopped")
    await server.stop(_STOP_SECONDS)
