"""A process's answers to questions about its work (``client/cluster_runtime.py``).

Functions here run in the I/O thread, so they are short; for slow work they return a function, which
a thread of its own runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from miniray.common.names import RANK_VARIABLE
from miniray.common.spans import SPANS
from miniray.profiling.stacks import Frame, frame_of, outward, stacks, trimmed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType

#: Stacks, the outermost frame first, each with its cost: seconds or bytes.
Samples = list[tuple[list[str], float]]

#: Seconds between two samples.
_INTERVAL = 0.01
#: Frames of a stack that are kept, at most.
_DEPTH = 200
#: Frames that tracemalloc keeps of each allocation.
_TRACED = 25
#: What stands for miniray's own work between calls.
_OWN = "miniray, between calls"


class Calls(Protocol):
    """The calls that this process makes."""

    next_number: Callable[[], int]


def probe(calls: Calls, what: str, *args: Any) -> Any:
    """Answer "stack" or "rank", or return a function of ``_RECORDS`` with these arguments."""
    if what == "stack":
        return stacks()
    return _rank() if what == "rank" else functools.partial(_RECORDS[what], calls, *args)


# --- the timeline ------------------------------------------------------------------------
def _timeline(calls: Calls, seconds: float) -> dict[str, Any]:
    """Record all for ``seconds``; 0: return the last calls that took long."""
    spans, left_out = SPANS.ring.read() if SPANS.ring is not None else [], 0
    if seconds > 0:
        SPANS.begin()
        number = calls.next_number

        def numbered() -> int:
            made = number()
            SPANS.submitted(made)
            return made

        calls.next_number = numbered  # in its place, so that it costs nothing else
        try:
            time.sleep(seconds)
        finally:
            calls.next_number = number
            spans, left_out = SPANS.end()
    ahead = time.time() - time.perf_counter()
    return {"spans": spans, "left_out": left_out, "ahead": ahead}


def _rank() -> int | None:
    """Return which rank of a training run this process is; None: of none."""
    number = os.environ.get(RANK_VARIABLE, "")
    return int(number) if number.isdigit() else None


def samples_of(weights: Iterable[tuple[Iterable[Frame], float]]) -> Samples:
    """Add up what the same frames of user code cost."""
    found: dict[tuple[str, ...], float] = {}
    for frames, weight in weights:
        key = tuple(trimmed(frames)[:_DEPTH]) or (_OWN,)
        found[key] = found.get(key, 0.0) + weight
    return [(list(frames), weight) for frames, weight in found.items()]


# --- CPU -------------------------------------------------------------------------------
def _sample(_calls: Any, seconds: float) -> Samples:
    """Look at all threads each 10 ms; a stack costs the CPU time of its thread since the last look.

    Native code that holds Python's lock keeps this thread from looking: its use meanwhile is in the
    next sample, so that nothing is lost.
    """
    found: dict[tuple[tuple[CodeType, int], ...], float] = {}
    own, end, now = threading.get_ident(), time.perf_counter() + seconds, _cpu_seconds()
    while time.perf_counter() < end:
        time.sleep(_INTERVAL)
        before, now = now, _cpu_seconds()
        for ident, frame in sys._current_frames().items():
            used = now.get(ident, 0.0) - before.get(ident, 0.0)
            if used > 0 and ident != own:
                key = tuple((each.f_code, each.f_lineno) for each in outward(frame))
                found[key] = found.get(key, 0.0) + used
    stacks = (([frame_of(*each) for each in reversed(key)], cost) for key, cost in found.items())
    return samples_of(stacks)


def _cpu_seconds() -> dict[int, float]:
    """Return the CPU time of each of Python's threads."""
    found: dict[int, float] = {}
    for thread in threading.enumerate():
        # For the main thread, threading still has the id of before the fork.
        native = os.getpid() if thread is threading.main_thread() else thread.native_id
        if thread.ident is not None and native is not None:
            with contextlib.suppress(OSError):  # it has just ended
                # As pthread_getcpuclockid, which crashes for one that has: clock_getres(2).
                found[thread.ident] = time.clock_gettime(~native << 3 | 6)
    return found


# --- memory ----------------------------------------------------------------------------
def _record(_calls: Any, seconds: float, path: str, leaks: bool) -> tuple[str, Samples]:
    """Record allocations; returns the tool, and the samples that are not in `path`.

    memray is started in here, which needs no debugger and no right, and writes into ``path``.
    """
    try:
        from memray import FileDestination, Tracker
    except ImportError:
        way = "tracemalloc (Python's own allocations; memray is not installed)"
        return way, _traced(seconds)
    with Tracker(destination=FileDestination(path, overwrite=True)):
        time.sleep(seconds)
    return "memray", []


def _traced(seconds: float) -> Samples:
    """Return Python's own allocations that are still there at the end."""
    import tracemalloc

    was_on = tracemalloc.is_tracing()
    if not was_on:
        tracemalloc.start(_TRACED)
    time.sleep(seconds)
    snapshot = tracemalloc.take_snapshot()
    if not was_on:
        tracemalloc.stop()
    return samples_of(
        ([("line", frame.filename, frame.lineno) for frame in each.traceback], float(each.size))
        for each in snapshot.statistics("traceback")
    )


#: Slow work: each function gets the calls of this process, and the request's arguments.
_RECORDS: dict[str, Callable[..., Any]] = {
    "cpu": _sample,
    "memory": _record,
    "timeline": _timeline,
}
