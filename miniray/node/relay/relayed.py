"""What daemons send each other: messages between processes of two nodes, and a few of their own.

They travel many at a time as one marshalled list inside a gRPC message: a protobuf
message for each costs several times as much as all the rest of the relay.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.messages import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

logger = logging.getLogger(__name__)

#: Notices of one daemon to another.
#: ``sender`` watches the process ``to``.
WATCH = "watch"
#: (what it was,): the process ``sender``, which ``to`` watches or has written to, is gone.
GONE = "gone"
#: (segment, ...) of the receiving node that their owner freed.
FREED = "freed"
#: (segment, ...) of the sending node, of which copies at the receiving one are freed.
FREED_COPIES = "freed copies"
#: (segment, ...) of the receiving node that their owner, which ends by rule, left to the sender.
ADOPTED = "adopted"
#: (number, node, segment there, nodes that did not serve it, whether by mover): the sender wants
#: that value, which the receiving node has, or has a copy of.
FETCH = "fetch"
#: (number, node, segment there, offset, length): the sender wants those bytes of a value.
READ = "read"
#: (number, ...): the answer to either (node/transfer/requests.py); bytes of the value as body.
ANSWER = "answer"
#: (node, segment there): the sender fetches that from the receiving node no more.
FETCH_ENDED = "fetch ended"
#: (segment, ...) of the receiving node, of which the sender has got a copy.
COPIED = "copied"
#: (node, (segment there, segment of the sending node, owner), ...): a node is gone; the sender has
#: copies of values that processes of the receiving node own.
LEFT = "left"
#: (segment, owner): the receiving node's segment is the value of a process of the sender.
OWNED = "owned"
#: (number, node): tell when you have sent LEFT about a node.
LEFT_ASKED = "left asked"
#: (number,): the answer to that.
LEFT_TOLD = "left told"
#: (topic, body): a push to the process ``to``.
PUSH = "push"

#: (number, how many, whether small ones too, seconds): what do you hold?
MEMORY_ASKED = "memory asked"
#: (number, report): the answer to that (common/state_types.py).
MEMORY_TOLD = "memory told"


#: (whether it is the last, whether it is of a notice): a piece, as body, of a message that is too
#: large to travel whole.
PIECE = "piece"


#: Of the fields of a message.
_TYPES = {(bytes, bytes, bodies, str, tuple) for bodies in (list, tuple)}


class Relayed(NamedTuple):
    """Messages of one process to another, or a notice."""

    #: Process that it is for, and that it is from.
    to: bytes = b""
    sender: bytes = b""
    bodies: Sequence[bytes] = ()
    #: One of the above and what belongs to it.
    notice: str = ""
    items: tuple[Any, ...] = ()

    def __str__(self) -> str:
        what = f"the notice {self.notice!r}" if self.notice else f"{len(self.bodies)} messages"
        return f"{what} from process {self.sender.hex()} to {self.to.hex()}"


def refusal(message: Relayed, why: str) -> Relayed | None:
    """What to answer whoever waits for a message that could not be handled; None if nobody does."""
    number = message.items[:1]
    if message.notice in (FETCH, READ):
        return Relayed(notice=ANSWER, items=(*number, why))
    if message.notice == LEFT_ASKED:
        return Relayed(notice=LEFT_TOLD, items=number)
    if message.bodies:
        # The sender need not know more than that what it sent was lost.
        return Relayed(to=message.sender, notice=PUSH, items=("process_unreachable", (message.to,)))
    return None


def size_of(message: Relayed) -> int:
    """About the bytes that a message takes on its way."""
    items = message.items
    return sum(map(len, message.bodies)) + (len(plain.dumps(items)) if items else 0) + 32


def split(message: Relayed, size: int) -> list[Relayed]:
    """The pieces of a message, so many bytes each."""
    data = memoryview(pack([message]))
    starts = range(0, len(data), size)
    of_notice = bool(message.notice)
    return [
        Relayed(
            notice=PIECE,
            bodies=[bytes(data[at : at + size])],
            items=(at == starts[-1], of_notice),
        )
        for at in starts
    ]


def pack(messages: Iterable[Relayed]) -> bytes:
    """Messages as they travel."""
    return plain.dumps([tuple(message) for message in messages])


def unpack(data: bytes) -> list[Relayed]:
    """The inverse of ``pack``; in place of what cannot be read stands that a message was lost."""
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
