"""What a process answers when it is asked what it does (``client/cluster_runtime.py``).

Functions here run in the I/O thread, so they are short; what takes its time they return as a
function, which a thread of its own runs.
"""

from __future__ import annotations

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

#: Stacks, the outermost frame first, each with what it cost: seconds or bytes.
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
    """Answer a question: ``what`` is a key of ``_PROBES``, ``args`` those of its function."""
    if what == "timeline":
        return functools.partial(_timeline, calls, *args)
    return _PROBES[what](*args)


# --- the timeline ------------------------------------------------------------------------
def _timeline(calls: Calls, seconds: float) -> dict[str, Any]:
    """Record all for so many seconds; 0: return the last calls that took long."""
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
    return {"spans": spans, "left_out": left_out, "ahead": ahead, "rank": rank()}


def _stacks() -> Any:
    return rank(), stacks()


def rank() -> int | None:
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
def _cpu(seconds: float) -> Callable[[], Any]:
    return lambda: (rank(), _sample(seconds))


def _sample(seconds: float) -> Samples:
    """Look at all threads each 10 ms; a stack costs the CPU time of its thread since the last look.

    Native code that holds Python's lock keeps this thread from looking: what it used meanwhile is
    in the next sample, so that nothing is lost.
    """
    found: dict[tuple[tuple[CodeType, int], ...], float] = {}
    clocks: dict[int, _Clock] = {}
    own, end = threading.get_ident(), time.perf_counter() + seconds
    try:
        while True:
            is_last = time.perf_counter() >= end
            for ident, frame in sys._current_frames().items():
                clock = clocks.get(ident)
                if clock is None:
                    clock = clocks[ident] = _Clock(ident)
                used = clock.used()
                if used > 0 and ident != own:
                    key = tuple((each.f_code, each.f_lineno) for each in outward(frame))
                    found[key] = found.get(key, 0.0) + used
            if is_last:
                break
            time.sleep(_INTERVAL)
    finally:
        for clock in clocks.values():
            clock.close()
    stacks = (([frame_of(*each) for each in reversed(key)], cost) for key, cost in found.items())
    return samples_of(stacks)


class _Clock:
    """The CPU time of a thread."""

    def __init__(self, ident: int) -> None:
        native = next((each.native_id for each in threading.enumerate() if each.ident == ident), 0)
        if ident == threading.main_thread().ident:
            native = os.getpid()  # what threading knows is that of before the fork
        self._fd = -1
        try:
            self._fd = os.open(f"/proc/self/task/{native}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # it is no thread of Python's, or the kernel does not count
            return
        self._last = self._read()

    def used(self) -> float:
        """Return the seconds since the last question."""
        if self._fd < 0:
            return 0.0
        last, self._last = self._last, self._read()
        return (self._last - last) / 1e9

    def _read(self) -> int:
        try:
            return int(os.pread(self._fd, 64, 0).split()[0])
        except OSError:  # the thread has ended
            return getattr(self, "_last", 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


# --- memory ----------------------------------------------------------------------------
def _memory(seconds: float, path: str, leaks: bool) -> Callable[[], Any]:
    return functools.partial(_record, seconds, path, leaks)


def _record(seconds: float, path: str, leaks: bool) -> tuple[int | None, str, Samples]:
    """Record allocations; returns the rank, by what they were recorded, and what is not in `path`.

    memray is started in here, which needs no debugger and no right, and writes into ``path``.
    """
    try:
        from memray import FileDestination, Tracker
    except ImportError:
        return (
            rank(),
            "tracemalloc (Python's own allocations; memray is not installed)",
            _traced(seconds, leaks),
        )
    with Tracker(destination=FileDestination(path, overwrite=True)):
        time.sleep(seconds)
    return rank(), "memray", []


def _traced(seconds: float, leaks: bool) -> Samples:
    import tracemalloc

    was_on = tracemalloc.is_tracing()
    if not was_on:
        tracemalloc.start(_TRACED)
    del leaks  # what it shows is what is still there
    time.sleep(seconds)
    snapshot = tracemalloc.take_snapshot()
    if not was_on:
        tracemalloc.stop()
    return samples_of(
        ([("line", frame.filename, frame.lineno) for frame in each.traceback], float(each.size))
        for each in snapshot.statistics("traceback")
    )


_PROBES: dict[str, Callable[..., Any]] = {
    "stack": _stacks,
    "rank": rank,
    "cpu": _cpu,
    "memory": _memory,
}
