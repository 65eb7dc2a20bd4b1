"""Room for workers: placement groups of the size that fits, and those that wait for more.

Whether something fits is the head's answer; which sizes are wanted is decided
by the scaling policy.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
from typing import TYPE_CHECKING, Any

from miniray.exceptions import MinirayError
from miniray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

#: Seconds that an elastic group waits for room that is only held by others, such as the
#: workers before it whose processes are just ending, before it begins smaller.
SETTLE_TIMEOUT = 1.5

#: Among so many placement groups that wait, the reason of one's own is looked for.
MAX_WAITING = 1000


class Fit(enum.Enum):
    """Whether there is room for a group."""

    NOW = "now"
    BUSY = "busy"  # others hold it
    NEVER = "never"  # not on the nodes that there are


def waiting_demand(name: str) -> Any:
    """What the head knows of the placement group of this name that waits; None if none does."""
    from miniray.util.state import list_pending_demands

    groups = [("kind", "=", "placement_group")]
    waiting = list_pending_demands(filters=groups, limit=MAX_WAITING)
    return next((demand for demand in waiting if name in demand.names), None)


class Room:
    """A placement group with one bundle for each worker.

    Args:
        size: Number of workers.
        resources: What each holds.
        strategy: How they lie to each other.
        selectors: Conditions on the node of each, or None.
        run: Name of the run, for messages.
    """

    def __init__(
        self,
        size: int,
        resources: Mapping[str, float],
        strategy: str,
        selectors: list[dict[str, str]] | None,
        run: str,
    ) -> None:
        self.size = size
        self.name = f"train-{run}-{secrets.token_hex(4)}"
        bundles = [dict(resources) for _ in range(size)]
        self.placement = placement_group(
            bundles, strategy, self.name, bundle_label_selector=selectors
        )

    async def ready(self) -> None:
        """Wait until the resources are reserved."""
        await self.placement.ready()

    def fit(self) -> Fit:
        """Whether there is room by now; blocks for a moment."""
        # The head tries to place a group when it hears of it, so the first answer is valid.
        if placement_group_table(self.placement).get("state") == "CREATED":
            return Fit.NOW
        demand = waiting_demand(self.name)
        if demand is not None:
            return Fit.NEVER if demand.infeasible else Fit.BUSY
        created = placement_group_table(self.placement).get("state") == "CREATED"
        return Fit.NOW if created else Fit.BUSY

    def lost(self) -> list[int]:
        """The bundles whose node was lost after they had been placed; blocks for a moment."""
        table = placement_group_table(self.placement)
        if table.get("state") == "CREATED":
            return []
        nodes = table.get("bundles_to_node_id", {})
        return [index for index in range(self.size) if not nodes.get(index)]

    def remove(self) -> None:
        """Give the resources back, or ask for them no longer."""
        try:
            remove_placement_group(self.placement)
        except (MinirayError, OSError) as error:
            # The head removes it when this process ends.
            logger.warning("Placement group %s can't be removed: %s", self.name, error)


async def largest_room(
    ask: Callable[[int], Room], sizes: Sequence[int], begun: Callable[[Room], None]
) -> Room:
    """The room for the largest of some sizes that fits; waits until the smallest does.

    Args:
        ask: Asks for the room of a size.
        sizes: The sizes, ascending.
        begun: Told of each room that is waited for.
    """
    # First what the nodes could hold: of that, what others hold may be free in a moment.
    size = await _largest(ask, sizes, lambda fit: fit is not Fit.NEVER)
    while size is not None and size > sizes[0]:
        room = ask(size)
        begun(room)
        if await _ready_in(room, SETTLE_TIMEOUT):
            return room
        room.remove()
        below = [smaller for smaller in sizes if smaller < size]
        size = await _largest(ask, below, lambda fit: fit is Fit.NOW)
    room = ask(sizes[0])
    begun(room)
    await room.ready()
    return room


async def _largest(
    ask: Callable[[int], Room], sizes: Sequence[int], suits: Callable[[Fit], bool]
) -> int | None:
    """The largest size that suits, by bisection; None if none does.

    The largest of all is tried first: mostly it suits.
    """
    best = None
    low, high = 0, len(sizes) - 1
    middle = high
    while low <= high:
        room = ask(sizes[middle])
        try:
            fit = await asyncio.to_thread(room.fit)
        finally:
            room.remove()
        if suits(fit):
            best, low = sizes[middle], middle + 1
        else:
            high = middle - 1
        middle = (low + high) // 2
    return best


async def _ready_in(room: Room, timeout: float) -> bool:
    ready = asyncio.ensure_future(room.ready())
    try:
        await asyncio.wait({ready}, timeout=timeout)
        if ready.done():
            ready.result()
            return True
        return False
    finally:
        ready.cancel()


class MoreRoom:
    """Waits for room for more workers, one after the other, and keeps what it gets.

    Args:
        ask: Asks for the room of the n-th worker more.
    """

    def __init__(self, ask: Callable[[int], Room]) -> None:
        self._ask = ask
        self._asked: list[Room] = []
        #: For how many workers more there is room.
        self.count = 0

    async def collect(self, wanted: int) -> None:
        """Wait for the room of so many workers."""
        for number in range(wanted):
            room = self._ask(number)
            self._asked.append(room)
            await room.ready()
            self.count += 1

    def give_back(self) -> None:
        """Let others have it."""
        asked, self._asked = self._asked, []
        self.count = 0
        for room in asked:
            room.remove()
