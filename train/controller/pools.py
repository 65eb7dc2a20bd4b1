"""The pools of a run's datasets: their actors in one attempt, which all its ranks use."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from miniray import api
from miniray.train.controller.placement import SETTLE_TIMEOUT, BundleReservation, Fit
from miniray.train.controller.waits import within
from miniray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miniray.train.controller.run_spec import RunSpec
    from miniray.train.data.datasets import PoolSpec


class PoolActors:
    """The actors of all pools, or none.

    There are none if what all of them hold is not free at the start, beside the workers and a CPU
    for tasks. Then each rank makes its own, which end with each epoch: so several datasets may have
    the same resources in turns.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._reservation: BundleReservation | None = None
        #: The actors of each pool, by dataset.
        self.actors: dict[str, list[list[Any]]] = {}

    async def start(self) -> None:
        """Start the actors, if there is capacity for all of them."""
        pools = self._spec.pools
        if not pools or not await self._reserve(pools):
            self.stop()
            return
        places = itertools.count()
        for pool in pools:
            actors = [self._actor(pool, places) for _ in range(pool.compute.most)]
            self.actors.setdefault(pool.dataset, []).append(actors)

    async def _reserve(self, pools: Sequence[PoolSpec]) -> bool:
        """Reserve what the actors hold; return whether that was free, and a CPU is left."""
        from miniray.train.data.datasets import is_cpu_left

        for compute in (each.compute for each in pools):
            # As many as the cluster can run is no number, and a strategy is for no reservation.
            if not compute.most or "scheduling_strategy" in compute.options:
                return False
        held = [each for each in pools for _ in range(each.compute.most) if each.compute.demand]
        if held:
            bundles = [each.compute.demand for each in held]
            selectors = [each.selector for each in held]
            name = f"{self._spec.name}-data"
            self._reservation = BundleReservation(bundles, "PACK", selectors, name)
            if await asyncio.to_thread(self._reservation.fit) is Fit.NEVER:
                return False
            if not await within(SETTLE_TIMEOUT, self._reservation.ready()):
                return False
        return await asyncio.to_thread(is_cpu_left)

    def _actor(self, pool: PoolSpec, places: Iterator[int]) -> Any:
        from miniray.data.stages import pool_worker
        from miniray.runtime_env.validate import merge

        compute = pool.compute
        env = merge(self._spec.run_config.worker_runtime_env, compute.options.get("runtime_env"))
        options: dict[str, Any] = {"runtime_env": env} if env else {}
        if compute.demand and self._reservation is not None:
            group = self._reservation.placement
            options["num_cpus"] = compute.demand.get("CPU", 0)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, next(places))
        return pool_worker(compute, pool.context).options(**options).remote(pool.work)

    def stop(self) -> None:
        """End the actors, and free what they hold."""
        actors, self.actors = self.actors, {}
        for actor in itertools.chain(*itertools.chain(*actors.values())):
            api.kill(actor)
        reserved, self._reservation = self._reservation, None
        if reserved is not None:
            reserved.remove()
