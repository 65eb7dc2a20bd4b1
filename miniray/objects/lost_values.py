"""Values of this process whose node is gone: where copies of them are, once that is known.

The daemons of other nodes tell of the copies that they have (``left_copies.py``); one that
nobody has is given up. With the first of a node that is read, all of its values are looked at: what
was lost together is made again together, so that what several were made from is made once.

The other way round, a node may have values of which their owner does not know: see
``UnclaimedResults``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from miniray.messages.protocol import VALUE_SHARED
from miniray.messages.value import is_shared, location_of, node_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from miniray.messages.value import Location, Value
    from miniray.objects.objects import Entry, ObjectTable
    from miniray.objects.shared_memory import SharedMemory
    from miniray.wire.node_link import NodeLink
    from miniray.wire.peers import Peer, PeerTable

#: Objects that are remembered before those that are gone are dropped.
_FEW = 256
#: How often a value is read again whose node says that it lives. Twice, as the first failure may
#: have been long ago, and the second one have come because the node has died.
_TRIES = 2


class LostValues:
    """Lost values of which it is not known yet whether another node has a copy. Thread-safe.

    Args:
        table: The objects of this process.
        link: The daemon.
        give_up: Called with an object id and its value when there is no copy. The object is pending
            if it was read.
    """

    def __init__(
        self, table: ObjectTable, link: NodeLink, give_up: Callable[[bytes, Value], None]
    ) -> None:
        self._table = table
        self._link = link
        self._give_up = give_up
        #: By node: the objects that wait for word of copies of what was there.
        self._missing: dict[bytes, dict[bytes, Value]] = {}
        #: Nodes that are gone, and all of whose copies were told of.
        self._settled: set[bytes] = set()
        #: What could not be read although its node lives, by object id, and how often. Nobody
        #: tells when it was read then; those that are freed are dropped whenever it has doubled.
        self._tried: dict[bytes, tuple[Location, int]] = {}
        self._look_at = _FEW
        #: A node that is gone, and what was there: segment → object id.
        self._were_there: tuple[bytes, dict[int, bytes]] = (b"", {})
        # Reentrant: a garbage collection may run user code, which may drop refs, anywhere.
        self._lock = threading.RLock()

    def wait(self, entry: Entry, value: Value) -> bool:
        """Make an object pending until it is known whether there is a copy of its value.

        If it turns out that its node lives, the object has the same value again, which may be
        read now.

        Returns:
            False if it is known that there is none, or its node lives and this was tried already.
        """
        location = location_of(value)
        node, _, _ = location
        with self._lock:
            if node in self._settled:
                return False
            if self._tried.get(entry.id) == (location, _TRIES):
                # Its node was asked after the last failure but this, and had not died.
                del self._tried[entry.id]
                return False
            missing = self._missing.get(node)
            first = missing is None
            if missing is None:
                missing = self._missing[node] = {}
            missing[entry.id] = value
            self._table.forget_value(entry.id)
        if first:
            self._link.node_request_async(
                "left_copies", (node,), lambda error, gone, _fd: self._told(node, error, gone)
            )
        return True

    def _told(self, node: bytes, error: Any, gone: bool) -> None:
        """Give up what has no copy, or restore what is on a living node, to be read once more."""
        is_gone = error is None and gone
        with self._lock:
            missing = self._missing.pop(node)
            if is_gone:
                self._settled.add(node)
        for id, value in missing.items():
            entry = self._table.entry(id)
            if entry is None or entry.value is not None:
                continue
            if is_gone:
                self._give_up(id, value)
            else:
                self._note_try(id, value)
                self._table.set_value(id, value, entry.contained)
        if is_gone:
            for id, value in self._values_on(node):  # but those that are made again by now
                self._give_up(id, value)

    def _note_try(self, id: bytes, value: Value) -> None:
        with self._lock:
            location = location_of(value)
            before, tries = self._tried.get(id, (None, 0))
            self._tried[id] = (location, tries + 1 if before == location else 1)
            if len(self._tried) > self._look_at:
                known = self._table.entry
                self._tried = {id: what for id, what in self._tried.items() if known(id)}
                self._look_at = max(_FEW, 2 * len(self._tried))

    def on_copies(self, gone: bytes, node: bytes, found: Iterable[tuple[int, int]]) -> None:
        """Use the copies that a node has of values that were on one that is gone.

        Args:
            gone: That node.
            node: The one that has the copies.
            found: Segment there, segment of the copy.
        """
        ids = self._ids_of(gone)
        for there, number in found:
            id = ids.pop(there, None)
            if id is None or not self._move(id, (gone, there), (node, number)):
                self._link.node_notice("free_segment", node, number)

    def _move(self, id: bytes, old: tuple[bytes, int], new: tuple[bytes, int]) -> bool:
        gone, _ = old
        with self._lock:
            missing = self._missing.get(gone, {}).get(id)
            return self._table.move(id, old, new, missing)

    def _ids_of(self, gone: bytes) -> dict[int, bytes]:
        """Return the values that were on a node; looked up once for all nodes with copies."""
        node, ids = self._were_there
        if node != gone:
            with self._lock:
                ids = {_segment(value): id for id, value in self._missing.get(gone, {}).items()}
            ids.update((_segment(value), id) for id, value in self._values_on(gone))
            self._were_there = (gone, ids)
        return ids

    def _values_on(self, node: bytes) -> Iterator[tuple[bytes, Value]]:
        """Yield the objects of this process whose values are on a node, as far as is known."""
        for entry in self._table.snapshot():
            value = entry.value
            if value is None or not is_shared(value) or node_of(value) != node:
                continue
            if self._table.is_owned(entry.id):
                yield entry.id, value


def _segment(value: Value) -> int:
    _, segment, _ = location_of(value)
    return segment


class UnclaimedResults:
    """Results in shared memory that their owner does not know of, or has forgotten: it frees them.

    A worker writes a large result for the caller, who owns it, and then tells the caller where it
    is. If it is killed between the two, nobody else knows of the segment. Its daemon lists what it
    wrote, and the owner frees what it was never told of. A node that was given up and comes back
    lists what it has: notices of what was freed did not reach it. Used in the I/O thread only.
    """

    def __init__(self, table: ObjectTable, shared_memory: SharedMemory, peers: PeerTable) -> None:
        self._table = table
        self._shared_memory = shared_memory
        self._peers = peers
        #: Lists that came before everything that their writer sent was read.
        self._early: dict[bytes, tuple[bytes, Sequence[int]]] = {}

    def on_list(self, writer: bytes, node_id: bytes, segments: Sequence[int]) -> None:
        """Free what is unknown here of what a daemon has for this process.

        Args:
            writer: The process that was killed; empty if it is all.
            node_id: Of the daemon.
            segments: Their numbers there.
        """
        peer = self._peers.known(writer)
        if peer is not None and peer.direct and not peer.lost:
            self._early[writer] = (node_id, segments)
        else:
            self._free(node_id, segments)

    def peer_lost(self, peer: Peer) -> None:
        """Use the list of a process all of whose messages are read."""
        early = self._early.pop(peer.process_id, None)
        if early is not None:
            self._free(*early)

    def _free(self, node_id: bytes, segments: Sequence[int]) -> None:
        values = (entry.value for entry in self._table.snapshot())
        known = {
            _segment(value)
            for value in values
            if value is not None and is_shared(value) and node_of(value) == node_id
        }
        for number in set(segments) - known:
            self._shared_memory.free((VALUE_SHARED, (node_id, number, 0), ()))
