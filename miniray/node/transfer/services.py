"""What a node offers to other nodes over gRPC: the services of ``node.proto``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import grpc

from miniray._proto import node_pb2, node_pb2_grpc
from miniray.node.base.tasks import BROKEN
from miniray.node.transfer.fetch_answers import FetchAnswers
from miniray.security.channels import one_line

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from miniray.node.relay.relay import RelayHub
    from miniray.node.transfer.serving import Serving
    from miniray.node.transfer.transfers import Transfers

logger = logging.getLogger(__name__)

_OBJECTS = "miniray.v1.Objects"


class NodeServicer(node_pb2_grpc.NodeServicer):
    """The Node service."""

    def __init__(self, relay: RelayHub) -> None:
        self._relay = relay

    async def Relay(  # noqa: N802 - gRPC's name
        self,
        incoming: AsyncIterator[node_pb2.RelayBatch],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Another node's stream."""
        await self._relay.serve(incoming, context)


def add_services(
    server: grpc.aio.Server, relay: RelayHub, serving: Serving, transfers: Transfers
) -> None:
    """Let a server answer what other daemons call."""
    node_pb2_grpc.add_NodeServicer_to_server(NodeServicer(relay), server)  # type: ignore[no-untyped-call]

    def asked(request: node_pb2.FetchRequest) -> AsyncGenerator[bytes, None]:
        return serving.serve(
            request.origin,
            request.segment,
            request.offset,
            request.node_id,
            request.tried,
            unreached=request.unreached,
        )

    async def fetch_many(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        try:
            await FetchAnswers(asked).run(requests, context.write)
        except BROKEN as error:
            logger.info("a stream of fetches broke: %s", one_line(error))

    async def push(
        pieces: AsyncIterator[bytes], _context: grpc.aio.ServicerContext[Any, Any]
    ) -> node_pb2.Pushed:
        await transfers.pushes.receive(pieces)
        return node_pb2.Pushed()

    handlers = {
        "FetchMany": grpc.stream_stream_rpc_method_handler(fetch_many),
        "Push": grpc.stream_unary_rpc_method_handler(
            push, response_serializer=node_pb2.Pushed.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_OBJECTS, handlers),))


def fetch_many(
    channel: grpc.aio.Channel, *, waits: bool
) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    """Begin a stream of fetches (``fetch_batches.py``).

    Args:
        channel: To the other node.
        waits: Whether to wait while that is out of reach, or to fail at once.
    """
    call = channel.stream_stream(
        f"/{_OBJECTS}/FetchMany", request_serializer=None, response_deserializer=None
    )
    return call(None, wait_for_ready=waits)


async def push(channel: grpc.aio.Channel, pieces: AsyncIterator[bytes]) -> None:
    """Send another node what it would fetch; waits while it cannot be reached."""
    call = channel.stream_unary(
        f"/{_OBJECTS}/Push",
        request_serializer=None,
        response_deserializer=node_pb2.Pushed.FromString,
    )
    await call(pieces, wait_for_ready=True)
