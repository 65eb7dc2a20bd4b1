"""The other processes that this one talks to: a direct socket on the same node, else a relay.

A peer is addressed by (node id, process id). Connections are made on first use and
by the process that needs it first; both ends then use it. Losing the connection, or
the daemon's report that a process is gone, is passed on once per peer.
"""

from __future__ import annotations

import dataclasses
import logging
import marshal
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.common.process_state import OUT_OF_DESCRIPTORS, limit
from miniray.messages import plain
from miniray.messages import protocol as p
from miniray.wire.connection import Connection, Endpoint
from miniray.wire.io_loop import Gate
from miniray.wire.sockets import MAX_MESSAGE, Listener, connect, too_large

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from miniray.wire.node_link import NodeLink

logger = logging.getLogger(__name__)

#: Messages within this many seconds of each other travel together, and how many at most.
_CLOSE_BY = 50e-6
_BATCH = 64
_now = time.perf_counter


def socket_path(folder: str, process_id: bytes) -> str:
    """Return where a process of this node listens."""
    return os.path.join(folder, f"p-{process_id.hex()}")


class RelaySender:
    """The messages for one process of another node, in batches. Thread-safe.

    The daemons pass a batch on as it is, so it costs them what a message would. A receiver that
    does not read (stopped, or busy in code that holds the interpreter's lock) must not fill the
    daemons' memory or stall its neighbours: a window bounds the bytes that it has not taken, and
    the rest waits here, in the sender.
    """

    __slots__ = (
        "_gone",
        "_link",
        "_lock",
        "_node_id",
        "_on_written",
        "_pending",
        "_process_id",
        "_sent",
        "_taken",
        "_waiting",
        "_window",
    )

    def __init__(self, link: NodeLink, node_id: bytes, process_id: bytes) -> None:
        self._link = link
        self._node_id = node_id
        self._process_id = process_id
        # Reentrant: a collection in here may drop something that sends.
        self._lock = threading.RLock()
        self._pending: list[bytes] = []
        #: Bytes of these.
        self._waiting = 0
        #: Bytes that the receiver may still get before it has taken some.
        self._window = config().relay_window
        self._sent = 0.0
        #: Bytes that came from it, and for which it got no credit yet.
        self._taken = 0
        #: The receiver is gone.
        self._gone = False
        #: Called once the queue is empty.
        self._on_written: Callable[[], object] | None = None

    def send(self, message: tuple[Any, ...]) -> bool:
        """Send a message, perhaps together with close successors; return True.

        Raises:
            ValueError: The message is too large.
        """
        body = plain.dumps(message)
        size = len(body)
        if size > MAX_MESSAGE:
            raise too_large(size, MAX_MESSAGE)
        with self._lock:
            pending = self._pending
            pending.append(body)
            self._waiting += size
            if self._window <= 0:
                return True
            if len(pending) == 1:
                now = _now()
                if now - self._sent <= _CLOSE_BY:
                    self._sent = now
                    self._link.loop.flush_soon(self)
                    return True
            elif len(pending) < _BATCH:
                return True
            self._write()
        return True

    post = send

    def took(self, size: int) -> None:
        """Count bytes that came from the process, and now and then send it credits for them."""
        self._taken += size
        if self._taken >= config().relay_window // 8:
            # Whatever the window: credits of both sides would wait for each other.
            credit = plain.dumps((p.PEER_CREDIT, self._taken))
            self._link.relay(self._node_id, self._process_id, [credit])
            self._taken = 0

    def flush_posted(self) -> None:
        with self._lock:
            if self._pending and self._window > 0:
                self._write()

    def credit(self, taken: int) -> None:
        """Widen the window by the bytes that the receiver has taken."""
        with self._lock:
            self._window += taken
            if self._pending and self._window > 0:
                self._write()

    def _write(self) -> None:
        """Write what the window allows; a message may overdraw it, so that any size passes.

        Needs the lock, and a window that is open.
        """
        batch: list[bytes] = []
        for body in self._pending:
            if self._window <= 0:
                break
            self._window -= len(body)
            self._waiting -= len(body)
            batch.append(body)
        del self._pending[: len(batch)]
        self._link.relay(self._node_id, self._process_id, batch)
        self._sent = _now()  # not before: a slow write would make the next message look alone
        if not self._pending:
            self._report_written()

    def flush_blocking(self, timeout: float | None) -> bool:
        """Wait until all that waits is written, or the receiver is gone; False on timeout."""
        gate = Gate(self._link.loop)
        self.flush_posted()
        self.when_drained(gate.arrived)
        return gate.wait(timeout)

    def backlog(self) -> int:
        """Return the bytes that wait because the receiver does not read."""
        return self._waiting

    def when_drained(self, callback: Callable[[], object]) -> None:
        """Call back once, when the queue is empty or it is gone; the latest callback counts."""
        with self._lock:
            if self._pending and not self._gone:
                self._on_written = callback
                return
        callback()

    def close(self) -> None:
        """Drop what waits: the receiver is gone."""
        with self._lock:
            self._gone = True
            self._pending.clear()
            self._waiting = 0
            self._report_written()

    def _report_written(self) -> None:
        callback, self._on_written = self._on_written, None
        if callback is not None:
            callback()


class Peer:
    """Another process, reachable or gone."""

    __slots__ = (
        "backlog",
        "channel",
        "lost",
        "node_id",
        "post",
        "process_id",
        "send",
        "unreachable",
        "was",
        "when_drained",
    )

    def __init__(
        self, node_id: bytes, process_id: bytes, channel: Connection | RelaySender
    ) -> None:
        self.node_id = node_id
        self.process_id = process_id
        self.channel = channel
        #: Send; False, and it is dropped, once its connection is closed (its loss is reported).
        self.send = channel.send
        #: Send, perhaps together with what follows closely.
        self.post = channel.post
        #: Bytes that wait in memory because it does not read.
        self.backlog = channel.backlog
        #: Call back once, when all that waits has been written. The latest callback counts.
        self.when_drained = channel.when_drained
        self.lost = False
        #: It is lost because its node cannot be reached; its process may live.
        self.unreachable = False
        #: What it was, as its daemon described it when it ended.
        self.was = ""

    @property
    def direct(self) -> bool:
        return isinstance(self.channel, Connection)

    def flush(self) -> None:
        """Wait until all sent messages are written, or the peer is gone (at a planned exit)."""
        self.channel.flush_blocking(None)


@dataclasses.dataclass(eq=False, repr=False)
class PeerTable:
    """All peers of this process, by process id. Thread-safe."""

    #: To the daemon, which relays to other nodes and knows this process's id.
    link: NodeLink
    #: The node of this process.
    node_id: bytes
    _: dataclasses.KW_ONLY
    #: Called once for each peer that is gone.
    on_lost: Callable[[Peer], None]

    def __post_init__(self) -> None:
        #: Handlers of what peers send, by kind of message: each part of a process adds its own.
        self.on_kind: dict[int, Callable[[Peer, tuple[Any, ...]], None]] = {}
        link = self.link
        self._loop = link.loop
        self._peers: dict[bytes, Peer] = {}
        self._lock = threading.RLock()  # a collection in here may drop a ref
        self._warned = False
        self._endpoint = Endpoint(link.loop, link.key, self._received, self._closed)
        self._listener = Listener(
            socket_path(link.folder, link.process_id), link.loop, self._accepted
        )
        self._connections: set[Connection] = set()
        #: Those that ``hang_up`` waits for, and its callback for the end of the last one.
        self._hung_up: set[Connection] = set()
        self._on_last_closed: Callable[[], None] | None = None

    def get(self, node_id: bytes, process_id: bytes) -> Peer:
        """Return the peer of this address; connect on first use, never block on the peer."""
        peer = self._peers.get(process_id)
        if peer is not None and not peer.lost:
            return peer
        with self._lock:
            peer = self._peers.get(process_id)
            if peer is not None and not peer.lost:
                return peer
            peer = self._connect(node_id, process_id)
            self._peers[process_id] = peer
        return peer

    def send_surely(self, node_id: bytes, process_id: bytes, message: tuple[Any, ...]) -> None:
        """Send a message that has no retry; after the peer's exit it goes to its daemon."""
        gone = self.get(node_id, process_id)
        if gone.send(message):
            return
        with self._lock:
            peer = self._peers.get(process_id)
            if peer is None or peer.lost or peer is gone:
                peer = self._peers[process_id] = self._connect(node_id, process_id)
        peer.send(message)

    def known(self, process_id: bytes) -> Peer | None:
        """Return the peer, if this process has talked to it."""
        return self._peers.get(process_id)

    def all(self) -> list[Peer]:
        """Return the living peers; one twice if both ends have connected at the same moment."""
        relayed = [peer for peer in list(self._peers.values()) if not peer.direct]
        return relayed + [conn.peer for conn in list(self._connections) if conn.peer is not None]

    def _connect(self, node_id: bytes, process_id: bytes) -> Peer:
        if node_id != self.node_id:
            return self._relayed_peer(node_id, process_id)
        try:
            sock = connect(socket_path(self.link.folder, process_id))
        except (FileNotFoundError, ConnectionRefusedError):
            # It ended; after a planned exit, the daemon answers for what it owned.
            return self._relayed_peer(node_id, process_id)
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS:
                raise
            self._warn_of_limit()
            return self._relayed_peer(node_id, process_id)
        conn = self._wrap(sock, server=False)
        peer = Peer(node_id, process_id, conn)
        conn.peer = peer
        if conn.closed:  # perhaps before it was in the table
            self._loop.call_soon(lambda: self._closed(conn))
        conn.send((p.PEER_HELLO, self.node_id, self.link.process_id))
        return peer

    def _warn_of_limit(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "This process may have %d files open (`ulimit -n`), and has. Calls to further "
                "processes of this machine go through the node's daemon, which is slower.",
                limit(),
            )

    def _relayed_peer(self, node_id: bytes, process_id: bytes) -> Peer:
        self.link.node_notice("watch", process_id, node_id)
        return Peer(node_id, process_id, RelaySender(self.link, node_id, process_id))

    def _wrap(self, sock: socket.socket, *, server: bool) -> Connection:
        conn = Connection(sock, self._endpoint, server=server)
        self._connections.add(conn)
        return conn

    def _accepted(self, sock: socket.socket) -> None:
        self._wrap(sock, server=True)

    # --- from the sockets ------------------------------------------------------------
    def _received(self, conn: Connection, message: tuple[Any, ...]) -> None:
        peer = conn.peer
        if peer is not None:
            self.on_kind.get(message[0], _unknown)(peer, message)
            return
        kind, *name = message
        if kind != p.PEER_HELLO:
            logger.error("a process sent message kind %r before its name; closing", kind)
            conn.close()
            return
        node_id, process_id = name
        conn.peer = peer = Peer(node_id, process_id, conn)
        with self._lock:
            # Two processes may connect to each other at the same moment: each keeps
            # sending on its own connection, so the order of its messages stays.
            known = self._peers.get(process_id)
            if known is None or known.lost:
                self._peers[process_id] = peer

    def _closed(self, conn: Connection) -> None:
        self._connections.discard(conn)
        if conn.peer is not None:
            self._lose(conn.peer)
        self._hung_up.discard(conn)
        if self._on_last_closed is not None and not self._hung_up:
            self._on_last_closed()

    def relayed(self, node_id: bytes, process_id: bytes, messages: list[bytes]) -> None:
        peer = self._peers.get(process_id)
        if peer is None or peer.lost:
            with self._lock:
                peer = self._peers.get(process_id)
                if peer is None or peer.lost:
                    peer = self._peers[process_id] = self._relayed_peer(node_id, process_id)
        relay = peer.channel if isinstance(peer.channel, RelaySender) else None
        size = 0
        for body in messages:
            message = marshal.loads(body)
            kind, *fields = message
            if kind == p.PEER_CREDIT:
                if relay is not None:
                    relay.credit(*fields)
                continue
            size += len(body)
            try:
                self.on_kind.get(kind, _unknown)(peer, message)
            except Exception:
                # As on a socket: one bad message must not lose those that came with it.
                logger.exception("handling message kind %r failed", kind)
        if relay is not None:
            relay.took(size)

    def process_unreachable(self, process_id: bytes) -> None:
        """Lose a process of another node: messages to or from it were lost."""
        peer = self._peers.get(process_id)
        if peer is not None and not peer.direct:
            peer.unreachable = True
            self._lose(peer)

    def node_unreachable(self, node_id: bytes) -> None:
        """Lose the processes of a node to or from which messages were lost."""
        for peer in self._on(node_id):
            self.process_unreachable(peer.process_id)

    def node_died(self, node_id: bytes) -> None:
        """Lose the processes of a node that is gone."""
        for peer in self._on(node_id):
            self._lose(peer)

    def _on(self, node_id: bytes) -> list[Peer]:
        with self._lock:  # the daemon already has the end of one that another thread connects to
            return [peer for peer in self._peers.values() if peer.node_id == node_id]

    def process_died(self, process_id: bytes, what: str = "") -> None:
        """Lose a process that the daemon reports gone; ``what`` it was."""
        peer = self._peers.get(process_id)
        if peer is not None:
            peer.was = what
            if peer.direct:
                peer.channel.close()  # which reports its loss
            else:
                self._lose(peer)

    def _lose(self, peer: Peer) -> None:
        with self._lock:
            if peer.lost:
                return
            peer.lost = True
            if self._peers.get(peer.process_id) is peer:
                del self._peers[peer.process_id]
        peer.channel.close()
        self.on_lost(peer)

    # --- ending ------------------------------------------------------------------
    def hang_up(self) -> None:
        """End all connections without losing what the other ends have sent.

        The other ends read end of file, and what they send is handled until they hang up
        too, or end. A connection that is made meanwhile, as to an actor that has just started, is
        not waited for: its other end has nothing to send to this process, and would keep it open.
        """
        gate = Gate(self._loop)

        def end() -> None:
            self._listener.close()
            self._on_last_closed = gate.arrived
            self._hung_up = set(self._connections)
            if not self._hung_up:
                gate.arrived()
            for conn in list(self._hung_up):
                conn.end_writing()

        self._loop.call_soon(end)
        gate.wait(None)

    def close(self) -> None:
        self._loop.call_soon(self._listener.close)
        for conn in list(self._connections):
            conn.close()

    def abandon(self) -> None:
        """Close the descriptors without sending anything, for a forked child."""
        self._listener.abandon()
        for conn in self._connections:
            conn.abandon()


def _unknown(peer: Peer, message: tuple[Any, ...]) -> None:
    logger.error("a peer sent message kind %r, which this process does not know", message[0])
