"""A scheduler with nodes, and what is asked of it."""

from __future__ import annotations

import itertools

from miniray.head.scheduling.demands import Decisions, Demand, LeaseRequest
from miniray.head.scheduling.resources import node_pool
from miniray.head.scheduling.scheduler import ClusterScheduler

_numbers = itertools.count()


def node_id(number: int) -> str:
    return f"{number:032x}"


def cluster(*nodes: dict[str, float], gpus: int = 0, **kwargs: float) -> ClusterScheduler:
    scheduler = ClusterScheduler(**kwargs)
    for number, resources in enumerate(nodes):
        join(scheduler, number, resources, gpus)
    return scheduler


def join(
    scheduler: ClusterScheduler,
    number: int,
    resources: dict[str, float],
    gpus: int = 0,
    labels: dict[str, str] | None = None,
    now: float = 0.0,
) -> Decisions:
    devices = {"GPU": [str(device) for device in range(gpus)]} if gpus else {}
    return scheduler.add_node(node_pool(node_id(number), resources, devices, labels), now)


def ask(
    scheduler: ClusterScheduler,
    demand: Demand,
    now: float = 0.0,
    near: str | None = None,
    fill: bool = False,
) -> tuple[int, Decisions]:
    lease_id = next(_numbers)
    return lease_id, scheduler.submit(LeaseRequest(lease_id, demand, near, fill), now)


def places(scheduler: ClusterScheduler, demand: Demand, count: int) -> list[int]:
    """Node numbers of that many grants in a row; -1 for one that waits."""
    found = []
    for _ in range(count):
        _, out = ask(scheduler, demand)
        found.append(int(out.grants[0].allocation.node_id, 16) if out.grants else -1)
    return found


def granted(out: Decisions) -> list[int]:
    return [grant.lease_id for grant in out.grants]
