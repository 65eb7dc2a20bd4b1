"""Messages between processes of this node and of others, and word of who has ended.

Responsible for whom a message goes to: a client of this node, what is left of an owner
that ended by rule, or another daemon. How it gets to another daemon is ``relay.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.messages import protocol as p
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.watches import Watches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.objects.adopted_service import AdoptedService
    from miniray.node.relay.relay import RelayHub
    from miniray.wire.poller import Pace

#: More messages than this in one batch are bulk, for which a wake-up more or less is nothing.
_FEW = 2


class Traffic:
    """All messages that are for a process."""

    def __init__(
        self,
        node_id: bytes,
        clients: ClientServer,
        relay: RelayHub,
        adopted: AdoptedService,
        runs: Callable[[bytes], bool],
        pace: Pace,
    ) -> None:
        """Register what it answers.

        Args:
            node_id: Of this node.
            clients: The processes of this node that are connected.
            relay: The way to other daemons.
            adopted: What is left of owners that ended by rule.
            runs: Whether a process of this node has not ended.
            pace: The event loop's; bulk makes it rest.
        """
        self._node_id = node_id
        self._clients = clients
        self._relay = relay
        self._adopted = adopted
        self._runs = runs
        self._pace = pace
        self._watches = Watches()
        #: Called with a process of another node that has ended, which this daemon watched.
        self.on_ended_there: Callable[[bytes], None] = adopted.process_died
        relay.on_message = self._relayed
        relay.on_lost = self._node_unreachable
        #: What a process that has ended was; empty if that is not known.
        self.describe_ended: Callable[[bytes], str] = _unknown
        #: Called with a node of which messages were lost.
        self.on_unreachable: Callable[[bytes], object] = _ignore
        clients.notices["watch"] = self._watch
        relay.notices[r.WATCH] = lambda node, message: self._add_watch(
            message.to, node, message.sender
        )
        relay.notices[r.GONE] = self._ended_there
        relay.notices[r.PUSH] = lambda _, message: clients.push(message.to, *message.items)

    # --- messages ----------------------------------------------------------------
    def send(self, client: Client, node_id: bytes, process_id: bytes, bodies: list[bytes]) -> None:
        """A client's messages to a process that it has no socket to."""
        if node_id == self._node_id:
            self._deliver(node_id, client.process_id, process_id, bodies)
            return
        if len(bodies) > _FEW:
            self._pace.rest()
        message = Relayed(to=process_id, sender=client.process_id, bodies=bodies)
        if not self._relay.send(node_id, message):
            client.conn.send((p.NODE_PUSH, "process_died", (process_id,)))

    def _relayed(self, node_id: bytes, message: Relayed) -> None:
        """Messages from a process of another node."""
        if message.bodies:
            self._deliver(node_id, message.sender, message.to, message.bodies)

    def _deliver(self, from_node: bytes, sender: bytes, to: bytes, bodies: Sequence[bytes]) -> None:
        if len(bodies) > _FEW:
            self._pace.rest()
        client = self._clients.clients.get(to)
        if self._adopted.speaks_for(to):  # though the process may still be there, to end
            self._adopted.answer(from_node, sender, to, bodies)
        elif client is not None:
            client.conn.post((p.NODE_RELAYED, from_node, sender, bodies))
        elif to != self._node_id:  # else they answer what the daemon said in its own name
            self._tell_gone(to, from_node, sender)

    def push(self, node_id: bytes, to: bytes, topic: str, body: tuple[Any, ...]) -> None:
        """Tell a process of any node something."""
        if node_id == self._node_id:
            self._clients.push(to, topic, body)
        else:
            self._relay.send(node_id, Relayed(to=to, notice=r.PUSH, items=(topic, body)))

    # --- ends --------------------------------------------------------------------
    def _watch(self, client: Client, process_id: bytes, node_id: bytes) -> None:
        """A client wants to know when a process ends."""
        if node_id == self._node_id:
            self._add_watch(process_id, node_id, client.process_id)
            return
        message = Relayed(to=process_id, sender=client.process_id, notice=r.WATCH)
        if self._relay.send(node_id, message):
            self._watches.add_there(node_id, process_id, client.process_id)
        else:
            client.conn.send((p.NODE_PUSH, "process_died", (process_id,)))

    def _add_watch(self, process_id: bytes, watcher_node: bytes, watcher: bytes) -> None:
        # Daemons watch processes; processes watch whoever answers under a process's id.
        by_daemon = watcher == watcher_node
        answered = process_id == self._node_id or self._adopted.speaks_for(process_id)
        if self._runs(process_id) or (answered and not by_daemon):
            self._watches.add_here(process_id, watcher_node, watcher)
        else:
            self._tell_gone(process_id, watcher_node, watcher)

    def _tell_gone(self, process_id: bytes, watcher_node: bytes, watcher: bytes) -> None:
        what = self.describe_ended(process_id)
        if watcher_node == self._node_id:
            self._clients.push(watcher, "process_died", (process_id, what))
        else:
            gone = Relayed(to=watcher, sender=process_id, notice=r.GONE, items=(what,))
            self._relay.send(watcher_node, gone)

    def ended_here(self, process_id: bytes) -> None:
        """A process of this node has ended: tell who watches it."""
        for node, watcher in self._watches.ended_here(process_id):
            self._tell_gone(process_id, node, watcher)

    def _ended_there(self, node_id: bytes, message: Relayed) -> None:
        if message.to == self._node_id:
            self.on_ended_there(message.sender)
        for watcher in self._watches.ended_there(node_id, message.sender) | {message.to}:
            self._clients.push(watcher, "process_died", (message.sender, *message.items))

    def node_died(self, node_id: bytes) -> None:
        """A node is gone, and all its processes."""
        self._tell_watchers("process_died", self._watches.node_ended(node_id))

    def _node_unreachable(self, node_id: bytes) -> None:
        """Messages to or from a node were given up; its processes may live."""
        self._tell_watchers("process_unreachable", self._watches.out_of_reach(node_id))
        self.on_unreachable(node_id)

    def _tell_watchers(self, topic: str, watched: dict[bytes, set[bytes]]) -> None:
        for process_id, watchers in watched.items():
            for watcher in watchers:
                self._clients.push(watcher, topic, (process_id,))


def _unknown(_process_id: bytes) -> str:
    return ""


def _ignore(_node_id: bytes) -> None:
    """Nobody else wants to know."""
