"""Messages between owners and borrowers of objects.

A borrower that unpickled a ref registers with the owner before anything that
protects the object meanwhile (a call in flight, a value that contains it) may end:
what would end it, an *unborrow* or a *release*, waits until the registrations made
before it are acknowledged.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from typing import TYPE_CHECKING, Any

from miniray.common.object_ref import owner_of
from miniray.exceptions import ObjectLostError, OwnerDiedError
from miniray.messages import protocol as p
from miniray.messages.value import error_value, payload_of, refs_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.common.object_ref import ObjectRef
    from miniray.messages.value import Value
    from miniray.objects.objects import Entry, ObjectTable
    from miniray.wire.peers import Peer, PeerTable

#: Registrations, by owner and its node: (object id, borrower, its node).
_Holds = dict[tuple[bytes, bytes], list[tuple[bytes, bytes, bytes]]]

#: Bytes of values after which a message is full and another one begins.
_VALUES_SIZE = 1 << 20


@dataclasses.dataclass(eq=False, repr=False)
class Borrowing:
    """Both sides of the borrowing protocol for one process. Thread-safe."""

    #: The objects of this process.
    table: ObjectTable
    #: The processes that it talks to.
    peers: PeerTable
    #: Owner's side: makes a lost value, given by the object's id and the value's payload, once
    #: more, or returns why that cannot be done.
    recover: Callable[[bytes, Any], str | None]

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1).__next__
        #: Registrations without an answer yet: number → (owner, its node, what is registered).
        #: The first of an ordinary dictionary takes as long to find as many were removed before it.
        self._open: collections.OrderedDict[
            int, tuple[bytes, bytes, list[tuple[bytes, bytes, bytes]]]
        ] = collections.OrderedDict()
        #: What must wait for them: (highest number before it, action).
        self._deferred: collections.deque[tuple[int, Callable[[], object]]] = collections.deque()
        # Reentrant: a garbage collection may run user code, which may use refs, anywhere.
        self._lock = threading.RLock()
        #: Owners whose daemon got the requests again after they ended.
        self._asked_again: set[bytes] = set()
        #: Values requested and not yet received, by owner.
        self._asked: dict[bytes, set[bytes]] = {}

    # --- borrower's side -----------------------------------------------------------
    def hold(self, contained: Iterable[tuple[bytes, bytes]]) -> list[ObjectRef[Any]]:
        """Make refs for what a value contains, and register them with their owners."""
        refs = []
        fresh: list[Entry] = []
        table = self.table
        for id, owner_node in contained:
            ref, entry = table.adopt(id, owner_node)
            refs.append(ref)
            if owner_node and not entry.registered and not table.is_owned(id):
                fresh.append(entry)
        if fresh:
            self._register_own(fresh)
        return refs

    def _register_own(self, entries: list[Entry]) -> None:
        holds: _Holds = {}
        own = (self.table.process_id, self.table.node_id)
        # One section: a thread that sees an entry registered also finds what to wait for.
        with self._lock:
            for entry in entries:
                if not entry.registered:  # another thread may have been quicker
                    entry.registered = True
                    where = (owner_of(entry.id), entry.owner_node)
                    holds.setdefault(where, []).append((entry.id, *own))
            numbers = [self._begin(*where, held) for where, held in holds.items()]
        self._send_all(numbers, holds)

    def _begin(self, owner: bytes, node: bytes, held: list[tuple[bytes, bytes, bytes]]) -> int:
        """Number a registration that later releases have to wait for. Needs the lock."""
        number = self._numbers()
        self._open[number] = (owner, node, held)
        return number

    def _send_all(self, numbers: list[int], holds: _Holds) -> None:
        for number, ((owner, node), held) in zip(numbers, holds.items(), strict=True):
            self.peers.get(node, owner).send((p.PEER_BORROW, number, held))

    def report_for(self, peer: Peer, borrowed: Iterable[tuple[bytes, bytes]]) -> None:
        """Register the refs that a call's executor kept of its arguments with their owners.

        What protects them here (this process's own borrow, or the call that it runs itself)
        may end once that is acknowledged.
        """
        holds: _Holds = {}
        for id, owner_node in borrowed:
            if self.table.is_owned(id):
                self._count(id, peer.process_id, peer.node_id)
            else:
                where = (owner_of(id), owner_node)
                holds.setdefault(where, []).append((id, peer.process_id, peer.node_id))
        with self._lock:
            numbers = [self._begin(*where, held) for where, held in holds.items()]
        self._send_all(numbers, holds)

    def keep_of(self, refs: Iterable[ObjectRef[Any]]) -> list[tuple[bytes, bytes]]:
        """Return, for ``report_for``, which of a call's refs still live here.

        Those that are registered already may not be counted yet: ``defer`` the reply.
        """
        kept = []
        for ref in refs:
            entry = self.table.entry(ref.binary())
            if entry is None or entry.registered or not entry.owner_node:
                continue
            with self._lock:
                # One count is the call's own list.
                kept_on = entry.local > 1 and not self.table.is_owned(entry.id)
                if kept_on and not entry.registered:
                    entry.registered = True
                    kept.append((entry.id, entry.owner_node))
        return kept

    def defer(self, action: Callable[[], object]) -> None:
        """Run ``action`` once all registrations made so far are acknowledged."""
        with self._lock:
            if self._open:
                self._deferred.append((next(reversed(self._open)), action))
                return
        action()

    def unborrow(self, id: bytes, owner_node: bytes) -> None:
        """Notify the owner of an object that its last ref here went away."""
        if not owner_node:
            return

        def tell() -> None:
            self.peers.send_surely(owner_node, owner_of(id), (p.PEER_UNBORROW, [id]))

        self.defer(tell)

    def want(self, entries: Iterable[Entry]) -> None:
        """Request values from their owners; answers arrive as values of the entries."""
        by_owner: dict[tuple[bytes, bytes], list[bytes]] = {}
        for entry in entries:
            if not entry.wanted and not self.table.is_owned(entry.id):
                entry.wanted = True
                by_owner.setdefault((owner_of(entry.id), entry.owner_node), []).append(entry.id)
        for (owner, node), ids in by_owner.items():
            self._note_asked(owner, ids)
            self.peers.get(node, owner).send(_want(ids))

    def _note_asked(self, owner: bytes, ids: list[bytes]) -> None:
        # Before the peer is looked up: if it is lost from then on, these are requested again.
        with self._lock:
            self._asked.setdefault(owner, set()).update(ids)

    def lost(self, entry: Entry, value: Value) -> None:
        """Request another value from the owner: this one is gone from shared memory."""
        owner = owner_of(entry.id)
        with self.table.lock:
            if entry.value is not value:
                return
            self.table.forget_value(entry.id)
            entry.wanted = True
        self._note_asked(owner, [entry.id])
        peer = self.peers.get(entry.owner_node, owner)
        peer.send((p.PEER_WANT, [(entry.id, payload_of(value))]))

    def on_value(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_VALUE: take values that were requested."""
        _, values = message
        self._asked_again.discard(peer.process_id)
        with self._lock:
            asked = self._asked.get(peer.process_id)
            if asked is not None:
                asked.difference_update(id for id, _ in values)
                if not asked:
                    del self._asked[peer.process_id]
        for id, value in values:
            contained = refs_in(value)
            self.table.set_value(id, value, self.hold(contained) if contained else None)

    def on_ack(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_ACK: run the actions that wait for a registration that is counted now."""
        _, number = message
        self._asked_again.discard(peer.process_id)
        self._answered(number)

    def _answered(self, number: int) -> None:
        ready = []
        with self._lock:
            self._open.pop(number, None)
            lowest = next(iter(self._open), None)
            while self._deferred and (lowest is None or self._deferred[0][0] < lowest):
                _, action = self._deferred.popleft()
                ready.append(action)
        for action in ready:
            action()

    def peer_lost(self, peer: Peer) -> None:
        """Send the open requests to a process that is gone to its daemon.

        At a planned exit it has left what it owned to that daemon, so everything open is requested
        there once more, through the relay, before it fails.
        """
        owner = peer.process_id
        if not peer.direct:
            # A request through the relay may still have gone to the process itself,
            # in its last moments: it is sent to the daemon again when that is surely gone.
            if owner in self._asked_again:
                self._asked_again.discard(owner)
                self._lost_with(peer)
                return
            self._asked_again.add(owner)
        again: list[tuple[Any, ...]] = [
            (p.PEER_BORROW, number, entries)
            for number, (who, _, entries) in list(self._open.items())
            if who == owner
        ]
        with self._lock:
            asked = list(self._asked.get(owner, ()))
        if asked:
            again.append(_want(asked))
        if not again:
            self._asked_again.discard(owner)
        for message in again:
            self.peers.get(peer.node_id, owner).send(message)

    def _lost_with(self, peer: Peer) -> None:
        """Fail the requests to a process of which only the node may be known."""
        owner, node = peer.process_id, peer.node_id
        self.owner_lost(owner, peer.was or f"process {owner.hex()} on node {node.hex()[:8]}")

    def owner_lost(self, owner: bytes, was: str = "") -> None:
        """Fail the requests to an owner that is gone; ``was`` says what it was."""
        for number, (who, _, _) in list(self._open.items()):
            if who == owner:
                self._answered(number)
        with self._lock:
            asked = self._asked.pop(owner, set())
        for id in asked:
            error = OwnerDiedError(id.hex(), was or f"process {owner.hex()}")
            self.table.set_value(id, error_value(error))

    # --- owner's side --------------------------------------------------------------
    def on_want(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_WANT: send a borrower values, once they are there; replace those that are gone."""
        _, wanted = message
        ready: list[tuple[bytes, Value]] = []
        size = 0
        for id, gone in wanted:
            reason = None if gone is None else self.recover(id, gone)
            entry = self.table.entry(id)
            if entry is None or reason is not None:
                error = ObjectLostError(id.hex(), reason or "its owner had freed it already")
                value: Value | None = error_value(error)
            elif self.table.when_ready(entry, lambda entry: self._send_value(peer, entry)):
                value = entry.value
                entry.seen = True
            else:
                continue
            assert value is not None
            ready.append((id, value))
            size += len(payload_of(value))
            if size > _VALUES_SIZE:
                peer.send((p.PEER_VALUE, ready))
                ready, size = [], 0
        if ready:
            peer.send((p.PEER_VALUE, ready))

    @staticmethod
    def _send_value(peer: Peer, entry: Entry) -> None:
        entry.seen = True
        peer.send((p.PEER_VALUE, [(entry.id, entry.value)]))

    def on_borrow(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_BORROW: count processes that hold objects of this one."""
        _, number, entries = message
        for id, borrower, node in entries:
            self._count(id, borrower, node)
        if number:
            peer.send((p.PEER_ACK, number))

    def _count(self, id: bytes, borrower: bytes, node: bytes) -> None:
        if self.table.borrow(id, borrower):
            # The connection to it, or its daemon, reports its end.
            self.peers.get(node, borrower)

    def on_unborrow(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_UNBORROW: uncount a process that holds objects no more."""
        _, ids = message
        for id in ids:
            self.table.unborrow(id, peer.process_id)


def _want(ids: Iterable[bytes]) -> tuple[Any, ...]:
    return p.PEER_WANT, [(id, None) for id in ids]
