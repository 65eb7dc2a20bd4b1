"""How functions, classes and packages travel and are kept: whole, or in pieces if large.

A call or a heartbeat behind a piece waits for that alone. The parts of one content have names:
under its own there is the content, or how many pieces it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes of a piece at most.
PIECE = 4 * 1024 * 1024
_WHOLE, _IN_PIECES = b"\0", b"\1"


def split(name: bytes, content: bytes, piece: int = PIECE) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and bytes of each part; that of ``name`` is the last, as it tells of the rest."""
    if len(content) <= piece:
        yield name, _WHOLE + content
        return
    count = -(-len(content) // piece)
    for number in range(count):
        yield _piece_name(name, number), content[number * piece : (number + 1) * piece]
    yield name, _IN_PIECES + count.to_bytes(4, "big")


def pieces(name: bytes, part: bytes) -> list[bytes]:
    """Return the names of the pieces that belong to what is kept under ``name``."""
    if part[:1] == _WHOLE:
        return []
    return [_piece_name(name, number) for number in range(int.from_bytes(part[1:], "big"))]


def whole(part: bytes) -> bytes:
    """Return the content of a part that is all."""
    return part[1:]


def _piece_name(name: bytes, number: int) -> bytes:
    return b"%s#%d" % (name, number)
