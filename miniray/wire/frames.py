"""Frames: a length (4 bytes, little-endian) and a marshalled tuple of plain data.

The tuple's first item is a kind of ``messages/protocol.py``. marshal is the fastest codec
at hand (``plain.py``): both ends run the same Python (checked when a node joins) and have
proved that they know the cluster's secret before the first frame is read.
"""

from __future__ import annotations

import struct
from typing import Any

from miniray.common.sizes import format_bytes
from miniray.messages import plain

LENGTH = struct.Struct("<I")
#: Bytes of one message: large values do not travel in messages, so only a mistake is above this.
MAX_MESSAGE = 1 << 30
#: Bytes of one frame. One that is relayed holds a message and what waited beside it.
MAX_FRAME = MAX_MESSAGE + (256 << 20)


def encode(message: tuple[Any, ...]) -> bytes:
    """One frame.

    Raises:
        ValueError: The message is too large.
    """
    body = plain.dumps(message)
    if len(body) > MAX_FRAME:
        raise too_large(len(body), MAX_FRAME)
    return LENGTH.pack(len(body)) + body


def too_large(size: int, limit: int, what: str = "A message to another process") -> ValueError:
    """The error of a sender: the receiver would close the connection for it."""
    return ValueError(
        f"{what} takes {format_bytes(size)}; it may take {format_bytes(limit)}. Pass large values "
        f"as arguments of calls, through miniray.put()."
    )
