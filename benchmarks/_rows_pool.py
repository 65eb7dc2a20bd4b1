"""Rows about programs that change one import: beside what they had before, in turns."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
from typing import TYPE_CHECKING, Any

from _actors import same, same_of_pair
from _common import CPUS, Engine, Figure, rate, row

if TYPE_CHECKING:
    from collections.abc import Callable

#: Turns of each.
_TURNS = 3
_ITEMS = range(1000)
_PAIRS = [(number, number) for number in _ITEMS]


def _figures(what: str, other: str) -> tuple[Figure, Figure]:
    return Figure(what, "/s"), Figure(f"the same, its time in times of {other}'s", "x", 1.0)


def _in_turns(ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[float, float]:
    """The rate of ours, and how many times as long it takes as theirs; 1,000 items a run."""
    found = [[rate(run, len(_ITEMS), seconds=1.0) for run in (ours, theirs)] for _ in range(_TURNS)]
    mine, other = (statistics.median(column) for column in zip(*found, strict=True))
    return mine, other / mine


def _beside_pool(engine: Engine, use: Callable[[Any], Callable[[], Any]]) -> tuple[float, float]:
    """The engine's pool beside the standard library's, each with as many processes."""
    engine.start()
    with contextlib.ExitStack() as stack:
        # A server forks its processes, as they must not inherit the engine's threads.
        context = multiprocessing.get_context("forkserver")
        theirs = stack.enter_context(context.Pool(CPUS))
        ours = stack.enter_context(engine.module("util.multiprocessing").Pool(CPUS))
        return _in_turns(use(ours), use(theirs))


@row("pool_map", *_figures("Pool.map, 1,000 items", "multiprocessing"))
def pool_map(engine: Engine) -> tuple[float, float]:
    return _beside_pool(engine, lambda pool: lambda: pool.map(same, _ITEMS))


@row("pool_starmap", *_figures("Pool.starmap, 1,000 items", "multiprocessing"))
def pool_starmap(engine: Engine) -> tuple[float, float]:
    return _beside_pool(engine, lambda pool: lambda: pool.starmap(same_of_pair, _PAIRS))


@row("pool_imap", *_figures("Pool.imap, 1,000 items", "multiprocessing"))
def pool_imap(engine: Engine) -> tuple[float, float]:
    return _beside_pool(engine, lambda pool: lambda: list(pool.imap(same, _ITEMS)))


@row("pool_unordered", *_figures("Pool.imap_unordered, 1,000 items", "multiprocessing"))
def pool_unordered(engine: Engine) -> tuple[float, float]:
    return _beside_pool(engine, lambda pool: lambda: list(pool.imap_unordered(same, _ITEMS)))


@row("pool_apply", *_figures("Pool.apply_async, 1,000 in flight", "multiprocessing"))
def pool_apply(engine: Engine) -> tuple[float, float]:
    def use(pool: Any) -> Callable[[], Any]:
        return lambda: [
            result.get() for result in [pool.apply_async(same, (item,)) for item in _ITEMS]
        ]

    return _beside_pool(engine, use)


@row("joblib", *_figures("joblib.Parallel, 1,000 calls", "loky"))
def joblib_calls(engine: Engine) -> tuple[float, float]:
    import joblib

    engine.start()
    engine.module("util.joblib").register_ray()

    def use(backend: str) -> Callable[[], Any]:
        def run() -> None:
            with joblib.parallel_backend(backend, n_jobs=CPUS):
                joblib.Parallel()(joblib.delayed(same)(item) for item in _ITEMS)

        return run

    return _in_turns(use("ray"), use("loky"))
