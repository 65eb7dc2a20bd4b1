"""Who wants to know when a process ends, here and on other nodes. Pure bookkeeping."""

from __future__ import annotations


class Watches:
    """Watchers are (node id, process id); so are the watched."""

    def __init__(self) -> None:
        #: Watched process of this node → who watches.
        self._here: dict[bytes, set[tuple[bytes, bytes]]] = {}
        #: Node → its processes that processes of this node watch → those.
        self._there: dict[bytes, dict[bytes, set[bytes]]] = {}

    def add_here(self, process_id: bytes, watcher_node: bytes, watcher: bytes) -> None:
        """Somebody watches a process of this node."""
        self._here.setdefault(process_id, set()).add((watcher_node, watcher))

    def add_there(self, node_id: bytes, process_id: bytes, watcher: bytes) -> None:
        """A process of this node watches one of another node."""
        self._there.setdefault(node_id, {}).setdefault(process_id, set()).add(watcher)

    def ended_here(self, process_id: bytes) -> set[tuple[bytes, bytes]]:
        """A process of this node ended: who has to be told."""
        return self._here.pop(process_id, set())

    def ended_there(self, node_id: bytes, process_id: bytes) -> set[bytes]:
        """A process of another node ended: who of this node has to be told."""
        watched = self._there.get(node_id)
        return watched.pop(process_id, set()) if watched is not None else set()

    def out_of_reach(self, node_id: bytes) -> dict[bytes, set[bytes]]:
        """Word from a node may be lost: its watched processes, and who has to be told."""
        return self._there.pop(node_id, {})

    def node_ended(self, node_id: bytes) -> dict[bytes, set[bytes]]:
        """A node is gone: its watched processes, and who of this node has to be told."""
        for watchers in self._here.values():
            watchers.difference_update({w for w in watchers if w[0] == node_id})
        return self._there.pop(node_id, {})
