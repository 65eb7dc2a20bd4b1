"""Messages that daemons send each other: for processes of two nodes, and notices of their own.

Many travel as one marshalled list inside a gRPC message: a protobuf message for each costs several
times as much as all the rest of the relay.
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
#: (description,): the process ``sender``, which ``to`` watches or has written to, is gone.
GONE = "gone"
#: (segment, owner): the sender has written a value there for a process of the receiving node.
WROTE = "wrote"
#: (key, ...) of values (node/store/segments.py): the sender has them, whole, and a process of the
#: receiving node owns them.
COPIED = "copied"
#: A key: its owner, a process of the sender, has freed that value.
FREED = "freed"
#: (number, *key, nodes that did not serve it, whether by mover, bytes that may come with the
#: answer): the sender wants that value, which the receiving node has, or of which it has the owner.
FETCH = "fetch"
#: (number, *key, offset, length): the sender wants those bytes of a value.
READ = "read"
#: (number, ...): the answer to either (node/transfer/requests.py); bytes of the value as body.
ANSWER = "answer"
#: A key: the sender has stopped fetching that value from the receiving node.
FETCH_ENDED = "fetch ended"
#: (topic, body): a push to the process ``to``.
PUSH = "push"

#: (number, what, arguments, seconds): a question (node/relay/questions.py).
ASKED = "asked"
#: (number, answer, why there is none): what the receiving node had asked.
TOLD = "told"

#: (whether it is the last, whether of a notice): a piece, as body, of a message that is too large
#: to travel whole.
PIECE = "piece"


#: Types of the fields of a message.
_TYPES = {(bytes, bytes, bodies, str, tuple) for bodies in (list, tuple)}


class Relayed(NamedTuple):
    """Messages of one process to another, or a notice."""

    #: Process that it is for, and that it is from.
    to: bytes = b""
    sender: bytes = b""
    bodies: Sequence[bytes] = ()
    #: The kind of a notice, and its fields.
    notice: str = ""
    items: tuple[Any, ...] = ()

    def __str__(self) -> str:
        what = f"the notice {self.notice!r}" if self.notice else f"{len(self.bodies)} messages"
        return f"{what} from process {self.sender.hex()} to {self.to.hex()}"


def refusal(message: Relayed, why: str) -> Relayed | None:
    """Return the answer to a message that could not be handled; None if no process waits for it."""
    if message.notice in (FETCH, READ):
        return Relayed(notice=ANSWER, items=(*message.items[:1], why))
    if message.bodies:
        # The sender need only know that its messages were lost.
        return Relayed(to=message.sender, notice=PUSH, items=("process_unreachable", (message.to,)))
    return None


def size_of(message: Relayed) -> int:
    """Return about how many bytes a message takes on its way."""
    items = message.items
    return sum(map(len, message.bodies)) + (len(plain.dumps(items)) if items else 0) + 32


def split(message: Relayed, size: int) -> list[Relayed]:
    """Cut a message into pieces of ``size`` bytes."""
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
    return plain.dumps([tuple(message) for message in messages])


def unpack(data: bytes) -> list[Relayed]:
    """Decode messages; one that cannot be read becomes an empty one, as if it was lost."""
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
