"""Pools: the capacity of a node or of a bundle, and how much of it is free.

Responsible for exact bookkeeping; not for which pool a demand goes to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from miniray.common.amounts import GRIDS, UNIT, to_units
from miniray.common.specs import Allocation
from miniray.head.scheduling.devices import DeviceGrid, Devices

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from miniray.common.amounts import Needs
    from miniray.head.scheduling.devices import Aside, DeviceShares


class Reservation(NamedTuple):
    """Capacity of a pool that is reserved for a demand that has waited long."""

    #: Its owner, which alone may use it; compared by identity.
    owner: object
    #: Fixed-point amount of each scalar resource.
    scalars: Mapping[str, int]
    #: Reserved amount of each device, by device resource.
    devices: Mapping[str, Aside]


_NOTHING = Reservation(None, {}, {})


class ResourcePool:
    """The capacity of one node or of one bundle, and how much of it is free.

    CPU may go below zero: a task that resumes takes its CPU at once, and the pool
    is in debt until others end.
    """

    def __init__(
        self,
        node_id: str,
        scalars: Iterable[tuple[str, int]],
        devices: Iterable[tuple[str, Iterable[tuple[str, int]]]] = (),
        labels: Mapping[str, str] | None = None,
        bundle: tuple[bytes, int] | None = None,
        whole: Container[str] = (),
        *,
        closed: bool = False,
    ) -> None:
        self.node_id = node_id
        #: (group id, index) for a bundle, None for a node.
        self.key = bundle
        self.total: dict[str, int] = dict(scalars)
        self.free: dict[str, int] = dict(self.total)
        self.devices = {
            name: (DeviceGrid if name in GRIDS else Devices)(shares, divisible=name not in whole)
            for name, shares in devices
        }
        self.labels: Mapping[str, str] = labels or {}
        #: No more grants: draining, or gone.
        self.closed = closed
        #: Position in the stable order of its set.
        self.order = 0
        #: Counts every change, so that values computed from the pool can be recognised as stale.
        self.version = 0
        #: CPU that leases needed to be placed and don't hold; counts as use when pools are ranked.
        self.load = 0
        #: Number of the last placement made here, for taking turns.
        self.last_placed = 0
        #: In the order in which they were granted.
        self.leases: dict[int, None] = {}
        self.reservation: Reservation | None = None

    # --- queries -------------------------------------------------------------------
    def fits(self, needs: Needs) -> bool:
        """Return whether all of this is free now."""
        if self.closed:
            return False
        free = self.free
        for name, units in needs:
            have = free.get(name)
            if have is None:
                devices = self.devices.get(name)
                if devices is None or not devices.fits(units):
                    return False
            elif have < units:
                return False
        return True

    def admits(self, owner: object, needs: Needs) -> bool:
        """Return whether this fits now, without the reservations of others than the owner."""
        if not self.fits(needs):
            return False
        aside = self.reservation
        if aside is None or aside.owner is owner:
            return True
        return all(
            self.devices[name].fits(units, aside.devices.get(name))
            if name in self.devices
            else units <= self.free[name] - aside.scalars.get(name, 0)
            for name, units in needs
        )

    def could_fit(self, needs: Needs, *, repaired: bool = False) -> bool:
        """Return whether this would be free if all were idle and in service."""
        return all(
            self.devices[name].could_fit(units, repaired=repaired)
            if name in self.devices
            else self.total.get(name, 0) >= units
            for name, units in needs
        )

    def copies(self, needs: Needs, owner: object) -> int:
        """Return an upper bound of how many of this the owner could take."""
        if self.closed:
            return 0
        aside = self._aside(owner)
        found = []
        for name, units in needs:
            devices = self.devices.get(name)
            if devices is not None:
                found.append(devices.copies(units, aside.devices.get(name)))
            else:
                free = self.free.get(name, 0) - aside.scalars.get(name, 0)
                found.append(max(free, 0) // units)
        return min(found, default=0)

    def outline(self, most: Needs, owner: object) -> tuple[int, ...]:
        """Return what an owner could take, ordered so that comparing it compares what fits.

        ``most`` names the resources, and how much of each matters at most.
        """
        if self.closed:
            return ()
        aside = self._aside(owner)
        found: list[int] = []
        for name, units in most:
            devices = self.devices.get(name)
            if devices is not None:
                found.extend(devices.outline(aside.devices.get(name)))
            else:
                found.append(min(self.free.get(name, 0) - aside.scalars.get(name, 0), units))
        return tuple(found)

    def _aside(self, owner: object) -> Reservation:
        """Return the capacity that is reserved for others than the owner."""
        reservation = self.reservation
        return _NOTHING if reservation is None or reservation.owner is owner else reservation

    def most(self, name: str) -> int:
        """Return the most of a resource that one demand can have now, without reservations."""
        aside = self._aside(None)
        devices = self.devices.get(name)
        if devices is not None:
            return devices.most(aside.devices.get(name))
        return self.free.get(name, 0) - aside.scalars.get(name, 0)

    def has_room_set_aside(self) -> bool:
        """Return whether all reserved capacity here is free by now."""
        aside = self.reservation or _NOTHING
        return all(self.free[name] >= units for name, units in aside.scalars.items()) and all(
            free >= units
            for name, amounts in aside.devices.items()
            for free, units in zip(self.devices[name].free, amounts, strict=True)
        )

    def utilisation(self, names: Iterable[str]) -> float:
        """Return the use of the most used of these resources: 0 to 1, above 1 in debt."""
        most = 0.0
        for name in names:
            total = self.total.get(name)
            if total:
                used = total - self.free[name] + (self.load if name == "CPU" else 0)
                most = max(most, used / total)
            elif (devices := self.devices.get(name)) is not None and devices.ids:
                most = max(most, 1 - sum(devices.free) / sum(devices.capacity))
        return most

    def totals(self) -> dict[str, int]:
        """Return the amount of each resource, without devices out of service."""
        usable = {name: sum(devices.usable()) for name, devices in self.devices.items()}
        return self.total | usable

    def available(self) -> dict[str, int]:
        """Return the free amount of each resource; 0 in debt, all 0 if the pool grants no more."""
        if self.closed:
            return dict.fromkeys([*self.free, *self.devices], 0)
        return self.unused()

    def unused(self) -> dict[str, int]:
        """Return the free amount of each resource, even if none may be granted; 0 in debt."""
        free = {name: max(units, 0) for name, units in self.free.items()}
        return free | {name: devices.available() for name, devices in self.devices.items()}

    # --- changing ------------------------------------------------------------------
    def allocate(self, needs: Needs, owner: object = None) -> Allocation:
        """Take all of this for an owner; only for needs that it is admitted with."""
        scalars = []
        devices = []
        aside = self._aside(owner).devices
        for name, units in needs:
            if name in self.free:
                self.free[name] -= units
                scalars.append((name, units))
            else:
                devices.append((name, self.devices[name].take(units, aside.get(name))))
        self.version += 1
        return Allocation(self.node_id, tuple(scalars), tuple(devices), self.key)

    def adopt(self, allocation: Allocation) -> None:
        """Count an allocation made earlier, as a daemon reports it.

        Raises:
            ValueError: it names a resource or device that is not here, or one without capacity.
        """
        unknown = allocation.names() - set(self.free) - set(self.devices)
        if unknown:
            raise ValueError(f"node {self.node_id} has no {', '.join(sorted(unknown))}")
        taken: list[tuple[str, DeviceShares]] = []
        try:
            for name, shares in allocation.devices:
                self.devices[name].take_exactly(shares)
                taken.append((name, shares))
        except ValueError as error:
            for name, shares in taken:
                self.devices[name].put(shares)
            raise ValueError(f"node {self.node_id}: {error}") from None
        for name, units in allocation.scalars:
            self.free[name] -= units
        self.version += 1

    def release(self, allocation: Allocation) -> None:
        """Give back an allocation: the exact reverse of ``allocate`` and ``adopt``."""
        for name, units in allocation.scalars:
            self.free[name] += units
        for name, shares in allocation.devices:
            self.devices[name].put(shares)
        self.version += 1

    def add_lease(self, lease_id: int, load: int = 0, placement: int = 0) -> None:
        """Record a lease whose allocation is counted already.

        ``load`` is CPU that it needed to be placed and does not hold; ``placement`` its number
        among all placements, 0 if it was not placed here just now.
        """
        self.leases[lease_id] = None
        self.load += load
        self.last_placed = placement or self.last_placed

    def remove_lease(self, lease_id: int, load: int) -> None:
        del self.leases[lease_id]
        self.load -= load

    def add_cpu(self, units: int) -> None:
        """Add free CPU (a task blocks) or take it, if negative, even into debt (it resumes)."""
        self.free["CPU"] += units
        self.version += 1

    def set_in_service(
        self, resource: str, device_id: str, in_service: bool, why: str = ""
    ) -> bool:
        """Take a device out of service, and say why, or back; return whether it changed."""
        devices = self.devices.get(resource)
        if devices is None or not devices.set_in_service(device_id, in_service, why):
            return False
        self.version += 1
        return True

    def copy(self) -> ResourcePool:
        """Copy the amounts, for what-if questions."""
        twin = self.emptied()
        twin.free = dict(self.free)
        twin.devices = {name: devices.copy() for name, devices in self.devices.items()}
        twin.closed, twin.reservation = self.closed, self.reservation
        return twin

    def emptied(self, *, repaired: bool = False) -> ResourcePool:
        """Copy it with everything free, without what is out of service unless ``repaired``."""
        devices = [
            (
                name,
                [
                    pair
                    for pair in zip(held.ids, held.capacity, strict=True)
                    if repaired or pair[0] not in held.out
                ],
            )
            for name, held in self.devices.items()
        ]
        return ResourcePool(
            self.node_id, self.total.items(), devices, self.labels, self.key, self.whole
        )

    @property
    def whole(self) -> set[str]:
        """Device resources whose devices cannot be shared."""
        return {name for name, devices in self.devices.items() if not devices.divisible}


def node_pool(
    node_id: str,
    resources: Mapping[str, float],
    devices: Mapping[str, Sequence[str]] | None = None,
    labels: Mapping[str, str] | None = None,
    whole: Container[str] = (),
) -> ResourcePool:
    """Make the pool of a node from what its daemon declares; ValueError if that is malformed.

    Amounts are in units; names in ``devices``, ids in the order of use, are left out of
    ``resources``. ``whole`` are the device resources whose devices can't be shared.
    """
    devices = devices or {}
    return ResourcePool(
        node_id,
        [(name, to_units(resources[name], name)) for name in resources if name not in devices],
        [(name, [(id, UNIT) for id in ids]) for name, ids in devices.items()],
        labels,
        whole=whole,
    )


def bundle_pool(allocation: Allocation, node: ResourcePool, key: tuple[bytes, int]) -> ResourcePool:
    """Make the pool of a bundle from what it reserved on its node; it is as usable as the node."""
    pool = ResourcePool(
        allocation.node_id,
        allocation.scalars,
        allocation.devices,
        node.labels,
        key,
        node.whole,
        closed=node.closed,
    )
    for name, devices in node.devices.items():
        for id, why in devices.out.items():
            pool.set_in_service(name, id, False, why)
    return pool
