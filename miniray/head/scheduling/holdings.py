"""What a node holds for placement groups after a restart of the head. Pure decisions.

Responsible for which of the bundles that were kept are still there, and which of the leases that
the node reports draw on them; entering them is the scheduler's work.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from miniray.head.scheduling.resources import bundle_pool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.common.specs import Allocation
    from miniray.head.scheduling.resources import ResourcePool

    BundleKey = tuple[bytes, int]

logger = logging.getLogger(__name__)


def sort_out(
    node: ResourcePool,
    awaited: Mapping[BundleKey, Allocation],
    running: Mapping[int, Allocation],
) -> tuple[dict[BundleKey, Allocation], set[int]]:
    """The bundles that are there, and the leases that are homeless.

    A lease may have outlived its bundle: the group was removed, or the head gave the node up and
    placed the bundle again, maybe on other devices of the same node. What it holds counts on the
    node itself then, until it has ended. The end of a group may not have been kept either, and
    what it had granted to others: these run.

    Args:
        node: the pool of the node, with nothing held.
        awaited: bundles that were kept.
        running: what the leases hold, by their numbers.

    Raises:
        ValueError: the leases hold more than the node has.
    """
    left = dict(awaited)
    while True:
        trial = node.copy()
        inside = _inside(node, left, running)
        for number, held in running.items():
            if number not in inside:
                trial.adopt(held)
        used = {running[number].bundle for number in inside}
        gone = [
            key
            for key in sorted(left, key=lambda key: key not in used)
            if not _take(trial, left[key])
        ]
        for key in gone:
            logger.warning("others have the room of bundle %d of %s", key[1], key[0].hex())
            del left[key]
        if not used.intersection(gone):  # else their leases hold what others were to have
            return left, {n for n, held in running.items() if held.bundle and n not in inside}


def _inside(
    node: ResourcePool, bundles: Mapping[BundleKey, Allocation], running: Mapping[int, Allocation]
) -> set[int]:
    """The leases that draw on these bundles as they are now, the latest first."""
    pools = {key: bundle_pool(held, node, key) for key, held in bundles.items()}
    return {
        number
        for number, held in sorted(running.items(), reverse=True)
        if held.bundle in pools and _take(pools[held.bundle], held)
    }


def _take(pool: ResourcePool, held: Allocation) -> bool:
    """Count what is held, if there is room for it (CPU may be in debt)."""
    if any(name != "CPU" and pool.free.get(name, 0) < units for name, units in held.scalars):
        return False
    try:
        pool.adopt(held)
    except ValueError:
        return False
    return True
