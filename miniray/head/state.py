"""Listings of the cluster: Ray's tables, nodes, actors, devices, jobs, and the status of all.

Only reads; every number comes from the part that owns it.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import TYPE_CHECKING, Any

from miniray.common.amounts import UNIT, from_units
from miniray.common.config import config
from miniray.common.series import COUNTED
from miniray.common.state_types import (
    TRAIN_RUNS,
    ActorStatus,
    AwaitedNode,
    ClusterStatus,
    DeadActorStatus,
    NodeStatus,
    PlacementGroupStatus,
    QuarantineStatus,
)
from miniray.exceptions import DeathCause
from miniray.head.directories.actor_table import ORDINARY, DeadActor
from miniray.head.directories.out_of_service import why_quarantined
from miniray.head.waiting import WaitingDemands
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miniray.head.cluster import ClusterDirectories
    from miniray.head.directories.actor_table import Actor
    from miniray.head.directories.nodes import ClusterNode
    from miniray.head.directories.submitted_job import SubmittedJob
    from miniray.head.recovery import HeadRecovery
    from miniray.head.scheduling.resources import ResourcePool

    Row = dict[str, Any]
    #: By resource and device.
    Holders = dict[tuple[str, str], list[Row]]

#: Missed heartbeats after which a node is shown as silent.
_MISSED = 3
#: Dead actors that the status lists.
_MAX_DEAD = 10


class ClusterState:
    """Read-only views of a cluster."""

    def __init__(self, cluster: ClusterDirectories, recovery: HeadRecovery) -> None:
        self._cluster = cluster
        self._recovery = recovery
        #: What waits for resources, and why.
        self.waiting = WaitingDemands(cluster)
        #: What ``listing`` returns, by name.
        self.listings: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "nodes": self.ray_nodes,
            "actors": self._list_actors,
            "leases": self._list_leases,
            "pending": lambda: [dict(demand) for demand in self.waiting.pending()],
            "placement_groups": self._list_placement_groups,
            "node_states": lambda: [{**self._node(node)} for node in self._all_nodes()],
            "jobs": self._list_jobs,
            "workers": self._list_workers,
            "submissions": self.submitted_jobs,
            "devices": self._list_devices,
            "events": lambda: self._cluster.events.after(0),
            "runs": self._list_runs,
            "head": self._list_head,
        }

    # --- Ray's tables ----------------------------------------------------------------
    def ray_nodes(self) -> list[dict[str, Any]]:
        """Return nodes as ``ray.nodes()`` lists them, lost ones included."""
        return [_ray_node(node) for node in self._all_nodes()]

    def total_resources(self) -> dict[str, float]:
        """Return the totals of the living nodes, without zeros; memory in bytes."""
        return _positive(self._cluster.scheduler.total_resources())

    def available_resources(self) -> dict[str, float]:
        """Return their free amounts, without zeros."""
        return _positive(self._cluster.scheduler.available_resources())

    # --- listings ----------------------------------------------------------------
    def listing(self, what: str) -> list[dict[str, Any]]:
        """Return one kind of thing as plain dicts; ValueError if there is no such kind."""
        listing = self.listings.get(what)
        if listing is None:
            raise ValueError(f"There is no listing of {what!r}; there are {sorted(self.listings)}.")
        return listing()

    def _list_actors(self) -> list[dict[str, Any]]:
        actors = self._cluster.actors
        living = [self._living_row(actor) for actor in actors.all()]
        return [*living, *(_dead_row(id, dead) for id, dead in actors.dead())]

    def actor_row(self, id: bytes) -> dict[str, Any] | None:
        """Return an actor as the listing has it; None if it is forgotten."""
        actor = self._cluster.actors.find_any(id)
        if isinstance(actor, DeadActor):
            return _dead_row(id, actor)
        return self._living_row(actor) if actor is not None else None

    def actor_ids(self) -> list[bytes]:
        """Return the ids of the actors that live or are remembered."""
        actors = self._cluster.actors
        return [*(actor.id for actor in actors.all()), *(id for id, _ in actors.dead())]

    def _living_row(self, actor: Actor) -> dict[str, Any]:
        group = actor.spec.group
        return {
            **self._actor(actor),
            "job_id": actor.job_id.hex(),
            "started": actor.arguments is not None,
            "required_resources": dict(actor.spec.placement_resources),
            "is_detached": actor.spec.detached,
            "placement_group_id": group and group.placement_group_id.hex(),
            "why_waits": self.waiting.why_actor_waits(actor),
        }

    def _lately_dead(self) -> list[DeadActorStatus]:
        """Return the actors that ended unexpectedly, the latest first."""
        dead = reversed(self._cluster.actors.dead())
        unusual = ((id, each) for id, each in dead if DeathCause[each.death.cause] not in ORDINARY)
        return [
            DeadActorStatus(
                actor_id=id.hex(),
                class_name=each.death.class_name,
                name=each.name,
                died=each.when,
                reason=str(each.death.error(id)),
            )
            for id, each in itertools.islice(unusual, _MAX_DEAD)
        ]

    def _list_placement_groups(self) -> list[dict[str, Any]]:
        known = {group.id.hex(): group for group in self._cluster.placement_groups.all()}
        found = []
        for id, table in self._cluster.placement_groups.table(None).items():
            group = known.get(id)
            detached = group is not None and group.detached
            job_id = self._cluster.placement_groups.job_of(bytes.fromhex(id))
            found.append({**table, "creator_job_id": job_id.hex(), "is_detached": detached})
        return found

    def _list_leases(self) -> list[dict[str, Any]]:
        return [
            {
                "lease": lease.number,
                "name": lease.group.name,
                "owner": lease.group.client_id.hex(),
                "job_id": lease.group.job_id.hex(),
                "node_id": lease.node_id.hex(),
                "worker_id": lease.process_id.hex(),
                "revoked": lease.revoked,
                "resources": self._held(lease.number),
            }
            for lease in self._cluster.leases.leases.values()
        ]

    def _list_jobs(self) -> list[dict[str, Any]]:
        return [
            {
                "job_id": job.id.hex(),
                "entrypoint": job.entrypoint,
                "namespace": job.spec.namespace,
                "metadata": job.metadata,
                "driver_node_id": job.spec.driver_node.hex(),
                "driver_pid": job.pid,
                "state": "RUNNING" if job.ended is None else "ENDED",
                "start_time": job.started,
                "end_time": job.ended,
            }
            for job in self._cluster.jobs.all()
        ]

    def submitted_job(self, name: str) -> dict[str, Any]:
        """Describe a submitted job.

        Raises:
            JobNotFoundError: There is none.
        """
        return self._submitted_job(self._cluster.submissions.get(name))

    def submitted_jobs(self) -> list[dict[str, Any]]:
        """Describe the submitted jobs, in the order of their submission."""
        return [self._submitted_job(job) for job in self._cluster.submissions.all()]

    def _submitted_job(self, job: SubmittedJob) -> dict[str, Any]:
        spec = job.spec
        drivers = [
            driver
            for driver in self._cluster.jobs.all()
            if driver.metadata.get("job_submission_id") == job.name
        ]
        ids = {driver.id for driver in drivers}
        return {
            "submission_id": job.name,
            "status": job.state,
            "entrypoint": job.entrypoint,
            "message": self._cluster.submissions.message(job),
            "error_type": job.error_type,
            "submitted": job.submitted,
            "start_time": job.started,
            "end_time": job.ended,
            "metadata": dict(spec.metadata),
            "runtime_env": job.runtime_env,
            "resources": dict(spec.resources),
            "driver_node_id": job.node,
            "driver_exit_code": job.exit_code,
            "driver_info": {
                "id": drivers[-1].id.hex(),
                "node_ip_address": self._address_of(drivers[-1].spec.driver_node),
                "pid": str(drivers[-1].pid),
            }
            if drivers
            else None,
            "detached_actors": [
                actor.spec.name or actor.class_name
                for actor in self._cluster.actors.all()
                if actor.spec.detached and actor.job_id in ids
            ],
        }

    def _address_of(self, node_id: bytes) -> str:
        """Return the address of a living node; empty if it is gone."""
        node = self._cluster.nodes.get(node_id)
        return node.host if node is not None else ""

    def _list_workers(self) -> list[dict[str, Any]]:
        leases = self._cluster.leases.leases.values()
        names = {lease.process_id: lease.group.name for lease in leases}
        actors = {}
        for actor in self._cluster.actors.all():
            names[actor.process_id], actors[actor.process_id] = actor.class_name, actor.id
        return [
            {
                "worker_id": client.id.hex(),
                "node_id": client.node.name,
                "pid": client.pid,
                "job_id": client.job_id.hex(),
                "kind": "driver" if client.is_driver else "worker",
                "name": names.get(client.id, ""),
                "actor_id": actors[client.id].hex() if client.id in actors else "",
            }
            for client in self._cluster.clients.all()
            if client.is_driver or client.job_id != client.id  # else it is a command
        ]

    def _list_devices(self) -> list[Row]:
        """Return the devices of the living nodes, each with its holders and their shares."""
        nodes = [node for node in self._cluster.nodes if not node.drivers_only]
        return [row for node in nodes for row in _device_rows(self._cluster, node)]

    def _list_runs(self) -> list[dict[str, Any]]:
        """Return the train runs, as their controllers reported them, oldest first."""
        runs = []
        for key in self._cluster.kv.keys(TRAIN_RUNS, ""):
            run = json.loads(self._cluster.kv.get(TRAIN_RUNS, key) or b"{}")
            lives = self._cluster.clients.get(bytes.fromhex(run["worker_id"])) is not None
            runs.append({**run, "alive": lives})
        return runs

    def _list_head(self) -> list[dict[str, Any]]:
        """Return one row: when this head was started, those before it, its nodes, its counts."""
        cluster, grants = self._cluster, self._cluster.grants
        nodes = [each for each in cluster.nodes if not each.drivers_only]
        return [
            {
                "started": cluster.started,
                "restarts": cluster.identity.epoch - 1,
                "sessions": len(tuple(cluster.nodes)),
                "heartbeat_ages": {each.name: cluster.silence_of(each) for each in nodes},
                "waiting": len(grants.waiting) + len(grants.waiting_groups),
                "counted": COUNTED.rows(),
            }
        ]

    # --- the status --------------------------------------------------------------
    def status(self) -> ClusterStatus:
        nodes = [self._node(node) for node in self._all_nodes()]
        total = self._cluster.scheduler.total_resources()
        # Not from what is available: a draining node offers none, though little may be used.
        used: dict[str, float] = {}
        for node in nodes:
            for name, amount in node["used"].items():
                used[name] = used.get(name, 0.0) + amount
        return ClusterStatus(
            address=self._cluster.identity.address,
            version=VERSION,
            started=self._cluster.identity.cluster_started,
            head_started=self._cluster.started,
            time=time.time(),
            nodes=nodes,
            awaited=[
                AwaitedNode(node_id=name, address=address, hostname=hostname)
                for name, (address, hostname) in self._recovery.awaited.items()
            ],
            total=_positive(total),
            used=_positive(used),
            actors=[self._actor(actor) for actor in self._cluster.actors.all()],
            dead_actors=self._lately_dead(),
            pending=self.waiting.pending(),
            placement_groups=[
                PlacementGroupStatus(
                    placement_group_id=group.id.hex(),
                    name=group.name,
                    strategy=group.strategy,  # type: ignore[typeddict-item]
                    state=group.status,  # type: ignore[typeddict-item]
                    bundles=group.bundles,
                    bundle_nodes=list(group.table()["bundles_to_node_id"].values()),
                )
                for group in self._cluster.placement_groups.all()
            ],
        )

    def _all_nodes(self) -> tuple[ClusterNode, ...]:
        """Return living and lost nodes, without the nodes of drivers outside the cluster."""
        nodes = self._cluster.nodes
        return tuple(node for node in (*nodes, *nodes.lost()) if not node.drivers_only)

    def _node(self, node: ClusterNode) -> NodeStatus:
        pool = self._cluster.scheduler.nodes.get(node.name) if node.alive else None
        silence, notable = self._cluster.silence_of(node), _MISSED * config().heartbeat_interval
        return NodeStatus(
            node_id=node.name,
            address=node.host,
            hostname=node.hostname,
            session_dir=node.session_dir,
            is_head=node.is_head_node,
            state=("DRAINING" if node.draining else "ALIVE") if node.alive else "DEAD",
            total=node.totals,
            used=_pool_used(pool) if pool is not None else {},
            labels=node.labels,
            object_store_used=node.object_store_used,
            object_store_capacity=node.object_store_capacity,
            object_store_spilled=node.object_store_spilled,
            quarantined=[
                QuarantineStatus(
                    pids=[process.pid for process in each.processes],
                    names=[process.name for process in each.processes],
                    devices={group.resource: list(group.ids) for group in each.devices},
                    since=each.since,
                    reason=why_quarantined(each),
                )
                for each in (node.quarantines if node.alive else ())
            ],
            silent=silence if node.alive and silence > notable else 0.0,
            reason=node.reason,
        )

    def _actor(self, actor: Actor) -> ActorStatus:
        starting = actor.state == "PENDING" and actor.node is not None
        return ActorStatus(
            actor_id=actor.id.hex(),
            class_name=actor.class_name,
            name=actor.spec.name or "",
            namespace=actor.spec.namespace,
            state="STARTING" if starting else actor.state,  # type: ignore[typeddict-item]
            since=actor.since,
            node_id=actor.node.name if actor.node is not None else "",
            pid=actor.pid,
            restarts=actor.restarts,
            resources=self._held(actor.lease),
        )

    def _held(self, number: int) -> dict[str, float]:
        lease = self._cluster.scheduler.lease(number)
        return lease.allocation.resources() if lease is not None else {}


def _dead_row(id: bytes, dead: DeadActor) -> dict[str, Any]:
    return {
        "actor_id": id.hex(),
        "class_name": dead.death.class_name,
        "name": dead.name,
        "namespace": dead.namespace,
        "state": "DEAD",
        "node_id": dead.death.node_id,
        "pid": dead.death.pid,
        "restarts": dead.death.restarts,
        "resources": {},
        "job_id": dead.job_id.hex(),
        "is_detached": dead.detached,
        "death_cause": str(dead.death.error(id)),
        "death_kind": dead.death.cause,
        "since": dead.when,
    }


def _ray_node(node: ClusterNode) -> dict[str, Any]:
    host, _, port = node.address.split("|")[-1].rpartition(":")
    return {
        "NodeID": node.name,
        "Alive": node.alive,
        "NodeManagerAddress": node.host or host,
        "NodeManagerHostname": node.hostname,
        "NodeManagerPort": int(port) if port.isdigit() else 0,
        "NodeName": node.host or host,
        "RayletSocketName": node.socket_path,
        "DeathReasonMessage": node.reason,
        "alive": node.alive,
        "Resources": _positive(node.totals) if node.alive else {},
        "Labels": node.labels,
        "ObjectStoreUsed": node.object_store_used,
        "ObjectStoreCapacity": node.object_store_capacity,
        "ObjectStoreSpilled": node.object_store_spilled,
    }


def _pool_used(pool: ResourcePool) -> dict[str, float]:
    free = pool.unused()
    used = {name: units - free.get(name, 0) for name, units in pool.totals().items()}
    return _positive({name: from_units(units) for name, units in used.items()})


def _positive(amounts: dict[str, float]) -> dict[str, float]:
    return {name: float(amount) for name, amount in amounts.items() if amount > 0}


def _device_rows(cluster: ClusterDirectories, node: ClusterNode) -> Iterator[Row]:
    holders = _holders(cluster, node)
    for resource, devices in node.pool.devices.items():
        for id in devices.ids:
            held = holders.get((resource, id), [])
            why = devices.out.get(id)
            free = 1 - sum(each["share"] for each in held)
            yield {
                "key": f"{node.name}/{resource}/{id}",
                "node_id": node.name,
                "node_name": node.hostname,
                "resource": resource,
                "device": id,
                "held": held,
                "free": 0.0 if why else round(max(0.0, free), 4),
                "quarantined": why,
            }


def _holders(cluster: ClusterDirectories, node: ClusterNode) -> Holders:
    """Return the holders of a node's devices; what groups have reserved and not used is theirs."""
    held: Holders = {}
    scheduler = cluster.scheduler
    for number in scheduler.leases_on(node.name):
        lease = scheduler.lease(number)
        for resource, shares in lease.allocation.devices if lease is not None else ():
            for id, units in shares:
                tenant = _tenant(cluster, number)
                held.setdefault((resource, id), []).append({**tenant, "share": units / UNIT})
    names = {group.id: group.name for group in cluster.placement_groups.all()}
    for key, pool in scheduler.bundles_on(node.name):
        name = names.get(key[0], "")
        for resource, devices in pool.devices.items():
            for id, units in zip(devices.ids, devices.free, strict=True):
                if units > 0:
                    tenant = {"kind": "group", "name": name, "id": key[0].hex()}
                    held.setdefault((resource, id), []).append({**tenant, "share": units / UNIT})
    return held


def _tenant(cluster: ClusterDirectories, number: int) -> Row:
    """Return the holder of a lease."""
    request = cluster.grants.request(number)
    if request is None:
        return {"kind": "", "name": f"lease {number}"}
    kind, name, job_id, *_ = request.requester.describe(request.token)
    tenant: Row = {"kind": kind, "name": name, "job_id": job_id.hex()}
    if kind == "actor":
        actor: Actor = request.token
        tenant |= {"name": actor.spec.name or name, "id": actor.id.hex(), "pid": actor.pid}
    return tenant
