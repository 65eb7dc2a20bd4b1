"""What this daemon keeps for objects, as plain data, for who asks what is held and by whom.

Only reads; every entry comes from the part that owns it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miniray.node.adopted_service import AdoptedService
    from miniray.node.clients import ClientServer
    from miniray.node.objects import NodeObjects
    from miniray.node.segments import Segment
    from miniray.node.serving import Serving
    from miniray.node.transfers import Transfers


class Inventory:
    """Answers the request ``inventory`` of the processes of this node."""

    def __init__(
        self,
        clients: ClientServer,
        objects: NodeObjects,
        transfers: Transfers,
        serving: Serving,
        adopted: AdoptedService,
    ) -> None:
        self._objects = objects
        self._transfers = transfers
        self._serving = serving
        self._adopted = adopted
        clients.quick["inventory"] = lambda _client: (self.listing(), -1)

    def listing(self) -> dict[str, Any]:
        """Everything, as data that every codec takes.

        Returns:
            ``pid`` of this daemon; ``segments``: a dict each; ``adopted``: object id → its
            borrowers, for objects whose owners ended by rule; ``tables``: how many entries each
            other table has.
        """
        return {
            "pid": os.getpid(),
            "segments": [_described(segment) for segment in self._objects.store],
            "adopted": {id: list(held) for id, held in self._adopted.borrowers_of().items()},
            "tables": {
                **self._objects.table_sizes(),
                **self._transfers.table_sizes(),
                **self._serving.table_sizes(),
            },
        }


def _described(segment: Segment) -> dict[str, Any]:
    return {
        "number": segment.number,
        "owner": segment.owner,
        "writer": segment.writer,  # this node itself, if it is a copy of another node's
        "size": segment.size,
        "complete": segment.creator is None,
        "freed": segment.freed,
        "mapped_by": dict(segment.mappers),
    }
