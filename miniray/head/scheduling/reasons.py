"""Why a demand waits: the best node for it, and the missing amounts there.

Responsible for finding and wording the reason; not for deciding what is placed.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.amounts import GRIDS, UNIT, from_units
from miniray.common.labels import LabelSelector, describe_all, first_match

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from miniray.common.amounts import Needs
    from miniray.head.scheduling.resources import ResourcePool

_BYTES = ("memory", "object_store_memory")


class ReasonKind(str, enum.Enum):
    NO_NODES = "no_nodes"  # the cluster is empty
    NO_LABELS = "no_labels"  # no node has the wanted labels
    ABSENT = "absent"  # no node has the resource
    TOO_LARGE = "too_large"  # no node has this much of it
    NOT_SHARED = "not_shared"  # a share of devices that can't be shared
    NOT_WHOLE = "not_whole"  # a part of more than one device
    COMBINATION = "combination"  # each resource exists, but not together on one node
    QUARANTINED = "quarantined"  # it would take a device that is out of service
    BUSY = "busy"  # in use by others
    RESERVED = "reserved"  # set aside for a demand that waited longer
    DRAINING = "draining"  # the node grants no more
    QUEUED = "queued"  # fits; is about to be placed
    GROUP_PENDING = "group_pending"  # its placement group is not placed
    TOGETHER = "together"  # each bundle fits, but not all at once
    NEVER_TOGETHER = "never_together"  # not even if all nodes were idle
    NOT_ENOUGH = "not_enough"  # all nodes together have less than all bundles need
    NODE_AWAITED = "node_awaited"  # the node has not reported since the head restarted
    NODE_GONE = "node_gone"  # hard affinity to a node that is not there
    NODE_TOO_SMALL = "node_too_small"  # hard affinity to a node that can't serve it
    NODE_LABELS = "node_labels"  # hard affinity to a node without the wanted labels
    GROUP_GONE = "group_gone"  # its placement group does not exist, or was removed
    NO_BUNDLE = "no_bundle"  # its bundle does not exist, or is too small


#: Kinds that only a change of the cluster's nodes can resolve.
INFEASIBLE = frozenset(
    {
        ReasonKind.NO_NODES,
        ReasonKind.NO_LABELS,
        ReasonKind.ABSENT,
        ReasonKind.TOO_LARGE,
        ReasonKind.NOT_SHARED,
        ReasonKind.NOT_WHOLE,
        ReasonKind.COMBINATION,
        ReasonKind.NEVER_TOGETHER,
        ReasonKind.NOT_ENOUGH,
    }
)


class Reason(NamedTuple):
    """Why a demand waits or fails. Amounts are fixed point; see ``sentence``."""

    kind: ReasonKind
    resource: str = ""
    needed: int = 0
    #: Free on the node (per device: on its freest device, or as whole devices).
    available: int = 0
    total: int = 0
    #: The node where least is missing, hex; empty if there is none.
    node_id: str = ""
    #: The bundle of ``node_id`` where least is missing, for a demand in a group.
    bundle_index: int = -1
    #: The amount is taken of devices, so that a node's sum does not matter.
    of_devices: bool = False
    #: What else a sentence needs: a selector, a group's id, a bundle's index.
    detail: str = ""

    @property
    def infeasible(self) -> bool:
        """No node could serve the demand even if all were idle."""
        return self.kind in INFEASIBLE

    def sentence(self) -> str:
        node = f"node {self.node_id[:8]}"
        if self.bundle_index >= 0:
            node = f"bundle {self.bundle_index} on {node}"
        wanted = f"{self.resource} {_amount(self.resource, self.needed)}"
        fixed = {
            ReasonKind.NO_NODES: "the cluster has no nodes",
            ReasonKind.NO_LABELS: f"no node matches the labels {self.detail}",
            ReasonKind.ABSENT: f"needs {wanted}; no node has {self.resource}",
            ReasonKind.NOT_SHARED: f"needs {wanted}; the devices of {self.resource} can't be "
            "shared, ask for whole ones",
            ReasonKind.NOT_WHOLE: f"needs {wanted}; above 1 the amount of {self.resource} must be "
            "whole, as it is taken in whole devices",
            ReasonKind.QUARANTINED: f"needs {wanted}; {self.detail}"
            if self.needed
            else self.detail,
            ReasonKind.COMBINATION: f"no single node has all of {self.detail}",
            ReasonKind.RESERVED: f"needs {wanted}; what is free on {node} is set aside for a "
            "demand that has waited longer",
            ReasonKind.DRAINING: f"{node} is draining and takes no new work",
            ReasonKind.QUEUED: "is next in line",
            ReasonKind.GROUP_PENDING: f"placement group {self.detail}",
            ReasonKind.TOGETHER: f"each bundle fits alone, but not all at once for {self.detail}",
            ReasonKind.NEVER_TOGETHER: f"{self.detail} find no place on the "
            f"{_count(self.total, 'node')} of the cluster, even if all were idle",
            ReasonKind.NOT_ENOUGH: f"{self.detail} need {wanted} in all; the nodes of the cluster "
            f"have {self._total()}",
            ReasonKind.NODE_AWAITED: f"{node} has not reported since the head restarted",
            ReasonKind.NODE_GONE: f"{node} is not in the cluster, and the affinity to it is hard",
            ReasonKind.NODE_TOO_SMALL: f"needs {wanted}; {node} has {self._total()} in all, and "
            "the affinity to it is hard",
            ReasonKind.NODE_LABELS: f"{node} does not match the labels {self.detail}, and the "
            "affinity to it is hard",
            ReasonKind.GROUP_GONE: f"placement group {self.detail} does not exist or was removed",
            ReasonKind.NO_BUNDLE: self.detail,
        }
        if self.kind in fixed:
            return fixed[self.kind]
        if self.kind is ReasonKind.TOO_LARGE:
            largest = f"the largest node, {self.node_id[:8]}, has {self._total()}"
            return f"needs {wanted}{self._block}; {largest}"
        return f"needs {wanted}{self._shortage(node)}{self.detail and f'; {self.detail}'}"

    @property
    def _block(self) -> str:
        grid = self.resource in GRIDS and self.needed > UNIT
        return " in one block of neighbours" if grid else ""

    def _total(self) -> str:
        return _amount(self.resource, self.total)

    def _shortage(self, node: str) -> str:
        free = _amount(self.resource, self.available)
        if self._block:
            return f"{self._block}; the largest free one of {node} has {free}"
        if not self.of_devices and self.available < 0:
            owed = _amount(self.resource, -self.available)
            return f"; {node} has none of {self._total()} free and owes {owed} to resumed tasks"
        if not self.of_devices:
            return f"; {node} has {free} of {self._total()} free"
        if self.needed < UNIT:
            return f" on one device; the freest device of {node} has {free}"
        return f" in whole devices; {node} has {free} of {self._total()} wholly free"


def explain(
    needs: Needs,
    selector: LabelSelector,
    pools: Collection[ResourcePool],
    owner: object,
    fallbacks: Sequence[LabelSelector] = (),
) -> Reason:
    """Return why none of these pools serves a demand now."""
    if not pools:
        return Reason(ReasonKind.NO_NODES)
    selectors = (selector, *fallbacks)
    labelled = [pool for pool in pools if first_match(selectors, pool.labels) is not None]
    if not labelled:
        return Reason(ReasonKind.NO_LABELS, detail=describe_all(selectors))
    able = [pool for pool in labelled if pool.could_fit(needs)]
    if not able:
        return _explain_quarantined(needs, labelled) or _explain_infeasible(needs, labelled)
    best = min(able, key=lambda pool: (pool.closed, _gap(needs, pool), pool.order))
    return _explain_busy(needs, best, owner)


def too_small(needs: Needs, node: ResourcePool) -> Reason:
    """Return what the node of a hard affinity has too little of, or cannot give in this form."""
    wrong = unlawful(needs, [node])
    if wrong is not None:
        return wrong._replace(node_id=node.node_id)
    lacking = [pair for pair in needs if not node.could_fit((pair,), repaired=True)]
    name, units = lacking[0]
    return Reason(
        ReasonKind.NODE_TOO_SMALL,
        name,
        units,
        total=_most(node, name, units),
        node_id=node.node_id,
        of_devices=name in node.devices,
    )


def no_bundle(group: str, bundles: Sequence[Needs], needs: Needs, index: int) -> Reason:
    """Return why no bundle of its group can ever hold a demand; ``index`` -1 is any bundle."""
    if index >= len(bundles):
        count = _count(len(bundles), "bundle")
        return Reason(ReasonKind.NO_BUNDLE, detail=f"{group} has {count}, and none {index}")
    if index == -1:
        found = f"no bundle of {group} has as much"
    else:
        found = f"bundle {index} of {group} has {_amounts(bundles[index])}"
    most = {name: max(dict(each).get(name, 0) for each in bundles) for name, _ in needs}
    if most.get("CPU", UNIT) < UNIT:
        found += (
            " (tasks need 1 CPU, and actors 1 CPU to be placed, unless num_cpus says otherwise)"
        )
    return Reason(ReasonKind.NO_BUNDLE, detail=f"needs {_amounts(needs)}; {found}")


def by_gap(needs: Needs, pools: Iterable[ResourcePool]) -> list[ResourcePool]:
    """Return the pools that could serve this, the one that lacks least of it now first."""
    able = [pool for pool in pools if not pool.closed and pool.could_fit(needs)]
    return sorted(able, key=lambda pool: (_gap(needs, pool), pool.order))


def unlawful(needs: Needs, pools: Iterable[ResourcePool]) -> Reason | None:
    """Return which amount the devices of no pool can serve, with the reason; None if all can."""
    for name, units in needs:
        if units % UNIT == 0:
            continue
        held = [pool.devices[name] for pool in pools if name in pool.devices]
        if held and not any(devices.takes(units) for devices in held):
            kind = ReasonKind.NOT_SHARED if units < UNIT else ReasonKind.NOT_WHOLE
            return Reason(kind, name, units, of_devices=True)
    return None


def describe_quarantined(pool: ResourcePool, resource: str) -> str:
    """Describe the devices of a resource that are out of service, and why; empty without any."""
    devices = pool.devices.get(resource)
    if devices is None:
        return ""
    by_why: dict[str, list[str]] = {}
    for id, why in devices.out.items():
        by_why.setdefault(why, []).append(id)
    return "; ".join(
        f"{resource} {', '.join(ids)} of node {pool.node_id[:8]} "
        f"{'is' if len(ids) == 1 else 'are'} quarantined: {why}"
        for why, ids in by_why.items()
    )


def first_quarantined(pool: ResourcePool) -> Reason | None:
    """Return why devices of a node are out of service; None if all are in service."""
    for name, devices in pool.devices.items():
        if devices.out:
            detail = describe_quarantined(pool, name)
            return Reason(ReasonKind.QUARANTINED, name, node_id=pool.node_id, detail=detail)
    return None


def _explain_quarantined(needs: Needs, pools: Collection[ResourcePool]) -> Reason | None:
    """Name the devices out of service that a demand lacks; None if it lacks others too."""
    for pool in pools:
        if not pool.closed and pool.could_fit(needs, repaired=True):
            name, units = next(pair for pair in needs if not pool.could_fit((pair,)))
            return Reason(
                ReasonKind.QUARANTINED,
                name,
                units,
                total=_most(pool, name, units),
                node_id=pool.node_id,
                of_devices=True,
                detail=describe_quarantined(pool, name),
            )
    return None


def _explain_infeasible(needs: Needs, pools: Collection[ResourcePool]) -> Reason:
    wrong = unlawful(needs, pools)
    if wrong is not None and not any(wrong.resource in pool.total for pool in pools):
        return wrong
    for name, units in needs:
        largest = max(pools, key=lambda pool: _most(pool, name, units))
        most = _most(largest, name, units)
        if most < units:
            kind = ReasonKind.TOO_LARGE if most else ReasonKind.ABSENT
            of_devices = name in largest.devices
            return Reason(
                kind, name, units, total=most, node_id=largest.node_id, of_devices=of_devices
            )
    return Reason(ReasonKind.COMBINATION, detail=_amounts(needs))


def _explain_busy(needs: Needs, pool: ResourcePool, owner: object) -> Reason:
    if pool.closed:
        return Reason(ReasonKind.DRAINING, node_id=pool.node_id)
    lacking = [(name, units) for name, units in needs if _available(pool, name, units) < units]
    if lacking:
        first, *others = [_shortage_of(pool, name, units) for name, units in lacking]
        told = [first.detail, *(f"and {each.sentence()}" for each in others)]
        return first._replace(detail="; ".join(filter(None, told)))
    if not pool.admits(owner, needs):
        refused = (pair for pair in needs if not pool.admits(owner, (pair,)))
        name, units = next(refused, needs[0])
        return Reason(ReasonKind.RESERVED, name, units, node_id=pool.node_id)
    return Reason(ReasonKind.QUEUED, node_id=pool.node_id)


def _shortage_of(pool: ResourcePool, name: str, units: int) -> Reason:
    """Say how much of one resource is missing on a node or in a bundle."""
    of_devices = name in pool.devices
    _, bundle_index = pool.key or (b"", -1)
    return Reason(
        ReasonKind.BUSY,
        name,
        units,
        _available(pool, name, units),
        _most(pool, name, units),
        pool.node_id,
        bundle_index,
        of_devices,
        describe_quarantined(pool, name) if of_devices else "",
    )


def _available(pool: ResourcePool, name: str, units: int) -> int:
    """Return what is free for such an amount: on one device, as whole devices, or of a scalar."""
    devices = pool.devices.get(name)
    if devices is None:
        return pool.free.get(name, 0)
    return max(devices.most_of(devices.free, units), 0)


def _most(pool: ResourcePool, name: str, units: int) -> int:
    """Return what such an amount could draw on if all were idle."""
    devices = pool.devices.get(name)
    if devices is None:
        return pool.total.get(name, 0)
    return devices.most_of(devices.usable(), units)


def _gap(needs: Needs, pool: ResourcePool) -> float:
    """Return how much is missing, each resource as a share of the needed amount."""
    return sum(max(0.0, 1 - _available(pool, name, units) / units) for name, units in needs)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _amounts(needs: Needs) -> str:
    return ", ".join(f"{name} {_amount(name, units)}" for name, units in needs)


def _amount(name: str, units: int) -> str:
    if name not in _BYTES:
        return f"{from_units(units):.10g}"
    size = from_units(units)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{f'{size:.1f}'.removesuffix('.0')} TiB"
