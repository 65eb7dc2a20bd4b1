"""Which segments of this node are copies of values that were written on other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.store.segments import SegmentStore

#: The name of a value in shared memory: the node on which it was written, its segment there, and
#: the node of its owner, whose daemon knows where it is.
Key = tuple[bytes, int, bytes]


class Copies:
    """All whole copies, by their key or their number here.

    Args:
        store: Where they are.
        lives: Whether another node lives.
    """

    def __init__(self, store: SegmentStore, lives: Callable[[bytes], bool]) -> None:
        self.store = store
        self._lives = lives
        self._by_key: dict[Key, int] = {}
        self._by_number: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, key: Key, number: int) -> None:
        """Add a copy of a value that has none here."""
        assert key not in self._by_key
        self._by_key[key] = number
        self._by_number[number] = key

    def find(self, key: Key) -> int | None:
        """Return the number here of the copy of a value."""
        return self._by_key.get(key)

    def owned_on(self, node_id: bytes) -> list[Key]:
        """Return the values of owners on a node of which there are copies here."""
        return [key for key in self._by_key if key[2] == node_id]

    def may_be_evicted(self, number: int) -> bool:
        """Return whether a segment is a copy, and the node on which the value was written lives."""
        key = self._by_number.get(number)
        return key is not None and self._lives(key[0])

    def source_of(self, number: int) -> tuple[bytes, int] | None:
        """Return of which node and segment there a segment here is a copy; None if it is none."""
        key = self._by_number.get(number)
        return None if key is None else key[:2]

    def drop(self, number: int) -> None:
        """Free a segment of this node, whether it is a copy or not."""
        self.remove(number)
        self.store.free(number)

    def remove(self, number: int) -> None:
        """Forget a segment of this node that is freed, whether it is a copy or not."""
        key = self._by_number.pop(number, None)
        if key is not None:
            del self._by_key[key]
