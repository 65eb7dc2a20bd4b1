"""Results that were not read: errors that no ``get`` requested, and values of killed workers.

Errors: the object table records which were not seen; this module decides which to print, so that
a thousand failures of one kind are not a thousand messages. Values: a worker writes a large result
and then notifies its owner; if it is killed between the two, only the daemon has a record of it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import TYPE_CHECKING

from miniray.common.config import config
from miniray.exceptions import (
    ActorDiedError,
    DeathCause,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)
from miniray.messages.protocol import VALUE_SHARED
from miniray.messages.value import load_error, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.messages.value import Value
    from miniray.objects.objects import ObjectTable
    from miniray.objects.shared_memory import SharedMemory
    from miniray.wire.peers import Peer, PeerTable

logger = logging.getLogger(__name__)

#: Seconds for which an error that was printed, or raised, stands for others of its kind.
WINDOW = 10.0
#: Errors that wait for a check; of further ones only the number is reported.
MOST_WAITING = 20

_Kind = tuple[str, type[BaseException]]


@dataclasses.dataclass(eq=False, repr=False)
class UnseenErrors:
    """Prints errors that were dropped unread."""

    #: Runs a function in a thread in which user code may run: unpickling an error does.
    later: Callable[[Callable[[], None]], object]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.RLock()  # a collection in here may drop further ones
        self._known: dict[_Kind, float] = {}
        self._waiting = 0
        self._skipped = 0

    def raised(self, error: BaseException) -> None:
        """Record that user code gets an error: others of its kind are not printed for a while."""
        kind = _kind_of(error)
        if kind is not None:
            self._is_known(kind)

    def dropped(self, value: Value) -> None:
        """Report an error that was not read."""
        if config().ignore_unhandled_errors:
            return
        with self._lock:
            if self._waiting >= MOST_WAITING:
                self._skipped += 1
                return
            self._waiting += 1
        self.later(lambda: self._print(value))

    def _print(self, value: Value) -> None:
        with self._lock:
            self._waiting -= 1
        error = load_error(value)
        kind = None if error is None else _kind_of(error)
        if kind is None or self._is_known(kind):
            return
        with self._lock:
            skipped, self._skipped = self._skipped, 0
        more = f" {skipped} others were not looked at." if skipped else ""
        logger.error(
            "Unhandled error: nobody asked for the result of %s, which failed.%s "
            "(MINIRAY_IGNORE_UNHANDLED_ERRORS=1 hides such messages.)\n%s",
            kind[0],
            more,
            error,
        )

    def _is_known(self, kind: _Kind) -> bool:
        """Note that an error is shown; return whether one of its kind was, shortly before."""
        now = self.clock()
        with self._lock:
            known = self._known.get(kind)
            if known is None:
                self._known = {each: at for each, at in self._known.items() if now - at < WINDOW}
            self._known[kind] = now
        return known is not None and now - known < WINDOW


def _kind_of(error: BaseException) -> _Kind | None:
    """Return what failed and how; None for ends that were requested, as by ``cancel``."""
    if isinstance(error, TaskError):
        cancelled = isinstance(error.cause, TaskCancelledError)
        return None if cancelled else (error.function_name, type(error.cause))
    if isinstance(error, WorkerCrashedError):
        return error.function_name or "a task", type(error)
    if isinstance(error, ActorDiedError) and error.cause is DeathCause.CREATION_FAILED:
        return f"a call of {error.class_name or 'an actor'}", type(error)
    return None


class UnclaimedResults:
    """Frees unclaimed results, when a daemon has listed what was written.

    Used in the I/O thread only.
    """

    def __init__(self, table: ObjectTable, shared_memory: SharedMemory, peers: PeerTable) -> None:
        self._table = table
        self._shared_memory = shared_memory
        self._peers = peers
        #: Lists that came before everything that their writer sent was read.
        self._early: dict[bytes, tuple[bytes, Sequence[int]]] = {}

    def on_list(self, writer: bytes, node_id: bytes, segments: Sequence[int]) -> None:
        """Free the segments that a daemon has for this process, but that are unknown here.

        Args:
            writer: The process that was killed; empty if messages of the node were lost.
            node_id: Where it was written.
            segments: Their numbers there.
        """
        peer = self._peers.known(writer)
        if peer is not None and peer.direct and not peer.lost:
            self._early[writer] = (node_id, segments)
        else:
            self._free(node_id, segments)

    def peer_lost(self, peer: Peer) -> None:
        """Use the list of a process all of whose messages are read."""
        early = self._early.pop(peer.process_id, None)
        if early is not None:
            self._free(*early)

    def _free(self, node_id: bytes, segments: Sequence[int]) -> None:
        values = (entry.value for entry in self._table.snapshot())
        known = {segment for node, segment, _ in map(place_of, values) if node == node_id}
        for number in set(segments) - known:
            location = (node_id, number, self._table.node_id, 0)
            self._shared_memory.free((VALUE_SHARED, location, ()))
