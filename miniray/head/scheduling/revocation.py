"""Which idle leases to ask back for a waiting request.

Responsible for a what-if search of bounded cost; asking the owners is the server's work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.common.specs import Allocation
    from miniray.head.scheduling.queues import ShapeQueue
    from miniray.head.scheduling.resources import ResourcePool

_MAX_POOLS = 32  # pools looked at per search
_MAX_LEASES = 256  # leases looked at per pool


def choose_revocations(
    queue: ShapeQueue, offers: Iterable[tuple[bytes, ResourcePool, Allocation]]
) -> list[bytes]:
    """The fewest leases, all of one pool, whose release lets the head of a queue be placed.

    Args:
        queue: the waiting requests.
        offers: (lease id, pool, what is held) of leases that could be returned.
    """
    wanted = {name for name, _ in queue.demand.placing}
    by_pool: dict[ResourcePool, list[tuple[bytes, Allocation]]] = {}
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
    queue: ShapeQueue, pool: ResourcePool, leases: list[tuple[bytes, Allocation]]
) -> list[bytes]:
    """Leases of one pool whose release makes room, without those that turn out not to help."""
    trial = pool.copy()
    chosen: list[tuple[bytes, Allocation]] = []
    for lease_id, allocation in sorted(leases, key=lambda lease: -_size(lease[1])):
        if queue.admits(trial):
            break
        trial.release(allocation)
        chosen.append((lease_id, allocation))
    if not queue.admits(trial):
        return []
    for lease in tuple(chosen):
        trial.adopt(lease[1])
        if queue.admits(trial):
            chosen.remove(lease)
        else:
            trial.release(lease[1])
    return [lease_id for lease_id, _ in chosen]


def _size(allocation: Allocation) -> int:
    devices = sum(units for _, shares in allocation.devices for _, units in shares)
    return devices or allocation.cpu
