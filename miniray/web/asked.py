"""Topics that have to be asked for, again and again while somebody looks: calls, objects, usage.

Each is a function of what can be asked, which a thread runs; it returns the rows by key and what
the summary says beside.
"""

from __future__ import annotations

import functools
import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.util.state import listed, summary
from miniray.util.state_records import ActorState
from miniray.util.task_records import processes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.web.feed import Feed

Row = dict[str, Any]

#: Seconds that processes may take for an answer.
_PATIENCE = 1.5
#: Seconds for an answer of the head.
_HEAD = 5.0
#: Objects and calls of one process that are shown, at most.
_MOST_OBJECTS, _MOST_CALLS = 2000, 200
#: Ray's states of tasks, as the page sums them up.
_STATES = {"RUNNING": "running", "FINISHED": "finished", "FAILED": "failed"}


class Asked(NamedTuple):
    """What a topic is now."""

    rows: dict[str, Row]
    facts: Row


def source_of(topic: str) -> Callable[[Feed], Asked] | None:
    """Return what asks for a topic; None if there is none of this name."""
    if topic in _PLAIN:
        return _PLAIN[topic]
    for pattern, function in _NAMED:
        found = pattern.fullmatch(topic)
        if found is not None:
            return functools.partial(function, *found.groups())
    return None


def _tasks(feed: Feed) -> Asked:
    rows = {}
    for name, entry in summary(feed.source, "tasks", _PATIENCE)["cluster"]["summary"].items():
        row = {"name": name, "type": entry["type"], "waiting": 0, "running": 0}
        row |= {"finished": 0, "failed": 0}
        for state, count in entry["state_counts"].items():
            row[_STATES.get(state, "waiting")] += count
        rows[name] = row
    return Asked(rows, {})


def _objects(feed: Feed) -> Asked:
    rows = {}
    for number, each in enumerate(listed(feed.source, "objects", None, _MOST_OBJECTS, _PATIENCE)):
        row = each.asdict()
        holders = row.pop("holders", None) or ()
        row["held_by"] = "; ".join(
            f"{holder['process']}: {holder['count']} {holder['reference_type'].lower()}"
            for holder in holders
        )
        rows[f"{each.object_id or number}/{each.node_id}"] = row
    return Asked(rows, {})


def _actor(id: str, feed: Feed) -> Asked:
    told = feed.link.head_request("actor_row", bytes.fromhex(id), timeout=_HEAD)
    if told is None:
        raise ValueError(f"There is no actor {id}, or it ended long ago.")
    row = {**vars(ActorState.of(told)), "resources": told["resources"]}
    if not row["pid"] or row["state"] == "DEAD":
        return Asked({}, {"actor": row})
    seen = _process(feed, row["node_id"], row["pid"])
    calls = seen.pop("calls")
    return Asked(calls, {"actor": row | seen})


def _worker(node: str, pid: str, feed: Feed) -> Asked:
    workers = feed.source.listing("workers")
    row = next(
        (each for each in workers if (each["node_id"], each["pid"]) == (node, int(pid))), None
    )
    if row is None:
        gone = {"node_id": node, "pid": int(pid), "state": "DEAD"}
        return Asked({}, {"worker": gone})
    seen = _process(feed, node, int(pid))
    calls = seen.pop("calls")
    title = row.get("name") or row["kind"]
    return Asked(calls, {"worker": {**row, **seen, "title": title}})


def _process(feed: Feed, node: str, pid: int) -> Row:
    """Return what a process runs, what waits in it, and what it uses."""
    nodes = [bytes.fromhex(node)]
    told, _ = processes_of(
        feed.source.ask_nodes("processes", ("calls", (_MOST_CALLS, False), None), _PATIENCE, nodes)
    )
    usage = feed.source.ask_nodes("usage", (), _PATIENCE, nodes)
    found: Row = {"calls": {}}
    for _, answer, _why in usage:
        for each, seconds, memory in (answer or {}).get("processes", ()):
            if each == pid:
                found |= {"cpu_seconds": seconds, "memory": memory}
    now = time.time()
    for each in told:
        if each.pid != pid or each.told is None:
            continue
        for id, name, seconds in each.told["running"]:
            found["calls"][id.hex()] = {
                "method": name,
                "state": "running",
                "since": round(now - seconds),
            }
        for id, name in each.told["queued"]:
            found["calls"][id.hex()] = {"method": name, "state": "queued", "since": None}
        found["queued"] = each.told["num_queued"]
        found["running"] = ", ".join(name for _, name, _ in each.told["running"]) or None
    return found


_PLAIN: dict[str, Callable[[Feed], Asked]] = {"tasks": _tasks, "objects": _objects}
_NAMED: list[tuple[re.Pattern[str], Callable[..., Asked]]] = [
    (re.compile(r"actor:([0-9a-f]{32})"), _actor),
    (re.compile(r"worker:([0-9a-f]{16}):(\d{1,10})"), _worker),
]


class NodeUsage:
    """What each node uses, from two looks at it: shares of CPU need the time between them."""

    def __init__(self) -> None:
        self._before: dict[str, Row] = {}

    def __call__(self, feed: Feed) -> dict[str, Row]:
        """Return further fields of the rows of nodes, by node id."""
        told = feed.source.ask_nodes("usage", (), _PATIENCE)
        now = {node.hex(): answer for node, answer, _ in told if answer is not None}
        found = {}
        for node, usage in now.items():
            before = self._before.get(node, usage)
            busy = usage["cpu_busy"] - before["cpu_busy"]
            total = usage["cpu_all"] - before["cpu_all"]
            found[node] = {
                "cpu_percent": round(100 * busy / total, 1) if total > 0 else None,
                "load1": usage["load1"],
                "memory_used": usage["memory_used"],
                "memory_total": usage["memory_total"],
                "disk_free": usage["disk_free"],
                "disk_size": usage["disk_size"],
                "workers": len(usage["processes"]),
            }
        self._before = now
        return found
