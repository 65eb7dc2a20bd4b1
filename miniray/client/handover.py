"""Handing over what a process owns at its planned exit, so that refs of others stay valid.

The process gives its node daemon every value that another process holds; the daemon answers for
them under the same owner id (``node/objects/adopted.py``), and gets the messages that the owner
still receives. Before that, the process waits for calls that use its values, and for results that
others hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.common.object_ref import owner_of
from miniray.messages import plain
from miniray.messages import protocol as p
from miniray.messages.value import is_shared
from miniray.wire.io_loop import Gate

if TYPE_CHECKING:
    from miniray.calls.call import Call
    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.objects.objects import Entry
    from miniray.wire.peers import Peer, PeerTable

#: (object id, value, borrowers as (process, node, count), refs inside as (id, owner's node))
Legacy = tuple[
    bytes, Any, "tuple[tuple[bytes, bytes, int], ...]", "tuple[tuple[bytes, bytes], ...]"
]

#: Messages of others to an owner.
_TO_OWNERS = (p.PEER_BORROW, p.PEER_UNBORROW, p.PEER_WANT)


def hand_over(runtime: ClusterRuntime) -> bool:
    """Give the daemon this process's objects that others still hold; False if none."""
    runtime.refs.settle()
    while True:
        _await_calls(runtime)
        _await_results(runtime)
        departure = _Departure(runtime)
        runtime.loop.call_soon(departure.leave)
        departure.over.wait(None)
        if departure.left is not None:
            return departure.left


def leave_to_actors(runtime: ClusterRuntime) -> None:
    """Give the daemon this process's objects that it holds for detached actors.

    For a driver: its job is over, but those live on. It does not wait for other processes.
    """
    departure = _Departure(runtime, holder=runtime.facts.node_id)
    runtime.loop.call_soon(departure.leave)
    departure.over.wait(config().stop_grace)


class _Departure:
    """The handover after which the daemon answers in the place of this process."""

    def __init__(self, runtime: ClusterRuntime, holder: bytes | None = None) -> None:
        """Leave the objects that any holder has, or those of one."""
        self._runtime = runtime
        self._holder = holder
        #: Opens when it is over; ``left`` has the outcome.
        self.over = Gate(runtime.loop)
        #: Whether anything was left to the daemon; None if a result must come first.
        self.left: bool | None = None

    def leave(self) -> None:
        """Hand over; called where messages are handled: each comes before this or is passed on."""
        try:
            held = _held_by_others(self._runtime, self._holder)
            if any(entry.value is None for entry in held):
                self.over.arrived()  # another process has just borrowed a result
                return
            self.left = bool(held)
            if held:
                self._pass_on(held)
            else:
                self.over.arrived()
        except BaseException:
            self.left = False  # another try would fail, too
            self.over.arrived()
            raise

    def _pass_on(self, held: list[Entry]) -> None:
        runtime = self._runtime
        runtime.peers.on_kind.update(dict.fromkeys(_TO_OWNERS, self._refer))
        for entry in held:
            runtime.table.pin(entry.id)  # it is the daemon's to free
        legacy = [_legacy(entry, runtime.peers) for entry in held]
        self._keep_contained(legacy)
        runtime.link.node_request_async("adopt", (legacy,), lambda *_: self.over.arrived())

    def _refer(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """Pass a message on to the daemon, which answers in this process's place."""
        body = plain.dumps(message)
        self._runtime.link.node_notice("for_adopted", peer.node_id, peer.process_id, body)

    def _keep_contained(self, legacy: list[Legacy]) -> None:
        """Register the daemon as a borrower of the refs inside the values."""
        runtime = self._runtime
        for _, _, _, contained in legacy:
            for id, node in contained:
                if node and not runtime.table.is_owned(id):
                    peer = runtime.peers.get(node, owner_of(id))
                    peer.send(
                        (p.PEER_BORROW, 0, [(id, runtime.facts.node_id, runtime.facts.node_id)])
                    )


def _await_calls(runtime: ClusterRuntime) -> None:
    """Wait for calls that were not sent yet, or that use values of this process."""
    table = runtime.table

    def lends(call: Call) -> bool:
        if call.peer is None or is_shared(call.arguments):
            return True
        ids = [pin.binary() for pin in call.pins or ()]
        return any(table.is_owned(id) and not table.is_actor(id) for id in ids)

    gate = Gate(runtime.loop)
    if not runtime.call_table.when_ended(lends, gate.arrived):
        await_others(runtime, gate)


def _await_results(runtime: ClusterRuntime) -> None:
    """Wait for calls of this process whose results others hold: only it can receive them."""
    while True:
        pending = [entry for entry in _held_by_others(runtime) if entry.value is None]
        if not pending:
            return
        gate = Gate(runtime.loop, len(pending))
        for entry in pending:
            if runtime.table.when_ready(entry, gate.arrived):
                gate.arrived()
        await_others(runtime, gate)


def await_others(runtime: ClusterRuntime, gate: Gate) -> None:
    """Wait at a planned exit for what other processes do; each does it in the end, or dies.

    It may need what this process has: the CPU is given back soon, as in any wait, and later on
    the devices too, which others find used until this process is gone.
    """
    if not gate.wait(config().block_after):
        runtime.link.node_notice("blocked", True)
        if not gate.wait(config().reserve_after):
            runtime.link.node_notice("let_go")
            gate.wait(None)


def _held_by_others(runtime: ClusterRuntime, holder: bytes | None = None) -> list[Entry]:
    """Return objects of this process that others hold, and those that these contain."""
    table = runtime.table
    found: dict[bytes, Entry] = {}
    more = [
        entry
        for entry in table.snapshot()
        if entry.borrowers and (holder is None or holder in entry.borrowers)
    ]
    while more:
        entry = more.pop()
        if entry.id in found or not table.is_owned(entry.id) or table.is_actor(entry.id):
            continue
        found[entry.id] = entry
        inside = [table.entry(ref.binary()) for ref in entry.contained or ()]
        more.extend(entry for entry in inside if entry is not None)
    return list(found.values())


def _legacy(entry: Entry, peers: PeerTable) -> Legacy:
    borrowers = []
    for process, count in (entry.borrowers or {}).items():
        peer = peers.known(process)
        if peer is not None:
            borrowers.append((process, peer.node_id, count))
    contained = tuple((ref.binary(), ref._owner_node) for ref in entry.contained or ())
    return (entry.id, entry.value, tuple(borrowers), contained)
