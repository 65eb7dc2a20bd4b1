"""The map of devices: who has which share of each, what is free, and what is out of service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.common.amounts import UNIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.head.cluster import ClusterDirectories
    from miniray.head.directories.actor_table import Actor
    from miniray.head.directories.nodes import ClusterNode

    Row = dict[str, Any]
    #: By resource and device.
    Holders = dict[tuple[str, str], list[Row]]


def device_map(cluster: ClusterDirectories) -> list[Row]:
    """Return the devices of the living nodes, each with its holders and their shares."""
    nodes = [node for node in cluster.nodes if not node.drivers_only and node.pool.devices]
    return [row for node in nodes for row in _rows(cluster, node)]


def _rows(cluster: ClusterDirectories, node: ClusterNode) -> Iterator[Row]:
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
    """Return who has shares of a node's devices; what groups have set aside is the groups'."""
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
    """Return who has a lease."""
    request = cluster.grants.request(number)
    if request is None:
        return {"kind": "", "name": f"lease {number}"}
    kind, name, job_id, *_ = request.requester.describe(request.token)
    tenant: Row = {"kind": kind, "name": name, "job_id": job_id.hex()}
    if kind == "actor":
        actor: Actor = request.token
        tenant |= {"name": actor.spec.name or name, "id": actor.id.hex(), "pid": actor.pid}
    return tenant
