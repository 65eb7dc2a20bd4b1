"""Values whose node is gone and of which copies are left: their owners hear where.

The daemon of a copy tells the daemon of the owner, which answers for the value until the owner
has taken it over, and for good if the owner has ended by rule. An owner that misses a value can
wait until every daemon has told what it has.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from miniray.node.base.question import Question
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.objects.objects import Left, NodeObjects
    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.adopted import AdoptedObjects


class LeftCopies:
    """Tells owners of copies here, and gathers what others tell the owners of this node."""

    def __init__(
        self,
        node_id: bytes,
        clients: ClientServer,
        relay: RelayHub,
        objects: NodeObjects,
        adopted: AdoptedObjects,
        runs: Callable[[bytes], bool],
    ) -> None:
        """Register what it answers.

        Args:
            node_id: Of this node.
            clients: The processes of this node.
            relay: The way to other daemons.
            objects: The store.
            adopted: What owners that ended by rule left to this daemon.
            runs: Whether a process of this node has not ended.
        """
        self._node_id = node_id
        self._clients = clients
        self._relay = relay
        self._objects = objects
        self._adopted = adopted
        self._runs = runs
        #: Nodes that are gone, and of which every node has told what it has.
        self._settled: set[bytes] = set()
        #: Who asked about nodes of which the head has not told here that they are gone.
        self._asked: dict[bytes, list[tuple[bytes, int]]] = {}
        self._numbers = itertools.count(1).__next__
        self._questions: dict[int, Question] = {}
        clients.requests["left_copies"] = self._settle
        relay.notices[r.LEFT] = lambda node, message: self._hear(
            node, message.items[0], message.items[1:]
        )
        relay.notices[r.OWNED] = lambda node, message: self._owned(node, *message.items)
        relay.notices[r.LEFT_ASKED] = lambda node, message: self._answer(node, *message.items)
        relay.notices[r.LEFT_TOLD] = lambda node, message: self._answered(node, message.items[0])

    # --- where the copies are ----------------------------------------------------------
    def _tell(self, gone: bytes, left: dict[bytes, list[Left]]) -> None:
        for owner_node, found in left.items():
            if owner_node == self._node_id:
                self._hear(self._node_id, gone, found)
            else:
                self._relay.send(owner_node, Relayed(notice=r.LEFT, items=(gone, *found)))

    def _owned(self, owner_node: bytes, number: int, owner: bytes) -> None:
        self._objects.give(number, owner, owner_node)

    def _answer(self, node_id: bytes, number: int, gone: bytes) -> None:
        """Answer when all copies that a node left here have been told to their owners.

        If that node is this one, the answer says that it lives.
        """
        if not self._relay.knows(gone):
            self._relay.send(node_id, Relayed(notice=r.LEFT_TOLD, items=(number,)))
        else:  # that it is gone has not come here yet
            self._asked.setdefault(gone, []).append((node_id, number))

    def node_died(self, node_id: bytes) -> None:
        """Handle the death of a node: tell the owners of copies of its values that are here."""
        self._tell(node_id, self._objects.node_died(node_id))
        for question in self._questions.values():
            question.ended(node_id)
        for asker, number in self._asked.pop(node_id, ()):
            self._answer(asker, number, node_id)

    # --- where the owners are ----------------------------------------------------------
    def _hear(self, node_id: bytes, gone: bytes, left: Iterable[Left]) -> None:
        """Take over copies on a node of values that are owned here, or free them."""
        owned: dict[bytes, list[tuple[int, int]]] = {}
        for there, number, owner in left:
            if self._adopted.moved((gone, there), (node_id, number)):
                continue  # this daemon is the owner already
            if not self._runs(owner):
                self._objects.free(node_id, number)
                continue
            if node_id == self._node_id:
                self._objects.give(number, owner, node_id)
            else:
                self._relay.send(node_id, Relayed(notice=r.OWNED, items=(number, owner)))
            owned.setdefault(owner, []).append((there, number))
        for owner, found in owned.items():
            self._clients.push(owner, "left_copies", (gone, node_id, found))

    async def _settle(self, _client: Client, gone: bytes) -> tuple[bool, int]:
        """Answer a process when it knows of all copies of what it owned on a node."""
        return await self.settle(gone), -1

    async def settle(self, gone: bytes) -> bool:
        """Wait until owners of this node were told of all copies of what a node had.

        Returns:
            Whether that node is gone; if not, there is nothing to be told.
        """
        if gone == self._node_id:
            return False
        if self._relay.knows(gone):
            # Who could not read there may have heard of its death before this node: ask itself.
            await self._ask([gone], gone)
            if self._relay.knows(gone):
                return False
        if gone not in self._settled:
            await self._ask(self._relay.nodes(), gone)
            self._settled.add(gone)
        return True

    async def _ask(self, nodes: Iterable[bytes], gone: bytes) -> None:
        """Wait until nodes have told what another one left there, or are out of reach."""
        number = self._numbers()
        question = self._questions[number] = Question(nodes)
        asked = Relayed(notice=r.LEFT_ASKED, items=(number, gone))
        try:
            for node in nodes:
                if not self._relay.send(node, asked):
                    question.ended(node)
            await question.wait()
        finally:
            del self._questions[number]

    def _answered(self, node_id: bytes, number: int) -> None:
        question = self._questions.get(number)
        if question is not None:
            question.answered(node_id, None)

    def node_unreachable(self, node_id: bytes) -> None:
        """Wait no more for a node to or from which messages were lost."""
        for question in self._questions.values():
            question.ended(node_id)
