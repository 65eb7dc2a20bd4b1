"""How one segment spreads from its node to others: as a tree, and who copies from whom.

Pure: the node of the segment decides with it, ``serving.py`` carries it out. Every node serves
at most two others at a time; those that have a copy, or are still getting one, serve too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

#: Copies of one segment that a node sends at a time.
FANOUT = 2


class SpreadTree:
    """The tree of one segment.

    Args:
        source: The node of the segment.
    """

    def __init__(self, source: bytes) -> None:
        self._source = source
        #: Every node that may have a copy: they are told when the segment is freed.
        self.nodes: set[bytes] = set()
        #: From whom each node copies that does at present.
        self._parents: dict[bytes, bytes] = {}
        #: How many copy from each node.
        self._children: dict[bytes, int] = {}
        #: Nodes that may be named to others: the source, and whoever has a copy or gets one.
        self._serves: set[bytes] = {source}
        self._whole: set[bytes] = {source}
        #: Those of them that could serve one more, in the order in which they could.
        self._free: dict[bytes, None] = {source: None}

    def place(self, node: bytes, tried: Container[bytes], *, serves: bool) -> bytes | None:
        """Say from whom a node is to copy; None if it has to wait until others are done.

        It has this place until ``leave``.

        Args:
            node: Who wants a copy, or has to go on with one.
            tried: Nodes that were named to it and did not serve it.
            serves: Whether others can reach it.
        """
        self.leave(node)
        self.nodes.add(node)
        self._whole.discard(node)  # it had a copy once, and has dropped it
        free = (other for other in self._free if other not in tried)
        parent = next((other for other in free if self._can_feed(other, node)), None)
        if parent is None:
            return None
        self._parents[node] = parent
        self._children[parent] = self._children.get(parent, 0) + 1
        if self._children[parent] >= FANOUT:
            del self._free[parent]
        if serves and node not in self._serves:
            self._serves.add(node)
            self._offer(node)
        return parent

    def _can_feed(self, other: bytes, node: bytes) -> bool:
        """Return whether a node can copy from another: not if that one itself waits for it."""
        above: bytes | None = other
        while above is not None and above not in self._whole:
            if above == node:
                return False
            above = self._parents.get(above)
        return other != node

    def leave(self, node: bytes) -> None:
        """Take a node's place away: it is done, or has given up."""
        parent = self._parents.pop(node, None)
        if parent is None:
            return
        if node not in self._whole:
            self._retire(node)
        left = self._children[parent] = self._children[parent] - 1
        if not left:
            del self._children[parent]
        self._offer(parent)

    def failed(self, node: bytes) -> None:
        """Name a node that did not serve to nobody, unless it gets a new copy."""
        if node != self._source:
            self._retire(node)

    def has_copy(self, node: bytes, *, serves: bool) -> None:
        """Count a node that has got the whole segment, or came back with it."""
        self.nodes.add(node)
        self._whole.add(node)
        if serves:
            self._serves.add(node)
            self._offer(node)
        self.leave(node)

    def node_died(self, node: bytes) -> None:
        """Forget a node; who copied from it will come back."""
        self._retire(node)
        self.leave(node)
        self.nodes.discard(node)

    def _offer(self, node: bytes) -> None:
        if node in self._serves and self._children.get(node, 0) < FANOUT:
            self._free.setdefault(node)

    def _retire(self, node: bytes) -> None:
        """Name a node to nobody any more."""
        self._serves.discard(node)
        self._whole.discard(node)
        self._free.pop(node, None)
