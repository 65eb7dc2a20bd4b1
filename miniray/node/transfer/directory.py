"""Locations of the large values that processes of this node own: one entry for each.

An entry is made when a value is written on another node, or when another node first requests it.
Daemons that want the value request a node to copy it from, report when they have it, and request
another one when that node fails. When the owner frees the value, or ends, all of them are notified.
A node that dies is taken out of all entries. The key of a value stays the same on all nodes.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.store.segments import segment_of, writer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from miniray.node.base.clients import ClientServer
    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.segments import Key, SegmentStore

_FREED = "its owner has freed it"
#: Copies of one value that a node sends at a time, as long as there are other sources.
FANOUT = 2


class SpreadTree:
    """The nodes that have one value, or are getting it, and which copies from which. Pure.

    Every node serves two others, and more only if there is no other source; nodes that are still
    getting a copy serve too. A node that gave up is named until it has refused a request.
    """

    def __init__(self, source: bytes) -> None:
        self._source = source
        #: Every node that may have the value: all are notified when it is freed.
        self.nodes: set[bytes] = {source}
        #: The source of each node that is copying.
        self._parents: dict[bytes, bytes] = {}
        #: Nodes that may be named to others: the source, and those that have a copy or get one.
        self._serves: dict[bytes, None] = {source: None}
        self._whole: set[bytes] = {source}

    @property
    def is_lost(self) -> bool:
        """Whether no node has the whole value."""
        return not self._whole

    def holder(self, node: bytes, tried: Container[bytes], first: bytes = b"") -> bytes:
        """Name a node that has the value, preferably ``first``, to one that takes it at once.

        Raises:
            LookupError: No node is left that has it.
        """
        self._begin(node)
        found = next((other for other in (first, *self._whole) if self._has(other, tried)), None)
        if found is None:
            raise LookupError
        self.nodes.add(node)
        return found

    def _has(self, node: bytes, tried: Container[bytes]) -> bool:
        return node in self._whole and node not in tried

    def place(self, node: bytes, tried: Container[bytes], *, serves: bool) -> bytes:
        """Choose the node from which another copies, until it has a copy or requests another.

        Args:
            node: The node that wants a copy, or has to go on with one.
            tried: Nodes that were named to it and did not serve it.
            serves: Whether others can reach it.

        Raises:
            LookupError: No node is left that has the value or gets it.
        """
        self._begin(node)
        feeds = [each for each in self._serves if each not in tried and self._can_feed(each, node)]
        copying = collections.Counter(self._parents.values())
        # Of those with as many the first; if there is none, one that not all nodes can reach.
        parent = (
            min(feeds, key=lambda each: max(copying[each], FANOUT - 1))
            if feeds
            else self.holder(node, tried)
        )
        self.nodes.add(node)
        self._parents[node] = parent
        if serves:
            self._serves.setdefault(node)
        return parent

    def _begin(self, node: bytes) -> None:
        """Remove the last place of a node whose request shows that it lost its copy."""
        self._leave(node)
        self._whole.discard(node)

    def _can_feed(self, other: bytes, node: bytes) -> bool:
        """Return whether a node can copy from another: not if that one itself waits for it."""
        above: bytes | None = other
        while above is not None and above not in self._whole:
            if above == node:
                return False
            above = self._parents.get(above)
        return above is not None and other != node

    def _leave(self, node: bytes) -> None:
        if self._parents.pop(node, None) is not None and node not in self._whole:
            self._serves.pop(node, None)

    def failed(self, node: bytes) -> None:
        """Stop naming a node that did not serve, unless no other has the value."""
        if node != self._source and self._whole - {node}:
            self._retire(node)

    def has_copy(self, node: bytes, *, serves: bool) -> None:
        """Count a node that has got the whole value, or came back with it."""
        self.nodes.add(node)
        self._whole.add(node)
        if serves or node == self._source:
            self._serves.setdefault(node)
        self._leave(node)

    def node_died(self, node: bytes) -> None:
        """Forget a node; nodes that copied from it request another."""
        self._leave(node)
        self._retire(node)
        self.nodes.discard(node)

    def _retire(self, node: bytes) -> None:
        self._serves.pop(node, None)
        self._whole.discard(node)


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Entry:
    """A value's owner, and the nodes that have it."""

    #: A process of this node, or its daemon in the place of one that has left.
    owner: bytes
    tree: SpreadTree


@dataclasses.dataclass(eq=False, repr=False)
class Directory:
    """The entries of the values that processes of this node own."""

    node_id: bytes
    #: Has the values that were written here.
    store: SegmentStore
    relay: RelayHub
    clients: ClientServer
    #: Frees a value's segments on this node.
    free_here: Callable[[Key], None]

    def __post_init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        #: The entries of each owner, so that its end costs no walk over all.
        self._by_owner: dict[bytes, set[Key]] = {}
        self.relay.notices[r.WROTE] = lambda node, message: self._wrote(node, *message.items)
        self.relay.notices[r.COPIED] = lambda node, message: self.copied(node, message.items)

    def __len__(self) -> int:
        return len(self._entries)

    # --- holders ------------------------------------------------------------------
    def _wrote(self, node_id: bytes, number: int, owner: bytes) -> None:
        """Enter a value that was written on another node for a process of this one."""
        key = (node_id, number, self.node_id)
        if owner in self.clients.clients and self.relay.knows(node_id):
            self._add(key, owner)
        else:
            self.relay.send(node_id, Relayed(notice=r.FREED, items=key))

    def copied(self, node_id: bytes, keys: Iterable[Key]) -> None:
        """Enter a node that has values now, or is back with them; it drops freed values."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.tree.has_copy(node_id, serves=self._can_serve(node_id))
            else:
                self._notify_freed(node_id, key)

    def ask(self, key: Key, node_id: bytes, tried: Sequence[bytes], *, small: bool) -> bytes:
        """Name a node from which another is to copy a value.

        Args:
            key: The value.
            node_id: The node that wants it.
            tried: Nodes that were named to it, and that did not serve it.
            small: Whether it takes the value at once, so that it needs no place in the tree.

        Raises:
            LookupError: There is none; the text gives the reason.
        """
        entry = self._entries.get(key) or self._enter(key)
        if entry is None:
            raise LookupError(_FREED)
        tree = entry.tree
        for node in tried[-1:]:
            tree.failed(node)
        try:
            if small:
                return tree.holder(node_id, tried, first=self.node_id)
            return tree.place(node_id, tried, serves=self._can_serve(node_id))
        except LookupError:
            lost = f"segment {segment_of(key)} of node {writer_of(key).hex()}"
            raise LookupError(f"no node has {lost} any more") from None

    def _enter(self, key: Key) -> _Entry | None:
        """Make the entry of a value that was written here; None if it is freed."""
        node_id, number, _home = key
        if node_id != self.node_id or not self.store.has_number(number):
            return None
        segment = self.store.get(number)
        if segment.freed or segment.home:
            return None
        return self._add(key, segment.owner)

    def _add(self, key: Key, owner: bytes) -> _Entry:
        entry = self._entries[key] = _Entry(owner, SpreadTree(writer_of(key)))
        self._by_owner.setdefault(owner, set()).add(key)
        return entry

    def _can_serve(self, node_id: bytes) -> bool:
        return node_id == self.node_id or self.relay.can_dial(node_id)

    def lost(self, owner: bytes, node_id: bytes) -> list[int]:
        """Return the segments of a node that have values of an owner which no node has any more."""
        return [
            segment_of(key)
            for key in self._by_owner.get(owner, ())
            if writer_of(key) == node_id and self._entries[key].tree.is_lost
        ]

    def written_on(self, node_id: bytes) -> dict[bytes, list[int]]:
        """Return the segments of a node with values of processes of this one, by owner."""
        found: dict[bytes, list[int]] = {}
        for key, entry in self._entries.items():
            if writer_of(key) == node_id:
                found.setdefault(entry.owner, []).append(segment_of(key))
        return found

    # --- owners -------------------------------------------------------------------
    def adopt(self, key: Key) -> None:
        """Have this daemon own a value of a process of this node."""
        node_id, number, _home = key
        if node_id == self.node_id:
            self.store.change_owner(number, node_id)
        if key in self._entries:
            entry = self._entries[key]
            self._forget_owner(key, entry)
            self._entries[key] = dataclasses.replace(entry, owner=self.node_id)
            self._by_owner.setdefault(self.node_id, set()).add(key)

    def free(self, key: Key) -> None:
        """Free a value of this node's, wherever it is."""
        entry = self._entries.pop(key, None)
        if entry is None:
            self.free_here(key)
            return
        self._forget_owner(key, entry)
        for node_id in entry.tree.nodes:
            self._notify_freed(node_id, key)

    def _forget_owner(self, key: Key, entry: _Entry) -> None:
        keys = self._by_owner[entry.owner]
        keys.discard(key)
        if not keys:
            del self._by_owner[entry.owner]

    def _notify_freed(self, node_id: bytes, key: Key) -> None:
        if node_id == self.node_id:
            self.free_here(key)
        else:
            self.relay.send(node_id, Relayed(notice=r.FREED, items=key))

    def process_died(self, process_id: bytes) -> None:
        """Free what a process owned that other nodes have."""
        for key in list(self._by_owner.get(process_id, ())):
            self.free(key)

    # --- other nodes --------------------------------------------------------------
    def node_died(self, node_id: bytes) -> None:
        """Take a node that is gone out of all entries."""
        for entry in self._entries.values():
            entry.tree.node_died(node_id)
