"""Results in shared memory that their owner does not know of, or has forgotten: it frees them.

A worker writes a large result for the caller, who owns it, and then tells the caller
where it is. If it is killed between the two, nobody else knows of the segment. Its
daemon lists what it wrote, and the owner frees what it was never told of. A node that
was given up and comes back lists what it has: word of what was freed did not reach it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.messages.protocol import VALUE_SHARED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.objects.objects import ObjectTable
    from miniray.objects.shared_memory import SharedMemory
    from miniray.wire.peers import Peer, PeerTable


class UnclaimedResults:
    """What other nodes have for this process. Used in the I/O thread only."""

    def __init__(self, table: ObjectTable, shared_memory: SharedMemory, peers: PeerTable) -> None:
        self._table = table
        self._shared_memory = shared_memory
        self._peers = peers
        #: Lists that came before everything that their writer sent was read.
        self._early: dict[bytes, tuple[bytes, Sequence[int]]] = {}

    def on_list(self, writer: bytes, node_id: bytes, segments: Sequence[int]) -> None:
        """A daemon says what a killed process of its node wrote for this one, or all that it has.

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
        """All that a process had sent is read."""
        early = self._early.pop(peer.process_id, None)
        if early is not None:
            self._free(*early)

    def _free(self, node_id: bytes, segments: Sequence[int]) -> None:
        values = (entry.value for entry in self._table.snapshot())
        known = {
            value[1][1]
            for value in values
            if value is not None and value[0] == VALUE_SHARED and value[1][0] == node_id
        }
        for number in set(segments) - known:
            self._shared_memory.free((VALUE_SHARED, (node_id, number, 0), ()))
