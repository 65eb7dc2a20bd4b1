"""Setting room aside for demands and groups that have waited long.

Responsible for choosing where; what is set aside is honoured by the pools. Room is waited for
only where tasks hold it, which end: what actors and bundles hold may never come back, and
what is free beside it would stand idle meanwhile.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from miniray.head.scheduling.planning import plan
from miniray.head.scheduling.policies import least_used
from miniray.head.scheduling.reasons import by_gap
from miniray.head.scheduling.resources import Reservation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from miniray.common.specs import Allocation
    from miniray.head.scheduling.devices import Aside
    from miniray.head.scheduling.groups import Group
    from miniray.head.scheduling.queues import ShapeQueue
    from miniray.head.scheduling.resources import ResourcePool

    #: A copy of a pool as it will be when its tasks have ended.
    Later = Callable[[ResourcePool], ResourcePool]


def reserve_for_queue(queue: ShapeQueue, later: Later, only: ResourcePool | None = None) -> bool:
    """Set aside, for the head of a queue, the pool where it lacks least; False if there is none.

    Args:
        queue: the demands that wait.
        later: what will be free on a pool.
        only: the pool to use, if it serves; None: any.
    """
    demand = queue.demand
    open_pools = [
        pool
        for pool in queue.reach()
        if pool.reservation is None and demand.accepts(pool.labels) and only in (None, pool)
    ]
    for pool in by_gap(demand.placing, open_pools):
        then = later(pool)
        if not then.fits(demand.placing):
            continue
        devices = {
            name: pool.devices[name].amounts(pool.devices[name].soonest(units, then.devices[name]))
            for name, units in demand.placing
            if name in pool.devices
        }
        scalars = {name: units for name, units in demand.placing if name not in devices}
        _reserve(pool, Reservation(queue, scalars, devices))
        queue.reserved = pool
        return True
    return False


def reserve_for_group(
    group: Group, nodes: Collection[ResourcePool], threshold: float, later: Later
) -> bool:
    """Set aside nodes that will hold a group, the least used first; False if there are none.

    Args:
        group: a group with bundles to place.
        nodes: all nodes.
        threshold: as for ``plan``.
        later: what will be free on a node.
    """
    names = {name for spec in group.state.missing.values() for name, _ in spec.needs}
    use = least_used(names)
    available = [node for node in nodes if node.reservation is None and not node.closed]
    emptied = []
    originals = {}
    for order, node in enumerate(sorted(available, key=lambda node: (use(node), node.order))):
        twin = later(node)
        twin.order = order
        emptied.append(twin)
        originals[node.node_id] = node
    planned = plan(group.state, emptied, group, threshold)
    if planned is None:
        return False
    for node_id in dict.fromkeys(pool.node_id for pool, _ in planned.values()):
        node = originals[node_id]
        made = [allocation for pool, allocation in planned.values() if pool.node_id == node_id]
        _reserve(node, _reservation(group, node, made))
        group.reserved.append(node)
    return True


def _reservation(
    group: Group, node: ResourcePool, allocations: Iterable[Allocation]
) -> Reservation:
    """All of this together."""
    scalars: collections.Counter[str] = collections.Counter()
    shares: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    for allocation in allocations:
        scalars.update(dict(allocation.scalars))
        for name, held in allocation.devices:
            shares[name].extend(held)
    devices: dict[str, Aside] = {
        name: node.devices[name].amounts(tuple(held)) for name, held in shares.items()
    }
    return Reservation(group, scalars, devices)


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
