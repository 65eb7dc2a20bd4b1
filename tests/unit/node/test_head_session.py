"""What a daemon writes to the head at once, and what it does not write at all."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from miniray._proto import common_pb2, head_pb2
from miniray.core import protocol as p
from miniray.node import head_client
from miniray.node.head_client import HeadClient
from miniray.node.head_session import HeadSession

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
        session = HeadSession(nobody, nobody, nobody, nobody)
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


class FakeClient:
    def __init__(self) -> None:
        self.conn = self
        self.got: list[Any] = []
        self.send = self.got.append


def test_a_request_above_the_limit_is_refused_and_never_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_client, "_LARGEST", 100)
    clients: Any = FakeClient()
    clients.clients = {b"process": clients}
    head = HeadClient(b"node", clients)
    head.request(b"process", 7, "kv_put", bytes(101))
    ((kind, number, error, _),) = clients.got
    assert (kind, number) == (p.HEAD_REPLY, 7)
    assert "'kv_put'" in str(pickle.loads(error))
    head.request(b"process", 0, "create_actor", bytes(101))  # a notice, which has no answer
    assert len(clients.got) == 1
