"""What daemons send each other: messages between processes of two nodes, and a few of their own.

They travel many at a time as one marshalled list inside a gRPC message: a protobuf
message for each costs several times as much as all the rest of the relay.
"""

from __future__ import annotations

import marshal
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Relayed(NamedTuple):
    """Messages of one process to another, or one of the notices below."""

    #: Process that it is for, and that it is from.
    to: bytes = b""
    sender: bytes = b""
    bodies: Sequence[bytes] = ()
    #: ``sender`` watches the process ``to``.
    watch: bool = False
    #: The process ``sender``, which ``to`` watches or has written to, is gone.
    gone: bool = False
    #: Segments of the receiving node that their owner freed.
    freed: tuple[int, ...] = ()
    #: Segments of the sending node, of which copies here are freed.
    freed_copies: tuple[int, ...] = ()
    #: Segments of the receiving node that their owner, which ends by rule, left to the sender.
    adopted: tuple[int, ...] = ()
    #: A push to the process ``to`` about this topic: the only one of ``bodies``.
    topic: str = ""


def pack(messages: Iterable[Relayed]) -> bytes:
    """Messages as they travel."""
    return marshal.dumps([tuple(message) for message in messages])


def unpack(data: bytes) -> list[Relayed]:
    """The inverse of ``pack``."""
    return [Relayed(*message) for message in marshal.loads(data)]
