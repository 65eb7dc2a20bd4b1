"""Objects of owners after a planned exit: the daemon answers under the old owner's id.

Values stay where they are; one is freed when its last borrower is gone. The arguments of a detached
actor are kept in the same way, under this daemon's own id, until the actor is dead for good.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from miniray.common.object_ref import owner_of
from miniray.exceptions import ObjectLostError, OwnerDiedError
from miniray.messages import plain
from miniray.messages import protocol as p
from miniray.messages.value import error_value, is_shared, key_of, payload_of
from miniray.node.relay.relayed import WATCH, Relayed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.messages.value import Value
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.base.head_client import HeadClient
    from miniray.node.relay.relay import RelayHub
    from miniray.node.transfer.directory import Directory

logger = logging.getLogger(__name__)

#: Borrows of one owner's objects that are remembered, to recognise repetitions, which come soon.
_REMEMBERED = 10_000


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Adopted:
    """A value whose owner has left."""

    value: Value
    #: How often each process has borrowed it.
    borrowers: dict[bytes, int]
    #: Refs inside, of the same owner or of others: (object id, owner's node).
    contained: tuple[tuple[bytes, bytes], ...]
    #: Adopted values of the same owner that contain this one.
    holders: int = 0


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Owner:
    """An owner that has left objects here."""

    #: How many are still here.
    objects: int = 0
    #: Its description, if it has left only a part of what others held.
    partly: str = ""
    #: The latest borrows that were counted, as (sender, number), oldest first.
    registered: dict[tuple[bytes, int], None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False, repr=False)
class AdoptedObjects:
    """All objects that this daemon answers for. It gets messages to their owners, and answers."""

    #: The id under which the daemon borrows what values contain from other owners.
    node_id: bytes
    clients: ClientServer
    relay: RelayHub
    #: Has the nodes of those in shared memory, and frees them.
    directory: Directory
    head: HeadClient

    def __post_init__(self) -> None:
        self._objects: dict[bytes, _Adopted] = {}
        self._owners: dict[bytes, _Owner] = {}
        #: What each borrower holds, so that its end costs no walk over all.
        self._held_by: dict[bytes, set[bytes]] = {}
        #: The nodes of borrowers on other nodes.
        self._elsewhere: dict[bytes, bytes] = {}
        #: Detached actors whose arguments are kept here.
        self.actors: set[bytes] = set()
        self.clients.requests["adopt"] = self._adopt
        self.clients.notices["keep_arguments"] = self._keep_arguments
        self.clients.notices["for_adopted"] = lambda client, node, sender, body: self._handle(
            node, sender, client.process_id, body
        )

    def speaks_for(self, owner: bytes) -> bool:
        """Return whether objects of this owner are here."""
        return owner in self._owners

    def held(self) -> list[tuple[bytes, Value, list[bytes], int]]:
        """Return each object's id, value, borrowers, and how many others here contain it."""
        return [
            (id, each.value, list(each.borrowers), each.holders)
            for id, each in self._objects.items()
        ]

    # --- what is taken over --------------------------------------------------------
    def _adopt(self, client: Client, legacy: list[Any]) -> tuple[None, int]:
        """Take over what others hold of the objects of a process that makes a planned exit.

        A driver leaves only what detached actors start with.
        """
        driver = f"the driver (pid {client.pid}) on node {self.node_id.hex()[:8]}"
        self._add(client.process_id, legacy, driver if client.is_driver else "")
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
        held = ((actor_id, self.node_id, 1),)
        self._add(self.node_id, [(self.node_id + actor_id, value, held, inside)])
        self.actors.add(actor_id)
        self.await_death(actor_id)

    def await_death(self, actor_id: bytes) -> None:
        """Subscribe to an actor's death for good at the head."""
        self.head.notify("subscribe_actor", actor_id)

    def _add(self, owner: bytes, legacy: Sequence[Any], partly: str = "") -> None:
        """Take over objects; ``partly``: what their owner was, if others hold more of it."""
        for id, value, borrowers, contained in legacy:
            if is_shared(value):
                self.directory.adopt(key_of(value))
            counts = {process: count for process, _node, count in borrowers}
            self._objects[id] = _Adopted(value, counts, contained)
            for process in counts:
                self._held_by.setdefault(process, set()).add(id)
            owned = self._owners.setdefault(owner, _Owner())
            owned.objects += 1
            owned.partly = partly
        for _id, _value, _borrowers, contained in legacy:
            for inner, _node in contained:
                if owner_of(inner) == owner and inner in self._objects:
                    self._objects[inner].holders += 1
        for id, *_ in legacy:
            self._free_if_unused(id)

    def _watch(self, process_id: bytes, node: bytes) -> None:
        """Watch a borrower, which may have ended before it was counted."""
        if node != self.node_id:
            self._elsewhere[process_id] = node
            if process_id != node:  # a daemon ends with its node
                self.relay.send(node, Relayed(to=process_id, sender=self.node_id, notice=WATCH))
        elif process_id != self.node_id and process_id not in self.clients.clients:
            self.process_died(process_id)

    # --- messages to owners ----------------------------------------------------------
    def answer(self, node: bytes, sender: bytes, owner: bytes, bodies: Sequence[bytes]) -> None:
        """Handle messages of a process to an owner that is gone."""
        for body in bodies:
            self._handle(node, sender, owner, body)
        if sender != node:  # a process, which stops sending when too much is in flight
            self._send_as(owner, node, sender, (p.PEER_CREDIT, sum(map(len, bodies))))

    def _handle(self, node: bytes, sender: bytes, owner: bytes, body: bytes) -> None:
        """Handle one message; log an error, and go on with the next."""
        try:
            reply = self._take(sender, owner, plain.loads(body))
        except Exception:
            logger.exception(
                "a message of process %s to the ended process %s was not handled",
                sender.hex(),
                owner.hex(),
            )
        else:
            if reply is not None:
                self._send_as(owner, node, sender, reply)

    def _take(self, sender: bytes, owner: bytes, message: tuple[Any, ...]) -> Any:
        """Carry out a message to an owner; return the answer, None if there is none."""
        kind, first, *rest = message
        if kind == p.PEER_WANT:
            return p.PEER_VALUE, [self._answer_to(*wanted) for wanted in first]
        if kind == p.PEER_BORROW:
            (borrowers,) = rest
            self._borrowed(sender, owner, first, borrowers)
            return (p.PEER_ACK, first) if first else None
        if kind == p.PEER_UNBORROW:
            for id in first:
                self._count(id, sender, -1)
                self._free_if_unused(id)
        return None

    def _borrowed(
        self, sender: bytes, owner: bytes, number: int, borrowers: Sequence[tuple[bytes, ...]]
    ) -> None:
        # What reached the owner in its last moments may come from there and again from its
        # sender, which has not yet received that it is counted.
        fresh = self._is_new(owner, sender, number)
        for id, process, _node in borrowers if fresh else ():
            if owner not in self._owners:
                break  # all objects of this owner are gone from here
            self._count(id, process, 1)
            # It may have made up for a release that came first, and there is no other holder.
            self._free_if_unused(id)
        for _id, process, its_node in borrowers:
            self._watch(process, its_node)

    def _is_new(self, owner: bytes, sender: bytes, number: int) -> bool:
        owned = self._owners.get(owner)
        if owned is None or not number:
            return True
        if (sender, number) in owned.registered:
            return False
        owned.registered[sender, number] = None
        if len(owned.registered) > _REMEMBERED:
            del owned.registered[next(iter(owned.registered))]
        return True

    def _answer_to(self, id: bytes, gone: Any) -> tuple[bytes, Value]:
        """Return the answer to a process that found no value of an object, or one that is gone."""
        value = self._value(id)
        if is_shared(value) and payload_of(value) == gone:
            why = "its owner, which could have made it again, has ended"
            return id, error_value(ObjectLostError(id.hex(), why))
        return id, value  # it was made again meanwhile

    def _value(self, id: bytes) -> Value:
        adopted = self._objects.get(id)
        if adopted is not None:
            return adopted.value
        owned = self._owners.get(owner_of(id))
        if owned is not None and owned.partly:
            return error_value(OwnerDiedError(id.hex(), owned.partly))
        why = "its owner had freed it, or ended before it was there"
        return error_value(ObjectLostError(id.hex(), why))

    def _send_as(self, sender: bytes, node: bytes, to: bytes, message: tuple[Any, ...]) -> None:
        """Send a message to any process, in the name of one of this node."""
        body = plain.dumps(message)
        if node == self.node_id:
            client = self.clients.clients.get(to)
            if client is not None:
                client.conn.send((p.NODE_RELAYED, self.node_id, sender, [body]))
        else:
            self.relay.send(node, Relayed(to=to, sender=sender, bodies=[body]))

    # --- holders -----------------------------------------------------------------------
    def process_died(self, process_id: bytes) -> None:
        """Free objects that only a process that is gone, of any node, held."""
        self._elsewhere.pop(process_id, None)
        for id in list(self._held_by.get(process_id, ())):
            adopted = self._objects.get(id)
            if adopted is None:
                continue
            borrowers = adopted.borrowers
            self._count(id, process_id, -borrowers.get(process_id, 0))
            if not any(count > 0 for count in borrowers.values()):
                # It has no holder: these released it before their borrow was reported.
                for process, count in list(borrowers.items()):
                    self._count(id, process, -count)
            self._free_if_unused(id)

    def node_died(self, node_id: bytes) -> None:
        """Free objects that only processes of a node that is gone held, its daemon included."""
        for process_id in [process for process, node in self._elsewhere.items() if node == node_id]:
            self.process_died(process_id)

    def actor_died(self, actor_id: bytes) -> None:
        """Free the arguments of an actor that will not start again."""
        self.actors.discard(actor_id)
        self.process_died(actor_id)

    def _count(self, id: bytes, process: bytes, step: int) -> None:
        adopted = self._objects.get(id)
        if adopted is None:
            return
        count = adopted.borrowers.get(process, 0) + step
        held = self._held_by.setdefault(process, set())
        if count:
            adopted.borrowers[process] = count
            held.add(id)
        else:
            adopted.borrowers.pop(process, None)
            held.discard(id)
        if not held:
            del self._held_by[process]

    def _free_if_unused(self, id: bytes) -> None:
        """Free an object, and the objects that only it held: a loop, for chains can be long."""
        more = [id]
        while more:
            id = more.pop()
            adopted = self._objects.get(id)
            if adopted is None or adopted.borrowers or adopted.holders:
                continue
            del self._objects[id]
            owner = owner_of(id)
            self._owners[owner].objects -= 1
            if not self._owners[owner].objects:
                del self._owners[owner]
            if is_shared(adopted.value):
                self.directory.free(key_of(adopted.value))
            for inner, node in adopted.contained:
                if inner not in self._objects:
                    if node:  # of another owner, from which the value had borrowed it
                        unborrow = (p.PEER_UNBORROW, [inner])
                        self._send_as(self.node_id, node, owner_of(inner), unborrow)
                    continue
                if owner_of(inner) == owner:
                    self._objects[inner].holders -= 1
                else:
                    self._count(inner, self.node_id, -1)
                more.append(inner)
