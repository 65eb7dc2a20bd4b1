"""How one segment spreads from its node to others: as a tree, and who copies from whom.

Pure: the node of the segment decides with it, ``serving.py`` carries it out. Every node serves
at most two others at a time; those that have a copy, or are still getting one, serve too.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

#: Copies of one segment that a node sends at a time.
FANOUT = 2


@dataclasses.dataclass(eq=False, frozen=True)
class Place:
    """A node's place in the tree, for as long as it copies."""

    node: bytes
    parent: bytes


class Spread:
    """The tree of one segment.

    Args:
        source: The node of the segment.
    """

    def __init__(self, source: bytes) -> None:
        self._source = source
        #: Every node that may have a copy: they are told when the segment is freed.
        self.nodes: set[bytes] = set()
        self._places: dict[bytes, Place] = {}
        #: How many copy from each node.
        self._children: dict[bytes, int] = {}
        #: Nodes that may be named to others: the source, and whoever has a copy or gets one.
        self._serves: set[bytes] = {source}
        self._whole: set[bytes] = {source}
        #: Those of them that could serve one more, in the order in which they could.
        self._free: dict[bytes, None] = {source: None}

    def place(self, node: bytes, tried: Container[bytes], *, serves: bool) -> Place | None:
        """Say from whom a node is to copy; None if it has to wait until others are done.

        Args:
            node: Who wants a copy, or has to go on with one.
            tried: Nodes that were named to it and did not serve it.
            serves: Whether others can reach it.
        """
        old = self._places.get(node)
        if old is not None:
            self.leave(old)
        self.nodes.add(node)
        self._whole.discard(node)  # it had a copy once, and has dropped it
        free = (other for other in self._free if other not in tried)
        parent = next((other for other in free if self._can_feed(other, node)), None)
        if parent is None:
            return None
        place = self._places[node] = Place(node, parent)
        self._children[parent] = self._children.get(parent, 0) + 1
        if self._children[parent] >= FANOUT:
            del self._free[parent]
        if serves and node not in self._serves:
            self._serves.add(node)
            self._offer(node)
        return place

    def _can_feed(self, other: bytes, node: bytes) -> bool:
        """Whether a node can copy from another: not if that one itself waits for it."""
        above: bytes | None = other
        while above is not None and above not in self._whole:
            if above == node:
                return False
            place = self._places.get(above)
            above = place.parent if place is not None else None
        return other != node

    def leave(self, place: Place) -> None:
        """A node copies no more: it is done, or has given up."""
        if self._places.get(place.node) is not place:
            return  # it has another place by now
        del self._places[place.node]
        if place.node not in self._whole:
            self._retire(place.node)
        left = self._children[place.parent] = self._children[place.parent] - 1
        if not left:
            del self._children[place.parent]
        self._offer(place.parent)

    def failed(self, node: bytes) -> None:
        """A node did not serve who was sent there: nobody is, unless it gets a new copy."""
        if node != self._source:
            self._retire(node)

    def has_copy(self, node: bytes, *, serves: bool) -> None:
        """A node has got the whole segment, or came back with it."""
        self.nodes.add(node)
        self._whole.add(node)
        if serves:
            self._serves.add(node)
            self._offer(node)

    def node_died(self, node: bytes) -> None:
        """A node is gone; who copied from it will come back."""
        place = self._places.get(node)
        self._retire(node)
        if place is not None:
            self.leave(place)
        self.nodes.discard(node)

    def _offer(self, node: bytes) -> None:
        if node in self._serves and self._children.get(node, 0) < FANOUT:
            self._free.setdefault(node)

    def _retire(self, node: bytes) -> None:
        """Name a node to nobody any more."""
        self._serves.discard(node)
        self._whole.discard(node)
        self._free.pop(node, None)
