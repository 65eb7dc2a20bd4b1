"""The head behind real sockets: sessions, batches, secrets."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from miniray._proto import common_pb2, head_pb2, head_pb2_grpc
from miniray.head.cluster import HeadIdentity
from miniray.head.head import Head
from miniray.head.main import HeadServicer
from miniray.head.storage import Storage
from miniray.messages import plain
from miniray.security import channels
from miniray.security.token import JoinToken
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

SECRET = b"s" * 32
TOKEN = JoinToken(bytes(32), SECRET)
EOF: Any = grpc.aio.EOF


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="mr-"))
    yield path
    shutil.rmtree(path)


def hello(**facts: Any) -> head_pb2.FromNode:
    return head_pb2.FromNode(
        hello=head_pb2.NodeHello(
            **{
                "node_id": b"12345678",
                "version": VERSION,
                "python": platform.python_version(),
                "address": "m|/s|",
                "resources": plain.dumps({"scalars": {"CPU": 4}}),
                **facts,
            }
        )
    )


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Head]:
    server = channels.server(TOKEN.grpc_secret)
    channels.listen_unix(server, str(folder / "head.sock"))
    loop = asyncio.get_running_loop()
    head = Head(HeadIdentity("test", 1, "here"), loop, Storage())
    head_pb2_grpc.add_HeadServicer_to_server(HeadServicer(head), server)
    await server.start()
    try:
        yield head
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def calling(folder: Path, secret: str = TOKEN.grpc_secret) -> AsyncIterator[Any]:
    channel = channels.channel(f"unix:{folder / 'head.sock'}", secret)
    try:
        yield head_pb2_grpc.HeadStub(channel)
    finally:
        await channel.close()


async def greet(session: Any) -> Any:
    await session.write(hello())
    return (await session.read()).welcome


async def until(condition: Any) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not happen within 10 s")


async def test_a_session_begins_with_a_welcome_and_ends_with_the_stream(folder: Path) -> None:
    async with serving(folder) as head, calling(folder) as stub:
        session = stub.Session()
        welcome = await greet(session)
        assert welcome.error_kind == ""
        assert [node.id for node in head.cluster.nodes] == [b"12345678"]
        session.cancel()
        await until(lambda: not list(head.cluster.nodes))


async def test_a_refused_session_is_closed(folder: Path) -> None:
    async with serving(folder), calling(folder) as stub:
        session = stub.Session()
        await session.write(hello(version="0"))
        assert (await session.read()).welcome.error_kind == "VersionMismatchError"
        assert await session.read() is EOF
        session = stub.Session()
        await session.write(head_pb2.FromNode(heartbeat=head_pb2.Heartbeat()))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await session.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_without_the_secret_nothing_is_answered(folder: Path) -> None:
    async with serving(folder) as head, calling(folder, "guess") as stub:
        session = stub.Session()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await greet(session)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert list(head.cluster.nodes) == []


def test_messages_that_wait_for_a_daemon_are_sent_as_one(folder: Path) -> None:
    count = 20
    requests = head_pb2.FromNodeBatch(
        messages=[
            head_pb2.FromNode(
                request=common_pb2.ClientRequest(
                    process_id=b"12345678", request=number, method="nodes", body=b"\x29\x00"
                )
            )
            for number in range(1, count + 1)
        ]
    )

    async def scenario() -> tuple[int, list[int]]:
        async with serving(folder), calling(folder) as stub:
            session = stub.Session()
            await session.write(hello())
            await session.read()
            await session.write(head_pb2.FromNode(batch=requests))
            answered: list[int] = []
            messages = 0
            while len(answered) < count:
                message = await session.read()
                messages += 1
                batched = message.WhichOneof("kind") == "batch"
                parts = message.batch.messages if batched else [message]
                answered.extend(part.reply.request for part in parts)
            session.cancel()
            return messages, answered

    messages, answered = asyncio.run(scenario())
    assert answered == list(range(1, count + 1))
    assert messages == 1
