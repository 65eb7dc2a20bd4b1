"""What two daemons say to each other on the stream over which one fetches objects of the other.

A stream carries many fetches at once, each with a number, in messages of all that waits: a gRPC
call for each object would cost several times what moving a small one does.
"""

from __future__ import annotations

from typing import Any

from miniray.messages import plain

#: Kinds of answers: a piece of what was asked for, its end, or why no more of it comes:
#: it is not there, or something broke and it may be asked for again.
PIECE, END, LOST, BROKEN = range(4)

#: Number of a fetch, and the ``FetchRequest`` that begins it, or None to end it.
Ask = tuple[int, bytes | None]
#: Number of a fetch, kind of the answer, and the piece or the reason.
Answer = tuple[int, int, bytes | str]


def pack(batch: list[Any]) -> bytes:
    """A message of asks or answers."""
    return plain.dumps(batch)


def unpack(data: bytes) -> list[Any]:
    """The asks or answers of a message."""
    batch: list[Any] = plain.loads(data)
    return batch
