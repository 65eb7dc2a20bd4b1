"""Rates of calls through the engine ``ray`` beside those of plain Ray, in turns on one cluster.

Needs an environment with both: ``make test-ray`` makes one.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import ray

import miniray

if TYPE_CHECKING:
    from collections.abc import Callable

#: Calls of one turn, and turns of each.
CALLS, TURNS = 200, int(sys.argv[1]) if len(sys.argv) > 1 else 15


def nothing(_value: object = None) -> None:
    """Do nothing."""


class Actor:
    """Does nothing."""

    def nothing(self, _value: object = None) -> None:
        """Do nothing."""

    def processor_seconds(self) -> float:
        """Return what its process has used."""
        return time.process_time()


def in_flight(call: Callable[..., object], get: Callable[..., object], *args: object) -> None:
    """Make all calls, then wait for them."""
    get([call(*args) for _ in range(CALLS)])


def one_by_one(call: Callable[..., object], get: Callable[..., object], *args: object) -> None:
    """Wait for each call."""
    for _ in range(CALLS):
        get(call(*args))


def repeat(work: Callable[[object], object], value: object) -> None:
    """Do it with a value."""
    for _ in range(CALLS):
        work(value)


def works_of(engine: Any) -> tuple[dict[str, Callable[[], object]], Callable[[], float]]:
    """Return what is measured of an engine, and what asks its actor for its processor time."""
    task, actor, value = engine.remote(nothing), engine.remote(Actor).remote(), engine.put(1)
    engine.get([actor.nothing.remote(), task.remote()])
    call, get, run = actor.nothing.remote, engine.get, functools.partial
    works: dict[str, Callable[[], object]] = {
        "one call of an actor": run(one_by_one, call, get),
        "calls of an actor in flight": run(in_flight, call, get),
        "the same with an argument": run(in_flight, call, get, 1),
        "one task": run(one_by_one, task.remote, get),
        "tasks in flight": run(in_flight, task.remote, get),
        "put of a small value": run(repeat, engine.put, 1),
        "get of a small value": run(repeat, engine.get, value),
    }
    return works, lambda: float(engine.get(actor.processor_seconds.remote()))


def main() -> None:
    """Print a table: the medians of rates, and of the processor time of one call on both sides."""
    miniray.init(engine="ray", num_cpus=2)
    plain, through = works_of(ray), works_of(miniray)
    print("| what | Ray, per s | engine, per s | of Ray's rate | processor time, us | |")
    print("|---|---|---|---|---|---|")
    for name in plain[0]:
        walls: list[tuple[float, float]] = []
        processor: list[tuple[float, float]] = []
        for _ in range(TURNS + 1):
            turn = [measured(works[name], actors) for works, actors in (plain, through)]
            walls.append((turn[0][0], turn[1][0]))
            processor.append((turn[0][1], turn[1][1]))
        ratio = statistics.median(one / other for one, other in walls[1:])
        rates = [CALLS / statistics.median(turn[side] for turn in walls[1:]) for side in (0, 1)]
        used = [
            1e6 / CALLS * statistics.median(turn[side] for turn in processor[1:]) for side in (0, 1)
        ]
        print(
            f"| {name} | {rates[0]:,.0f} | {rates[1]:,.0f} | {ratio:.2f} "
            f"| {used[0]:.0f} | {used[1]:.0f} |",
            flush=True,
        )
    miniray.shutdown()


def measured(work: Callable[[], object], of_actor: Callable[[], float]) -> tuple[float, float]:
    """Return how long it takes, and the processor time of the driver and its actor."""
    before = time.process_time() + of_actor()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return seconds, time.process_time() + of_actor() - before


if __name__ == "__main__":
    main()
