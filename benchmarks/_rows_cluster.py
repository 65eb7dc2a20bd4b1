"""Rows about starting and stopping: clusters, actors, nodes, placement groups."""

from __future__ import annotations

import time
from typing import Any

from _actors import Echo
from _common import CPUS, MIB, Engine, Figure, at_once, rate, row
from _processes import cluster_processes, pss, settled, wait_for_end

WAVE = 20
SUSTAINED = 500
TWO_NODES = ({"num_cpus": CPUS}, {"num_cpus": CPUS, "resources": {"far": 1000}})


@row("init", Figure("init until the first actor answered", "s", 0.55))
def init(engine: Engine) -> float:
    ray = engine.api
    start = time.perf_counter()
    engine.start()
    actor = ray.remote(Echo).remote()
    ray.get(actor.echo.remote())
    return time.perf_counter() - start


@row("idle", Figure("memory of an idle cluster", "MiB", 120), Figure("its processes", "", 5))
def idle(engine: Engine) -> tuple[float, int]:
    engine.start()
    pids = settled()
    return pss(pids) / MIB, len(pids)


def _wave(ray: Any, actor_class: Any) -> None:
    actors = [actor_class.remote() for _ in range(WAVE)]
    ray.get([actor.echo.remote() for actor in actors])


@row("actors_at_once", Figure("actors created, 20 at once", "/s", 100), limit=120)
def actors_at_once(engine: Engine) -> float:
    ray = engine.start()
    start = time.perf_counter()
    _wave(ray, ray.remote(Echo))
    return WAVE / (time.perf_counter() - start)


@row(
    "actors_sustained",
    Figure("actors created, 500 in waves of 20", "/s", 100),
    Figure("memory before", "MiB", 120),
    Figure("memory after", "MiB"),
    Figure("processes before", "", 5),
    Figure("processes after", ""),
    limit=400,
    once=True,
)
def actors_sustained(engine: Engine) -> list[float]:
    ray = engine.start()
    actor_class = ray.remote(Echo)
    before = settled()
    memory_before = pss(before) / MIB
    start = time.perf_counter()
    for _ in range(SUSTAINED // WAVE):
        _wave(ray, actor_class)
    elapsed = time.perf_counter() - start
    after = settled()
    return [SUSTAINED / elapsed, memory_before, pss(after) / MIB, len(before), len(after)]


def _far_actor(ray: Any) -> Any:
    actor = ray.remote(Echo).options(resources={"far": 1}).remote()
    ray.get(actor.echo.remote())
    return actor


@row(
    "node_calls",
    Figure("call to another node, one at a time", "/s", 1_800),
    Figure("calls to another node, 1,000 in flight", "/s", 40_000),
    limit=90,
)
def node_calls(engine: Engine) -> tuple[float, float]:
    ray = engine.start_nodes(TWO_NODES)
    actor = _far_actor(ray)
    one = rate(lambda: ray.get(actor.echo.remote()))
    return one, rate(at_once(ray, actor.echo.remote), 1000)


@row(
    "node_transfer",
    Figure("100 MiB to another node", "GiB/s", 1.0),
    Figure("100 MiB from another node", "GiB/s", 1.0),
    limit=120,
)
def node_transfer(engine: Engine) -> tuple[float, float]:
    import numpy as np

    ray = engine.start_nodes(TWO_NODES)
    size = 100 * MIB

    class Store:
        def make(self) -> Any:
            return np.ones(size, dtype=np.uint8)

        def take(self, value: Any) -> int:
            return len(value)

    store = ray.remote(Store).options(resources={"far": 1}).remote()
    ray.get(store.take.remote(b""))

    def timed_to() -> float:
        ref = ray.put(np.ones(size, dtype=np.uint8))
        start = time.perf_counter()
        ray.get(store.take.remote(ref))
        return time.perf_counter() - start

    def timed_from() -> float:
        ref = store.make.remote()
        ray.wait([ref], fetch_local=False)
        start = time.perf_counter()
        ray.get(ref)
        return time.perf_counter() - start

    timed_to()
    timed_from()
    runs = 5
    sent = sum(timed_to() for _ in range(runs))
    fetched = sum(timed_from() for _ in range(runs))
    gibibytes = runs * size / (1024 * MIB)
    return gibibytes / sent, gibibytes / fetched


@row("placement_group", Figure("placement group made, ready and removed", "/s", 1_500))
def placement_group(engine: Engine) -> float:
    ray = engine.start()
    groups = engine.module("util.placement_group")

    def cycle() -> None:
        made = [groups.placement_group([{"CPU": CPUS / 1000}]) for _ in range(100)]
        ray.get([group.ready() for group in made])
        for group in made:
            groups.remove_placement_group(group)

    return rate(cycle, 100)


@row("shutdown", Figure("shutdown until the last process is gone", "s", 0.3))
def shutdown(engine: Engine) -> float:
    ray = engine.start()
    _wave(ray, ray.remote(Echo))
    pids = cluster_processes()
    start = time.perf_counter()
    ray.shutdown()
    if not wait_for_end(pids, 30):
        raise TimeoutError("processes were left 30 s after shutdown()")
    return time.perf_counter() - start
