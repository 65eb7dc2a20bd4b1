"""Requests to the scheduler and its decisions, as plain data.

Responsible for the form of demands and of decisions only.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.amounts import Needs, parse_needs
from miniray.common.labels import LabelSelector, matches, parse_selector
from miniray.common.specs import BundleAffinity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from miniray.common.specs import Allocation, Placement
    from miniray.head.scheduling.reasons import Reason


@dataclasses.dataclass(frozen=True)
class Demand:
    """The shape of a lease: demands that compare equal wait in one queue."""

    #: What the lease holds.
    needs: Needs
    #: What must be free to place it; differs for actors that hold no CPU.
    placing: Needs
    placement: Placement = None
    selector: LabelSelector = ()
    #: Nodes that will do too if none that meets the selector has capacity, the best first.
    fallbacks: tuple[LabelSelector, ...] = ()
    #: An actor's: it may be held for ever.
    lasting: bool = False

    def __post_init__(self) -> None:
        parts = (self.needs, self.placing, self.placement, self.selector, self.fallbacks)
        object.__setattr__(self, "_hash", hash((*parts, self.lasting)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def accepts(self, labels: Mapping[str, str]) -> bool:
        """Return whether a node with these labels will do."""
        return matches(self.selector, labels) or any(
            matches(each, labels) for each in self.fallbacks
        )

    @property
    def load(self) -> int:
        """Fixed-point CPU that is needed to place it and not held."""
        return dict(self.placing).get("CPU", 0) - dict(self.needs).get("CPU", 0)

    @classmethod
    def of(
        cls,
        resources: Mapping[str, float],
        placement_resources: Mapping[str, float] | None = None,
        placement: Placement = None,
        label_selector: Mapping[str, str] | None = None,
        fallback_selectors: Sequence[Mapping[str, str]] = (),
        *,
        lasting: bool = False,
    ) -> Demand:
        """Make a demand from checked options; ValueError if an amount or a condition is malformed.

        The lease holds ``resources``, in units; ``placement_resources``, or the same, must be free
        to place it. ``fallback_selectors`` serve when no node that meets the selector has capacity.
        """
        needs = parse_needs(resources)
        placing = needs if placement_resources is None else parse_needs(placement_resources)
        if isinstance(placement, BundleAffinity) and placement.capture_child_tasks:
            placement = dataclasses.replace(placement, capture_child_tasks=False)
        fallbacks = tuple(parse_selector(each) for each in fallback_selectors)
        return cls(needs, placing, placement, parse_selector(label_selector), fallbacks, lasting)


class LeaseRequest(NamedTuple):
    #: Names the request while it waits and the lease once it is granted.
    lease_id: int
    demand: Demand
    #: Node that the default policy prefers: that of the requester, or of the values it will read.
    near: str | None = None
    #: Prefer it as long as it has capacity, not only while the policy packs.
    fill: bool = False


class Grant(NamedTuple):
    lease_id: int
    allocation: Allocation


class Refusal(NamedTuple):
    """The reason why a request is not granted."""

    lease_id: int
    reason: Reason


@dataclasses.dataclass(slots=True)
class Decisions:
    """The scheduler's decisions of one step."""

    grants: list[Grant] = dataclasses.field(default_factory=list)
    #: Requests that can never be granted: the caller fails them.
    failures: list[Refusal] = dataclasses.field(default_factory=list)
    #: Requests that no node could serve as the cluster is now; they wait for one to join.
    infeasible: list[Refusal] = dataclasses.field(default_factory=list)
    #: Ids of the groups whose bundles are all placed now.
    placed: list[bytes] = dataclasses.field(default_factory=list)
    #: Leases that are gone, because their node is.
    lost: list[int] = dataclasses.field(default_factory=list)
    #: Leases that must be ended, because their group was removed; then ``release`` them.
    to_end: list[int] = dataclasses.field(default_factory=list)
