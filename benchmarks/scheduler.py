"""How many decisions per second the head's scheduler makes, and that a long queue costs nothing.

Places mixed demands (CPU, shared and whole GPUs, a custom resource) over many
nodes, then releases and places again at full load: without a queue, behind many
demands of few shapes that can't be placed, behind many shapes, and behind many
demands of many shapes of which some always fit. One process, no I/O; figures are of
processor time.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time

from miniray.head.scheduling.demands import Demand, LeaseRequest
from miniray.head.scheduling.resources import node_pool
from miniray.head.scheduling.scheduler import ClusterScheduler

DEVICES = 8
#: (share of the demands, resources)
MIX = (
    (60, {"CPU": 1}),
    (6, {"CPU": 1, "GPU": 0.25}),
    (4, {"CPU": 1, "GPU": 0.5}),
    (6, {"CPU": 1, "GPU": 0.18}),
    (1, {"CPU": 2, "GPU": 1}),
    (0.5, {"CPU": 4, "GPU": 2}),
    (0.05, {"CPU": 8, "GPU": 8}),
    (22.45, {"CPU": 1, "licence": 1}),
)


def make_cluster(nodes: int) -> ClusterScheduler:
    scheduler = ClusterScheduler()
    for number in range(nodes):
        resources = {"CPU": 256.0, "memory": 2.0**40, "licence": 64.0}
        devices = {"GPU": [str(device) for device in range(DEVICES)]}
        scheduler.add_node(node_pool(f"{number:032x}", resources, devices), 0.0)
    return scheduler


def requests(count: int, seed: int, prefix: bytes) -> list[LeaseRequest]:
    rng = random.Random(seed)
    shapes = [Demand.of(resources) for _, resources in MIX]
    drawn = rng.choices(shapes, [share for share, _ in MIX], k=count)
    return [
        LeaseRequest(prefix + number.to_bytes(8, "big"), demand)
        for number, demand in enumerate(drawn)
    ]


def place(scheduler: ClusterScheduler, wanted: list[LeaseRequest]) -> tuple[float, list[bytes]]:
    """Seconds taken, and the leases granted."""
    granted = []
    start = time.process_time()
    for request in wanted:
        granted.extend([grant.lease_id for grant in scheduler.submit(request, 0.0).grants])
    return time.process_time() - start, granted


def churn(scheduler: ClusterScheduler, held: list[bytes], rounds: int, prefix: bytes) -> float:
    """Seconds to release a random lease and ask for another one, ``rounds`` times."""
    rng = random.Random(1)
    fresh = iter(requests(rounds, 2, prefix))
    rng.shuffle(held)
    start = time.process_time()
    for request in itertools.islice(fresh, rounds):
        freed = scheduler.release(held.pop(), 0.0)
        asked = scheduler.submit(request, 0.0)
        held.extend(grant.lease_id for grant in (*freed.grants, *asked.grants))
    return time.process_time() - start


def many_shapes(count: int, rng: random.Random, prefix: bytes) -> list[LeaseRequest]:
    """Demands of which no two are alike and each lacks something else on a full cluster."""
    found = []
    for number in range(count):
        resources = {"CPU": rng.randint(1, 64) + rng.randint(1, 9999) / 10_000}
        kind = number % 4
        if kind == 0:
            resources |= {"GPU": rng.randint(2, DEVICES)}
        elif kind == 1:
            resources |= {"memory": float(rng.randint(2**40 // 2, 2**40)), "licence": 40.0}
        elif kind == 2:
            resources |= {f"special_{number}": 1.0}
        else:
            resources["CPU"] += 150
        found.append(LeaseRequest(prefix + number.to_bytes(8, "big"), Demand.of(resources)))
    return found


def behind_shapes_that_fit(nodes: int, demands: int, shapes: int, rounds: int) -> tuple[int, float]:
    """Fill a cluster, let the rest wait, and serve it: how many wait, seconds for these rounds."""
    scheduler = make_cluster(nodes)
    rng = random.Random(4)
    kinds = [
        Demand.of({"CPU": rng.randint(10, 40_000) / 10_000, "memory": float(rng.randint(1, 2**33))})
        for _ in range(shapes)
    ]
    capacity = nodes * 200
    wanted = [
        LeaseRequest(b"e" + number.to_bytes(8, "big"), rng.choice(kinds))
        for number in range(capacity + demands)
    ]
    _, held = place(scheduler, wanted)
    rng.shuffle(held)
    start = time.process_time()
    for number in range(rounds):
        freed = scheduler.release(held.pop(), 0.0)
        more = LeaseRequest(b"f" + number.to_bytes(8, "big"), rng.choice(kinds))
        asked = scheduler.submit(more, 0.0)
        held.extend(grant.lease_id for grant in (*freed.grants, *asked.grants))
    return len(scheduler.waiting()), time.process_time() - start


def report(what: str, count: int, seconds: float) -> None:
    print(f"{what:<58} {count / seconds:>10,.0f}/s  {seconds / count * 1e6:>7.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--demands", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--shapes", type=int, default=1000, help="shapes that wait, at most")
    args = parser.parse_args()

    scheduler = make_cluster(args.nodes)
    seconds, held = place(scheduler, requests(args.demands, 0, b"a"))
    report(
        f"place {args.demands:,} on {args.nodes:,} nodes ({len(held):,} fit)", args.demands, seconds
    )
    report("release and place", args.rounds, churn(scheduler, held, args.rounds, b"b"))

    absent = Demand.of({"CPU": 1, "FPGA": 1})
    busy = [Demand.of({"CPU": 200 + extra, "GPU": 8}) for extra in range(3)]
    queue = [
        LeaseRequest(b"q" + number.to_bytes(8, "big"), demand)
        for number, demand in zip(range(100_000), itertools.cycle([absent, *busy]), strict=False)
    ]
    seconds, stuck = place(scheduler, queue)
    report(f"queue 100,000 that can't be placed ({len(stuck):,} fit)", len(queue), seconds)
    report(
        "release and place behind that queue",
        args.rounds,
        churn(scheduler, held, args.rounds, b"c"),
    )

    waiting = 0
    rng = random.Random(3)
    for shapes in (args.shapes // 50, args.shapes):
        more = many_shapes(shapes - waiting, rng, b"s" + bytes([waiting > 0]))
        waiting = shapes
        seconds, _ = place(scheduler, more)
        report(f"queue up to {shapes:,} shapes", len(more), seconds)
        report(
            f"release and place behind {shapes:,} shapes",
            args.rounds,
            churn(scheduler, held, args.rounds, b"d" + bytes([shapes > args.shapes // 50])),
        )

    rounds = args.rounds // 4
    waiting, seconds = behind_shapes_that_fit(args.nodes, 100_000, args.shapes, rounds)
    report(f"serve {waiting:,} of {args.shapes:,} shapes that fit", rounds, seconds)


if __name__ == "__main__":
    main()
