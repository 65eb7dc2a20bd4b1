"""How the head writes what waits for a daemon."""

from __future__ import annotations

import asyncio

from miniray._proto import head_pb2
from miniray.head.main import SessionOutbox


class Stream:
    """The stream to a daemon."""

    def __init__(self) -> None:
        self.written: list[head_pb2.ToNode] = []

    async def write(self, message: head_pb2.ToNode) -> None:
        self.written.append(message)


def written(*messages: head_pb2.ToNode) -> list[head_pb2.ToNode]:
    async def drain() -> list[head_pb2.ToNode]:
        stream = Stream()
        outbox = SessionOutbox()
        for message in messages:
            outbox.put(message)
        outbox.close()
        await outbox.drain(stream)  # type: ignore[arg-type]
        return stream.written

    return asyncio.run(drain())


def lease(number: int) -> head_pb2.ToNode:
    return head_pb2.ToNode(start_lease=head_pb2.StartLease(granted=bytes([number])))


def test_what_waits_together_goes_in_one_message() -> None:
    [message] = written(lease(1), lease(2))
    assert [part.start_lease.granted[0] for part in message.batch.messages] == [1, 2]


def test_the_welcome_goes_alone_before_what_the_new_node_is_to_do() -> None:
    """The daemon reads it as the answer to its hello, before it takes batches."""
    welcome = head_pb2.ToNode(welcome=head_pb2.Welcome(error="full"))
    first, second = written(welcome, lease(1))
    assert first.welcome.error == "full"
    assert second.start_lease.granted == b"\1"
    first, second = written(welcome, lease(1), lease(2))
    assert first.welcome.error == "full"
    assert len(second.batch.messages) == 2
