"""Nodes that are being drained: nothing new is placed there, what runs goes on.

Kept over restarts of the head and broken sessions of the node, until the node ends or is put
back into service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miniray.head.directories.clients import ClientDirectory, ProcessExit
    from miniray.head.directories.grants import GrantTable
    from miniray.head.directories.kv import KeyValues
    from miniray.head.directories.leases import TaskLeases
    from miniray.head.directories.nodes import ClusterNode, NodeDirectory

_NAMESPACE = "_draining"

#: A request that waits: (process id, number of the request).
Waiter = tuple[bytes, int]


class Drains:
    """Which nodes are drained, and who waits until nothing runs there any more."""

    def __init__(
        self,
        grants: GrantTable,
        leases: TaskLeases,
        nodes: NodeDirectory,
        clients: ClientDirectory,
        kv: KeyValues,
    ) -> None:
        self._grants = grants
        self._leases = leases
        self._nodes = nodes
        self._clients = clients
        self._kv = kv
        self._waiting: dict[str, list[Waiter]] = {}
        grants.on_ended = self._look
        clients.on_ended.append(self._forget)

    def drain(self, prefix: str) -> str:
        """Place nothing new on a node; returns its id.

        Args:
            prefix: the first hex digits of its id, as many as tell it from others.

        Raises:
            ValueError: no living node, or more than one, has such an id.
        """
        node = self._find(prefix)
        self._kv.put(_NAMESPACE, node.name, b"1")
        self._set(node, draining=True)
        self._leases.recall_from(node.id)
        return node.name

    def undo(self, prefix: str) -> str:
        """Use a node again; as ``drain``."""
        node = self._find(prefix)
        self._kv.delete(_NAMESPACE, node.name)
        self._set(node, draining=False)
        self._look()
        return node.name

    def wait(self, waiter: Waiter, node_id: str) -> None:
        """Answer a request with True when nothing runs on a draining node any more.

        The answer is False if the node is not drained (any more).
        """
        self._waiting.setdefault(node_id, []).append(waiter)
        self._look()

    def joins(self, node: ClusterNode) -> None:
        """A node that was drained in its last session, or under the last head, still is.

        To be called before anything is placed there.
        """
        if self._kv.exists(_NAMESPACE, node.name):
            node.draining = node.pool.closed = True

    def left(self) -> None:
        """A node is gone; it is still drained if it comes back."""
        self._look()

    def _set(self, node: ClusterNode, *, draining: bool) -> None:
        node.draining = draining
        self._grants.drain(node.name, draining)

    def _find(self, prefix: str) -> ClusterNode:
        found = [
            node
            for node in self._nodes
            if node.name.startswith(prefix.lower()) and not node.drivers_only
        ]
        if prefix and len(found) == 1:
            return found[0]
        names = sorted(node.name for node in self._nodes if not node.drivers_only)
        which = "Several nodes have" if prefix and found else "No living node has"
        raise ValueError(
            f"{which} an id that begins with {prefix!r}; the nodes are {', '.join(names)}."
        )

    def _look(self) -> None:
        """Answer those who wait for nodes that are empty, gone or in service again."""
        for node_id in list(self._waiting):
            node = next((node for node in self._nodes if node.name == node_id), None)
            if node is not None and node.draining and self._grants.scheduler.leases_on(node_id):
                continue
            for who, number in self._waiting.pop(node_id):
                self._clients.answer(who, number, node is None or node.draining)

    def _forget(self, process_id: bytes, _how: ProcessExit) -> None:
        for node_id, waiters in list(self._waiting.items()):
            left = [waiter for waiter in waiters if waiter[0] != process_id]
            if left:
                self._waiting[node_id] = left
            else:
                del self._waiting[node_id]
