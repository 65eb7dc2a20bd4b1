"""Metrics of what the head lists, and of calls that have not ended: which rows make each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.common.names import short_name
from miniray.util.task_records import ask_processes, summary_of
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from miniray.profiling.targets import ClusterSource

Row = dict[str, Any]
#: Name, labels and value.
Sample = tuple[str, dict[str, Any], float]

_NODE = {"node": "node_id"}
_ABOUT = {"host": "hostname", "address": "address", "version": "version", "head": "is_head"}
_DEVICE = {**_NODE, "resource": "resource", "device": "device"}
_RUN = {"run": "name"}
#: Of each metric its rows, the field that each label has, and the field, or the number, that a row
#: adds to the series of its labels.
_METRICS: tuple[tuple[str, str, dict[str, str], str | int], ...] = (
    ("node_info", "nodes", {**_NODE, **_ABOUT}, 1),
    ("node_up", "nodes", _NODE, "answers"),
    ("node_state", "nodes", {**_NODE, "state": "state"}, 1),
    ("node_silent_seconds", "nodes", _NODE, "silent"),
    ("resource_total", "resources", {**_NODE, "resource": "resource"}, "total"),
    ("resource_used", "resources", {**_NODE, "resource": "resource"}, "used"),
    ("resource_waiting", "wanted", {"resource": "resource"}, "amount"),
    ("device_info", "devices", {**_DEVICE, "model": "model"}, 1),
    ("device_granted_ratio", "devices", _DEVICE, "granted"),
    ("device_quarantined", "devices", _DEVICE, "is_out"),
    ("pending_demands", "pending", {"kind": "kind", "infeasible": "infeasible"}, "count"),
    ("pending_oldest_seconds", "oldest", {"kind": "kind"}, "seconds"),
    ("actors", "actors", {"class": "class_name", "state": "state"}, 1),
    ("actor_queued_calls", "queued", {"class": "class"}, "count"),
    ("actor_oldest_call_seconds", "running", {"class": "class"}, "seconds"),
    ("tasks", "tasks", {"function": "name", "state": "state"}, "count"),
    ("placement_groups", "placement_groups", {"strategy": "strategy", "state": "state"}, 1),
    ("jobs", "jobs", {"state": "state"}, 1),
    ("leases", "leases", {**_NODE, "state": "state"}, 1),
    ("head_info", "head", {"version": "version"}, 1),
    ("head_start_time_seconds", "head", {}, "started"),
    ("head_restarts_total", "head", {}, "restarts"),
    ("head_sessions", "head", {}, "sessions"),
    ("train_run_info", "runs", {**_RUN, "id": "run_id", "state": "state"}, 1),
    ("train_workers", "runs", _RUN, "workers"),
    ("train_reports_total", "runs", _RUN, "reports"),
    ("train_attempts_total", "runs", _RUN, "attempts"),
    ("train_checkpoints", "runs", _RUN, "checkpoints"),
    ("train_metric", "reported", {**_RUN, "metric": "metric"}, "value"),
)
_KINDS = ("actor", "job", "placement_group", "task")
#: Series of one metric that is of no node or run; runs, and metrics of a run, that are shown.
_MOST_SERIES, _MOST_RUNS, _MOST = 1000, 100, 50
#: Seconds in which processes have to tell which of their calls are open.
_PATIENCE = 0.5
#: The label that says of which kind the accelerators of a node are.
_MODEL = "miniray.io/accelerator-type"


def samples(cluster: ClusterSource, answering: Iterable[str]) -> Iterator[Sample]:
    """Yield the samples of these metrics; ``answering`` are the hex ids of nodes that do."""
    rows = _rows(cluster, set(answering))
    for name, listing, labels, value in _METRICS:
        if listing == "actors" and config().metrics_per_actor:
            labels = {**labels, "name": "name"}  # noqa: PLW2901
        sums: dict[tuple[Any, ...], float] = {}
        for row in rows[listing]:
            key = tuple([row[field] for field in labels.values()])
            sums[key] = sums.get(key, 0) + (row[value] if isinstance(value, str) else value)
        largest = sorted(sums, key=sums.__getitem__, reverse=True)
        shown = largest if "node" in labels or "run" in labels else largest[:_MOST_SERIES]
        for key in shown:
            yield name, dict(zip(labels, key, strict=True)), sums[key]
        if len(shown) < len(largest):
            yield name, {"overflow": "true"}, sum(sums[key] for key in largest[len(shown) :])


def _rows(cluster: ClusterSource, answering: set[str]) -> dict[str, list[Row]]:
    """Return the rows of each listing."""
    nodes, pending = cluster.listing("node_states"), cluster.listing("pending")
    models = {node["node_id"]: node["labels"].get(_MODEL, "") for node in nodes}
    runs = {run["name"]: _run(run) for run in cluster.listing("runs")[-_MOST_RUNS:]}
    return {
        **{name: cluster.listing(name) for name in ("placement_groups", "jobs")},
        "actors": [
            {**actor, "class_name": short_name(actor["class_name"])}
            for actor in cluster.listing("actors")
        ],
        **_waiting(pending),
        **_calls(cluster),
        "nodes": [
            {**node, "answers": node["node_id"] in answering, "version": VERSION} for node in nodes
        ],
        "resources": [
            {**node, "resource": name, "total": amount, "used": node["used"].get(name, 0.0)}
            for node in nodes
            for name, amount in node["total"].items()
        ],
        "devices": [
            {
                **device,
                "model": models.get(device["node_id"], ""),
                "granted": sum(each["share"] for each in device["held"]),
                "is_out": bool(device["quarantined"]),
            }
            for device in cluster.listing("devices")
        ],
        "leases": [
            {**lease, "state": "revoked" if lease["revoked"] else "granted"}
            for lease in cluster.listing("leases")
        ],
        "head": [{**head, "version": VERSION} for head in cluster.listing("head")],
        "runs": [*runs.values()],
        "reported": [
            {"name": name, "metric": metric, "value": value}
            for name, run in runs.items()
            for metric, value in run["numbers"][:_MOST]
        ],
    }


def _waiting(pending: list[Row]) -> dict[str, list[Row]]:
    """Return rows of what waits, those of kinds of which nothing does among them."""
    now = time.time()
    found: dict[str, list[Row]] = {"pending": [*pending], "oldest": []}
    for kind in _KINDS:
        found["pending"] += [
            {"kind": kind, "infeasible": each, "count": 0} for each in (False, True)
        ]
        oldest = min((each["since"] for each in pending if each["kind"] == kind), default=now)
        found["oldest"].append({"kind": kind, "seconds": max(0.0, now - oldest)})
    found["wanted"] = [
        {"resource": name, "amount": amount * demand["count"]}
        for demand in pending
        for shape in demand["shape"]
        for name, amount in shape.items()
    ]
    return found


def _calls(cluster: ClusterSource) -> dict[str, list[Row]]:
    """Return rows of the tasks and the calls of actors that have not ended."""
    processes, _ = ask_processes(cluster, _PATIENCE, 0)
    names = summary_of(processes)["summary"]
    found: dict[str, list[Row]] = {"tasks": [], "queued": []}
    for name, entry in names.items():
        for state, count in entry["state_counts"].items():
            row = {"name": name, "class": _class(name), "state": state, "count": count}
            if entry["type"] == "NORMAL_TASK" and state not in ("FINISHED", "FAILED"):
                found["tasks"].append(row)
            elif entry["type"] == "ACTOR_TASK" and state not in ("FINISHED", "FAILED", "RUNNING"):
                found["queued"].append(row)
    longest: dict[str, float] = {}
    for process in processes:
        for name, (_, seconds) in process.told["running_by_name"].items():
            if names.get(short_name(name), {}).get("type") == "ACTOR_TASK":
                of = _class(short_name(name))
                longest[of] = max(seconds, longest.get(of, 0.0))
    found["running"] = [{"class": of, "seconds": seconds} for of, seconds in longest.items()]
    return found


def _class(method: str) -> str:
    return method.rpartition(".")[0]


def _run(run: Row) -> Row:
    """Return the row of a train run with the numbers that it reported last."""
    lives = run["state"] == "RUNNING" and run["alive"]
    numbers = [each for each in run["metrics"].items() if isinstance(each[1], (int, float))]
    return {**run, "workers": run["workers"] if lives else 0, "numbers": numbers}
