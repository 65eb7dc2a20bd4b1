"""Placement policies: in which order pools are considered for a demand.

A policy is a tuple of small rankers; the pool with the smallest tuple of their
values wins. Rankers only look at a pool; what fits is the pool's own question.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.amounts import ACCELERATORS, UNIT
from miniray.common.labels import first_match
from miniray.common.specs import BundleAffinity, Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from miniray.common.labels import LabelSelector
    from miniray.head.scheduling.demands import Demand
    from miniray.head.scheduling.resources import ResourcePool

    Ranker = Callable[[ResourcePool], float]

#: Use from which on a node is no longer filled before the next.
_HALF = 0.5
_MARKER = ":"  # node:<ip> and accelerator_type:<type> mark nodes; their use is not load


def avoid_accelerators(pool: ResourcePool) -> float:
    """Rank pools without devices first: for work that needs none."""
    return 1.0 if pool.devices else 0.0


def leave_to_others(names: Collection[str]) -> tuple[Ranker, Ranker]:
    """Rank pools with the fewest other devices, then other resources, first.

    For bundles: a later demand may need the other resources of a bundle, and has no other bundle.
    """

    def devices(pool: ResourcePool) -> float:
        return sum(name not in names for name in pool.devices)

    def others(pool: ResourcePool) -> float:
        return sum(name not in names for name in pool.total)

    return devices, others


def pack_then_spread(names: Collection[str]) -> Ranker:
    """Rank pools that are used by less than half equally (so the first is filled), others by use.

    This is Ray's hybrid policy.
    """

    def rank(pool: ResourcePool) -> float:
        used = pool.utilisation(names)
        return 0.0 if used < _HALF else used

    return rank


def least_used(names: Collection[str]) -> Ranker:
    return lambda pool: pool.utilisation(names)


def least_recent(pool: ResourcePool) -> float:
    """Rank pools first that waited longest for a placement: equals take turns."""
    return pool.last_placed


def fewest_leases(pool: ResourcePool) -> float:
    """Rank pools with the fewest leases first: for demands without resources."""
    return len(pool.leases)


def fullest_device(resource: str, units: int) -> Ranker:
    """Rank pools by the free amount of their fullest device that fits: pack, then open another."""

    def rank(pool: ResourcePool) -> float:
        devices = pool.devices.get(resource)
        return UNIT if devices is None else devices.tightest(units)

    return rank


def preferred_labels(selectors: Sequence[LabelSelector]) -> Ranker:
    """Rank pools by the first of these selectors that their node meets."""

    def rank(pool: ResourcePool) -> float:
        at = first_match(selectors, pool.labels)
        return len(selectors) if at is None else at

    return rank


def shared_device(demand: Demand, device_names: Collection[str]) -> tuple[str, int] | None:
    """Return the device resource, and the part of one device, that a demand takes; or None."""
    for name, units in demand.placing:
        if units < UNIT and name in device_names:
            return name, units
    return None


def rankers_for(demand: Demand, device_names: Collection[str]) -> tuple[Ranker, ...]:
    wishes: tuple[Ranker, ...] = ()
    if demand.fallbacks:
        wishes = (preferred_labels((demand.selector, *demand.fallbacks)),)
    return (*wishes, *_rankers_by_use(demand, device_names))


def _rankers_by_use(demand: Demand, device_names: Collection[str]) -> tuple[Ranker, ...]:
    shared = shared_device(demand, device_names)
    best_fit = () if shared is None else (fullest_device(*shared),)
    if isinstance(demand.placement, BundleAffinity):
        return (*leave_to_others([name for name, _ in demand.placing]), *best_fit)
    wanted = [name for name, _ in demand.placing if _MARKER not in name]
    names = tuple({"CPU", *wanted})
    needs_accelerator = any(
        name in ACCELERATORS or name in device_names or _MARKER in name
        for name, _ in demand.placing
    )
    avoid = () if needs_accelerator else (avoid_accelerators,)
    if isinstance(demand.placement, Spread):
        return (least_used(names), least_recent)
    if not demand.placing:
        return (*avoid, fewest_leases)
    return (*avoid, *best_fit, pack_then_spread(names))
