"""Which segments of this node are copies of other nodes' segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.node.transfers import Key


class Copies:
    """Both directions of it."""

    def __init__(self) -> None:
        self._by_key: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    def add(self, key: Key, number: int) -> None:
        """A segment of another node has a copy here."""
        self._by_key[key] = number
        self._keys[number] = key

    def find(self, key: Key) -> int | None:
        """The number of the copy of a segment of another node."""
        return self._by_key.get(key)

    def is_copy(self, number: int) -> bool:
        """Whether a segment of this node is a copy."""
        return number in self._keys

    def remove(self, key: Key) -> int | None:
        """The copy of a segment is dropped; returns its number."""
        number = self._by_key.pop(key, None)
        if number is not None:
            del self._keys[number]
        return number

    def key_of(self, number: int) -> Key:
        """What a segment of this node is a copy of."""
        return self._keys[number]

    @property
    def sources(self) -> dict[int, Key]:
        """Of which segment each copy is one, by the number of the copy."""
        return dict(self._keys)

    def of_node(self, node_id: bytes) -> Iterator[Key]:
        """The segments of a node that have copies here, at this moment."""
        return iter([key for key in self._by_key if key[0] == node_id])
