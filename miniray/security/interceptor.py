"""The one place where a gRPC server checks the cluster's secret, before any handler."""

from __future__ import annotations

import hmac
import logging
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from miniray.security.peer_log import PeerLog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _ServerInterceptor = grpc.aio.ServerInterceptor  # generic in its type stubs only

logger = logging.getLogger(__name__)

METADATA_KEY = "authorization"
_SCHEME = "Bearer "


def authorization(secret: str) -> tuple[str, str]:
    """The metadata entry that proves a client, from ``JoinToken.grpc_secret``."""
    return METADATA_KEY, _SCHEME + secret


class SecretInterceptor(_ServerInterceptor):
    """Lets an RPC through only if its metadata holds the secret, once.

    Args:
        secret: ``JoinToken.grpc_secret``.
    """

    def __init__(self, secret: str) -> None:
        self._expected = authorization(secret)[1].encode()
        self._log = PeerLog(logger.warning)
        #: Answers every kind of RPC: as a stream handler it runs before a request is read, so
        #: nothing that an unproven client sends is ever parsed.
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

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
    """The address in what gRPC calls a peer: ``ipv4:1.2.3.4:5``, ``ipv6:%5B::1%5D:5``."""
    kind, _, where = peer.partition(":")
    if kind == "unix":
        return "this machine"
    from urllib.parse import unquote

    return unquote(where).rpartition(":")[0].strip("[]")
