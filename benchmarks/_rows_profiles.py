"""Rows about stacks, profiles and the timeline: how long a look takes, and what they cost."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import timeit
from typing import Any

from _common import CPUS, Engine, Figure, row

#: Looks at one process, and turns with a profile and without.
_LOOKS, _TURNS = 20, 5
#: Seconds of each turn.
_SECONDS = 2.0
#: Turns of the timeline's test, and how often each makes it.
_TESTS, _TIMES = 200, 100_000


class _Busy:
    """Computes in Python."""

    def work(self, seconds: float, sample: bool = False) -> float:
        """Return how many rounds a second it makes, profiled by a thread of its own or not."""
        from miniray.profiling.inside import probe

        if sample:
            threading.Thread(target=probe(None, "cpu", seconds), daemon=True).start()  # type: ignore[arg-type]
        rounds, end = 0, time.perf_counter() + seconds
        began = time.thread_time()
        while time.perf_counter() < end:
            sum(range(200))
            rounds += 1
        return rounds / (time.thread_time() - began)


def _busy(engine: Engine) -> tuple[Any, Any]:
    engine.api.init(address="local", num_cpus=CPUS)
    actor = engine.api.remote(_Busy).remote()
    engine.api.get(actor.work.remote(0.1))
    return engine.api, actor


@row("stack", Figure("stacks of a busy worker", "ms", 200))
def stack(engine: Engine) -> float:
    from miniray.client.command_connection import connect_for_cli
    from miniray.profiling.looks import look

    ray, actor = _busy(engine)
    took = []
    running = actor.work.remote(10.0)
    with contextlib.closing(connect_for_cli(None, "address=", None)) as cluster:
        for _ in range(_LOOKS):
            began = time.perf_counter()
            assert look(cluster, "_Busy")["groups"][0]["stack"]
            took.append(time.perf_counter() - began)
    ray.cancel(running)
    return 1000 * statistics.median(took)


@row(
    "profile_cost",
    Figure("rounds of a loop, less while it profiles itself", "%", 3),
    Figure("the same, less while py-spy looks", "%", 3),
    limit=120,
)
def profile_cost(engine: Engine) -> tuple[float, float]:
    from miniray.client.command_connection import connect_for_cli
    from miniray.profiling.looks import profile

    ray, actor = _busy(engine)
    alone, inside, outside = [], [], []
    with contextlib.closing(connect_for_cli(None, "address=", None)) as cluster:
        for _ in range(_TURNS):
            alone.append(ray.get(actor.work.remote(_SECONDS)))
            inside.append(ray.get(actor.work.remote(_SECONDS, True)))
            running = actor.work.remote(_SECONDS)
            profile(cluster, "cpu", "_Busy", _SECONDS)
            outside.append(ray.get(running))
    base = statistics.median(alone)
    return tuple(100 * (1 - statistics.median(each) / base) for each in (inside, outside))  # type: ignore[return-value]


@row(
    "timeline_off",
    Figure("what the timeline costs a call while it is off", "ns", 10),
    Figure("that test, which is there for calls above 1 ms too", "ns"),
)
def timeline_off(_engine: Engine) -> tuple[float, float]:
    """Time what a call passes: the test at its end (``Replies.answer``) is all of it.

    Who submits, waits or loads arguments has another function put in its place while all is
    recorded. Without a timeline, that test would be with a constant.
    """
    from miniray.common.spans import LONG, SPANS

    def quickest(test: str) -> float:
        timer = timeit.Timer(test, "seconds = 1e-5", globals={"SPANS": SPANS, "LONG": LONG})
        return 1e9 * min(timer.repeat(_TESTS, _TIMES)) / _TIMES

    nothing, constant = quickest("pass"), quickest("if seconds > LONG: pass")
    timeline = quickest("if seconds > SPANS.least: pass")
    return timeline - constant, timeline - nothing
