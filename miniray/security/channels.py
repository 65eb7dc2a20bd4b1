"""gRPC servers and channels of a cluster: authentication, and limits.

Only the head and the node daemons load this. What the RPCs mean is their business.
"""

from __future__ import annotations

import errno
import hmac
import logging
import socket
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from miniray.common.config import config
from miniray.common.host_port import join_host_port
from miniray.security.certificates import HEAD_NAME, NODE_NAME
from miniray.security.peer_log import Arrivals, PeerLog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from miniray.security.certificates import Credentials, Identity

    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _ServerInterceptor = grpc.aio.ServerInterceptor  # generic in its type stubs only

logger = logging.getLogger(__name__)

#: The entry of an RPC's metadata that proves the client, and how its value begins.
METADATA_KEY = "authorization"
_SCHEME = "Bearer "

#: Bytes of a message of gRPC: more than a message between processes may take (wire/sockets.py).
MAX_MESSAGE_SIZE = 3 << 29

_MESSAGE_SIZE: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_SIZE),
    ("grpc.max_receive_message_length", MAX_MESSAGE_SIZE),
]
#: A peer whose machine vanished is noticed after time + timeout, with or without calls.
_KEEPALIVE: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
#: Large values move in large pieces.
_BULK: list[tuple[str, int]] = [
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.http2.lookahead_bytes", 1 << 24),
    ("grpc.http2.write_buffer_size", 1 << 24),
]
_SERVER_OPTIONS: list[tuple[str, int]] = [
    *_MESSAGE_SIZE,
    *_KEEPALIVE,
    *_BULK,
    # Accept the clients' pings, which come more often than a server tolerates by default.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two servers that share a port would take each other's clients in turn.
    ("grpc.so_reuseport", 0),
]
_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_MESSAGE_SIZE,
    *_KEEPALIVE,
    *_BULK,
    # A cluster's traffic never belongs to a web proxy of the environment.
    ("grpc.enable_http_proxy", 0),
    # Each channel has a connection of its own; else objects would delay calls and heartbeats.
    ("grpc.use_local_subchannel_pool", 1),
    # A peer that comes back is found again within a second or two.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class AddressInUseError(OSError):
    """A server cannot listen because another process has the port; the text names it."""


def one_line(error: BaseException) -> str:
    """Shorten an error to one line for the log: gRPC's own text has many."""
    if isinstance(error, grpc.aio.AioRpcError):
        return " ".join(f"{error.code().name}: {error.details()}".split())
    return " ".join(f"{type(error).__name__}: {error}".split())


def server(secret: str, on_refused: Callable[[str], object] | None = None) -> grpc.aio.Server:
    """Make a server that answers only clients with the secret. Listen, then start it.

    Args:
        secret: ``JoinToken.grpc_secret``.
        on_refused: Called, seldom, with a sentence on who does not have it.
    """
    within = ("grpc.server_handshake_timeout_ms", int(1000 * config().auth_timeout))
    options = [*_SERVER_OPTIONS, within]
    return grpc.aio.server(interceptors=[SecretInterceptor(secret, on_refused)], options=options)


def listen_unix(server: grpc.aio.Server, path: str) -> None:
    """Add a Unix socket to a server. Its folder must be 0700.

    Raises:
        OSError: The socket cannot be made there.
    """
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise OSError(f"Cannot listen on the socket {path}: {error}") from None


def listen_tcp(
    server: grpc.aio.Server, host: str, port: int, identity: Identity, members: bytes
) -> int:
    """Add a TLS port to a server; return its number.

    Strangers are refused in the handshake of TLS: not one byte of theirs is taken for HTTP/2.

    Args:
        server: A server that is not started yet.
        host: The address to bind.
        port: The port, or 0 for a free one.
        identity: The certificate and key to show.
        members: Certificate of the authority that signed what clients show, PEM.

    Raises:
        AddressInUseError: Another process has the port; the text names host and port.
        OSError: The host is no address of this machine, or the port needs privileges.
    """
    # gRPC reports any failure as the same text; the kernel says which one it is.
    _try_bind(host, port)
    shown = grpc.ssl_server_certificate_configuration(
        [(identity.key, identity.certificate)], members
    )
    arrivals = Arrivals(logger.info)
    credentials = grpc.dynamic_ssl_server_credentials(
        shown,
        arrivals,  # type: ignore[arg-type]  # the stubs lack its None: show the same as before
        require_client_authentication=True,
    )
    try:
        arrivals.port = int(server.add_secure_port(join_host_port(host, port), credentials))
    except RuntimeError:
        # The port was taken between the trial and now.
        raise _in_use(host, port) from None
    return arrivals.port


def channel(
    address: str,
    secret: str,
    credentials: Credentials | None = None,
    head: bytes | None = None,
) -> grpc.aio.Channel:
    """Make a channel that proves itself in every RPC. It connects on first use.

    The secret is sent only to a server that shows the certificate expected here.

    Args:
        address: ``unix:<path>``, or ``HOST:PORT``, which needs ``credentials``.
        secret: ``JoinToken.grpc_secret``.
        credentials: What this process shows. A server with a certificate of their authority is
            taken for a node.
        head: The pinned certificate of the head, PEM, if the server is the head.

    Raises:
        ValueError: A TCP address without credentials.
    """
    if address.startswith("unix:"):
        inner = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        return _ProvenChannel(inner, secret)
    if credentials is None:
        raise ValueError(f"A channel to {address} needs credentials of the cluster, to check it.")
    identity = credentials.identity
    trusted, name = (credentials.authority, NODE_NAME) if head is None else (head, HEAD_NAME)
    tls = grpc.ssl_channel_credentials(trusted, identity.key, identity.certificate)
    options = [*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name)]
    return _ProvenChannel(grpc.aio.secure_channel(address, tls, options=options), secret)


def _try_bind(host: str, port: int) -> None:
    """Raise the right OSError if this process cannot listen there."""
    try:
        candidates = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror:
        raise OSError(f"The host {host!r} is unknown.") from None
    family, kind, protocol, _, address = candidates[0]
    with socket.socket(family, kind, protocol) as trial:
        # As gRPC does it: connections of an ended server do not hold the port.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(address)
            trial.listen(1)
        except OSError as error:
            raise _bind_error(host, port, error) from None


def _bind_error(host: str, port: int, error: OSError) -> OSError:
    where = join_host_port(host, port)
    if error.errno == errno.EADDRINUSE:
        return _in_use(host, port)
    if error.errno == errno.EADDRNOTAVAIL:
        return OSError(
            error.errno, f"Cannot listen on {where}: {host} is no address of this machine."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return OSError(error.errno, f"Cannot listen on {where}: this user may not use that port.")
    return OSError(error.errno, f"Cannot listen on {where}: {error.strerror}.")


def _in_use(host: str, port: int) -> AddressInUseError:
    return AddressInUseError(
        f"Cannot listen on {join_host_port(host, port)}: another process uses this port. "
        "Choose another one, or 0 for any free one."
    )


class _ProvenChannel(grpc.aio.Channel):
    """A channel that adds the secret to the metadata of every RPC.

    gRPC's own ways are an interceptor, which puts a queue into every stream, and call
    credentials, which cost a thread switch (150 µs) per RPC.
    """

    def __init__(self, inner: grpc.aio.Channel, secret: str) -> None:
        self._inner = inner
        self._proof = authorization(secret)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._proven(self._inner.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._proven(self._inner.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._proven(self._inner.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._proven(self._inner.stream_stream(*args, **kwargs))

    def _proven(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            *args: Any, metadata: Sequence[tuple[str, str | bytes]] = (), **kwargs: Any
        ) -> Any:
            return start(*args, metadata=(*metadata, self._proof), **kwargs)

        return call

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> _ProvenChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def authorization(secret: str) -> tuple[str, str]:
    """Return the metadata entry that proves a client, from ``JoinToken.grpc_secret``."""
    return METADATA_KEY, _SCHEME + secret


class SecretInterceptor(_ServerInterceptor):
    """Lets an RPC through only if its metadata holds the secret, once.

    Args:
        secret: ``JoinToken.grpc_secret``.
        on_refused: Called with the log line of each refusal.
    """

    def __init__(self, secret: str, on_refused: Callable[[str], object] | None = None) -> None:
        _, expected = authorization(secret)
        self._expected = expected.encode()
        self._on_refused = on_refused
        self._log = PeerLog(self._tell)
        #: Answers every kind of RPC: as a stream handler it runs before a request is read, so the
        #: data of an unproven client are never parsed.
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    def _tell(self, text: str) -> None:
        logger.warning("%s", text)
        if self._on_refused is not None:
            self._on_refused(text)

    async def _refuse(self, _requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._log.add(host_of(context.peer()), "was refused: it does not have the cluster's secret")
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "The join token's secret is missing or is not this cluster's.",
        )

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the method's handler, or one that refuses."""
        given = [
            value
            for key, value in handler_call_details.invocation_metadata or ()
            if key == METADATA_KEY
        ]
        if len(given) == 1 and hmac.compare_digest(_as_bytes(given[0]), self._expected):
            return await continuation(handler_call_details)
        return self._refusal


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def host_of(peer: str) -> str:
    """Return the address in gRPC's name of a peer: ``ipv4:1.2.3.4:5``, ``ipv6:%5B::1%5D:5``."""
    kind, _, where = peer.partition(":")
    if kind == "unix":
        return "this machine"
    from urllib.parse import unquote

    return unquote(where).rpartition(":")[0].strip("[]")
