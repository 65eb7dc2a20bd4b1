"""The daemon in place of owners after a planned exit: their messages in, answers out."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from miniray.common.ids import owner_of
from miniray.messages import plain
from miniray.messages import protocol as p
from miniray.messages.value import is_shared, key_of
from miniray.node.relay.relayed import WATCH, Relayed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.messages.value import Value
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.adopted import AdoptedObjects, Freed
    from miniray.node.transfer.directory import Directory

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class AdoptedService:
    """Answers for the objects of ``AdoptedObjects``."""

    node_id: bytes
    clients: ClientServer
    relay: RelayHub
    #: Knows where those in shared memory are, and frees them.
    directory: Directory
    adopted: AdoptedObjects
    #: Whether a process of this node has not ended.
    runs: Callable[[bytes], bool]
    #: Has the head tell when an actor is dead for good.
    await_death: Callable[[bytes], None]

    def __post_init__(self) -> None:
        #: Whether objects of an owner are here.
        self.speaks_for = self.adopted.speaks_for
        #: The nodes of borrowers that are not of this one.
        self._elsewhere: dict[bytes, bytes] = {}
        #: Detached actors whose arguments are kept here.
        self.actors: set[bytes] = set()
        self.clients.requests["adopt"] = self._adopt
        self.clients.notices["keep_arguments"] = self._keep_arguments
        self.clients.notices["for_adopted"] = lambda client, node, sender, body: self._handle(
            node, sender, client.process_id, body
        )

    def process_died(self, process_id: bytes) -> None:
        """Free what only a process that is gone, of any node, held."""
        self._elsewhere.pop(process_id, None)
        self._free(self.adopted.process_died(process_id))

    def node_died(self, node_id: bytes) -> None:
        """Free what only processes of a node that is gone held, its daemon included."""
        for process_id in [process for process, node in self._elsewhere.items() if node == node_id]:
            self.process_died(process_id)

    def _adopt(self, client: Client, legacy: list[Any]) -> tuple[None, int]:
        """Take over what others hold of the objects of a process that makes a planned exit.

        A driver leaves only what detached actors start with.
        """
        for _id, value, _borrowers, _contained in legacy:
            self._adopt_value(value)
        driver = f"the driver (pid {client.pid}) on node {self.node_id.hex()[:8]}"
        partly = driver if client.is_driver else ""
        self._free(self.adopted.add(client.process_id, legacy, partly))
        for _id, _value, borrowers, _contained in legacy:
            for process, node, _count in borrowers:
                self._watch(process, node)
        return None, -1

    def _keep_arguments(
        self, _client: Client, actor_id: bytes, value: Any, inside: tuple[tuple[bytes, bytes], ...]
    ) -> None:
        """Keep the arguments of a detached actor, which outlive the process that made it.

        Args:
            actor_id: The actor, which holds this as a process holds what it has borrowed.
            value: Its arguments.
            inside: Refs that they contain; this daemon is counted as their borrower already.
        """
        self._adopt_value(value)
        held = ((actor_id, self.node_id, 1),)
        self.adopted.add(self.node_id, [(self.node_id + actor_id, value, held, inside)])
        self.actors.add(actor_id)
        self.await_death(actor_id)

    def _adopt_value(self, value: Value) -> None:
        if is_shared(value):
            self.directory.adopt(key_of(value))

    def actor_died(self, actor_id: bytes) -> None:
        """Free the arguments of an actor that will not start again."""
        self.actors.discard(actor_id)
        self._free(self.adopted.process_died(actor_id))

    def _watch(self, process_id: bytes, node: bytes) -> None:
        """Watch a borrower, which may have ended before it was counted."""
        if node != self.node_id:
            self._elsewhere[process_id] = node
            if process_id != node:  # a daemon ends with its node
                self.relay.send(node, Relayed(to=process_id, sender=self.node_id, notice=WATCH))
        elif process_id != self.node_id and not self.runs(process_id):
            self.process_died(process_id)

    def answer(self, node: bytes, sender: bytes, owner: bytes, bodies: Sequence[bytes]) -> None:
        """Handle messages of a process to an owner that is gone."""
        for body in bodies:
            self._handle(node, sender, owner, body)
        if sender != node:  # a process, which stops sending when too much is in flight
            self._send_as(owner, node, sender, (p.PEER_CREDIT, sum(map(len, bodies))))

    def _handle(self, node: bytes, sender: bytes, owner: bytes, body: bytes) -> None:
        """Handle one message; an error is logged, and harms no other message."""
        try:
            self._handle_message(node, sender, owner, plain.loads(body))
        except Exception:
            logger.exception(
                "a message of process %s to the ended process %s was not handled",
                sender.hex(),
                owner.hex(),
            )

    def _handle_message(self, node: bytes, sender: bytes, owner: bytes, message: Any) -> None:
        if message[0] == p.PEER_CREDIT:
            return  # what is sent here is not counted
        answers, freed = self.adopted.handle(sender, message)
        for reply in answers:
            self._send_as(owner, node, sender, reply)
        self._free(freed)
        kind, *fields = message
        if kind == p.PEER_BORROW:
            _number, borrowers = fields
            for _id, process, its_node in borrowers:
                self._watch(process, its_node)

    def _send_as(self, sender: bytes, node: bytes, to: bytes, message: tuple[Any, ...]) -> None:
        """Send a message to any process, in the name of one of this node."""
        body = plain.dumps(message)
        if node == self.node_id:
            client = self.clients.clients.get(to)
            if client is not None:
                client.conn.send((p.NODE_RELAYED, self.node_id, sender, [body]))
        else:
            self.relay.send(node, Relayed(to=to, sender=sender, bodies=[body]))

    def _free(self, freed: list[Freed]) -> None:
        for item in freed:
            if is_shared(item.value):
                self.directory.free(key_of(item.value))
            for id, node in item.borrowed:
                self._send_as(self.node_id, node, owner_of(id), (p.PEER_UNBORROW, [id]))
