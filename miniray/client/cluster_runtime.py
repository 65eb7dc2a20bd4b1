"""The runtime of a process that is attached to a cluster: driver or worker.

Makes the parts of ``objects/``, ``calls/`` and ``client/``, and hands what happens (messages,
pushes, lost processes, objects that go) to the part that it is for.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
import threading
from concurrent.futures.thread import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.calls import context
from miniray.calls.calls import CallTable
from miniray.calls.recovery import ValueRecovery
from miniray.calls.task_client import TaskClient
from miniray.client.actor_clients import ActorClients
from miniray.client.cluster_requests import ClusterRequests
from miniray.client.job_uploads import JobUploads
from miniray.client.object_access import ObjectAccess
from miniray.client.ref_tracking import RefTracking
from miniray.client.reports import Answers, CallReports, ObjectReports
from miniray.client.submission import Returns, Submission
from miniray.common.object_ref import ObjectRef, hooks
from miniray.common.runtime import ActorLocation, Runtime, RuntimeContextData
from miniray.common.series import COUNTED
from miniray.messages import protocol as p
from miniray.messages.value import ActorExit, error_value
from miniray.objects.borrowing import Borrowing
from miniray.objects.objects import ObjectTable
from miniray.objects.shared_memory import SharedMemory
from miniray.objects.unseen_results import UnclaimedResults, UnseenErrors
from miniray.objects.waiting import ValueFetches, Waits, plain_wait
from miniray.wire.peers import Peer, PeerTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from miniray.calls.context import ProcessFacts
    from miniray.exceptions import ObjectLostError
    from miniray.messages.value import Value
    from miniray.objects.objects import Entry
    from miniray.objects.waiting import Block
    from miniray.wire.io_loop import IOLoop
    from miniray.wire.node_link import NodeLink


#: Name of threads that read values of futures, and how many may: some take long.
FUTURE_THREAD, _FUTURE_THREADS = "miniray-future", 32


logger = logging.getLogger(__name__)


def _nothing() -> None:
    pass


def _no_call() -> None:
    return None


def _no_actor() -> None:
    raise RuntimeError("There is no actor in this process.")


class ProcessHooks(NamedTuple):
    """The functions that a runtime calls in its process; the defaults are a driver's."""

    #: Runs a wait of the running task, given with its timeout; gives the CPU back meanwhile.
    block: Block = plain_wait
    #: Ends the actor of this process: its running calls fail.
    end_actor: Callable[[], None] = _no_actor
    #: The calls that run here, and the refs that they hold, for reports.
    executing: Callable[[], Iterable[tuple[str, Iterable[ObjectRef[Any]]]]] = tuple
    #: The calls that it was given and that have not ended, for reports: id, name, and for how many
    #: seconds each runs (None: it waits for its turn).
    works: Callable[[], Iterable[tuple[bytes, str, float | None]]] = tuple
    #: Called in a child that user code forks, after the inherited descriptors are closed.
    in_forked_child: Callable[[], None] = _nothing
    #: Loads the arguments of the call of this actor that waits next.
    next_arguments: Callable[[], tuple[Any, ...] | None] = _no_call


class ClusterRuntime(Runtime):
    """The cluster engine behind the public API."""

    objects: ObjectAccess
    calls: Submission
    head: ClusterRequests

    def __init__(
        self,
        facts: ProcessFacts,
        link: NodeLink,
        loop: IOLoop,
        process: ProcessHooks,
        on_shutdown: Callable[[], None],
    ) -> None:
        self.session = object()
        self.facts, self.link, self.loop = facts, link, loop
        self._process = process
        self._on_shutdown = on_shutdown
        self._closed = False
        #: Called for each peer that is gone; a worker adds its own.
        self.on_peer_lost: list[Callable[[Peer], None]] = []
        self.peers = PeerTable(link, facts.node_id, on_lost=self._on_peer_lost)
        # A part that needs a later one goes through a method of this class.
        fetches = ValueFetches(link, facts.node_id, self._lost_on_the_way)
        self.shared_memory = SharedMemory(link, facts.node_id, fetches, self._free_memory)
        self.free_shared = self.shared_memory.free
        self.table = table = ObjectTable(facts.process_id, facts.node_id, self)
        self.borrowing = Borrowing(table, self.peers, self._make_again)
        self.refs = RefTracking(loop, table, self.shared_memory, self.borrowing)
        self._unclaimed = UnclaimedResults(table, self.shared_memory, self.peers)
        self.uploads = JobUploads(link, facts, table)
        self.call_table = CallTable(
            table,
            self.borrowing,
            self.shared_memory,
            self.peers,
            link,
            loop.call_later,
            self._recover,
        )
        self.tasks = TaskClient(self.call_table, self.peers, link, loop, self._warn)
        self._recovery = ValueRecovery(table, self.borrowing, self.call_table, link)
        self.actors = ActorClients(
            facts, link, self.peers, table, self.borrowing, self.call_table, self.uploads
        )
        #: To questions that the daemon passes on; a process adds its own.
        self.answers = Answers(link)
        self._waits = Waits(loop, table, self.borrowing, process.block)
        self._make_api(self._waits)
        self.on_topic = self._handlers_of_pushes()
        self.peers.on_kind.update(self._handlers_of_messages())
        self.on_peer_lost += [
            self.tasks.on_peer_lost,
            self.actors.on_peer_lost,
            self.borrowing.peer_lost,
            lambda peer: table.borrower_died(peer.process_id),
            self._unclaimed.peer_lost,
        ]
        self.refs.begin()

    def _make_api(self, waits: Waits) -> None:
        self._threads = ThreadPoolExecutor(_FUTURE_THREADS, FUTURE_THREAD)
        self._unseen_errors = UnseenErrors(self._threads.submit)
        self.head = ClusterRequests(self.facts, self.link, self.table, self.call_table, self.actors)
        self.objects = ObjectAccess(
            self.refs,
            self.shared_memory,
            waits,
            self._threads,
            self._unseen_errors,
            self._recover,
            self.head.why_missing,
        )
        self.calls = Submission(
            self.facts,
            self.refs,
            self.call_table,
            self.tasks,
            self.actors,
            self.uploads,
            Returns(self.table, self.call_table, self.loop, waits),
        )

    def _handlers_of_pushes(self) -> dict[str, Callable[..., None]]:
        """Return the handlers of pushes, from the daemon or the head; a process adds its own."""
        reports = ObjectReports(self.refs, self.call_table, self.actors, self._process.executing)
        calls = CallReports(self.table, self.call_table, self.actors, self._process.works)
        self.answers.by_name.update(objects=reports.held, calls=calls.told, probe=self._probe)
        self.answers.by_name["metrics of calls"] = calls.metrics
        return {
            "lease_granted": self.tasks.on_granted,
            "lease_failed": self.tasks.on_failed,
            "lease_revoked": self.tasks.on_revoked,
            "process_died": self.peers.process_died,
            "process_unreachable": self.peers.process_unreachable,
            "node_died": self.peers.node_died,
            "node_unreachable": self.peers.node_unreachable,
            "unclaimed": self._unclaimed.on_list,
            "actor": self.actors.on_state,
            "give_up_memory": self.shared_memory.warm.give_up,
            "segment_freed": self.shared_memory.on_freed,
            "store_short": self.shared_memory.on_short,
            "node_stops": self.link.node_stops,
            "warning": lambda text: logger.warning("%s", text),  # a driver prints it
            "head_lost": lambda: None,  # requests to it wait
            "head_back": self._on_head_back,
            "asked": self.answers.on_asked,
        }

    def _probe(self, what: str, *args: Any) -> Any:
        """Answer what this process does: its stacks, a profile, a timeline."""
        from miniray.profiling import inside

        return inside.probe(self.call_table, what, *args)

    def _handlers_of_messages(self) -> dict[int, Callable[[Peer, tuple[Any, ...]], None]]:
        return {
            p.PEER_REPLY: self.call_table.on_reply,
            p.PEER_STREAM: self.call_table.on_stream_item,
            p.PEER_CANCEL_MAKER: self.call_table.on_cancel_asked,
            p.PEER_RECALLED: self.tasks.on_recalled,
            p.PEER_WANT: self.borrowing.on_want,
            p.PEER_VALUE: self.borrowing.on_value,
            p.PEER_BORROW: self.borrowing.on_borrow,
            p.PEER_UNBORROW: self.borrowing.on_unborrow,
            p.PEER_ACK: self.borrowing.on_ack,
        }

    # --- what happens outside ------------------------------------------------------------
    def on_push(self, topic: str, body: tuple[Any, ...]) -> None:
        """Handle a push from the daemon or the head."""
        handler = self.on_topic.get(topic)
        if handler is not None:
            handler(*body)
        else:
            logger.error("a push about %r, which this process does not know", topic)

    def _on_head_back(self) -> None:
        """Repeat to the restarted head what this process wants."""
        self.tasks.on_head_back()
        self.actors.on_head_back()

    def _on_peer_lost(self, peer: Peer) -> None:
        for handle in self.on_peer_lost:
            handle(peer)

    def on_link_lost(self) -> None:
        """Fail all that is waited for: the node's daemon is gone."""
        if self._closed:
            return
        if not self.link.ends_as_asked:
            logger.error("%s", self.link.end())
        error = error_value(self.link.end())
        for call in list(self.call_table.open.values()):
            self.call_table.fail_value(call, error)
        self._fail_pending(error)

    def _fail_pending(self, error: Value) -> None:
        for entry in self.table.snapshot():
            if entry.value is None:
                self.table.set_value(entry.id, error)

    # --- what lower parts need from higher ones ---------------------------------------------
    def _warn(self, text: str) -> None:
        """Warn the user; a worker's log goes to the driver."""
        self.on_topic["warning"](text)

    def _free_memory(self) -> None:
        self.refs.release_unused()

    def _recover(self, entry: Entry, value: Value) -> str | None:
        return self._recovery.lost(entry, value)

    def _make_again(self, id: bytes, payload: Any) -> str | None:
        return self._recovery.again(id, payload)

    def _lost_on_the_way(self, entry: Entry, value: Value, _error: ObjectLostError) -> None:
        """Replace a value that `wait` wanted here and that is gone; else `get` will say so."""
        self._recovery.lost(entry, value)

    # --- objects.objects.Outside: what follows when an object goes -------------------------
    def unborrow(self, id: bytes, owner_node: bytes) -> None:
        self.borrowing.unborrow(id, owner_node)
        self.actors.released(id)

    def origin_unused(self, id: bytes) -> None:
        self.call_table.lineage.forget(id)
        self.call_table.free_unneeded()

    def error_unseen(self, value: Value) -> None:
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # this process ends, and starts no threads
                self._unseen_errors.dropped(value)

    def actor_unreferenced(self, id: bytes) -> None:
        self.actors.unreferenced(id)

    # --- the process -----------------------------------------------------------------
    def context(self) -> RuntimeContextData:
        return self.facts.runtime_context()

    def answer(self, question: str, handler: Callable[..., Any] | None) -> None:
        if handler is None:
            self.answers.by_name.pop(question, None)
        else:
            self.answers.by_name[question] = handler

    def prepare_runtime_env(self, own: Mapping[str, Any] | None) -> str:
        return self.uploads.environment(own)

    def current_actor(self) -> ActorLocation:
        id, info = self.facts.actor_id, self.facts.actor_info
        if id is None or info is None:
            raise RuntimeError("This code does not run in an actor.")
        # Not counted, as in Ray: an actor that keeps its own handle would never end.
        return ActorLocation(ObjectRef(id, b""), pickle.loads(info))

    def next_arguments(self) -> tuple[Any, ...] | None:
        return self._process.next_arguments()

    def owns_actors(self) -> bool:
        return self.actors.owns_any()

    def exit_actor(self) -> None:
        if self.facts.actor_id is None:
            raise RuntimeError("exit_actor() can only be called in a method of an actor.")
        running = context.execution.get()
        if running is not None:
            running.exits = True  # before the check whether the error will be shown
        if running is None or running.answered:
            self._process.end_actor()
        if running is None:
            sys.exit()  # a thread of the user's: its end is not printed
        raise ActorExit

    # --- the end -------------------------------------------------------------------
    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._waits.end()
        self.tell_counts()
        COUNTED.clear()  # it may attach again, and would report them twice
        hooks.end()
        self._give_up()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._on_shutdown()
        self._give_up()  # what other threads have begun to wait for meanwhile

    def tell_counts(self) -> None:
        if counted := self.answers.metrics():
            self.link.node_notice("metrics", counted)

    def _give_up(self) -> None:
        """Fail all pending calls and values.

        Not at exit, when only daemon threads are left, which end with the process: their errors
        would be printed.
        """
        if all(thread.daemon or not thread.is_alive() for thread in threading.enumerate()):
            return
        error = error_value(RuntimeError("miniray.shutdown() was called."))
        for call in list(self.call_table.open.values()):
            if call.stream is not None:
                call.stream.end(error)
        self._fail_pending(error)

    def abandon(self) -> None:
        """Close what a forked child has inherited; send nothing."""
        self._closed = True
        self._waits.abandon()
        hooks.abandon()
        self.peers.abandon()
        self.link.abandon()
        self.loop.abandon()
