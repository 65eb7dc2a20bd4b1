"""The runtime of a process that is attached to a cluster: driver or worker.

Puts the parts of ``core/`` together behind ``common/runtime.py`` and hands each
message that arrives to the part it is for. What it owns itself is small: exported
functions, the clients of actors, and the wait for values.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from miniray.calls.calls import CallTable
from miniray.calls.recovery import Recovery
from miniray.calls.task_client import TaskClient
from miniray.client.actor_directory import ActorDirectory
from miniray.client.head_requests import HeadRequests
from miniray.client.object_access import ObjectAccess
from miniray.client.object_reports import ObjectReports
from miniray.client.submission import Submission
from miniray.common.ids import ObjectIds
from miniray.common.object_ref import hooks
from miniray.exceptions import (
    NotInitializedError,
)
from miniray.messages import protocol as p
from miniray.objects.borrowing import Borrowing, error_value
from miniray.objects.objects import ObjectTable
from miniray.objects.shared_memory import SharedMemory
from miniray.objects.unclaimed import UnclaimedResults
from miniray.objects.unseen_errors import UnseenErrors
from miniray.wire.peers import Peer, PeerTable

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Mapping

    from miniray.calls.context import ProcessFacts
    from miniray.wire.io_loop import IOLoop
    from miniray.wire.node_link import NodeLink

logger = logging.getLogger(__name__)


class ClusterRuntime(ObjectAccess, Submission, HeadRequests):
    """The cluster engine behind the public API."""

    def __init__(
        self,
        *,
        loop: IOLoop,
        link: NodeLink,
        process_id: bytes,
        node_id: bytes,
        facts: ProcessFacts,
        on_shutdown: Callable[[], None],
    ) -> None:
        self.session = object()
        self.loop = loop
        self.link = link
        self.process_id = process_id
        self.node_id = node_id
        self.facts = facts
        self._on_shutdown = on_shutdown
        self.ids = ObjectIds(process_id)
        self.table = ObjectTable(process_id, node_id, self)
        self.shared_memory = SharedMemory(link, node_id, self.make_room)
        self.borrowing = Borrowing(self.table)
        self.calls = CallTable(self.table, self.borrowing, self.shared_memory, loop.call_later)
        self.peers = PeerTable(
            link, node_id, on_message=self._on_message, on_lost=self._on_peer_lost
        )
        self.borrowing.attach(self.peers)
        self.unclaimed = UnclaimedResults(self.table, self.shared_memory, self.peers)
        self.tasks = TaskClient(self.calls, self.peers, link, loop, tell=self._warn)
        self.recovery = Recovery(
            self.table, self.borrowing, self.calls, self.calls.lineage, self.tasks, link
        )
        self.calls.recover = self.recovery.lost
        self.shared_memory.fetches.on_lost = self.lost_on_the_way
        self.borrowing.recover = self.recovery.again
        self.actors = ActorDirectory(self)
        self._exported: set[bytes] = set()
        self._futures: concurrent.futures.ThreadPoolExecutor | None = None
        self.unseen_errors = UnseenErrors(lambda tell: self._future_pool().submit(tell))
        self.own_groups = set()
        self.awaited_groups = {}
        self._lock = threading.RLock()  # a collection in here may make a future
        self._closed = False
        self._quiet = False
        self._draining = threading.RLock()
        #: Pushes from the daemon or the head, by topic.
        self.on_topic: dict[str, Callable[..., None]] = {
            "lease_granted": self.tasks.on_granted,
            "no_room_near": self.tasks.on_no_room,
            "lease_failed": self.tasks.on_failed,
            "lease_revoked": self.tasks.on_revoked,
            "process_died": self.peers.process_died,
            "process_unreachable": self.peers.process_unreachable,
            "unclaimed": self.unclaimed.on_list,
            "actor": self.actors.on_state,
            "give_up_memory": self.shared_memory.warm.give_up,
            "segment_freed": self.shared_memory.on_freed,
            "store_short": self.shared_memory.on_short,
            "node_stops": link.node_stops,
            "warning": lambda text: logger.warning("%s", text),  # a driver prints it
            "head_back": self._on_head_back,
            "left_copies": self.recovery.values.on_copies,
            "report_objects": ObjectReports(self).on_asked,
        }
        #: Messages of peers, by kind; a worker adds those that ask it to run something.
        self.on_kind: dict[int, Callable[[Peer, tuple[Any, ...]], None]] = {
            p.PEER_REPLY: self._on_reply,
            p.PEER_STREAM: self._on_stream_item,
            p.PEER_RECALLED: lambda peer, message: self.tasks.on_recalled(peer, message[1]),
            p.PEER_WANT: self.borrowing.on_want,
            p.PEER_VALUE: self.borrowing.on_value,
            p.PEER_LOST: self.borrowing.on_lost,
            p.PEER_BORROW: self.borrowing.on_borrow,
            p.PEER_UNBORROW: self.borrowing.on_unborrow,
            p.PEER_ACK: self.borrowing.on_ack,
            p.PEER_CANCEL_MAKER: self._on_cancel_asked,
        }
        #: Called for each peer that is gone, after the parts above know it.
        self.on_peer_gone: Callable[[Peer], None] | None = None
        #: Merges an environment with the job's and uploads what it names; see bootstrap.
        self.prepare_runtime_env: Callable[[Mapping[str, Any] | None], str] = _no_runtime_env
        #: In a worker: runs around a wait that blocks the task (gives the CPU back).
        self.block: Callable[[Callable[[float | None], bool], float | None], bool] = _plain_wait
        self._install_hooks()

    # --- messages ------------------------------------------------------------------
    def _on_message(self, peer: Peer, message: tuple[Any, ...]) -> None:
        handler = self.on_kind.get(message[0])
        if handler is None:
            logger.error(
                "a peer sent message kind %r, which this process does not know", message[0]
            )
        else:
            handler(peer, message)

    def on_push(self, topic: str, body: tuple[Any, ...]) -> None:
        """A push from the daemon or the head."""
        handler = self.on_topic.get(topic)
        if handler is not None:
            handler(*body)
        else:
            logger.error("a push about %r, which this process does not know", topic)

    def _warn(self, text: str) -> None:
        """Tell the user something; a worker's log goes to the driver."""
        self.on_topic["warning"](text)

    def _on_head_back(self) -> None:
        """The head, or its successor, knows of this process again, but not what it wants."""
        self.tasks.on_head_back()
        self.actors.on_head_back()

    def _on_peer_lost(self, peer: Peer) -> None:
        self.tasks.on_peer_lost(peer)
        self.actors.on_peer_lost(peer)
        self.borrowing.peer_lost(peer)
        self.table.borrower_died(peer.process_id)
        self.unclaimed.peer_lost(peer)
        if self.on_peer_gone is not None:
            self.on_peer_gone(peer)

    def on_link_lost(self) -> None:
        """The node's daemon is gone: nothing that was waited for will come."""
        if self._closed:
            return
        if not self.link.ends_as_asked:
            logger.error("%s", self.link.end())
        error = error_value(self.link.end())
        for call in list(self.calls.open.values()):
            self.calls.fail_value(call, error)
        for entry in self.table.snapshot():
            if entry.value is None:
                self.table.set_value(entry.id, error)

    def shutdown(self) -> None:
        """Leave the cluster."""
        if self._closed:
            return
        self._closed = True
        hooks.wake = hooks.serialized = hooks.deserialized = None
        self._fail_pending()
        if self._futures is not None:
            self._futures.shutdown(wait=False, cancel_futures=True)
        self._on_shutdown()
        self._fail_pending()  # what other threads have begun to wait for meanwhile

    def _fail_pending(self) -> None:
        """Nothing that is waited for will come any more."""
        error = error_value(RuntimeError("miniray.shutdown() was called."))
        for call in list(self.calls.open.values()):
            if call.stream is not None:
                call.stream.end(error)
        for entry in self.table.snapshot():
            if entry.value is None:
                self.table.set_value(entry.id, error)

    def close_sockets(self) -> None:
        """Close the peers; the daemon's link is closed by who made it."""
        self.peers.close()

    def abandon(self) -> None:
        """In a forked child: close what was inherited, tell nobody."""
        self._closed = True
        hooks.wake = hooks.serialized = hooks.deserialized = None
        self.block = _refuse_wait
        self.peers.abandon()
        self.link.abandon()
        self.loop.abandon()


def _refuse_wait(_wait: Callable[[float | None], bool], _timeout: float | None) -> bool:
    raise NotInitializedError(
        "This process was forked from the one that waits here for a value. What the parent "
        "started can be waited for in the parent only."
    )


def _plain_wait(wait: Callable[[float | None], bool], timeout: float | None) -> bool:
    return wait(timeout)


def _no_runtime_env(own: Mapping[str, Any] | None) -> str:
    raise RuntimeError(f"runtime_env {own!r} cannot be used in this process")
