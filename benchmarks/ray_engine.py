"""Rates of calls through the engine ``ray`` beside those of plain Ray, in turns on one cluster.

Needs an environment with both: ``make test-ray`` makes one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import ray

import miniray

if TYPE_CHECKING:
    from collections.abc import Callable

#: Calls of one turn, and turns of each.
CALLS, TURNS = 200, 15


def nothing() -> None:
    """Do nothing."""


class Actor:
    """Does nothing."""

    def nothing(self) -> None:
        """Do nothing."""


def seconds(work: Callable[[], object]) -> float:
    """Return how long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Print a table of rates."""
    miniray.init(engine="ray", num_cpus=2)
    works: dict[str, list[Callable[[], object]]] = {"tasks in flight": [], "one task": []}
    works |= {"calls of an actor in flight": [], "one call of an actor": []}
    works |= {"put of a small value": [], "get of a small value": []}
    keep = []
    for engine in (ray, miniray):
        task, actor = engine.remote(nothing), engine.remote(Actor).remote()
        value = engine.put(1)
        keep.append((actor, value))
        engine.get([actor.nothing.remote(), task.remote()])

        def many(call: Callable[[], object], get: Callable[..., object]) -> None:
            get([call() for _ in range(CALLS)])

        def each(call: Callable[[], object], get: Callable[..., object]) -> None:
            for _ in range(CALLS):
                get(call())

        for name, call in (("task", task.remote), ("call of an actor", actor.nothing.remote)):
            plural = "tasks" if name == "task" else "calls of an actor"
            works[f"{plural} in flight"].append(lambda c=call, g=engine.get: many(c, g))
            works[f"one {name}"].append(lambda c=call, g=engine.get: each(c, g))
        put = engine.put
        works["put of a small value"].append(lambda p=put: [p(1) for _ in range(CALLS)])
        works["get of a small value"].append(
            lambda g=engine.get, v=value: [g(v) for _ in range(CALLS)]
        )
    print("| what | Ray | through the engine | of Ray's rate |\n|---|---|---|---|")
    for name, (plain, through) in works.items():
        turns = [(seconds(plain), seconds(through)) for _ in range(TURNS + 1)][1:]
        # The best turn of each: on a busy machine the others tell of its other work.
        rates = [CALLS / min(turn[side] for turn in turns) for side in (0, 1)]
        print(
            f"| {name} | {rates[0]:,.0f}/s | {rates[1]:,.0f}/s | {rates[1] / rates[0]:.2f} |",
            flush=True,
        )
    miniray.shutdown()


if __name__ == "__main__":
    main()
