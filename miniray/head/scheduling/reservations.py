"""Capacity for demands that have waited long: reserved, or freed by requesting leases back.

Responsible for choosing where, at a bounded cost; the pools honour reservations, and
``directories/contention.py`` requests leases from their owners. Capacity is reserved only where
tasks hold it, which end: what actors and bundles hold may never come back, and free capacity beside
it would stand idle meanwhile.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from miniray.head.scheduling.bundles import plan
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

_MAX_POOLS = 32  # pools examined per search for leases to request back
_MAX_LEASES = 256  # leases examined per pool


def reserve_for_queue(queue: ShapeQueue, later: Later, only: ResourcePool | None = None) -> bool:
    """Reserve capacity for a queue's head where least is missing, or on ``only``; False if not."""
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


def reserve_for_group(group: Group, nodes: Collection[ResourcePool], later: Later) -> bool:
    """Set aside nodes that will hold a group, the least used first; False if there are none."""
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
    planned = plan(group.state, emptied, group)
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
    """Drop the reservations of an owner; return the pools that others may use again."""
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


# --- requesting leases back ----------------------------------------------------------
def choose_revocations(
    queue: ShapeQueue, offers: Iterable[tuple[int, ResourcePool, Allocation]]
) -> list[int]:
    """Choose the fewest leases, all of one pool, whose release lets a queue's head be placed."""
    wanted = {name for name, _ in queue.demand.placing}
    by_pool: dict[ResourcePool, list[tuple[int, Allocation]]] = {}
    reach = set(queue.reach())
    for lease_id, pool, allocation in offers:
        if pool not in reach or not wanted & allocation.names():
            continue
        found = by_pool.get(pool)
        if found is None:
            if len(by_pool) == _MAX_POOLS or not pool.could_fit(queue.demand.placing):
                continue
            found = by_pool[pool] = []
        if len(found) < _MAX_LEASES:
            found.append((lease_id, allocation))
    choices = [_choose_on(queue, pool, leases) for pool, leases in by_pool.items()]
    return min((choice for choice in choices if choice), key=len, default=[])


def _choose_on(
    queue: ShapeQueue, pool: ResourcePool, leases: list[tuple[int, Allocation]]
) -> list[int]:
    """Choose leases of one pool whose release frees enough; each of them is needed."""
    trial = pool.copy()
    chosen: dict[int, Allocation] = {}
    leases.sort(key=_by_size)
    for lease_id, allocation in leases:
        if queue.admits(trial):
            break
        trial.release(allocation)
        chosen[lease_id] = allocation
    if not queue.admits(trial):
        return []
    for lease_id, allocation in tuple(chosen.items()):
        trial.adopt(allocation)
        if queue.admits(trial):
            del chosen[lease_id]
        else:
            trial.release(allocation)
    return list(chosen)


def _by_size(lease: tuple[int, Allocation]) -> int:
    """Sort the largest first, by devices if any are held."""
    _, allocation = lease
    devices = sum(units for _, shares in allocation.devices for _, units in shares)
    return -(devices or allocation.cpu)
