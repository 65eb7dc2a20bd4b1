"""The shape of what processes and node daemons tell of the objects that they hold, as plain data.

Processes tell their daemon, daemons tell each other, ``memory_records.py`` puts it together.
Every value can be marshalled; ids are bytes, sizes are bytes of memory.
"""

from __future__ import annotations

from typing import Literal, TypedDict

#: Ray's names for why an object is held. PINNED_IN_MEMORY: a process has it mapped;
#: UNKNOWN_STATUS: whoever knows did not tell.
ReferenceType = Literal[
    "USED_BY_PENDING_TASK",
    "LOCAL_REFERENCE",
    "CAPTURED_IN_OBJECT",
    "ACTOR_HANDLE",
    "PINNED_IN_MEMORY",
    "UNKNOWN_STATUS",
]

#: How many objects a report has at most: as in Ray, and few enough for one message.
MAX_OBJECTS = 10_000
#: The name of a local reference that nobody can drop: a copy was pickled by the user, or
#: captured by the code of a function.
PICKLED = "pickled"

ProcessType = Literal["DRIVER", "WORKER", "NODE"]

#: HELD: its owner has not freed it. WRITING: it is not complete yet. FREED: its owner has no
#: use for it, and it counts until the last process has unmapped it.
SegmentState = Literal["HELD", "WRITING", "FREED"]


def order(size: int, segment: int, name: bytes) -> tuple[int, int, bytes]:
    """What the largest come first by.

    Daemons and processes choose what they tell one by one, each on its own. For what they tell to
    fit together, a piece of memory has the same place in the order of all of them.

    Args:
        size: Of the value.
        segment: That it was written to; 0: none.
        name: Id of that segment's node, or of the object if there is no segment.
    """
    return (-size, segment, name)


class Hold(TypedDict):
    """One reason why a process holds an object."""

    kind: ReferenceType
    #: How many refs, calls or objects.
    count: int
    #: Some of the calls' names, or of the outer objects' ids in hex.
    names: list[str]


class ObjectRow(TypedDict):
    """An object as one process knows it."""

    #: Empty for the arguments of a call, which are no object of their own.
    id: bytes
    owner: bytes
    #: Who tells: the owner, a borrower, or the daemon in place of an owner that has ended.
    process: bytes
    size: int
    #: Where in shared memory it is; empty and 0 for a small value, or one that is still to come.
    node: bytes
    segment: int
    #: Ray's: NIL for what was put, or the state of the task that makes it.
    status: str
    #: Where it was put, or what made it; empty if that is not recorded.
    call_site: str
    holds: list[Hold]
    #: Owner's side: processes that have borrowed it.
    borrowers: list[bytes]


class ProcessRow(TypedDict):
    """A process of a node."""

    process: bytes
    pid: int
    type: ProcessType
    #: The class of its actor, or its task; empty if it is idle.
    name: str
    #: Whether it answered in time: its user code may keep it busy.
    answered: bool
    #: Small values that it owns, in its own memory, and their bytes.
    inline: int
    inline_bytes: int


class ObjectsHeld(TypedDict):
    """What a process answers its daemon."""

    #: As in ``ProcessRow``.
    inline: int
    inline_bytes: int
    #: The largest.
    objects: list[ObjectRow]


class SegmentRow(TypedDict):
    """A piece of a node's shared memory that a value is in."""

    number: int
    #: Of the value, and of the memory that it takes.
    size: int
    allocated: int
    owner: bytes
    writer: bytes
    state: SegmentState
    #: As ``ObjectRow.call_site``.
    call_site: str
    #: Processes that have it mapped.
    mappers: list[bytes]
    #: Node and segment that it is a copy of; empty and 0 if it is the first.
    source_node: bytes
    source: int
    spilled: bool


class StoreTotals(TypedDict):
    """All shared memory of a node in numbers; but for ``segments`` all are bytes."""

    capacity: int
    #: What values are in, those that are freed and still mapped included.
    used: int
    #: What waits, warm, for the next value.
    pooled: int
    #: Of ``used``: what is freed and still mapped, and what is being written.
    freed: int
    writing: int
    #: On disk.
    spilled: int
    segments: int
    #: Bytes that are freed and still mapped, by process.
    freed_by: dict[bytes, int]


class NodeMemory(TypedDict):
    """What a node's daemon tells."""

    node: bytes
    #: Why it tells nothing, or "".
    reason: str
    totals: StoreTotals
    processes: list[ProcessRow]
    #: The largest of each.
    segments: list[SegmentRow]
    objects: list[ObjectRow]


class OwnMemory(TypedDict):
    """What a node's daemon keeps by itself."""

    pid: int
    #: The largest of each: all of them, unless there are more than ``MAX_OBJECTS``.
    segments: list[SegmentRow]
    #: Those whose owners ended by rule.
    adopted: list[ObjectRow]
    #: How many entries each other table has.
    tables: dict[str, int]
