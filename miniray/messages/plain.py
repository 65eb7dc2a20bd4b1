"""Plain data as bytes: how messages are written, and how bytes of others are read.

``marshal`` allocates as many items as five bytes claim, so what comes from a process that may
mean harm is looked through before it is loaded: each claim has to be borne out by the bytes that
follow. Of what marshal knows, only plain data is taken.
"""

from __future__ import annotations

import marshal
import struct
from typing import Any

#: Version of the format: the latest one in which nothing refers to what came before. A few bytes
#: that refer to each other may stand for more data than any machine holds.
_VERSION = 2
#: Items of one message, and how deep they may be nested.
MAX_ITEMS = 4_000_000
MAX_DEPTH = 64
#: 15-bit digits of the largest integer.
_MAX_DIGITS = 20

_length = struct.Struct("<I").unpack_from
_digits = struct.Struct("<i").unpack_from
#: Bytes of what has a fixed size, by the byte that it begins with: None, True, False, int, float.
_SIZES = [0] * 256
for _code, _size in ((b"N", 1), (b"T", 1), (b"F", 1), (b"i", 5), (b"g", 9)):
    _SIZES[_code[0]] = _size
_BYTES, _TEXT, _INTERNED, _TUPLE, _LIST, _DICT, _END, _LONG = b"sut([{0l"
_STRINGS = frozenset((_BYTES, _TEXT, _INTERNED))
_SEQUENCES = frozenset((_TUPLE, _LIST))


def dumps(data: Any) -> bytes:
    """Encode plain data.

    Raises:
        ValueError: Something in it is no plain data.
    """
    return marshal.dumps(data, _VERSION)


def loads(data: bytes | memoryview) -> Any:
    """Decode what ``dumps`` has made, of any origin: it is as large as it claims to be.

    Raises:
        ValueError: They are no plain data.
    """
    check(data)
    try:
        return marshal.loads(data)
    except (EOFError, TypeError, MemoryError) as error:
        raise ValueError(f"{len(data)} bytes are no plain data: {error}") from None


def check(data: bytes | memoryview) -> None:
    """Look through marshalled data without loading it.

    Raises:
        ValueError: A size in it is larger than what follows, or something is no plain data.
    """
    try:
        end = _skip(data, 0, 1, 0, MAX_ITEMS)[0]
    except (IndexError, struct.error):
        end = -1
    if end != len(data):
        raise ValueError(f"{len(data)} bytes are no plain data: they end too soon, or too late")


def _skip(data: bytes | memoryview, at: int, count: int, depth: int, left: int) -> tuple[int, int]:
    """Return where so many items end, and how many more there may be in the message."""
    left -= count
    if left < 0 or depth > MAX_DEPTH:
        raise ValueError(
            f"{len(data)} bytes are no plain data that is taken: they claim more than {MAX_ITEMS} "
            f"items, or are nested deeper than {MAX_DEPTH}"
        )
    for _ in range(count):
        code = data[at]
        if code == _BYTES:
            at += 5 + _length(data, at + 1)[0]
        elif size := _SIZES[code]:
            at += size
        elif code in _STRINGS:
            at += 5 + _length(data, at + 1)[0]
        elif code in _SEQUENCES:
            at, left = _skip(data, at + 5, _length(data, at + 1)[0], depth + 1, left)
        elif code == _DICT:
            at += 1
            while data[at] != _END:
                if data[at] not in _STRINGS:  # numbers can be chosen such that all collide
                    raise ValueError("a key of a dict is neither text nor bytes")
                at, left = _skip(data, at, 2, depth + 1, left)
            at += 1
        elif code == _LONG and abs(digits := _digits(data, at + 1)[0]) <= _MAX_DIGITS:
            at += 5 + 2 * abs(digits)
        else:
            raise ValueError(f"an item begins with the byte {code}, as no plain data does")
    return at, left
