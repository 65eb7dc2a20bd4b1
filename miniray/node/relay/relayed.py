"""Messages that daemons send each other: for processes of two nodes, and notices of their own.

Many travel as one marshalled list inside a gRPC message: a protobuf message for each costs several
times as much as all the rest of the relay. None is lost or doubled when a stream breaks: messages
are numbered, the sender keeps those that are not acknowledged and sends them again over the next
stream, and the receiver drops those that it has had. ``relay.py`` has the streams.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray._proto import node_pb2
from miniray.common.series import COUNTED
from miniray.messages import plain

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

logger = logging.getLogger(__name__)

# --- what daemons send each other: ``Relayed.notice`` ------------------------------------------
#: ``bodies`` are messages of the process ``sender`` to the process ``to``.
MESSAGES = ""
#: ``sender`` watches the process ``to``.
WATCH = "watch"
#: (description,): the process ``sender``, which ``to`` watches or has written to, is gone.
GONE = "gone"
#: (segment, owner): the sender has written a value there for a process of the receiving node.
WROTE = "wrote"
#: (key, ...) of values (node/store/segments.py): the sender has them, whole, and a process of the
#: receiving node owns them.
COPIED = "copied"
#: A key: its owner, a process of the sender, has freed that value.
FREED = "freed"
#: (number, what, ...): a request of the sender (node/relay/relay.py).
REQUEST = "request"
#: (number, why there is none, answer): the answer; bytes of a value as body.
ANSWER = "answer"
#: (topic, body): a push to the process ``to``.
PUSH = "push"

#: Types of the fields of a message.
_TYPES = {(bytes, bytes, bodies, str, tuple) for bodies in (list, tuple)}


class Relayed(NamedTuple):
    """Messages of one process to another, or a notice."""

    #: Process that it is for, and that it is from.
    to: bytes = b""
    sender: bytes = b""
    bodies: Sequence[bytes] = ()
    #: ``MESSAGES``, or the kind of a notice, and its fields.
    notice: str = MESSAGES
    items: tuple[Any, ...] = ()

    def __str__(self) -> str:
        what = f"the notice {self.notice!r}" if self.notice else f"{len(self.bodies)} messages"
        return f"{what} from process {self.sender.hex()} to {self.to.hex()}"


def refusal(message: Relayed, why: str) -> Relayed | None:
    """Return the answer to a message that could not be handled; None if no process waits for it."""
    if message.notice == REQUEST:
        return Relayed(notice=ANSWER, items=(*message.items[:1], why, None))
    if message.bodies:
        # The sender only needs the notice that its messages were lost.
        return Relayed(to=message.sender, notice=PUSH, items=("process_unreachable", (message.to,)))
    return None


def size_of(message: Relayed) -> int:
    """Return about how many bytes a message takes on its way."""
    items = message.items
    return sum(map(len, message.bodies)) + (len(plain.dumps(items)) if items else 0) + 32


def pack(messages: Iterable[Relayed]) -> bytes:
    return plain.dumps([tuple(message) for message in messages])


def unpack(data: bytes) -> list[Relayed]:
    """Decode messages; one that cannot be read becomes an empty one, as if it were lost."""
    try:
        messages = list(plain.loads(data))
    except (ValueError, TypeError):
        logger.exception("%d bytes of messages from another node cannot be read", len(data))
        return [Relayed()]
    return [_message(each) for each in messages]


def _message(fields: Any) -> Relayed:
    try:
        message = Relayed(*fields)
    except TypeError:
        message = None
    if message is None or tuple(map(type, message)) not in _TYPES:
        logger.error("a message from another node cannot be read: %.200r", fields)
        return Relayed()
    return message


#: Bytes in one gRPC message, without its last part and one value.
_BATCH_BYTES = 1 << 20
#: Received bytes that are acknowledged at once: their sender keeps them until then.
_MUCH = 4 << 20
#: Stands for a message that was given up, with its size.
_GIVEN_UP = (32, Relayed())


def _is_kept(message: Relayed) -> bool:
    """Return whether a message stays when a node is given up."""
    return bool(message.notice) and not message.bodies


class Outbox:
    """Messages for one other node: waiting ones, and ones that it may not have received."""

    def __init__(self) -> None:
        #: Names this numbering; there is a new one after the node was given up and came back.
        self.id = int.from_bytes(os.urandom(8), "big") | 1
        #: (size, message).
        self._waiting: collections.deque[tuple[int, Relayed]] = collections.deque()
        #: Bytes of values that wait: they are sent behind other messages, one with each batch.
        self._values: collections.deque[tuple[int, Relayed]] = collections.deque()
        self._sent: collections.deque[tuple[int, Relayed]] = collections.deque()
        #: Bytes that wait, without the bytes of values.
        self.waiting = 0
        #: Number of the oldest message that is not acknowledged.
        self._oldest = 1
        #: Wakes the stream, as there is something to write.
        self.filled = asyncio.Event()
        #: How many streams it was written to.
        self._stream = 0
        self._messages, self._bytes, self._resent = (
            COUNTED.values(("counter", f"relay_{what}_total", "", ()), ())
            for what in ("messages", "bytes", "resent")
        )

    def put(self, message: Relayed) -> None:
        size = size_of(message)
        if message.notice == ANSWER and message.bodies:
            self._values.append((size, message))
        else:
            self._waiting.append((size, message))
            self.waiting += size
        self.filled.set()

    def acknowledged(self, batch: node_pb2.RelayBatch) -> None:
        if batch.received_of != self.id:
            return  # it is about an earlier numbering
        number = batch.received
        while self._sent and self._oldest <= number:
            self._sent.popleft()
            self._oldest += 1

    def rewind(self) -> None:
        """Queue the messages again that a broken stream may have lost."""
        self._resent[0] += len(self._sent)
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        self._count()

    def _count(self) -> None:
        self.waiting = sum(size for size, _ in self._waiting)

    def give_up(self) -> None:
        """Drop the messages of processes; empty ones in their place show the receiver the gap.

        Notices of this daemon stay: they are few and small, and would not be repeated.
        """
        self._values.clear()
        for box in (self._sent, self._waiting):
            kept = [(size, message) if _is_kept(message) else _GIVEN_UP for size, message in box]
            box.clear()
            box.extend(kept)
        self._count()
        self.put(Relayed())

    def take(self) -> node_pb2.RelayBatch:
        first = self._oldest + len(self._sent)
        batch: list[Relayed] = []
        size = 0
        while self._waiting and size < _BATCH_BYTES:
            sent = its_size, message = self._waiting.popleft()
            self.waiting -= its_size
            size += its_size
            batch.append(message)
            self._sent.append(sent)
        left = max(1, _BATCH_BYTES - size)  # for one at least: messages may always wait
        while self._values and left > 0:
            sent = its_size, message = self._values.popleft()
            left -= its_size
            batch.append(message)
            self._sent.append(sent)
        packed = pack(batch)
        self._messages[0] += len(batch)
        self._bytes[0] += len(packed)
        return node_pb2.RelayBatch(messages=packed, first=first, outbox=self.id)

    async def drain_to(
        self, write: Callable[[node_pb2.RelayBatch], Awaitable[None]], inbox: Inbox
    ) -> None:
        """Write batches, and acknowledge the inbox, until another stream takes over."""
        self._stream += 1
        own = self._stream
        self.rewind()
        self.filled.set()  # a task that wrote to the last stream ends
        inbox.writers.add(self.filled)
        while True:
            while not (self._waiting or self._values or inbox.is_due) and self._stream == own:
                self.filled.clear()
                await self.filled.wait()
            if self._stream != own:
                return
            has_any = self._waiting or self._values
            batch = self.take() if has_any else node_pb2.RelayBatch()
            if inbox.arrived:
                inbox.acknowledge(batch)
            await write(batch)


class Inbox:
    """Messages from one other node."""

    def __init__(self) -> None:
        #: The highest number that was received; lower ones are repetitions.
        self.received = 0
        #: Whether messages are not acknowledged, and whether they have to be now: a while after the
        #: first of them, or as they are large.
        self.arrived = self.is_due = False
        #: Whether a timer will remind of them.
        self.will_remind = False
        #: What wakes the streams to that node, of which any may acknowledge.
        self.writers: set[asyncio.Event] = set()
        self._size = 0
        #: How often messages were missing, because their sender gave them up.
        self.gaps = 0
        self._in_gap = False
        self._outbox = 0

    def acknowledge(self, batch: node_pb2.RelayBatch | None = None) -> node_pb2.RelayBatch:
        if batch is None:
            batch = node_pb2.RelayBatch()
        batch.received, batch.received_of = self.received, self._outbox
        self._size = 0
        self.arrived = self.is_due = False
        return batch

    def remind(self) -> None:
        """Have a stream send the due acknowledgement now."""
        self.is_due, self.will_remind = self.arrived, False
        for writer in self.writers if self.is_due else ():
            writer.set()

    def accept(self, batch: node_pb2.RelayBatch) -> list[Relayed]:
        """Return the messages of a batch that were not received before, in order."""
        if batch.outbox != self._outbox:
            self._outbox, self.received = batch.outbox, 0
            self._in_gap = False
        messages = unpack(batch.messages)
        known = max(0, self.received + 1 - batch.first)
        self.received = max(self.received, batch.first + len(messages) - 1)
        self.arrived = True
        self._size += len(batch.messages)
        if self._size >= _MUCH:
            self.remind()
        return list(self._with_gaps(itertools.islice(messages, known, None)))

    def _with_gaps(self, messages: Iterable[Relayed]) -> Iterable[Relayed]:
        """Count the gaps; each is filled by one empty message."""
        for message in messages:
            was_in_gap, self._in_gap = self._in_gap, not (message.bodies or message.notice)
            if self._in_gap and was_in_gap:
                continue
            self.gaps += self._in_gap
            yield message
