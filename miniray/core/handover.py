"""Handing over what a process owns when it ends by rule, so that refs of others stay good.

The process gives its node daemon every value that somebody else still holds; the
daemon answers for them under the same owner id (``node/adopted.py``). Results that
are still to come, and that others hold, are waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.config import config
from miniray.core import protocol as p
from miniray.core.gates import Gate
from miniray.core.ids import owner_of

if TYPE_CHECKING:
    from miniray.core.cluster_runtime import ClusterRuntime
    from miniray.core.objects import Entry
    from miniray.core.peers import PeerTable

#: (object id, value, borrowers as (process, node, count), refs inside as (id, owner's node))
Legacy = tuple[
    bytes, Any, "tuple[tuple[bytes, bytes, int], ...]", "tuple[tuple[bytes, bytes], ...]"
]


def hand_over(runtime: ClusterRuntime) -> None:
    """Give the daemon what others still hold of this process's objects."""
    runtime.settle()
    _await_results(runtime)
    legacy = _legacy_of(runtime)
    if not legacy:
        return
    table = runtime.table
    for _, _, _, contained in legacy:
        for id, node in contained:
            if node and not table.is_owned(id):
                # The daemon holds it from now on, as this process did.
                peer = runtime.peers.get(node, owner_of(id))
                peer.send((p.PEER_BORROW, 0, [(id, runtime.node_id, runtime.node_id)]))
    runtime.link.node_request("adopt", (legacy,))


def _await_results(runtime: ClusterRuntime) -> None:
    """Wait for calls of this process whose results others hold: only it can receive them."""
    table = runtime.table
    while True:
        pending = [
            entry
            for entry in table.snapshot()
            if entry.value is None
            and entry.borrowers
            and not table.is_actor(entry.id)
            and table.is_owned(entry.id)
        ]
        if not pending:
            return
        gate = Gate(runtime.loop, len(pending))
        for entry in pending:
            if table.when_ready(entry, gate.arrived):
                gate.arrived()
        if not gate.wait(config().block_after):
            # What is to come may need the CPU that this process was given.
            runtime.link.node_notice("blocked", True)
            gate.wait(None)


def _legacy_of(runtime: ClusterRuntime) -> list[Legacy]:
    """Borrowed values, and those of this process that they contain."""
    table = runtime.table
    kept: dict[bytes, Legacy] = {}
    pending = [entry for entry in table.snapshot() if table.is_owned(entry.id) and entry.borrowers]
    while pending:
        entry = pending.pop()
        if entry.id in kept or entry.value is None:
            continue
        kept[entry.id] = _legacy(entry, runtime.peers)
        for ref in entry.contained or ():
            inner = table.entry(ref.binary())
            if inner is not None and table.is_owned(inner.id):
                pending.append(inner)
    return list(kept.values())


def _legacy(entry: Entry, peers: PeerTable) -> Legacy:
    borrowers = []
    for process, count in (entry.borrowers or {}).items():
        peer = peers.known(process)
        if peer is not None:
            borrowers.append((process, peer.node_id, count))
    contained = tuple((ref.binary(), ref._owner_node) for ref in entry.contained or ())
    return (entry.id, entry.value, tuple(borrowers), contained)
