"""Messages between processes of this node and of others, and notices of ended processes.

Responsible for routing: to a process of this node, to this daemon in place of an owner that has
exited as planned, or to another daemon. The stream to another daemon is ``relay.py``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.messages import protocol as p
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.objects.adopted import AdoptedObjects
    from miniray.node.relay.relay import RelayHub
    from miniray.node.workers.process_names import ProcessNames
    from miniray.wire.poller import Pace

#: Batches of more messages than this are bulk, for which one wake-up more does not matter.
_FEW = 2


@dataclasses.dataclass(eq=False, repr=False)
class Traffic:
    """Routes all messages for processes.

    ``adopted`` speaks for owners that have exited as planned; ``pace`` is the event loop's: bulk
    makes it rest.
    """

    node_id: bytes
    clients: ClientServer
    relay: RelayHub
    adopted: AdoptedObjects
    names: ProcessNames
    pace: Pace

    def __post_init__(self) -> None:
        #: Watched process of this node → its watchers as (node, process).
        self._watched_here: dict[bytes, set[tuple[bytes, bytes]]] = {}
        self.clients.kinds[p.NODE_RELAY] = self._send
        self.relay.notices[r.MESSAGES] = self._relayed
        self.clients.notices["watch"] = self._watch
        self.relay.notices[r.WATCH] = lambda node, message: self._add_watch(
            message.to, node, message.sender
        )
        self.relay.notices[r.GONE] = self._ended_there

    # --- messages ----------------------------------------------------------------
    def _send(self, client: Client, node_id: bytes, process_id: bytes, bodies: list[bytes]) -> None:
        """Send a client's messages to a process that it has no socket to."""
        if set(map(type, (node_id, process_id, *bodies))) != {bytes}:
            raise ValueError("ids and messages to another process are bytes")
        if node_id == self.node_id:
            self._deliver(node_id, client.process_id, process_id, bodies)
            return
        if len(bodies) > _FEW:
            self.pace.rest()
        message = Relayed(to=process_id, sender=client.process_id, bodies=bodies)
        if not self.relay.send(node_id, message):
            client.conn.send((p.NODE_PUSH, "process_died", (process_id,)))

    def _relayed(self, node_id: bytes, message: Relayed) -> None:
        if message.bodies:
            self._deliver(node_id, message.sender, message.to, message.bodies)

    def _deliver(self, from_node: bytes, sender: bytes, to: bytes, bodies: Sequence[bytes]) -> None:
        if len(bodies) > _FEW:
            self.pace.rest()
        client = self.clients.clients.get(to)
        if self.adopted.speaks_for(to):  # though the process may still run, on its way out
            self.adopted.answer(from_node, sender, to, bodies)
            left = self.adopted.speaks_for(to) or self.names.runs(to) or to == self.node_id
            if not left:  # nobody holds anything of it any more
                self.ended_here(to)
        elif client is not None:
            client.conn.post((p.NODE_RELAYED, from_node, sender, bodies))
        elif to != self.node_id:  # else they answer messages of this daemon itself
            self._tell_gone(to, from_node, sender)

    def push(self, node_id: bytes, to: bytes, topic: str, body: tuple[Any, ...]) -> None:
        if node_id == self.node_id:
            self.clients.push(to, topic, body)
        else:
            self.relay.send(node_id, Relayed(to=to, notice=r.PUSH, items=(topic, body)))

    # --- ends --------------------------------------------------------------------
    def _watch(self, client: Client, process_id: bytes, node_id: bytes) -> None:
        if node_id == self.node_id:
            self._add_watch(process_id, node_id, client.process_id)
            return
        message = Relayed(to=process_id, sender=client.process_id, notice=r.WATCH)
        if not self.relay.send(node_id, message):
            client.conn.send((p.NODE_PUSH, "process_died", (process_id,)))

    def _add_watch(self, process_id: bytes, watcher_node: bytes, watcher: bytes) -> None:
        # Daemons watch processes; processes watch whatever answers under a process's id.
        by_daemon = watcher == watcher_node
        answered = process_id == self.node_id or self.adopted.speaks_for(process_id)
        if self.names.runs(process_id) or (answered and not by_daemon):
            self._watched_here.setdefault(process_id, set()).add((watcher_node, watcher))
        else:
            self._tell_gone(process_id, watcher_node, watcher)

    def _tell_gone(self, process_id: bytes, watcher_node: bytes, watcher: bytes) -> None:
        what = self.names.of_ended(process_id)
        if watcher_node == self.node_id:
            self.clients.push(watcher, "process_died", (process_id, what))
        else:
            gone = Relayed(to=watcher, sender=process_id, notice=r.GONE, items=(what,))
            self.relay.send(watcher_node, gone)

    def ended_here(self, process_id: bytes) -> None:
        for node, watcher in self._watched_here.pop(process_id, ()):
            self._tell_gone(process_id, node, watcher)

    def _ended_there(self, _node_id: bytes, message: Relayed) -> None:
        if message.to == self.node_id:
            self.adopted.process_died(message.sender)
        else:
            self.clients.push(message.to, "process_died", (message.sender, *message.items))

    def node_died(self, node_id: bytes) -> None:
        for watchers in self._watched_here.values():
            watchers.difference_update({each for each in watchers if each[0] == node_id})
        self._tell_all("node_died", node_id)

    def messages_lost(self, node_id: bytes) -> None:
        """Tell the processes of this node that those of another are out of reach, and may live."""
        self._tell_all("node_unreachable", node_id)

    def _tell_all(self, topic: str, node_id: bytes) -> None:
        for process_id in list(self.clients.clients):
            self.clients.push(process_id, topic, (node_id,))
