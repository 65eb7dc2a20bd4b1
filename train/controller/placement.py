"""What workers hold: placement groups of the size that fits, and those that wait for more.

Whether something fits, and which bundle has lost its node, is the head's answer. An elastic group
grows at a checkpoint.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
from typing import TYPE_CHECKING, Any

from miniray.exceptions import MinirayError
from miniray.train.controller.waits import within
from miniray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from miniray.train.base.states import ScalingDecision

logger = logging.getLogger(__name__)


def explain(
    workers: int,
    resources: Mapping[str, float],
    total: Mapping[str, float],
    free: Mapping[str, float],
    reason: str = "",
) -> str:
    """Return a sentence for each resource that is short, then the head's reason."""
    each = f" with {dict(resources)} each" if resources else ""
    sentences = [f"Waiting for the resources of {workers} workers{each}."]
    for name, amount in resources.items():
        if name.startswith("accelerator_type:"):
            if not total.get(name):
                kind = name.partition(":")[2]
                sentences.append(f"No node has the accelerator type {kind}.")
            continue
        needed = amount * workers
        missing = needed - free.get(name, 0)
        if missing > 0:
            sentences.append(
                f"{name} is short by {_amount(missing)}: {_amount(needed)} are needed, "
                f"{_amount(free.get(name, 0))} of the cluster's {_amount(total.get(name, 0))} are "
                f"free."
            )
    if reason:
        sentences.append(f"The scheduler says: {reason}.")
    return " ".join(sentences)


def _amount(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")


#: Seconds that an elastic group waits for resources in use, such as those of earlier workers whose
#: processes are just ending, before it begins smaller.
SETTLE_TIMEOUT = 1.5

#: The most waiting placement groups among which the reason of this one is looked up.
MAX_WAITING = 1000


class Fit(enum.Enum):
    """Whether the resources of a group are free."""

    NOW = "now"
    BUSY = "busy"  # others hold it
    NEVER = "never"  # not on the nodes that there are


def waiting_demand(name: str) -> Any:
    """Return the head's row of the placement group of this name; None if it does not wait."""
    from miniray.util.state import list_pending_demands

    groups = [("kind", "=", "placement_group")]
    waiting = list_pending_demands(filters=groups, limit=MAX_WAITING)
    return next((demand for demand in waiting if name in demand.names), None)


class BundleReservation:
    """A placement group with one bundle for each worker."""

    def __init__(
        self,
        bundles: list[dict[str, float]],
        strategy: str,
        selectors: list[dict[str, str]] | None,
        run: str,
    ) -> None:
        self.size = len(bundles)
        self.name = f"train-{run}-{secrets.token_hex(4)}"
        self.placement = placement_group(
            bundles, strategy, self.name, bundle_label_selector=selectors
        )

    async def ready(self) -> None:
        await self.placement.ready()

    def fit(self) -> Fit:
        """Return whether the resources are free; block for a moment."""
        # The head tries to place a group when it gets the request, so the first answer is valid.
        if placement_group_table(self.placement).get("state") == "CREATED":
            return Fit.NOW
        demand = waiting_demand(self.name)
        if demand is not None:
            return Fit.NEVER if demand.infeasible else Fit.BUSY
        created = placement_group_table(self.placement).get("state") == "CREATED"
        return Fit.NOW if created else Fit.BUSY

    def lost(self) -> list[int]:
        """Return the bundles whose node was lost after they had been placed; block for a moment."""
        table = placement_group_table(self.placement)
        if table.get("state") == "CREATED":
            return []
        nodes = table.get("bundles_to_node_id", {})
        return [index for index in range(self.size) if not nodes.get(index)]

    def remove(self) -> None:
        """Give the resources back, or withdraw the request."""
        try:
            remove_placement_group(self.placement)
        except (MinirayError, OSError) as error:
            # The head removes it when this process ends.
            logger.warning("Placement group %s can't be removed: %s", self.name, error)


async def largest_reservation(
    ask: Callable[[int], BundleReservation],
    sizes: Sequence[int],
    begun: Callable[[BundleReservation], None],
) -> BundleReservation:
    """Reserve the largest of some sizes that fits; wait until the smallest does."""
    size: int | None = sizes[0]
    if len(sizes) > 1:
        # First what the nodes could hold: resources in use may be free in a moment.
        size = await _largest(ask, sizes, lambda fit: fit is not Fit.NEVER)
    while size is not None and size > sizes[0]:
        reserved = ask(size)
        begun(reserved)
        if await within(SETTLE_TIMEOUT, reserved.ready()):
            return reserved
        reserved.remove()
        below = [smaller for smaller in sizes if smaller < size]
        size = await _largest(ask, below, lambda fit: fit is Fit.NOW)
    reserved = ask(sizes[0])
    begun(reserved)
    await reserved.ready()
    return reserved


async def _largest(
    ask: Callable[[int], BundleReservation], sizes: Sequence[int], suits: Callable[[Fit], bool]
) -> int | None:
    """Return the largest size that suits, by bisection; None if none does.

    The largest of all is tried first: mostly it suits.
    """
    best = None
    low, high = 0, len(sizes) - 1
    middle = high
    while low <= high:
        reserved = ask(sizes[middle])
        try:
            fit = await asyncio.to_thread(reserved.fit)
        finally:
            reserved.remove()
        if suits(fit):
            best, low = sizes[middle], middle + 1
        else:
            high = middle - 1
        middle = (low + high) // 2
    return best


class Growth:
    """What an elastic group reserves, while it runs, to grow into.

    Args:
        group: That a run starts with.
        interval: Seconds that a group runs at least before it requests more.
    """

    def __init__(self, group: ScalingDecision, interval: float) -> None:
        self._group = group
        self._interval = interval
        self._asking: asyncio.Task[None] | None = None
        self._reservations: list[BundleReservation] = []
        self._count = 0  # reservations that have been placed
        self._size = 0
        self._decision: ScalingDecision | None = None

    def begin(self, size: int, reserve: Callable[[int], BundleReservation]) -> None:
        """Request more workers beside a group of this size, if it could use more.

        Args:
            reserve: Requests one worker more, beside the group and the given number of others.
        """
        self._size = size
        if (wanted := self._group.wanted(size)) > 0:
            self._asking = asyncio.create_task(self._ask(wanted, reserve))

    async def _ask(self, wanted: int, reserve: Callable[[int], BundleReservation]) -> None:
        """Wait for more workers, one after the other."""
        await asyncio.sleep(self._interval)
        for number in range(wanted):
            reserved = reserve(number)
            self._reservations.append(reserved)
            await reserved.ready()
            self._count += 1

    def at_checkpoint(self) -> bool:
        """Return whether a larger group is to go on from the checkpoint that is complete now."""
        if self._asking is not None and self._asking.done():
            self._asking.result()  # raises why there can be no more
        if self._count:
            self._decision = self._group.grown(self._size, self._count)
        return self._decision is not None

    def next_group(self) -> ScalingDecision:
        decision, self._decision = self._decision, None
        return decision if decision is not None else self._group

    async def end(self) -> None:
        """Free what is reserved, for the next group to be placed there."""
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        self._count = 0
        while self._reservations:  # one by one: the call after one that is cancelled has the others
            await asyncio.to_thread(self._reservations.pop(0).remove)
