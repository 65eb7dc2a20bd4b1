"""Whether it is of use to plan a placement group again that could not be placed.

Responsible for telling that from one node that has got room, so that a group which lacks much is
not planned anew whenever a little comes free. Decides nothing about where bundles go.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from miniray.head.scheduling.bundles import total_needs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from miniray.common.amounts import Needs
    from miniray.head.scheduling.bundles import BundleSpec
    from miniray.head.scheduling.resources import ResourcePool


class Prospects:
    """What the nodes had for the bundles of a group when it could not be placed.

    If one kind of bundle has room for too few of its copies, only more room for that one matters.
    Otherwise a node matters that has more than it had of something that the bundles need.
    """

    def __init__(
        self, missing: Iterable[BundleSpec], nodes: Collection[ResourcePool], owner: object
    ) -> None:
        """Look at every node.

        Args:
            missing: the bundles that are to be placed.
            nodes: of the cluster.
            owner: whose reservations may be used.
        """
        specs = list(missing)
        self._owner = owner
        self._most = total_needs(specs)
        #: The bundle of which there is room for too few, how many are wanted, and how many fit.
        self._scarce: BundleSpec | None = None
        self._wanted = self._total = 0
        self._copies: dict[str, int] = {}
        self._outlines: dict[str, tuple[int, ...]] = {}
        for spec, wanted in sorted(
            collections.Counter(specs).items(), key=lambda item: item[0].needs, reverse=True
        ):
            copies = {node.node_id: spec.copies(node, owner) for node in nodes}
            total = sum(copies.values())
            if total < wanted:
                self._scarce, self._wanted, self._total = spec, wanted, total
                self._copies = copies
                return
        self._outlines = {node.node_id: self._outline(node) for node in nodes}

    @property
    def scarce(self) -> Needs | None:
        """What the bundle needs of which there is room for too few; None if there is no such."""
        return None if self._scarce is None else self._scarce.needs

    def improved_by(self, node: ResourcePool) -> bool:
        """Whether the group might have a place now that this node has more room.

        To be asked whenever a node has got more. Others may have less by now.
        """
        if self._scarce is not None:
            copies = self._scarce.copies(node, self._owner)
            known = self._copies.get(node.node_id, 0)
            if copies > known:
                self._copies[node.node_id] = copies
                self._total += copies - known
            return self._total >= self._wanted
        known_outline = self._outlines.get(node.node_id)
        outline = self._outline(node)
        if known_outline is None or len(outline) != len(known_outline):
            return True
        return any(has > had for has, had in zip(outline, known_outline, strict=True))

    def failed_on(self, node: ResourcePool) -> bool:
        """Note that a group which is for one node has no place on this one.

        Returns:
            Whether that was noted; else all nodes are to be looked at anew.
        """
        if self._scarce is not None:
            return False
        self._outlines[node.node_id] = self._outline(node)
        return True

    def _outline(self, node: ResourcePool) -> tuple[int, ...]:
        return node.outline(self._most, self._owner)
