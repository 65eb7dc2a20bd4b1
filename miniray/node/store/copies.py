"""Which segments of this node are copies of other nodes' segments."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from miniray.node.store.segments import SegmentStore

#: A segment of any node: the node, and its number there.
Key = tuple[bytes, int]


class Owner(NamedTuple):
    """Who frees a value."""

    process: bytes
    node: bytes


@dataclasses.dataclass(eq=False, slots=True)
class Copy:
    """A whole copy of a segment of another node."""

    key: Key
    #: Its number here.
    number: int
    #: Who owned the value when it was copied.
    owner: Owner
    #: The node of the segment is gone: this is the value from now on, and no copy any more.
    left: bool = False


class Copies:
    """All whole copies, by either number.

    Args:
        store: Where they are.
    """

    def __init__(self, store: SegmentStore) -> None:
        self.store = store
        self._by_key: dict[Key, Copy] = {}
        self._by_number: dict[int, Copy] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, key: Key, number: int, owner: Owner) -> Copy:
        """Add a copy of a segment that has none here."""
        assert key not in self._by_key
        copy = self._by_key[key] = self._by_number[number] = Copy(key, number, owner)
        return copy

    def find(self, key: Key) -> Copy | None:
        """Return the copy of a segment of another node."""
        return self._by_key.get(key)

    def is_copy(self, number: int) -> bool:
        """Return whether a segment of this node is a copy, and not the value itself."""
        return self.source_of(number) is not None

    def source_of(self, number: int) -> Key | None:
        """Return of which segment a segment of this node is a copy; None if it is the value."""
        copy = self._by_number.get(number)
        return None if copy is None or copy.left else copy.key

    def drop(self, number: int) -> None:
        """Free a segment of this node, whether it is a copy or not."""
        self.remove(number)
        self.store.free(number)

    def remove(self, number: int) -> None:
        """Forget a segment of this node that is freed, whether it is a copy or not."""
        copy = self._by_number.pop(number, None)
        if copy is not None:
            del self._by_key[copy.key]

    def of_node(self, node_id: bytes) -> list[Copy]:
        """Return the copies here of segments of a node."""
        return [copy for key, copy in self._by_key.items() if key[0] == node_id]
