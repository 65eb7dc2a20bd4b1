"""The values of a node: puts together its store, transfers, and what ended owners left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.node.objects.adopted import AdoptedObjects
from miniray.node.objects.memory_service import MemoryService, describe_holders, store_totals
from miniray.node.objects.objects import NodeObjects
from miniray.node.store.segments import Copies, SegmentStore
from miniray.node.store.spill_files import SpillFiles
from miniray.node.store.spilling import Spilling
from miniray.node.transfer.directory import Directory
from miniray.node.transfer.mover_client import MoverClient
from miniray.node.transfer.serving import Serving
from miniray.node.transfer.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.base.clients import ClientServer
    from miniray.node.base.head_client import HeadClient
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.base.template_client import Helper
    from miniray.node.relay.questions import Questions
    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.segments import Key
    from miniray.node.transfer.mover_client import Opened
    from miniray.node.workers.process_names import ProcessNames

_MOVER = "miniray.node.transfer.mover"


class SharedObjects:
    """The parts that hold, move and answer for values.

    ``fork_helper`` runs ``serve(control)`` of a module in a process of the node's own.
    """

    def __init__(
        self,
        node: NodeConfig,
        clients: ClientServer,
        relay: RelayHub,
        questions: Questions,
        names: ProcessNames,
        fork_helper: Callable[[str], Helper],
        head: HeadClient,
    ) -> None:
        node_id, runs, requests = node.node_id, names.runs, questions.requests
        self._push = clients.push
        self.store = store = SegmentStore(
            node.object_store_capacity, SpillFiles(node.spill_folder), clients.push
        )
        copies = Copies(store, relay.knows)
        self.spilling = Spilling(copies, lambda: describe_holders(store, names.of), node_id)
        self._mover = MoverClient(lambda: fork_helper(_MOVER), node.mover, self._open)
        #: Whether large values are on their way to or from this node.
        self.moves_values = self._mover.is_busy
        self._directory = directory = Directory(node_id, store, relay, runs, self._free_here)
        self._transfers = Transfers(
            node_id, store, self.spilling, relay, requests, self._mover, directory
        )
        self._serving = Serving(
            node_id,
            self.spilling,
            requests,
            self._mover,
            directory,
            copies=copies,
            arriving=self._transfers.arriving,
        )
        parts = (directory, copies, clients, runs)
        self._objects = NodeObjects(node_id, self.spilling, relay, self._transfers, *parts)
        self.unclaimed = self._objects.unclaimed
        self.adopted = AdoptedObjects(node_id, clients, relay, directory, runs, head)
        MemoryService(self._objects, self.adopted, clients, questions, names, self._table_sizes)

    def _table_sizes(self) -> dict[str, int]:
        objects = self._objects
        own = {
            "copies": len(objects.copies),
            "directory": len(objects.directory),
            "pulls": len(objects.pulls),
            "requests for copies": objects.pulls.waiting,
        }
        return own | self._transfers.table_sizes() | self._serving.table_sizes()

    def figures(self) -> list[tuple[str, dict[str, str], float]]:
        """Return what is a metric of values on this node, to any thread: (name, labels, value)."""
        spilling, received = self.spilling, self._transfers.received
        segments = list(self.store)
        totals = store_totals(self.store, segments)
        in_memory = sum(segment.in_memory for segment in segments)
        used = {
            "values": totals["used"] - totals["freed"] - totals["writing"],
            "freed": totals["freed"],
            "writing": totals["writing"],
            "pooled": totals["pooled"],
        }
        return [
            *(("object_store_used_bytes", {"state": state}, used[state]) for state in used),
            ("object_store_capacity_bytes", {}, self.store.capacity),
            ("object_store_spilled_bytes", {}, spilling.spilled),
            ("objects", {"place": "memory"}, in_memory),
            ("objects", {"place": "disk"}, len(segments) - in_memory),
            ("object_transfers", {"direction": "in"}, self._transfers.table_sizes()["arriving"]),
            ("object_transfers", {"direction": "out"}, self._mover.table_sizes()["moving away"]),
            ("object_spill_bytes_total", {}, spilling.written),
            ("object_restore_bytes_total", {}, spilling.restored),
            ("object_transfer_bytes_total", {"direction": "in"}, received),
            ("object_room_waiters", {}, spilling.waiting),
        ]

    def _open(self, key: Key, node_id: bytes) -> Opened | None:
        return self._serving.open(key, node_id)

    def _free_here(self, key: Key) -> None:
        self._objects.free_here(key)

    def process_ended(self, process_id: bytes, *, gone: bool, may_look: bool) -> None:
        """Free what a process of this node owned.

        What it has mapped stays if it was killed and is not gone; ``may_look``: it may live on and
        look at that.
        """
        if gone:
            self._objects.process_died(process_id, may_look=may_look)
        else:
            self._objects.pulls.process_died(process_id)
        self.adopted.process_died(process_id)

    def messages_lost(self, node_id: bytes) -> None:
        self._objects.messages_lost(node_id)
        self._ask_owners(node_id)

    def node_died(self, node_id: bytes) -> None:
        self._objects.node_died(node_id)
        self._directory.node_died(node_id)
        self._ask_owners(node_id)
        self.adopted.node_died(node_id)

    def _ask_owners(self, node_id: bytes) -> None:
        """Have owners free what a node wrote for them if the message that tells them was lost."""
        for owner, segments in self._directory.written_on(node_id).items():
            self._push(owner, "unclaimed", (b"", node_id, segments))

    def stop_transfers(self) -> None:
        self._mover.close()

    async def close(self) -> None:
        await self.spilling.close()
        self.store.close()
