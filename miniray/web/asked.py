"""Topics that are polled while there is a viewer: calls, objects, usage.

Each is a function of a source of answers, which a thread runs; it returns the rows by key and the
other fields of the summary.
"""

from __future__ import annotations

import functools
import re
import time
from typing import TYPE_CHECKING, Any

from miniray.common.names import short_name
from miniray.profiling.targets import answers
from miniray.util.state import listed, summary
from miniray.util.state_records import ActorState
from miniray.util.task_records import ask_processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.runtime import RuntimeHead
    from miniray.web.tables import Asked

Row = dict[str, Any]

#: Seconds that processes may take for an answer.
_PATIENCE = 1.5
#: Seconds for an answer of a node that runs the tools of its devices.
_USE = 3.0
#: Objects and calls of one process that are shown, at most.
_MOST_OBJECTS, _MOST_CALLS = 2000, 200
#: Ray's states of tasks, as the page sums them up.
_STATES = {"RUNNING": "running", "FINISHED": "finished", "FAILED": "failed"}


def _tasks(source: RuntimeHead) -> Asked:
    rows = {}
    for name, entry in summary(source, "tasks", _PATIENCE)["cluster"]["summary"].items():
        counts = dict.fromkeys(("waiting", *_STATES.values()), 0)
        for state, count in entry["state_counts"].items():
            counts[_STATES.get(state, "waiting")] += count
        rows[name] = {"name": name, "type": entry["type"], **counts}
    return rows, {}


def _objects(source: RuntimeHead) -> Asked:
    rows = {}
    for number, each in enumerate(listed(source, "objects", None, _MOST_OBJECTS, _PATIENCE)):
        # Who holds it is in words, too.
        row = {name: value for name, value in vars(each).items() if name != "holders"}
        rows[f"{each.object_id or number}/{each.node_id}"] = row
    return rows, {}


def _actor(id: str, source: RuntimeHead) -> Asked:
    told = source.head_call("actor_row", bytes.fromhex(id))
    if told is None:
        raise ValueError(f"There is no actor {id}, or it ended long ago.")
    row = vars(ActorState.of(told))
    if not row["pid"] or row["state"] == "DEAD":
        return {}, {"actor": row}
    calls, uses = _process(source, row["node_id"], row["pid"])
    return calls, {"actor": row | uses}


def _worker(node: str, pid: str, source: RuntimeHead) -> Asked:
    of = {"node_id": node, "pid": int(pid)}
    rows = source.listing("workers")
    row = next((each for each in rows if of.items() <= each.items()), None)
    if row is None:
        return {}, {"worker": {**of, "state": "DEAD"}}
    calls, uses = _process(source, node, int(pid))
    return calls, {"worker": {**row, **uses, "name": short_name(row["name"])}}


def _process(source: RuntimeHead, node: str, pid: int) -> tuple[dict[str, Row], Row]:
    """Return the calls that a process runs or has queued, and its usage."""
    nodes = [bytes.fromhex(node)]
    told, _ = ask_processes(source, _PATIENCE, _MOST_CALLS, nodes=nodes, pids=[pid])
    calls: dict[str, Row] = {}
    found: Row = {}
    usage, _ = answers(source, "process_usage", (pid,), _PATIENCE, nodes)
    for seconds, memory in usage.values():
        found |= {"cpu_seconds": seconds, "memory": memory}
    now = time.time()
    for process in told:
        for id, name, seconds in process.told["works"]:
            since = None if seconds is None else round(now - seconds)
            state = "queued" if since is None else "running"
            calls[id.hex()] = {"method": name, "state": state, "since": since}
        if not process.missing:
            found["queued"] = process.told["num_queued"]
    return calls, found


_TOPICS: dict[str, Callable[[RuntimeHead], Asked]] = {
    "tasks": _tasks,
    "objects": _objects,
    "usage": lambda source: (answers(source, "usage", (), _USE)[0], {}),
}
_NAMED: list[tuple[re.Pattern[str], Callable[..., Asked]]] = [
    (re.compile(r"actor:([0-9a-f]{32})"), _actor),
    (re.compile(r"worker:([0-9a-f]{16}):(\d{1,10})"), _worker),
]


def source_of(topic: str) -> Callable[[RuntimeHead], Asked] | None:
    """Return the function that polls a topic; None if there is none of this name."""
    if topic == "datasets" or topic.startswith("run:"):
        # The train layer, only if there is a viewer.
        from miniray.train.run.page import RunPage
        from miniray.web import runs

        if topic == "datasets":
            return runs.DatasetTable()
        return functools.partial(runs.look_at, RunPage(topic.removeprefix("run:")))
    for pattern, function in _NAMED:
        if (found := pattern.fullmatch(topic)) is not None:
            return functools.partial(function, *found.groups())
    return _TOPICS.get(topic)
