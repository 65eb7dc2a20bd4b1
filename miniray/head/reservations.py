"""Setting room aside for demands and groups that have waited long.

Responsible for choosing where; what is set aside is honoured by the pools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.head.bundles import plan, total_needs
from miniray.head.labels import matches
from miniray.head.policies import least_used
from miniray.head.reasons import closest
from miniray.head.resources import Reservation

if TYPE_CHECKING:
    from collections.abc import Collection

    from miniray.head.groups import Group
    from miniray.head.queues import ShapeQueue
    from miniray.head.resources import ResourcePool


def reserve_for_queue(queue: ShapeQueue) -> bool:
    """Set aside, for the head of a queue, the pool where it lacks least; False if there is none."""
    demand = queue.demand
    free = [
        pool
        for pool in queue.reach()
        if pool.reservation is None and matches(demand.selector, pool.labels)
    ]
    pool = closest(demand.placing, free)
    if pool is None:
        return False
    _reserve(pool, Reservation(queue, demand.placing))
    queue.reserved = pool
    return True


def reserve_for_group(group: Group, nodes: Collection[ResourcePool], threshold: float) -> bool:
    """Set aside nodes that could hold a group if they were empty, the least used first."""
    names = {name for spec in group.state.missing.values() for name, _ in spec.needs}
    use = least_used(names)
    available = [node for node in nodes if node.reservation is None and not node.closed]
    emptied = []
    originals = {}
    for order, node in enumerate(sorted(available, key=lambda node: (use(node), node.order))):
        twin = node.emptied()
        twin.order = order
        emptied.append(twin)
        originals[node.node_id] = node
    planned = plan(group.state, emptied, group, threshold)
    if planned is None:
        return False
    for node_id in {pool.node_id for pool, _ in planned.values()}:
        specs = [
            group.state.bundles[index]
            for index, (pool, _) in planned.items()
            if pool.node_id == node_id
        ]
        _reserve(originals[node_id], Reservation(group, total_needs(specs)))
        group.reserved.append(originals[node_id])
    return True


def lift(owner: ShapeQueue | Group) -> list[ResourcePool]:
    """Drop what is set aside for an owner: the pools that others may use again."""
    if isinstance(owner.reserved, list):
        pools, owner.reserved = owner.reserved, []
    else:
        pools = [] if owner.reserved is None else [owner.reserved]
        owner.reserved = None
    for pool in pools:
        pool.reservation = None
        pool.version += 1
    return pools


def _reserve(pool: ResourcePool, reservation: Reservation) -> None:
    pool.reservation = reservation
    pool.version += 1
