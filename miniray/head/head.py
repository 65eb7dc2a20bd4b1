"""The head: its parts put together; messages of daemons and requests of processes reach them here.

Independent of gRPC: a session is a ``Node`` whose outbox takes messages. All of it
runs in one event loop's thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from miniray._proto import head_pb2
from miniray.common.config import config
from miniray.common.names import format_bytes
from miniray.common.series import COUNTED
from miniray.exceptions import MinirayError
from miniray.head.cluster import ClusterDirectories, HeadIdentity
from miniray.head.directories.clients import AttachedProcess, ProcessExit
from miniray.head.directories.nodes import ClusterNode
from miniray.head.recovery import HeadRecovery
from miniray.head.state import ClusterState
from miniray.head.watches import Watches
from miniray.messages import plain
from miniray.messages.plain import Arguments
from miniray.messages.value import rebuild_error
from miniray.version import PYTHON_VERSION, VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray._proto import common_pb2
    from miniray.head.directories.grants import Timers
    from miniray.head.directories.nodes import NodeOutbox
    from miniray.head.storage import Storage

    Handlers = dict[str, Callable[..., Any]]

logger = logging.getLogger(__name__)


class Requests:
    """Handlers by name. Arguments that do not match a handler's annotations are refused."""

    def __init__(self, cluster: ClusterDirectories, state: ClusterState, watches: Watches) -> None:
        self._clients = cluster.clients
        by, later = _for_process(cluster, state), _to_answer_later(cluster)
        by["watch"] = watches.watch
        self._by, self._later = by.keys(), later.keys()
        self._handlers = {**by, **later, **_for_anybody(cluster, state)}
        #: Of requests that were made: an embedded cluster sees few of them.
        self._arguments: dict[str, Arguments] = {}
        self._counts = {
            name: COUNTED.values(("counter", "head_requests_total", "", ()), (("method", name),))
            for name in self._handlers
        }
        self._failing = _on_refused_notice(cluster)

    def handle(self, request: common_pb2.ClientRequest) -> None:
        """Answer a request; its sender gets the error if it fails."""
        who, number, method = request.process_id, request.request, request.method
        arguments: tuple[Any, ...] = ()
        try:
            arguments = tuple(plain.loads(request.body))
            handler = self._handler(method)
            self._counts[method][0] += 1
            arguments = self._arguments_of(method, handler).check(arguments)
            if method in self._later:
                handler((who, number), *arguments)
                return
            result = handler(who, *arguments) if method in self._by else handler(*arguments)
            if number:
                self._clients.answer(who, number, result)
        except (ValueError, MinirayError) as error:
            self._refuse(request, arguments, error)
        except Exception as error:
            logger.exception("request %r of %s failed", method, who.hex())
            self._refuse(request, arguments, error)

    def _handler(self, method: str) -> Callable[..., Any]:
        handler = self._handlers.get(method)
        if handler is None:
            raise ValueError(
                f"The head has no request {method!r}; it has {sorted(self._handlers)}."
            )
        return handler

    def _arguments_of(self, method: str, handler: Callable[..., Any]) -> Arguments:
        known = self._arguments.get(method)
        if known is None:
            given = method in self._by or method in self._later
            known = self._arguments[method] = Arguments(handler, given)
        return known

    def _refuse(
        self, request: common_pb2.ClientRequest, arguments: tuple[Any, ...], error: Exception
    ) -> None:
        who, method = request.process_id, request.method
        if request.request:
            self._clients.refuse(who, request.request, error)
            return
        logger.warning("notice %r of %s was refused: %s", method, who.hex(), error)
        fail = self._failing.get(method)
        if fail is None:
            return
        try:
            Arguments(fail, 2).check(arguments)
        except ValueError:
            return  # it does not even say which request waits
        why = f"the head refused it ({type(error).__name__}: {error})"
        fail(who, why, *arguments)


def _for_process(cluster: ClusterDirectories, state: ClusterState) -> Handlers:
    """Return requests whose handlers get the requesting process, then the arguments."""
    actors, leases = cluster.actors, cluster.leases
    return {
        "create_actor": actors.create,
        "subscribe_actor": actors.subscribe,
        "actor_out_of_scope": actors.out_of_scope,
        "want_leases": leases.want,
        "return_lease": leases.give_back,
        "hold_leases": leases.hold,
        "ended_jobs": cluster.tell_ended_jobs,
        "waiting_of_job": state.waiting.of_job,
        "why_waits": state.waiting.why_waits,
        "event": cluster.events.told,
        "delete_job": cluster.submissions.delete,
    }


def _for_anybody(cluster: ClusterDirectories, state: ClusterState) -> Handlers:
    """Return requests whose handlers get the arguments alone."""
    actors, groups, kv = cluster.actors, cluster.placement_groups, cluster.kv
    return {
        "start_actor": actors.start,
        "kill_actor": actors.kill,
        "get_actor": actors.find,
        "list_named_actors": actors.named,
        "create_placement_group": groups.create,
        "remove_placement_group": groups.remove,
        "placement_group_table": groups.table,
        "find_placement_group": groups.find,
        "pin_placement_group": groups.pin,
        "put_code": cluster.code.put,
        "use_code": cluster.code.use,
        "get_code": cluster.code.get,
        "kv_put": kv.put,
        "kv_get": kv.get,
        "kv_del": kv.delete,
        "kv_keys": kv.keys,
        "kv_exists": kv.exists,
        "drain_node": cluster.drains.drain,
        "undo_drain": cluster.drains.undo,
        "nodes": state.ray_nodes,
        "cluster_resources": state.total_resources,
        "available_resources": state.available_resources,
        "job_output": cluster.submissions.output,
        "job_log_offset": cluster.submissions.log_offset,
        "job_info": state.submitted_job,
        "state": state.listing,
        "actor_row": state.actor_row,
        "status": state.status,
    }


def _to_answer_later(cluster: ClusterDirectories) -> Handlers:
    """Return requests whose handlers answer themselves, and get (process, number) first."""
    return {
        "await_placement_group": cluster.placement_groups.wait,
        "await_drained": cluster.drains.wait,
        "await_end": cluster.ends.wait,
        "submit_job": cluster.submissions.submit,
        "stop_job": cluster.submissions.stop,
        "read_job_log": cluster.submissions.read_log,
    }


def _on_refused_notice(cluster: ClusterDirectories) -> Handlers:
    """Return what fails the waiters of a refused notice; gets process, why and arguments."""
    return {
        "want_leases": cluster.leases.refuse,
        "create_actor": cluster.actors.refuse,
        "start_actor": cluster.actors.refuse,
        "create_placement_group": cluster.placement_groups.refuse,
    }


class Head:
    """A head without its connections."""

    def __init__(self, identity: HeadIdentity, timers: Timers, storage: Storage) -> None:
        self.cluster = cluster = ClusterDirectories(identity, timers, storage)
        self._timers = timers
        self._stopping = False
        self.recovery = HeadRecovery(cluster, timers, self.handle)
        self.state = ClusterState(cluster, self.recovery)
        self.watches = Watches(cluster, self.state, timers)
        self._requests = Requests(cluster, self.state, self.watches)
        self._handlers: dict[str, Callable[[ClusterNode, head_pb2.FromNode], None]] = {
            "heartbeat": lambda node, message: self._beat(node, message.heartbeat),
            "request": lambda _, message: self._requests.handle(message.request),
            "attached": lambda node, message: self._attached(node, message.attached),
            "ended": lambda _, message: self._process_ended(message.ended),
            "lease_started": lambda _, message: self._lease_started(message.lease_started),
            "lease_failed": lambda _, message: self._lease_failed(message.lease_failed),
            "actor": lambda _, message: self.cluster.actors.reported(message.actor),
            "lease_ended": lambda _, message: self._lease_ended(message.lease_ended.lease),
            "blocked": lambda _, message: self.cluster.grants.set_blocked(
                message.blocked.lease, message.blocked.blocked, message.blocked.leaving
            ),
            "quarantines": lambda node, message: self.cluster.quarantines.told(
                node, message.quarantines
            ),
            "leaving": lambda node, message: self.lose(
                node, message.leaving.reason, planned=not message.leaving.failed
            ),
            "batch": self._batch,
        }

    # --- sessions --------------------------------------------------------------------
    def join(self, hello: head_pb2.NodeHello, outbox: NodeOutbox) -> ClusterNode | None:
        """Add the node of a daemon's hello; None if it is refused, with the error in its outbox."""
        refusal = _version_error(hello)
        node = None
        if refusal is None:
            try:
                node = ClusterNode.of(hello, outbox, self._timers.time())
            except Exception as error:
                logger.exception("the hello of a node cannot be read")
                refusal = ("ValueError", f"The head cannot read the node's report: {error}")
        if refusal is not None or node is None:
            kind, text = refusal or ("", "")
            logger.warning("a node on %s (%s) was refused: %s", hello.host, hello.hostname, text)
            outbox.put(head_pb2.ToNode(welcome=head_pb2.Welcome(error_kind=kind, error=text)))
            return None
        came_back = self.cluster.nodes.is_known(node.id) or node.name in self.recovery.awaited
        self._welcome(node)
        try:
            if not node.drivers_only:
                self.cluster.drains.joins(node)
                self.cluster.quarantines.joins(node, hello.quarantines)
                self.recovery.add_node(node, hello.leases, hello.lately.messages)
        except Exception as error:
            logger.exception("node %s was refused", node.name)
            reason = f"the head cannot use what the node reports of its leases: {error}"
            node.send(stop=head_pb2.Stop(reason=reason))
            self.lose(node, reason)
            return None
        if not node.drivers_only:
            event, what = ("back", "is back") if came_back else ("joined", "has joined")
            text = f"Node {node.name} ({node.hostname}) {what}."
            self.cluster.events.add("NODE", event, text, node_id=node.name)
        return node

    def _welcome(self, node: ClusterNode) -> None:
        """Add a node, and queue its welcome before anything that its capacity leads to."""
        known = self.cluster.nodes.get(node.id)
        if known is not None:
            self.lose(known, "it opened a new session")
        others = [self.cluster.nodes.introduction(other) for other in self.cluster.nodes]
        node.send(
            welcome=head_pb2.Welcome(
                nodes=others,
                nodes_are_all=self.recovery.over,
            )
        )
        self.cluster.nodes.add(node)

    def lose(self, node: ClusterNode, reason: str, *, planned: bool = False) -> None:
        """Remove a node with everything that ran there; ``planned``: its end was requested."""
        if self.cluster.nodes.get(node.id) is not node:
            return
        if planned or self._stopping:
            logger.info("node %s (%s) has left: %s", node.name, node.hostname, reason)
        else:
            logger.warning("node %s (%s) is lost: %s", node.name, node.hostname, reason)
        if not node.drivers_only:
            left = planned or self._stopping
            text = f"Node {node.name} ({node.hostname}) {'has left' if left else 'is lost'}: "
            event, severity = ("left", "INFO") if left else ("lost", "ERROR")
            self.cluster.events.add("NODE", event, f"{text}{reason}.", severity, node_id=node.name)
        self.cluster.nodes.remove(node, reason)
        self.cluster.grants.decide(self.cluster.scheduler.remove_node, node.name)
        self.cluster.actors.node_never_came(node.id)  # what it was to report, if that was refused
        self.cluster.clients.node_lost(node)
        self.cluster.drains.left()
        self.recovery.lost(node)
        node.outbox.close()

    def check_liveness(self) -> None:
        """Remove the nodes that were silent for too long. Call it once per heartbeat interval."""
        timeout = config().node_timeout
        every = config().heartbeat_interval
        for node in self.cluster.nodes.silent(self._timers.time(), timeout, every):
            self.lose(node, f"it was silent for {timeout:g} s")
        self.watches.moved()

    def stop(self, reason: str) -> None:
        self._stopping = True
        for node in self.cluster.nodes:
            node.send(stop=head_pb2.Stop(reason=reason))

    def refused(self, text: str) -> None:
        """Record a connection without the cluster's secret."""
        self.cluster.events.add("SECURITY", "wrong_secret", f"{text}.", "WARNING")

    def warn_drivers(self, text: str) -> None:
        for job in self.cluster.jobs.all():
            self.cluster.clients.push(job.driver, "warning", text)

    # --- messages --------------------------------------------------------------------
    def on_message(self, node: ClusterNode, message: head_pb2.FromNode) -> None:
        if not node.alive:
            return
        node.heard = self._timers.time()
        self.handle(node, message)

    def handle(self, node: ClusterNode, message: head_pb2.FromNode) -> None:
        """Handle a message; log a failure, and go on."""
        kind = message.WhichOneof("kind")
        handler = self._handlers.get(kind or "")
        if handler is None:
            logger.error("node %s sent a message of kind %r", node.name, kind)
            return
        self.watches.moved()
        try:
            handler(node, message)
        except Exception:
            logger.exception("handling %s of node %s failed", kind, node.name)

    def _batch(self, node: ClusterNode, message: head_pb2.FromNode) -> None:
        for part in message.batch.messages:
            self.handle(node, part)

    def _beat(self, node: ClusterNode, heartbeat: head_pb2.Heartbeat) -> None:
        before = node.object_store_spilled
        node.beat(heartbeat)
        if node.object_store_spilled > before:
            size = format_bytes(node.object_store_spilled)
            text = f"Node {node.name} has no memory for all objects: {size} of them are on disk."
            self.cluster.events.add_seldom("OBJECT", "spilled", text, "WARNING", node.name)

    def _attached(self, node: ClusterNode, attached: head_pb2.ProcessAttached) -> None:
        job_id = attached.job_id or attached.process_id
        self.cluster.clients.attach(
            AttachedProcess(attached.process_id, node, attached.pid, attached.driver, job_id)
        )
        if attached.driver:
            job = self.cluster.jobs.started(
                job_id, attached.process_id, node.id, attached.pid, attached.details
            )
            self.cluster.job_started(job)
        if attached.driver or job_id != attached.process_id:  # else it is of no job
            self.cluster.jobs.hold(attached.process_id, job_id)

    def _process_ended(self, ended: head_pb2.ProcessEnded) -> None:
        if ended.lease:
            self.cluster.actors.process_of_lease(ended.lease, ended.process_id)
        code = ended.exit_code if ended.exit_known else None
        how = ProcessExit(code, ended.pid, ended.planned, detail=ended.detail)
        self.cluster.submissions.command_ended(ended.lease, how)
        self.cluster.clients.ended(ended.process_id, how)

    def _lease_started(self, started: head_pb2.LeaseStarted) -> None:
        self.cluster.leases.started(started.lease, started.process_id, started.calls_left)
        self.cluster.submissions.command_started(started.lease)

    def _lease_failed(self, failed: head_pb2.LeaseFailed) -> None:
        submissions = self.cluster.submissions
        if submissions.has_lease(failed.lease):
            submissions.start_failed(failed.lease, rebuild_error(failed.error))
            self.cluster.grants.release(failed.lease)
        elif self.cluster.actors.lease_failed(failed.lease, failed.error, failed.tries):
            self.cluster.grants.release(failed.lease)
        else:
            self.cluster.leases.failed(failed.lease, failed.error, failed.tries)

    def _lease_ended(self, number: int) -> None:
        self.cluster.actors.lease_over(number)
        self.cluster.submissions.lease_over(number)
        self.cluster.leases.over(number)


def _version_error(hello: head_pb2.NodeHello) -> tuple[str, str] | None:
    """Return (name of an exception, its text) for a node of another version."""
    ours = PYTHON_VERSION
    if hello.version != VERSION:
        what, theirs, wanted = "miniray", hello.version, VERSION
    elif _minor(hello.python) != _minor(ours):
        # Code travels as bytecode, and plain data as marshal: both are of one minor version.
        what, theirs, wanted = "Python", hello.python, ours
    else:
        return None
    text = (
        f"This node has {what} {theirs}, the cluster has {wanted}. "
        f"Install the same version on every machine and start the node again."
    )
    return "VersionMismatchError", text


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
