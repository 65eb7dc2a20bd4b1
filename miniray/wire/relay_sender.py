"""Sending to one process of another node: messages in batches, with byte credits end to end.

The daemons pass a batch on as it is, so a batch costs them what a message would. A
receiver that does not read (stopped, or busy in code that holds the interpreter's
lock) must not fill the daemons' memory or stall its neighbours: what it has not taken
is bounded by a window, and the rest waits here, in the sender.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.messages import plain
from miniray.messages import protocol as p
from miniray.wire.gates import Gate
from miniray.wire.sockets import MAX_MESSAGE, too_large

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.wire.node_link import NodeLink

#: Messages within this many seconds of each other travel together, and how many at most.
_CLOSE_BY = 50e-6
_BATCH = 64
_now = time.perf_counter


class RelaySender:
    """The messages for one process of another node. Thread-safe."""

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
        #: Called once nothing waits.
        self._on_written: Callable[[], object] | None = None

    def send(self, message: tuple[Any, ...]) -> bool:
        """Send a message, perhaps together with those that follow it closely; True.

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
        """Widen the window: the receiver has taken so many bytes."""
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
        """Call back once, when nothing waits or it is gone; the latest callback counts."""
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
