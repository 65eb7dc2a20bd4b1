"""What ran where and when, as Chrome trace events, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.common.runtime import current_runtime
from miniray.engines import refuse_on_ray
from miniray.profiling.targets import answers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from miniray.common.spans import Span
    from miniray.profiling.targets import ClusterSource

#: Seconds that nodes may take for their answers, beside what the recording takes.
_PATIENCE = 10.0
#: Seconds that a recording may take.
LONGEST = 300.0
_MICRO = 1e6
Event = dict[str, Any]


def timeline(filename: str | None = None) -> list[Event] | None:
    """Return the recent calls of workers above 1 ms, as Chrome trace events.

    Each worker remembers its last 255 of them. ``miniray timeline --seconds 10 -o FILE`` records
    all calls for a time, with waits, transfers and spills.

    Args:
        filename: Where to write the events, as JSON, instead.
    """
    refuse_on_ray("timeline")
    events, _ = record(current_runtime().head, 0.0)
    if filename is None:
        return events
    Path(filename).write_text(json.dumps(events), encoding="utf-8")
    return None


def record(cluster: ClusterSource, seconds: float) -> tuple[list[Event], list[str]]:
    """Record all processes for some seconds; 0: return their recent calls.

    Returns:
        Trace events; and sentences on missing spans.

    Raises:
        ValueError: It would take too long.
    """
    if not 0 <= seconds <= LONGEST:
        raise ValueError(f"A timeline takes up to {LONGEST:g} seconds, not {seconds:g}.")
    told, notes = answers(cluster, "timeline", (float(seconds),), seconds + _PATIENCE)
    clocks = _clocks(cluster, [*map(bytes.fromhex, told)], notes)
    events: list[Event] = []
    processes = []
    for place, (node, found) in enumerate(told.items(), 1):
        events.append(_named("process_name", place, 0, f"node {node[:8]}"))
        for process in found:
            process["ahead"] -= clocks.get(bytes.fromhex(node), 0.0)
            processes.append((place, process))
            name = f"{process['name'] or 'worker'} (pid {process['pid']})"
            if process["note"]:
                notes.append(f"{name}: {process['note']}")
            if process["left_out"]:
                notes.append(f"{name}: {process['left_out']:,} more did not fit.")
    return [*events, *_events(processes)], notes


def _clocks(cluster: ClusterSource, nodes: list[bytes], notes: list[str]) -> dict[bytes, float]:
    """Return how many seconds nodes' clocks are ahead of that of the first; add to the notes."""
    found = {}
    for first, told, why in cluster.ask_nodes("clocks", (nodes,), _PATIENCE, nodes[:1]):
        if why:
            text = f"Node {first.hex()[:8]}, which is to compare the nodes' clocks: {why}."
            notes.append(f"{text} They are taken as they are.")
        for node, clock in (told or {}).items():
            if clock is None:
                notes.append(f"Node {node.hex()[:8]}: its clock is not known, and taken as it is.")
            elif clock != (0.0, 0.0):
                found[node], exact = clock
                notes.append(
                    f"The clock of node {node.hex()[:8]} is {found[node]:+.6f} s from that of node "
                    f"{first.hex()[:8]}, within {exact:.6f} s: its times are moved by that."
                )
    return found


def _events(processes: list[tuple[int, dict[str, Any]]]) -> Iterator[Event]:
    """Yield the spans of processes, on tracks, with arrows from caller to call."""
    submitted = {}
    for place, process in processes:
        for kind, _, started, _, _, of in process["spans"]:
            if kind == "submit" and of is not None:
                _, number = of
                submitted[process["worker_id"], number] = place, process, started
    arrows = 0
    for place, process in processes:
        lanes = {0}
        for lane, span in _in_lanes(each for each in process["spans"] if each[0] != "submit"):
            lanes.add(lane)
            kind, name, started, seconds, ok, of = span
            here = {"pid": place, "tid": _track(process, lane), "ts": _time(process, started)}
            args = {} if ok else {"failed": True}
            what = {"ph": "X", "cat": kind, "name": name}
            yield {**what, **here, "dur": seconds * _MICRO, "args": args}
            caller_id, number = of or (b"", 0)
            made = submitted.get((caller_id.hex(), number))
            if made is None:
                continue
            arrows += 1
            from_place, caller, when = made
            at = min(_time(caller, when), here["ts"])
            there = {"pid": from_place, "tid": _track(caller, 0), "ts": at}
            call = {"ph": "X", "cat": "submit", "name": f"submit {name}"}
            yield {**call, **there, "dur": 1.0, "args": {}}
            ends = {"cat": "call", "name": "call", "id": arrows}
            yield {**ends, "ph": "s", **there}
            yield {**ends, "ph": "f", "bp": "e", **here}
        for lane in sorted(lanes):
            label = f"{process['name'] or 'worker'} (pid {process['pid']})"
            yield _named("thread_name", place, _track(process, lane), label)


def _in_lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Yield spans with a track each, on which they lie apart or within each other."""
    lanes: list[list[float]] = []  # the ends of what is open there, the innermost last
    for span in sorted(spans, key=_outer_first):
        _, _, begin, seconds, *_ = span
        end = begin + seconds
        for number, open_ends in enumerate(lanes):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            if not open_ends or open_ends[-1] >= end:
                open_ends.append(end)
                yield number, span
                break
        else:
            lanes.append([end])
            yield len(lanes) - 1, span


def _outer_first(span: Span) -> tuple[float, float]:
    _, _, begin, seconds, *_ = span
    return begin, -seconds


def _named(what: str, place: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": place, "tid": track, "args": {"name": name}}


def _track(process: dict[str, Any], lane: int) -> int:
    return operator.index(process["pid"]) * 1000 + lane


def _time(process: dict[str, Any], when: float) -> float:
    """Return a moment in microseconds since the epoch, by the clock of the first node."""
    return float(process["ahead"] + when) * _MICRO
