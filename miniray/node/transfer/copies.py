"""Which segments of this node are copies of other nodes' segments.

One entry for each value of another node that is here; what is on its way is in ``pulls.py``, which
begins no transfer of what is in this table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from miniray.node.transfer.arriving import Key


class Owner(NamedTuple):
    """Who frees a value."""

    process: bytes
    node: bytes


class Copy:
    """A segment of another node that is here too."""

    __slots__ = ("key", "left", "number", "owner")

    def __init__(self, key: Key, number: int, owner: Owner) -> None:
        #: The node of the segment, and its number there.
        self.key = key
        #: Its number here.
        self.number = number
        #: Who owned the value when it was copied.
        self.owner = owner
        #: The node of the segment is gone: this is the value from now on, and no copy any more.
        self.left = False


class Copies:
    """All of them, by either number."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Copy] = {}
        self._by_number: dict[int, Copy] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, key: Key, number: int, owner: Owner) -> Copy:
        """A segment of another node has a copy here; it must not have had one."""
        assert key not in self._by_key
        copy = self._by_key[key] = self._by_number[number] = Copy(key, number, owner)
        return copy

    def find(self, key: Key) -> Copy | None:
        """The copy of a segment of another node."""
        return self._by_key.get(key)

    def is_copy(self, number: int) -> bool:
        """Whether a segment of this node is a copy, so that the value does not go with it."""
        return self.source_of(number) is not None

    def source_of(self, number: int) -> Key | None:
        """Of which segment a segment of this node is a copy; None if it is the value itself."""
        copy = self._by_number.get(number)
        return None if copy is None or copy.left else copy.key

    def remove(self, number: int) -> None:
        """A segment of this node, copy or not, is dropped."""
        copy = self._by_number.pop(number, None)
        if copy is not None:
            del self._by_key[copy.key]

    def of_node(self, node_id: bytes) -> list[Copy]:
        """The copies here of segments of a node."""
        return [copy for key, copy in self._by_key.items() if key[0] == node_id]
