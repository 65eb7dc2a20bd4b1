"""Messages between owners and borrowers of objects.

A borrower that unpickled a ref registers with the owner before anything that
protects the object meanwhile (a call in flight, a value that contains it) may end:
what would end it, an *unborrow* or a *release*, waits until the registrations made
before it are acknowledged.
"""

from __future__ import annotations

import collections
import itertools
import pickle
import threading
from typing import TYPE_CHECKING, Any

from miniray.core import protocol as p
from miniray.core.ids import owner_of
from miniray.exceptions import ObjectLostError, OwnerDiedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.core.objects import Entry, ObjectTable, Value
    from miniray.core.peers import Peer, PeerTable
    from miniray.object_ref import ObjectRef


def error_value(error: BaseException) -> Value:
    """An exception as a value, so that `get` raises it."""
    return (p.VALUE_ERROR, pickle.dumps(error, 5), ())


class Borrowing:
    """Both sides of the borrowing protocol for one process."""

    def __init__(self, table: ObjectTable) -> None:
        self._table = table
        self._peers: PeerTable
        self._numbers = itertools.count(1).__next__
        #: Registrations without an answer yet: number → (owner, its node, what is registered).
        self._open: dict[int, tuple[bytes, bytes, list[tuple[bytes, bytes, bytes]]]] = {}
        #: What must wait for them: (highest number before it, action).
        self._deferred: collections.deque[tuple[int, Callable[[], None]]] = collections.deque()
        self._lock = threading.Lock()
        #: Values asked for and not yet there, by owner.
        self._asked: dict[bytes, set[bytes]] = {}

    def attach(self, peers: PeerTable) -> None:
        """Say how others are reached."""
        self._peers = peers

    # --- borrower's side -----------------------------------------------------------
    def hold(self, contained: Iterable[tuple[bytes, bytes]]) -> list[ObjectRef[Any]]:
        """Refs for what a value contains, registered with their owners."""
        refs = []
        fresh: dict[tuple[bytes, bytes], list[tuple[bytes, bytes, bytes]]] = {}
        table = self._table
        for id, owner_node in contained:
            ref, entry = table.adopt(id, owner_node)
            refs.append(ref)
            if owner_node and not entry.registered and not table.is_owned(id):
                entry.registered = True
                fresh.setdefault((owner_of(id), owner_node), []).append(
                    (id, table.process_id, table.node_id)
                )
        for (owner, node), entries in fresh.items():
            self._register(owner, node, entries)
        return refs

    def _register(
        self, owner: bytes, node: bytes, entries: list[tuple[bytes, bytes, bytes]]
    ) -> None:
        number = self._numbers()
        with self._lock:
            self._open[number] = (owner, node, entries)
        peer = self._peers.get(node, owner)
        peer.send((p.PEER_BORROW, number, entries))
        if peer.lost:
            self._answered(number)

    def report_for(self, peer: Peer, borrowed: Iterable[tuple[bytes, bytes]]) -> None:
        """A call's executor kept refs of its arguments: tell their owners."""
        table = self._table
        for id, owner_node in borrowed:
            if table.is_owned(id):
                self._count(id, peer.process_id, peer.node_id)
            else:
                owner = self._peers.get(owner_node, owner_of(id))
                owner.send((p.PEER_BORROW, 0, [(id, peer.process_id, peer.node_id)]))

    def keep_of(self, refs: Iterable[ObjectRef[Any]]) -> list[tuple[bytes, bytes]]:
        """Executor's side of ``report_for``: which of a call's refs still live here."""
        kept = []
        for ref in refs:
            entry = self._table.entry(ref.binary())
            if entry is None or entry.registered or not entry.owner_node:
                continue
            # One count is the call's own list.
            if entry.local > 1 and not self._table.is_owned(entry.id):
                entry.registered = True
                kept.append((entry.id, entry.owner_node))
        return kept

    def defer(self, action: Callable[[], None]) -> None:
        """Run ``action`` once all registrations made so far are acknowledged."""
        with self._lock:
            if self._open:
                self._deferred.append((max(self._open), action))
                return
        action()

    def unborrow(self, id: bytes, owner_node: bytes) -> None:
        """The last ref of a borrowed object went away."""
        if not owner_node:
            return

        def tell() -> None:
            peer = self._peers.get(owner_node, owner_of(id))
            peer.send((p.PEER_UNBORROW, [id]))

        self.defer(tell)

    def want(self, entries: Iterable[Entry]) -> None:
        """Ask the owners for values; answers arrive as values of the entries."""
        by_owner: dict[tuple[bytes, bytes], list[bytes]] = {}
        for entry in entries:
            if not entry.wanted and not self._table.is_owned(entry.id):
                entry.wanted = True
                by_owner.setdefault((owner_of(entry.id), entry.owner_node), []).append(entry.id)
        for (owner, node), ids in by_owner.items():
            peer = self._peers.get(node, owner)
            self._asked.setdefault(owner, set()).update(ids)
            peer.send((p.PEER_WANT, ids))
            if peer.lost:
                self.owner_lost(owner)

    def on_value(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_VALUE: values that were asked for."""
        asked = self._asked.get(peer.process_id)
        for id, value in message[1]:
            if asked is not None:
                asked.discard(id)
            refs = self.hold(value[2]) if value[2] else None
            self._table.set_value(id, value, refs)

    def on_ack(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_ACK: a registration is counted."""
        self._answered(message[1])

    def _answered(self, number: int) -> None:
        ready = []
        with self._lock:
            self._open.pop(number, None)
            lowest = min(self._open) if self._open else None
            while self._deferred and (lowest is None or self._deferred[0][0] < lowest):
                ready.append(self._deferred.popleft()[1])
        for action in ready:
            action()

    def peer_lost(self, peer: Peer) -> None:
        """A process is gone.

        It may have ended by rule and left what it owned to the daemon of its node, so
        everything open is asked there once more, through the relay, before it is lost.
        """
        owner = peer.process_id
        if not peer.direct:
            self.owner_lost(owner)
            return
        for number, (who, node, entries) in list(self._open.items()):
            if who == owner:
                self._peers.get(node, owner).send((p.PEER_BORROW, number, entries))
        asked = self._asked.get(owner)
        if asked:
            self._peers.get(peer.node_id, owner).send((p.PEER_WANT, list(asked)))

    def owner_lost(self, owner: bytes) -> None:
        """A process is gone: what it owned and was asked for will not come."""
        for number in [number for number, who in list(self._open.items()) if who[0] == owner]:
            self._answered(number)
        for id in self._asked.pop(owner, ()):
            self._table.set_value(id, error_value(OwnerDiedError(id.hex(), owner.hex())))

    # --- owner's side --------------------------------------------------------------
    def on_want(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_WANT: a borrower needs values."""
        ready = []
        for id in message[1]:
            entry = self._table.entry(id)
            if entry is None:
                error = ObjectLostError(id.hex(), "its owner had freed it already")
                ready.append((id, error_value(error)))
            elif self._table.when_ready(entry, lambda entry: self._send_value(peer, entry)):
                ready.append((id, entry.value))  # type: ignore[arg-type]
        if ready:
            peer.send((p.PEER_VALUE, ready))

    @staticmethod
    def _send_value(peer: Peer, entry: Entry) -> None:
        peer.send((p.PEER_VALUE, [(entry.id, entry.value)]))

    def on_borrow(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_BORROW: processes hold objects of this one."""
        _, number, entries = message
        for id, borrower, node in entries:
            self._count(id, borrower, node)
        if number:
            peer.send((p.PEER_ACK, number))

    def _count(self, id: bytes, borrower: bytes, node: bytes) -> None:
        if self._table.borrow(id, borrower):
            # Being connected to it, or its daemon, tells when it ends.
            self._peers.get(node, borrower)

    def on_unborrow(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_UNBORROW: a process holds objects no more."""
        for id in message[1]:
            self._table.unborrow(id, peer.process_id)
