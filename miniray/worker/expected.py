"""Arguments of tasks that are to be sent here when the running one has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miniray.objects.fetches import Fetches
    from miniray.wire.peers import Peer


class ExpectedArguments:
    """What moves to this node for them."""

    def __init__(self, fetches: Fetches) -> None:
        self._fetches = fetches
        #: By caller and call: numbers under which they were asked for.
        self._ahead: dict[tuple[bytes, int], list[int]] = {}

    def on_ahead(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_AHEAD: what a task will read that is to come, or that it is not to come."""
        _, number, values = message
        self.came(peer, number)
        if values:
            self._ahead[peer.process_id, number] = self._fetches.prefetch(values)

    def came(self, peer: Peer, number: int) -> None:
        """A task is here, and has asked for its arguments itself, or will not be."""
        self._fetches.withdraw(self._ahead.pop((peer.process_id, number), ()))

    def caller_gone(self, peer: Peer) -> None:
        """A caller ended: none of its tasks will come."""
        for process_id, number in list(self._ahead):
            if process_id == peer.process_id:
                self.came(peer, number)
