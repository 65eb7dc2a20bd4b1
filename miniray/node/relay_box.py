"""The two ends of the way between a pair of daemons: numbered, so that nothing is lost or doubled.

A stream may break with messages on it. The sender keeps what the receiver has not
acknowledged and sends it again over the next stream; the receiver drops what it has
had. Bookkeeping only: streams are ``relay.py``'s business.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
from typing import TYPE_CHECKING

from miniray._proto import node_pb2
from miniray.node.relayed import Relayed, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

#: Bytes of bodies in one gRPC message.
_BATCH_BYTES = 1 << 20


class Outbox:
    """What waits for one other node, and what that node may not have received."""

    def __init__(self) -> None:
        #: Tells this numbering from others, as after the node was given up and came back.
        self.id = int.from_bytes(os.urandom(8), "big") | 1
        self._waiting: collections.deque[Relayed] = collections.deque()
        self._sent: collections.deque[Relayed] = collections.deque()
        #: Number of the oldest message that is not acknowledged.
        self._oldest = 1
        self._filled = asyncio.Event()
        #: Counts the streams that it was written to.
        self._stream = 0

    def put(self, message: Relayed) -> None:
        """Queue a message."""
        self._waiting.append(message)
        self._filled.set()

    def acknowledged(self, number: int) -> None:
        """The other node has received everything up to this number."""
        while self._sent and self._oldest <= number:
            self._sent.popleft()
            self._oldest += 1

    def rewind(self) -> None:
        """The stream broke: what was not acknowledged is to be sent again."""
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()

    def give_up(self) -> None:
        """Drop everything; an empty message follows, whose number tells the receiver of it."""
        self._oldest += len(self._sent) + len(self._waiting)
        self._sent.clear()
        self._waiting.clear()
        self.put(Relayed())

    def take(self) -> node_pb2.RelayBatch:
        """As much of what waits as goes into one message."""
        first = self._oldest + len(self._sent)
        batch: list[Relayed] = []
        size = 0
        while self._waiting and size < _BATCH_BYTES:
            message = self._waiting.popleft()
            size += sum(map(len, message.bodies)) + 32
            batch.append(message)
        self._sent.extend(batch)
        return node_pb2.RelayBatch(messages=pack(batch), first=first, outbox=self.id)

    async def drain_to(self, write: Callable[[node_pb2.RelayBatch], Awaitable[None]]) -> None:
        """Write batches until another stream takes over; each takes all that waits."""
        self._stream += 1
        own = self._stream
        self.rewind()
        self._filled.set()  # whoever wrote before sees that it is over
        while True:
            while not self._waiting and self._stream == own:
                self._filled.clear()
                await self._filled.wait()
            if self._stream != own:
                return
            await write(self.take())


class Inbox:
    """What came from one other node."""

    def __init__(self) -> None:
        #: Highest number that was received; what comes below it is a repetition.
        self.received = 0
        #: Something came that is not acknowledged.
        self.arrived = asyncio.Event()
        #: How often messages are missing between two batches: their sender gave them up.
        self.gaps = 0
        self._outbox = 0

    def accept(self, batch: node_pb2.RelayBatch) -> list[Relayed]:
        """The messages of a batch that were not received before, in order."""
        if batch.outbox != self._outbox:
            self._outbox, self.received = batch.outbox, 0
        messages = unpack(batch.messages)
        known = max(0, self.received + 1 - batch.first)
        self.gaps += batch.first > self.received + 1
        self.received = max(self.received, batch.first + len(messages) - 1)
        self.arrived.set()
        return list(itertools.islice(messages, known, None)) if known else messages
