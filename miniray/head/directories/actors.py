"""The actors of the cluster: names, addresses, subscribers, and restarts.

Responsible for the life of an actor from its registration to its death; placing it is
the scheduler's work, and running it a daemon's.
"""

from __future__ import annotations

import dataclasses
import logging
import marshal
import pickle
import time
from typing import TYPE_CHECKING, Any

from miniray._proto import head_pb2
from miniray.common.object_ref import owner_of
from miniray.common.series import COUNTED
from miniray.common.specs import ActorSpec, BundleAffinity, GrantedLease, JobSpec
from miniray.common.state_types import ALIVE, DEAD
from miniray.exceptions import ActorAlreadyExistsError, ActorUnschedulableError, DeathCause
from miniray.head.directories.actor_table import (
    NEVER_MADE,
    ORDINARY,
    REQUESTED,
    UNKNOWN,
    Actor,
    ActorSubscribers,
    ActorTable,
    DeadActor,
)
from miniray.head.directories.clients import ProcessExit
from miniray.head.directories.grants import RequestSummary
from miniray.head.scheduling.demands import Demand
from miniray.head.scheduling.reasons import ReasonKind

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from miniray.common.specs import Allocation
    from miniray.head.directories.clients import ClientDirectory
    from miniray.head.directories.events import EventLog
    from miniray.head.directories.grants import GrantTable
    from miniray.head.directories.jobs import JobDirectory
    from miniray.head.directories.nodes import ClusterNode, NodeDirectory
    from miniray.head.scheduling.reasons import Reason

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, repr=False)
class ActorRegistry:
    """All actors by id, name and process. Implements ``grants.Requester`` for actors."""

    grants: GrantTable
    nodes: NodeDirectory
    clients: ClientDirectory
    jobs: JobDirectory
    #: Called when state that must survive a restart has changed.
    on_change: Callable[[Actor], None]
    events: EventLog

    def __post_init__(self) -> None:
        self._table = ActorTable()
        self.changes = self._table.changes
        self._subscribers = ActorSubscribers(self.clients, self.grants.timers)
        #: After a restart of the head: actors and their leases by the node that is to report them.
        self._awaited: dict[bytes, list[tuple[Actor, int]]] = {}
        self.clients.on_ended.append(self._process_ended)

    # --- requests of clients ---------------------------------------------------------
    def create(
        self, requester: bytes, id: bytes, spec: ActorSpec, get_if_exists: bool
    ) -> tuple[bytes, bytes, bool, bytes] | None:
        """Register an actor; its arguments follow with ``start``.

        Returns how to make a handle of the one that exists already, for ``get_if_exists``.

        Raises:
            ActorAlreadyExistsError: the name is taken.
        """
        if self._table.living.get(id) is not None:
            return None  # repeated after the head before this one had kept it
        dead = self._table.dead.get(id)
        if dead is not None:  # the same; or its end was requested on another way, which was quicker
            self._subscribers.tell_dead(requester, id, dead.death)
            return None
        client = self.clients.get(requester)
        job_id = client.job_id if client is not None else b""
        actor = Actor(
            id=id,
            spec=spec,
            job_id=job_id,
            job=self.jobs.get(job_id),
            near=spec.owner_node.hex(),
            restarts_left=spec.max_restarts,
        )
        if actor.name is not None:
            holder = self._table.by_name.get(actor.name)
            if holder is not None and get_if_exists:
                return holder.location
            if holder is not None:
                raise ActorAlreadyExistsError(*reversed(actor.name))
        self._enter(actor)
        if client is not None:
            self._subscribers.add(requester, id)
        elif not spec.detached:
            self._die(actor, DeathCause.OWNER_DIED)
        return None

    def _enter(self, actor: Actor) -> None:
        self._table.enter(actor)
        if actor.spec.detached:
            self.jobs.hold(actor.id, actor.job_id)
        self._subscribers.came(actor.id)

    def start(
        self, id: bytes, arguments: Any, refs: Any, error: tuple[int, bytes, Any] | None
    ) -> None:
        """Request an actor's lease, as its arguments have values; fail it if one of them failed."""
        actor = self._table.living.get(id)
        if actor is None or actor.arguments is not None:
            return
        if error is not None:
            _, pickled, _ = error
            self._die(actor, DeathCause.CREATION_FAILED, creation=pickled)
            return
        actor.arguments = marshal.dumps((arguments, refs))
        if actor.spec.detached:
            self._table.disown(actor)
        self._changed(actor)
        self._submit(actor)

    def refuse(self, requester: bytes, why: str, id: bytes, *_: object) -> None:
        """Mark an actor dead that could not be registered or started."""
        actor = self._table.living.get(id)
        if actor is not None:
            self._die_unschedulable(actor, why)
        elif self._table.dead.get(id) is None:
            creation = _unschedulable(id.hex(), why)
            death = NEVER_MADE._replace(cause=DeathCause.CREATION_FAILED.name, creation=creation)
            self._table.enter_dead(id, DeadActor(death, when=time.time()))
            self._subscribers.tell_dead(requester, id, death)

    def subscribe(self, process_id: bytes, id: bytes) -> None:
        """Notify a process of the actor's state, now and whenever it changes."""
        actor = self._table.living.get(id)
        dead = self._table.dead.get(id)
        if actor is not None:
            self._subscribers.add(process_id, id)
            if actor.state != ALIVE or actor.node is not None:  # else its node has yet to report
                self._subscribers.tell(process_id, actor)
        elif dead is None and self.clients.get(owner_of(id)) is not None:
            self._subscribers.add(process_id, id)
            self._subscribers.wait_for(id)
        else:
            death = dead.death if dead is not None else UNKNOWN
            self._subscribers.tell_dead(process_id, id, death)

    def kill(self, id: bytes, no_restart: bool) -> None:
        """End an actor's process; it starts again if it may and ``no_restart`` is False."""
        actor = self._table.living.get(id)
        if actor is None:
            if no_restart and self._table.dead.get(id) is None:  # it must not be made any more
                self._table.enter_dead(id, DeadActor(NEVER_MADE, when=time.time()))
            return
        if no_restart or actor.restarts_left == 0:
            self._die(actor, DeathCause.KILLED)
        elif actor.node is not None:
            actor.killed = True
            self._end(actor, kill=True)

    def out_of_scope(self, process_id: bytes, id: bytes) -> None:
        actor = self._table.living.get(id)
        if actor is not None and actor.owner == process_id and not actor.spec.detached:
            self._die(actor, DeathCause.OUT_OF_SCOPE)

    def find(self, name: str, namespace: str) -> tuple[bytes, bytes, bool, bytes]:
        """Return how to make a handle of a named actor; ValueError if there is none."""
        actor = self._table.by_name.get((namespace, name))
        if actor is None:
            raise ValueError(f"There is no actor named {name!r} in namespace {namespace!r}.")
        return actor.location

    def named(self, namespace: str | None) -> list[dict[str, str]]:
        """Return names and namespaces of living named actors, of one namespace or of all."""
        return [
            {"name": name, "namespace": where}
            for where, name in self._table.by_name
            if namespace is None or where == namespace
        ]

    # --- placing ---------------------------------------------------------------------
    def _submit(self, actor: Actor) -> None:
        try:
            actor.demand = demand_of(actor)
        except ValueError as error:
            self._die_unschedulable(actor, str(error))
            return
        number = self.grants.reserve_number()
        self._table.leased(actor, number)
        self.grants.submit(number, self, actor, actor.demand, actor.near)

    def granted(self, token: Actor, number: int, allocation: Allocation) -> None:
        node = self.nodes.get(bytes.fromhex(allocation.node_id))
        assert node is not None  # the scheduler has living nodes only
        now = time.time()
        self._took(token, "placed", now - token.since)
        token.node, token.since = node, now
        self._changed(token)
        # The namespace is the job's, as in Ray: the actor's own is only where its name is.
        no_job = JobSpec(namespace=token.spec.namespace)
        node.start(
            GrantedLease(
                number=number,
                epoch=self.grants.epoch,
                owner=token.owner,
                job_id=token.job_id,
                job=token.job.spec if token.job is not None else no_job,
                spec=token.spec,
                allocation=allocation,
                actor_id=token.id,
                arguments=token.arguments or b"",
                restarts=token.restarts,
            )
        )

    def refused(self, token: Actor, number: int, reason: Reason) -> None:
        if reason.kind is ReasonKind.GROUP_GONE:
            self._die(token, DeathCause.GROUP_REMOVED, ended=True)
        else:
            self._die_unschedulable(token, reason.sentence())

    def lost(self, token: Actor, number: int) -> None:
        if token.lease == number:  # else it was dead already, and only its process was left
            self._ended(token, ProcessExit(pid=token.pid, with_node=True))

    def must_end(self, token: Actor, number: int) -> None:
        if token.lease == number and token.state != DEAD:
            self._die(token, DeathCause.GROUP_REMOVED)

    def waiting(self, id: bytes) -> int:
        """Return the number of an actor's waiting request; 0 if none waits."""
        actor = self._table.living.get(id)
        return actor.lease if actor is not None and actor.node is None else 0

    def describe(self, token: Actor) -> RequestSummary:
        return RequestSummary("actor", token.class_name, token.job_id, token.owner)

    def _die_unschedulable(self, actor: Actor, why: str) -> None:
        creation = _unschedulable(f"{actor.class_name} ({actor.id.hex()})", why)
        self._die(actor, DeathCause.CREATION_FAILED, creation=creation, ended=True)

    # --- reports of daemons ------------------------------------------------------------
    def reported(self, report: head_pb2.ActorReported) -> None:
        """Record that an actor's constructor ended, or that the actor ends itself."""
        actor = self._table.by_lease.get(report.lease)
        if actor is None or actor.id != report.actor_id:
            return  # it is dead or elsewhere already
        if report.process_id:
            self._table.lives_in(actor, report.process_id, report.pid)
        if report.exiting:
            actor.exiting = True
        elif report.error:
            self._die(actor, DeathCause.CREATION_FAILED, creation=report.error, ended=True)
        else:
            self._count_start(actor)
            actor.state, actor.since = ALIVE, time.time()
            self._changed(actor)
            self._report_placed(actor)
            self._subscribers.tell_all(actor)

    def _count_start(self, actor: Actor) -> None:
        """Count a start, unless a node reports it again to a restarted head."""
        process, now = self.clients.get(actor.process_id), time.time()
        if actor.state != ALIVE and process is not None:
            attached = max(process.since, actor.since)
            self._took(actor, "process", attached - actor.since)
            self._took(actor, "constructor", now - attached)
            COUNTED.count("actor_starts_total", (actor.tag,))

    @staticmethod
    def _took(actor: Actor, phase: str, seconds: float) -> None:
        tags = (actor.tag, ("phase", phase))
        COUNTED.took("actor_start_seconds", seconds, tags)

    def _report_placed(self, actor: Actor) -> None:
        name = f" {actor.spec.name!r}" if actor.spec.name else ""
        where = actor.node.name[:8] if actor.node is not None else "?"
        again = f", restart {actor.restarts}" if actor.restarts else ""
        text = f"{actor.class_name}{name} runs on node {where} (pid {actor.pid}{again})."
        self._report("placed", text, "INFO", actor)

    def _report(self, event: str, text: str, severity: str, actor: Actor) -> None:
        node = actor.node.name if actor.node is not None else ""
        ids = {"actor_id": actor.id.hex(), "job_id": actor.job_id.hex(), "node_id": node}
        self.events.add("ACTOR", event, text, severity, **ids)

    def process_of_lease(self, number: int, process_id: bytes) -> None:
        """Record the process of a lease, which a daemon may report only here."""
        actor = self._table.by_lease.get(number)
        if actor is not None and process_id:
            self._table.lives_in(actor, process_id)

    def lease_failed(self, number: int, error: bytes, tries: int) -> bool:
        """Handle a process that a daemon could not start; False if the lease is no actor's.

        If it may be tried more than once, that node was unsuitable, and there may be another one.
        """
        actor = self._table.by_lease.get(number)
        if actor is None:
            return False
        if tries > 1:
            self._table.leave_place(actor)
            self._submit(actor)
        else:
            self._die(actor, DeathCause.CREATION_FAILED, creation=error, ended=True)
        return True

    def lease_over(self, number: int) -> None:
        actor = self._table.by_lease.get(number)
        if actor is not None:
            self._ended(actor, ProcessExit(pid=actor.pid))

    # --- ending ------------------------------------------------------------------------
    def _process_ended(self, process_id: bytes, how: ProcessExit) -> None:
        actor = self._table.by_process.get(process_id)
        if actor is not None:
            self._ended(actor, how)
        self._subscribers.process_ended(process_id)
        self._end_owned(process_id, how.detail if how.with_node else "")

    def _end_owned(self, process_id: bytes, detail: str = "") -> None:
        for owned in self._table.take_owned(process_id):
            if owned.state != DEAD:  # the end of one may have refused another
                self._die(owned, DeathCause.OWNER_DIED, how=ProcessExit(detail=detail))

    def _ended(self, actor: Actor, how: ProcessExit) -> None:
        """Restart an actor whose process is gone, or mark it dead."""
        cause = actor.cause_of_death(how)
        if cause is not None:
            self._die(actor, cause, how=how, ended=True)
            return
        died = actor.describe_death(actor.end_of_process(how), how)
        COUNTED.count("actor_restarts_total", (actor.tag,))
        self._report("restarted", f"{died.error(actor.id)} It starts again.", "WARNING", actor)
        self._table.leave_place(actor)
        actor.begin_restart()
        logger.warning("%s It starts again.", died.error(actor.id))
        self._changed(actor)
        self._subscribers.tell_all(actor, died)
        self._submit(actor)

    def _end(self, actor: Actor, *, kill: bool) -> None:
        if actor.node is not None:
            actor.node.send(end_lease=head_pb2.EndLease(lease=actor.lease, kill=kill))

    def _die(
        self,
        actor: Actor,
        cause: DeathCause,
        *,
        creation: bytes | None = None,
        how: ProcessExit | None = None,
        ended: bool = False,
    ) -> None:
        """Mark an actor dead for all callers; its process may still be ending.

        ``creation`` is the pickled error of its creation. ``ended``: its process ends without a
        request, or never was.
        """
        tags = (actor.tag, ("cause", cause.name.lower()))
        COUNTED.count("actor_deaths_total", tags)
        death = actor.describe_death(cause, how or ProcessExit(), creation)
        if cause in ORDINARY:  # there may be many, and no error is made for them
            self._report("ended", f"{actor.class_name} has ended: {cause.value}.", "INFO", actor)
        else:
            severity = "INFO" if cause in REQUESTED else "ERROR"
            self._report("died", str(death.error(actor.id)), severity, actor)
        if actor.node is None and actor.lease:
            self.grants.withdraw(actor.lease)
        elif not ended:
            self._end(actor, kill=cause is not DeathCause.OUT_OF_SCOPE)
        self._table.leave_place(actor)
        actor.die(death)
        if cause not in ORDINARY:
            level = logging.INFO if cause in REQUESTED else logging.WARNING
            logger.log(level, "%s", death.error(actor.id))
        self._table.died(actor)
        if actor.spec.detached:
            self.jobs.release(actor.id)
        self._subscribers.tell_death(actor.id, death)
        self._changed(actor)

    # --- restarts of the head ------------------------------------------------------------
    def restore(self, actor: Actor, node_id: bytes) -> None:
        """Enter an actor kept by an earlier head; place it, or await its node's report."""
        actor.job = self.jobs.get(actor.job_id)
        self._enter(actor)
        if node_id:
            self._awaited.setdefault(node_id, []).append((actor, actor.lease))
            # So that the node's report of its end finds it.
            self._table.leased(actor, actor.lease)
            if actor.process_id:
                self._table.lives_in(actor, actor.process_id)
        else:
            actor.lease = 0
            self._submit(actor)

    def restore_dead(self, id: bytes, dead: DeadActor) -> None:
        self._table.enter_dead(id, dead)

    def node_reports(
        self, node: ClusterNode, processes: Mapping[int, bytes], without_bundle: Container[int]
    ) -> None:
        """Take over the actors that a node reports; the ones that it lacks have ended."""
        for actor, lease in self._awaited.pop(node.id, ()):
            if actor.lease != lease:  # it has ended
                continue
            process_id = processes.get(actor.lease)
            if process_id is None:
                self._not_there(actor)
                continue
            if actor.lease in without_bundle:
                self._bundle_gone(actor)
                continue
            actor.node = node
            actor.demand = demand_of(actor)
            self._table.leased(actor, actor.lease)
            self.grants.restore(actor.lease, self, actor, actor.demand)
            if process_id:
                self._table.lives_in(actor, process_id)
            if actor.state == ALIVE:
                self._subscribers.tell_all(actor)

    def _not_there(self, actor: Actor) -> None:
        if actor.state == ALIVE:
            self._ended(actor, ProcessExit(pid=actor.pid))
            return
        self._table.leave_place(actor)
        self._changed(actor)
        self._submit(actor)

    def _bundle_gone(self, actor: Actor) -> None:
        placement = demand_of(actor).placement
        assert isinstance(placement, BundleAffinity)
        if self.grants.scheduler.group(placement.placement_group_id) is None:
            self._die(actor, DeathCause.GROUP_REMOVED, ended=True)
        else:
            self._ended(actor, ProcessExit(pid=actor.pid, with_node=True))

    def node_never_came(self, node_id: bytes) -> None:
        """Restart or mark dead the actors of a node that did not report."""
        for actor, lease in self._awaited.pop(node_id, ()):
            if actor.lease == lease:
                self._ended(actor, ProcessExit(pid=actor.pid, with_node=True))

    def end_orphans(self) -> None:
        for owner in [owner for owner in self._table.owned if self.clients.get(owner) is None]:
            self._end_owned(owner)

    def has_lease(self, number: int) -> bool:
        return self._table.by_lease.get(number) is not None

    def _changed(self, actor: Actor) -> None:
        self.changes.add(actor.id)
        self.on_change(actor)

    # --- listings ------------------------------------------------------------------------
    def all(self) -> list[Actor]:
        return list(self._table.living.values())

    def find_any(self, id: bytes) -> Actor | DeadActor | None:
        """Return an actor that lives or is remembered; None if it is forgotten."""
        return self._table.living.get(id) or self._table.dead.get(id)

    def dead(self) -> list[tuple[bytes, DeadActor]]:
        """Return the remembered dead, the latest last."""
        return list(self._table.dead.items())


def _unschedulable(actor: str, why: str) -> bytes:
    return pickle.dumps(
        ActorUnschedulableError(f"The actor {actor} cannot be scheduled: {why}."), 5
    )


def demand_of(actor: Actor) -> Demand:
    """Return an actor's demand; ValueError if its spec is malformed."""
    spec = actor.spec
    return Demand.of(
        spec.resources,
        spec.placement_resources,
        spec.placement,
        spec.label_selector,
        spec.fallback_selectors,
        lasting=True,
    )
