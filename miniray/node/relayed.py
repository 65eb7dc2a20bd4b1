"""What daemons send each other: messages between processes of two nodes, and a few of their own.

They travel many at a time as one marshalled list inside a gRPC message: a protobuf
message for each costs several times as much as all the rest of the relay.
"""

from __future__ import annotations

import marshal
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Notices of one daemon to another.
#: ``sender`` watches the process ``to``.
WATCH = "watch"
#: The process ``sender``, which ``to`` watches or has written to, is gone.
GONE = "gone"
#: (segment, ...) of the receiving node that their owner freed.
FREED = "freed"
#: (segment, ...) of the sending node, of which copies at the receiving one are freed.
FREED_COPIES = "freed copies"
#: (segment, ...) of the receiving node that their owner, which ends by rule, left to the sender.
ADOPTED = "adopted"
#: (segment, ...) of the receiving node, of which the sender has got a copy.
COPIED = "copied"
#: (ticket, segment, offset, node, ...): the sender, which cannot dial, wants a segment pushed;
#: the nodes were named to it and did not serve.
WANTED = "wanted"
#: (ticket, reason, whether it may work later): a segment that was wanted cannot be pushed.
REFUSED = "refused"
#: (topic, body): a push to the process ``to``.
PUSH = "push"

#: (number, how many, whether small ones too, seconds): what do you hold?
MEMORY_ASKED = "memory asked"
#: (number, report): the answer to that (util/memory_types.py).
MEMORY_TOLD = "memory told"


class Relayed(NamedTuple):
    """Messages of one process to another, or a notice."""

    #: Process that it is for, and that it is from.
    to: bytes = b""
    sender: bytes = b""
    bodies: Sequence[bytes] = ()
    #: One of the above and what belongs to it.
    notice: str = ""
    items: tuple[Any, ...] = ()


def pack(messages: Iterable[Relayed]) -> bytes:
    """Messages as they travel."""
    return marshal.dumps([tuple(message) for message in messages])


def unpack(data: bytes) -> list[Relayed]:
    """The inverse of ``pack``."""
    return [Relayed(*message) for message in marshal.loads(data)]
