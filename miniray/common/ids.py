"""Ids: 8 random bytes for a process, a node or a job; process id + number for objects."""

from __future__ import annotations

import itertools
import os
import struct

#: Bytes of the id of a process (driver, worker), of a node and of a job.
PROCESS_ID_LENGTH = 8
#: So many hex digits of a creator are enough for people.
_SHORT = 8
_NUMBER = struct.Struct(">Q")


def new_id() -> bytes:
    """Return a random id of 8 bytes."""
    return os.urandom(PROCESS_ID_LENGTH)


def owner_of(object_id: bytes) -> bytes:
    """Return the id of the process that owns an object (or created an actor)."""
    return object_id[:PROCESS_ID_LENGTH]


def short_id(id: str) -> str:
    """Return an id in hex of something that a process made, short but still distinct.

    It names its creator and a number there: the first digits alone are those of all that it made.
    """
    creator = 2 * PROCESS_ID_LENGTH
    return f"{id[:_SHORT]}-{int(id[creator:] or '0', 16)}"


def call_id(caller: bytes, number: int) -> bytes:
    """Return the id of a call that makes no object of its own; never that of an object."""
    return caller + _NUMBER.pack(1 << 63 | number)


class ObjectIds:
    """Numbers the objects that this process creates. Thread-safe."""

    __slots__ = ("_next", "_prefix")

    def __init__(self, process_id: bytes) -> None:
        self._prefix = process_id
        self._next = itertools.count(1).__next__  # one C call: atomic under the GIL

    def new(self) -> bytes:
        return self._prefix + _NUMBER.pack(self._next())
