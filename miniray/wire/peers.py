"""The other processes that this one talks to: a direct socket on the same node, else a relay.

A peer is addressed by (node id, process id). Connections are made on first use and
by whoever asks first; both ends then use the same one. Losing the connection, or
word from the daemon that a process is gone, is reported once per peer.
"""

from __future__ import annotations

import logging
import marshal
import os
import threading
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.common.process_limits import OUT_OF_DESCRIPTORS, limit
from miniray.messages import plain
from miniray.messages import protocol as p
from miniray.wire.connection import Connection
from miniray.wire.gates import Gate
from miniray.wire.relay_sender import RelaySender
from miniray.wire.sockets import MAX_MESSAGE, Listener, connect, too_large

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from miniray.wire.io_loop import IOLoop
    from miniray.wire.node_link import NodeLink

logger = logging.getLogger(__name__)


def socket_path(folder: str, process_id: bytes) -> str:
    """Where a process of this node listens."""
    return os.path.join(folder, f"p-{process_id.hex()}")


class Peer:
    """Another process, reachable or gone."""

    __slots__ = (
        "_conn",
        "_relay",
        "lost",
        "node_id",
        "process_id",
        "taken",
        "unreachable",
        "was",
        "watched",
    )

    def __init__(
        self,
        node_id: bytes,
        process_id: bytes,
        conn: Connection | None,
        relay: RelaySender | None,
    ) -> None:
        self.node_id = node_id
        self.process_id = process_id
        self._conn = conn
        self._relay = relay
        self.lost = False
        #: It is lost because its node cannot be reached; its process may live.
        self.unreachable = False
        #: Bytes taken from it through the relay that it was not told of yet.
        self.taken = 0
        #: What it was, once its daemon has told that it ended.
        self.was = ""
        #: The daemon was asked to tell when this process ends.
        self.watched = conn is not None

    def send(self, message: tuple[Any, ...]) -> bool:
        """Send; False, and it is dropped, once its connection is closed (its loss is reported)."""
        if self._conn is not None:
            return self._conn.send(message)
        if self._relay is not None:
            body = plain.dumps(message)
            if len(body) > MAX_MESSAGE:
                raise too_large(len(body), MAX_MESSAGE)
            self._relay.send(body)
        return True

    @property
    def closed(self) -> bool:
        """Whether there was a socket of its own to this peer, which is closed by now."""
        return self._conn is not None and self._conn.closed

    @property
    def direct(self) -> bool:
        """Whether there is a socket of its own to this peer."""
        return self._conn is not None

    def post(self, message: tuple[Any, ...]) -> None:
        """Send, perhaps together with what follows closely; see ``Connection.post``."""
        if self._conn is not None:
            self._conn.post(message)
        else:
            self.send(message)

    def take(self, size: int) -> None:
        """So many bytes came through the relay: tell the sender now and then."""
        self.taken += size
        if self._relay is not None and self.taken >= config().relay_window // 8:
            self._relay.send(plain.dumps((p.PEER_CREDIT, self.taken)), counted=False)
            self.taken = 0

    def credit(self, taken: int) -> None:
        """The other end has taken so many bytes."""
        if self._relay is not None:
            self._relay.credit(taken)

    def flush(self) -> None:
        """Wait until what was sent is written, or the peer is gone (at a planned exit)."""
        if self._relay is not None:
            self._relay.flush_blocking()
        if self._conn is not None:
            self._conn.flush_blocking(None)

    def backlog(self) -> int:
        """Bytes that wait in memory because it does not read."""
        if self._relay is not None:
            return self._relay.backlog()
        return self._conn.backlog() if self._conn is not None else 0

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call back once, when all that waits has been written; not if it is gone before.

        The latest callback counts.
        """
        if self._relay is not None:
            self._relay.when_drained(callback)
        elif self._conn is not None:
            self._conn.when_drained(callback)

    def give_up(self) -> None:
        """It is gone: what waits for it is dropped."""
        if self._relay is not None:
            self._relay.give_up()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._conn is not None:
            self._conn.close()

    def abandon(self) -> None:
        """For a forked child."""
        if self._conn is not None:
            self._conn.abandon()


class PeerTable:
    """All peers of this process, by process id. Thread-safe."""

    def __init__(
        self,
        folder: str,
        node_id: bytes,
        process_id: bytes,
        loop: IOLoop,
        key: bytes,
        link: NodeLink,
        *,
        auth_timeout: float,
        on_message: Callable[[Peer, tuple[Any, ...]], None],
        on_lost: Callable[[Peer], None],
    ) -> None:
        self._folder = folder
        self._node_id = node_id
        self._process_id = process_id
        self._loop = loop
        self._key = key
        self._link = link
        self._auth_timeout = auth_timeout
        self._on_message = on_message
        self._on_lost = on_lost
        self._peers: dict[bytes, Peer] = {}
        self._lock = threading.RLock()  # a collection in here may drop a ref
        self._warned = False
        self._listener = Listener(socket_path(folder, process_id), loop, self._accepted)
        self._unnamed: set[Connection] = set()
        self._connections: set[Connection] = set()
        #: Called when the last connection is gone.
        self._on_last_closed: Callable[[], None] | None = None

    def get(self, node_id: bytes, process_id: bytes) -> Peer:
        """The peer of this address; connects on first use, never blocks on the peer."""
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
        """Send what nobody asks for again; what comes too late for a process goes to its daemon."""
        if self.get(node_id, process_id).send(message):
            return
        with self._lock:
            peer = self._peers.get(process_id)
            if peer is None or peer.lost or peer.closed:
                peer = self._peers[process_id] = self._connect(node_id, process_id)
        peer.send(message)

    def known(self, process_id: bytes) -> Peer | None:
        """The peer, if this process has talked to it."""
        return self._peers.get(process_id)

    def all(self) -> list[Peer]:
        """The living peers; one twice if both ends have connected at the same moment."""
        relayed = [peer for peer in list(self._peers.values()) if not peer.direct]
        return relayed + [conn.peer for conn in list(self._connections) if conn.peer is not None]

    def _connect(self, node_id: bytes, process_id: bytes) -> Peer:
        if node_id != self._node_id:
            return self._relayed_peer(node_id, process_id)
        try:
            sock = connect(socket_path(self._folder, process_id))
        except (FileNotFoundError, ConnectionRefusedError):
            # It ended; by rule perhaps, and then the daemon answers for what it owned.
            return self._relayed_peer(node_id, process_id)
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS:
                raise
            self._warn_of_limit()
            return self._relayed_peer(node_id, process_id)
        conn = self._wrap(sock, server=False)
        peer = Peer(node_id, process_id, conn, None)
        conn.peer = peer
        if conn.closed:  # it ended before anybody was told to listen for that
            self._loop.call_soon(lambda: self._lose(peer))
        conn.send((p.PEER_HELLO, self._node_id, self._process_id))
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
        sender = RelaySender(self._link, self._loop, node_id, process_id)
        peer = Peer(node_id, process_id, None, sender)
        peer.watched = True
        self._link.node_notice("watch", process_id, node_id)
        return peer

    def _wrap(self, sock: socket.socket, *, server: bool) -> Connection:
        conn = Connection(
            sock,
            self._loop,
            self._key,
            server=server,
            on_message=self._received,
            on_close=self._closed,
            auth_timeout=self._auth_timeout,
        )
        self._connections.add(conn)
        return conn

    def _accepted(self, sock: socket.socket) -> None:
        self._unnamed.add(self._wrap(sock, server=True))

    # --- from the sockets ------------------------------------------------------------
    def _received(self, conn: Connection, message: tuple[Any, ...]) -> None:
        peer = conn.peer
        if peer is not None:
            self._on_message(peer, message)
            return
        if message[0] != p.PEER_HELLO:
            logger.error("a process sent message kind %r before its name; closing", message[0])
            conn.close()
            return
        self._unnamed.discard(conn)
        conn.peer = peer = Peer(message[1], message[2], conn, None)
        with self._lock:
            # Two processes may connect to each other at the same moment: each keeps
            # sending on its own connection, so the order of its messages stays.
            known = self._peers.get(peer.process_id)
            if known is None or known.lost:
                self._peers[peer.process_id] = peer

    def _closed(self, conn: Connection) -> None:
        self._unnamed.discard(conn)
        self._connections.discard(conn)
        if conn.peer is not None:
            self._lose(conn.peer)
        if self._on_last_closed is not None and not self._connections:
            self._on_last_closed()

    def relayed(self, node_id: bytes, process_id: bytes, messages: list[bytes]) -> None:
        """Messages from a process of another node."""
        peer = self._peers.get(process_id)
        if peer is None or peer.lost:
            with self._lock:
                peer = self._peers.get(process_id)
                if peer is None or peer.lost:
                    peer = self._peers[process_id] = self._relayed_peer(node_id, process_id)
        size = 0
        for body in messages:
            message = marshal.loads(body)
            if message[0] == p.PEER_CREDIT:
                peer.credit(message[1])
                continue
            size += len(body)
            try:
                self._on_message(peer, message)
            except Exception:
                # As on a socket: one bad message must not lose those that came with it.
                logger.exception("handling message kind %r failed", message[0])
        peer.take(size)

    def process_unreachable(self, process_id: bytes) -> None:
        """The daemon says that messages to or from a process of another node were lost."""
        peer = self._peers.get(process_id)
        if peer is not None and not peer.direct:
            peer.unreachable = True
            self._lose(peer)

    def process_died(self, process_id: bytes, what: str = "") -> None:
        """The daemon says that a watched process is gone, and what it was if that is known."""
        peer = self._peers.get(process_id)
        if peer is not None:
            peer.was = what
            peer.close()
            if not peer.direct:
                self._lose(peer)

    def _lose(self, peer: Peer) -> None:
        with self._lock:
            if peer.lost:
                return
            peer.lost = True
            if self._peers.get(peer.process_id) is peer:
                del self._peers[peer.process_id]
        peer.give_up()
        self._on_lost(peer)

    # --- ending ------------------------------------------------------------------
    def hang_up(self) -> None:
        """End all connections without losing what the other ends have sent.

        They are told that nothing more comes, and what they send is handled until they hang up
        too, or end.
        """
        gate = Gate(self._loop)
        self._on_last_closed = gate.arrived

        def end() -> None:
            self._listener.close()
            if not self._connections:
                gate.arrived()
            for conn in list(self._connections):
                conn.end_writing()

        self._loop.call_soon(end)
        gate.wait(None)

    def close(self) -> None:
        """Close all connections and stop listening."""
        self._loop.call_soon(self._listener.close)
        for peer in list(self._peers.values()):
            peer.close()
        for conn in list(self._unnamed):
            conn.close()

    def abandon(self) -> None:
        """For a forked child: close the descriptors, tell nobody."""
        self._listener.abandon()
        for peer in self._peers.values():
            peer.abandon()
        for conn in self._unnamed:
            conn.abandon()
