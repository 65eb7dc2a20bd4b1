"""What a daemon writes to the head at once, and what it does not write at all."""

from __future__ import annotations

import asyncio
import pickle
import types
from typing import Any

import grpc
import pytest

from miniray._proto import common_pb2, head_pb2
from miniray.exceptions import AuthenticationError
from miniray.messages import protocol as p
from miniray.node.base import head_client
from miniray.node.base.head_client import HeadClient, HeadSession

MIB = 1 << 20


def request(size: int) -> head_pb2.FromNode:
    return head_pb2.FromNode(request=common_pb2.ClientRequest(body=bytes(size)))


class Call:
    """Stands in for the stream: keeps what is written."""

    def __init__(self, enough: int) -> None:
        self.written: list[head_pb2.FromNode] = []
        self.done = asyncio.Event()
        self._enough = enough

    async def write(self, message: head_pb2.FromNode) -> None:
        self.written.append(message)
        if sum(map(len, map(bodies, self.written))) >= self._enough:
            self.done.set()


def bodies(message: head_pb2.FromNode) -> list[int]:
    parts = message.batch.messages if message.HasField("batch") else [message]
    return [len(part.request.body) for part in parts]


def written(*sizes: int) -> list[list[int]]:
    """How requests of these sizes, all waiting, are written: those of each message."""

    async def run() -> list[list[int]]:
        nobody: Any = None
        session = HeadSession(nobody)
        call: Any = Call(len(sizes))
        for size in sizes:
            session.send(request(size))
        writer = asyncio.ensure_future(session._write(call))
        await asyncio.wait_for(call.done.wait(), 10)
        writer.cancel()
        return [bodies(message) for message in call.written]

    return asyncio.run(run())


def test_small_requests_that_wait_are_written_together() -> None:
    assert written(1, 2, 3) == [[1, 2, 3]]


@pytest.mark.parametrize("large", [2 * MIB, 40 * MIB])
def test_a_large_request_goes_by_itself_and_in_its_place(large: int) -> None:
    assert written(1, large, 2, large, large) == [[1], [large], [2], [large], [large]]


def test_what_is_written_together_is_bounded() -> None:
    assert max(sum(sizes) for sizes in written(*[MIB // 4] * 50)) < 2 * MIB


class Refusing:
    """Stands in for the head: how each of its calls ends, the last one again and again."""

    def __init__(self, *ends: grpc.StatusCode) -> None:
        self._ends = list(ends)
        self.calls = 0

    def Session(self, *, wait_for_ready: bool) -> Refusing:
        assert wait_for_ready
        self.calls += 1
        return self

    async def write(self, message: head_pb2.FromNode) -> None:
        end = self._ends.pop(0) if len(self._ends) > 1 else self._ends[0]
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(end, nothing, nothing, f"it said {end.name}")


async def ready() -> None:
    """Be connected at once."""


def open_session(head: Refusing, monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    channel: Any = types.SimpleNamespace(channel_ready=ready)
    member: Any = types.SimpleNamespace(hello=head_pb2.NodeHello)
    monkeypatch.setattr(head_client.head_pb2_grpc, "HeadStub", lambda channel: head)
    asyncio.run(HeadSession(channel).open(member, timeout, lambda waiting: []))


def test_a_refusal_that_grpc_forgets_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Refusing(grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAUTHENTICATED)
    with pytest.raises(AuthenticationError, match="it said UNAUTHENTICATED"):
        open_session(head, monkeypatch, 20)
    assert head.calls == 2


def test_a_head_that_answers_nothing_else_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Refusing(grpc.StatusCode.INTERNAL)
    with pytest.raises(ConnectionError, match="cannot be reached: it said INTERNAL"):
        open_session(head, monkeypatch, 1)
    assert head.calls > 1


class FakeClient:
    def __init__(self) -> None:
        self.conn = self
        self.got: list[Any] = []
        self.kinds: dict[int, Any] = {}
        self.send = self.got.append


def test_a_request_above_the_limit_is_refused_and_never_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_client, "_LARGEST", 100)
    clients: Any = FakeClient()
    clients.clients = {b"process": clients}
    head = HeadClient(b"node", clients, clients)
    head.request(b"process", 7, "kv_put", bytes(101))
    ((kind, number, error, _),) = clients.got
    assert (kind, number) == (p.HEAD_REPLY, 7)
    assert "'kv_put'" in str(pickle.loads(error))
    head.request(b"process", 0, "create_actor", bytes(101))  # a notice, which has no answer
    assert len(clients.got) == 1
