"""One value in the shared memory of a node, or on its disk: who owns it and who maps it.

Its fields are changed by the store that it is in only (``segments.py``), but for where it is, which
``spilling.py`` changes too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miniray.node.store.memories import Memory
    from miniray.node.store.spill_files import Place


class Segment:
    """One value in shared memory."""

    __slots__ = (
        "creator",
        "form",
        "freed",
        "left_open",
        "made",
        "mappers",
        "memory",
        "moves",
        "number",
        "owner",
        "place",
        "size",
        "writer",
    )

    def __init__(
        self, number: int, memory: Memory | None, size: int, form: int, owner: bytes
    ) -> None:
        self.number = number
        #: None while it is on disk only.
        self.memory = memory
        #: Where it is on disk, if it was written there; it never changes.
        self.place: Place | None = None
        #: It is being written to disk, or read from there.
        self.moves = False
        self.size = size
        self.form = form
        self.owner = owner
        #: The process that writes it; None once it is complete.
        self.creator: bytes | None = None
        #: The process that wrote it, complete or not.
        self.writer = b""
        self.freed = False
        #: Where it was put, or what made it, for reports; empty if nobody told.
        self.made = ""
        #: How often each process has it mapped.
        self.mappers: dict[bytes, int] = {}
        #: A process was using it when it left, or forked. It may live on, as a driver does after
        #: `shutdown` or a child after its parent, and look at its arrays: nobody may write there.
        self.left_open = False

    @property
    def in_memory(self) -> bool:
        """Whether it is in memory; else it is on disk only."""
        return self.memory is not None

    @property
    def fd(self) -> int:
        """Descriptor of its memory, or of its file while it is on disk only."""
        if self.memory is not None:
            return self.memory.fd
        assert self.place is not None
        return self.place.fd

    @property
    def offset(self) -> int:
        """Where it begins there, in bytes: whole pages."""
        if self.memory is not None:
            return 0
        assert self.place is not None
        return self.place.offset

    def leave_open(self) -> None:
        """A process that maps it may look at it though it will be counted no longer."""
        self.left_open = True
        if self.place is not None and self.place.shown:
            self.place.left_open = True

    @property
    def capacity(self) -> int:
        """Bytes of memory that it takes."""
        return 0 if self.memory is None else self.memory.capacity
