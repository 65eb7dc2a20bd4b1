"""Requests that wait for resources, and why, for listings and the status.

Only reads; the reasons are the scheduler's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from miniray.common.amounts import from_units
from miniray.common.state_types import PendingDemand, Why
from miniray.head.scheduling.bundles import GroupStatus
from miniray.head.scheduling.reasons import Reason, ReasonKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.head.cluster import ClusterDirectories
    from miniray.head.directories.actor_table import Actor
    from miniray.head.directories.grants import Request
    from miniray.head.directories.placement_groups import PlacementGroupEntry

#: Shapes that are explained; explaining looks at every node.
_MAX_SHAPES = 200
#: Seconds for which an explanation is reused.
_REASONS_LAST = 1.0
#: Names that are listed per shape.
_MAX_NAMES = 10


class WaitingDemands:
    """Requests without resources."""

    def __init__(self, cluster: ClusterDirectories) -> None:
        self._cluster = cluster
        #: Why actors wait, by their demand, and when that was found out.
        self._reasons: dict[Any, str] = {}
        self._reasoned = 0.0

    def of_job(self, process_id: bytes) -> list[dict[str, Any]]:
        """Return demands of a process's job that wait long or cannot be served, with seconds."""
        client = self._cluster.clients.get(process_id)
        if client is None:
            return []
        now = time.time()
        waiting = self.pending(client.job_id, self._cluster.grants.warn_after)
        return [{**each, "seconds": now - each["since"]} for each in waiting]

    def why_waits(self, process_id: bytes, kind: str, id: Any) -> str:
        """Return why an actor, a placement group or a process's tasks wait; empty if not."""
        cluster = self._cluster
        if kind == "placement_group":
            reason = cluster.scheduler.explain_group(id)
        else:
            is_actor = kind == "actor"
            number = (
                cluster.actors.waiting(id)
                if is_actor
                else cluster.leases.first_waiting(process_id, id)
            )
            reason = cluster.scheduler.explain(number) if number else None
        return reason.sentence() if reason is not None else ""

    def pending(self, job_id: bytes | None = None, least: float = 0.0) -> list[PendingDemand]:
        """Return the waiting requests, equal shapes together, then placement groups.

        Of a job, or all; only requests that have waited ``least`` seconds, or cannot be served.
        """
        long_ago = self._cluster.grants.timers.time() - least
        shapes: dict[Any, list[Request]] = {}
        for request in self._cluster.grants.waiting.values():
            summary = request.requester.describe(request.token)
            if job_id is None or summary.job_id == job_id:
                shapes.setdefault((summary.kind, request.demand), []).append(request)
        found = []
        for (kind, demand), requests in list(shapes.items())[:_MAX_SHAPES]:
            reason = self._cluster.scheduler.explain(requests[0].number)
            if requests[0].since > long_ago and not (reason and reason.infeasible):
                continue
            by_token = {id(request.token): request for request in requests}.values()
            summaries = [request.requester.describe(request.token) for request in by_token]
            found.append(
                PendingDemand(
                    kind=kind,
                    shape=[{name: from_units(units) for name, units in demand.placing}],
                    count=sum(summary.waiting for summary in summaries),
                    names=_names(summary.name for summary in summaries),
                    job_ids=_names(summary.job_id.hex() for summary in summaries),
                    since=requests[0].since_epoch,
                    **_why(reason),
                )
            )
        return [*found, *self._pending_groups(job_id, long_ago)]

    def _pending_groups(self, of_job: bytes | None, long_ago: float) -> list[PendingDemand]:
        groups, grants = self._cluster.placement_groups, self._cluster.grants
        alike: dict[Any, list[PlacementGroupEntry]] = {}
        for group in groups.all():
            if group.status != GroupStatus.CREATED and of_job in (None, groups.job_of(group.id)):
                like = f"{group.strategy} {group.bundles} {group.selectors}"
                alike.setdefault(like, []).append(group)
        found: list[PendingDemand] = []
        for some in list(alike.values())[:_MAX_SHAPES]:
            reason = self._cluster.scheduler.explain_group(some[0].id)
            since = grants.waiting_groups.get(some[0].id, long_ago)
            if reason is None or (since > long_ago and not reason.infeasible):
                continue
            found.append(
                PendingDemand(
                    kind="placement_group",
                    shape=some[0].bundles,
                    count=len(some),
                    names=_names(group.name for group in some if group.name),
                    job_ids=_names(job.hex() for group in some if (job := groups.job_of(group.id))),
                    since=some[0].asked,
                    **_why(reason),
                )
            )
        return found

    def why_actor_waits(self, actor: Actor) -> str:
        """Return which resources an actor waits for; empty if it does not.

        Finding out examines every node, so it is done once a second per shape.
        """
        number = self._cluster.actors.waiting(actor.id)
        if not number:
            return ""
        known, now = self._reasons, time.monotonic()
        if now - self._reasoned > _REASONS_LAST:
            self._reasoned = now
            known.clear()
        if actor.demand not in known and len(known) < _MAX_SHAPES:
            reason = self._cluster.scheduler.explain(number)
            known[actor.demand] = reason.sentence() if reason is not None else ""
        return known.get(actor.demand, "")


def _why(reason: Reason | None) -> Why:
    reason = reason or Reason(ReasonKind.QUEUED)  # it was granted a moment ago
    return Why(
        reason=reason.sentence(),
        cause=reason.kind.value,
        infeasible=reason.infeasible,
        node_id=reason.node_id,
        resource=reason.resource,
        needed=from_units(reason.needed),
        available=from_units(reason.available),
    )


def _names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))[:_MAX_NAMES]
