"""Results of which their owner was not told: it frees them.

A worker writes a large result for the caller, who owns it, and then tells the caller where it is.
If it is killed between the two, or that message is lost with the connection between two nodes,
nobody else knows of the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.messages.protocol import VALUE_SHARED
from miniray.messages.value import place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.objects.objects import ObjectTable
    from miniray.objects.shared_memory import SharedMemory
    from miniray.wire.peers import Peer, PeerTable


class UnclaimedResults:
    """Frees them, when a daemon has listed what was written.

    Used in the I/O thread only.
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
            writer: The process that was killed; empty if messages of the node were lost.
            node_id: Where it was written.
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
        known = {segment for node, segment, _ in map(place_of, values) if node == node_id}
        for number in set(segments) - known:
            location = (node_id, number, self._table.node_id, 0)
            self._shared_memory.free((VALUE_SHARED, location, ()))
