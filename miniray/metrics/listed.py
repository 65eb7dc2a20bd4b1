"""Metrics of the head's listings, and of calls that have not ended: the series of each row."""

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

_KINDS = ("actor", "job", "placement_group", "task")
#: Series of one metric that is of no node or run; runs, and metrics of a run, that are shown.
_MOST_SERIES, _MOST_RUNS, _MOST = 1000, 100, 50
#: Seconds in which processes have to report their open calls.
_PATIENCE = 0.5


def samples(cluster: ClusterSource, answering: Iterable[str]) -> Iterator[Sample]:
    """Yield the samples of these metrics; ``answering`` are the hex ids of nodes that do."""
    sums: dict[str, dict[tuple[Any, ...], float]] = {}
    for name, labels, value in _values(cluster, set(answering)):
        series, key = sums.setdefault(name, {}), tuple(labels.items())
        series[key] = series.get(key, 0) + value
    for name, series in sums.items():
        largest = sorted(series, key=series.__getitem__, reverse=True)
        is_few = {"node", "run"} & dict(largest[0]).keys()
        shown = largest if is_few else largest[:_MOST_SERIES]
        for key in shown:
            yield name, dict(key), series[key]
        if len(shown) < len(largest):
            yield name, {"overflow": "true"}, sum(series[key] for key in largest[len(shown) :])


def _values(cluster: ClusterSource, answering: set[str]) -> Iterator[Sample]:
    """Yield what each row adds to the series of its labels."""
    for node in cluster.listing("node_states"):
        of = {"node": node["node_id"]}
        about = {"host": node["hostname"], "address": node["address"]}
        yield "node_info", of | about | {"version": VERSION, "head": node["is_head"]}, 1
        yield "node_up", of, node["node_id"] in answering
        yield "node_state", of | {"state": node["state"]}, 1
        for resource, amount in node["total"].items():
            yield "resource_total", of | {"resource": resource}, amount
            yield "resource_used", of | {"resource": resource}, node["used"].get(resource, 0.0)
    for device in cluster.listing("devices"):
        of = {"node": device["node_id"], "resource": device["resource"], "device": device["device"]}
        yield "device_granted_ratio", of, sum(each["share"] for each in device["held"])
        yield "device_quarantined", of, bool(device["quarantined"])
    for actor in cluster.listing("actors"):
        of = {"class": short_name(actor["class_name"]), "state": actor["state"]}
        yield "actors", of | ({"name": actor["name"]} if config().metrics_per_actor else {}), 1
    for group in cluster.listing("placement_groups"):
        yield "placement_groups", {"strategy": group["strategy"], "state": group["state"]}, 1
    for job in cluster.listing("jobs"):
        yield "jobs", {"state": job["state"]}, 1
    for lease in cluster.listing("leases"):
        state = "revoked" if lease["revoked"] else "granted"
        yield "leases", {"node": lease["node_id"], "state": state}, 1
    for head in cluster.listing("head"):
        yield "head_info", {"version": VERSION}, 1
        yield "head_start_time_seconds", {}, head["started"]
        yield "head_restarts_total", {}, head["restarts"]
        yield "head_sessions", {}, head["sessions"]
        yield "head_demands_waiting", {}, head["waiting"]
        for node_id, age in head["heartbeat_ages"].items():
            yield "node_heartbeat_age_seconds", {"node": node_id}, age
    yield from _waiting(cluster.listing("pending"))
    yield from _calls(cluster)
    yield from _runs(cluster.listing("runs"))


def _waiting(pending: list[Row]) -> Iterator[Sample]:
    """Yield what waits by kind, kinds without any included."""
    now = time.time()
    for kind in _KINDS:
        yield "pending_demands", {"kind": kind, "infeasible": False, "reason": ""}, 0
        oldest = min((each["since"] for each in pending if each["kind"] == kind), default=now)
        yield "pending_oldest_seconds", {"kind": kind}, max(0.0, now - oldest)
    for demand in pending:
        of = {"kind": demand["kind"], "infeasible": demand["infeasible"]}
        yield "pending_demands", of | {"reason": demand["cause"]}, demand["count"]
        for shape in demand["shape"]:
            for name, amount in shape.items():
                yield "resource_waiting", {"resource": name}, amount * demand["count"]


def _calls(cluster: ClusterSource) -> Iterator[Sample]:
    """Yield the tasks and the calls of actors that have not ended."""
    processes, _ = ask_processes(cluster, _PATIENCE, 0)
    names = summary_of(processes)["summary"]
    for name, entry in names.items():
        for state, count in entry["state_counts"].items():
            if entry["type"] == "NORMAL_TASK" and state not in ("FINISHED", "FAILED"):
                yield "tasks", {"function": name, "state": state}, count
            elif entry["type"] == "ACTOR_TASK" and state not in ("FINISHED", "FAILED", "RUNNING"):
                yield "actor_queued_calls", {"class": _class(name)}, count
    longest: dict[str, float] = {}
    for process in processes:
        for name, (_, seconds) in process.told["running_by_name"].items():
            if names.get(short_name(name), {}).get("type") == "ACTOR_TASK":
                of = _class(short_name(name))
                longest[of] = max(seconds, longest.get(of, 0.0))
    for of, seconds in longest.items():
        yield "actor_oldest_call_seconds", {"class": of}, seconds


def _class(method: str) -> str:
    return method.rpartition(".")[0]


def _runs(runs: list[Row]) -> Iterator[Sample]:
    """Yield figures of train runs: of each name, those of the latest run."""
    for name, run in {run["name"]: run for run in runs[-_MOST_RUNS:]}.items():
        of, lives = {"run": name}, run["state"] == "RUNNING" and run["alive"]
        yield "train_run_info", of | {"id": run["run_id"], "state": run["state"]}, 1
        yield "train_workers", of, run["workers"] if lives else 0
        yield "train_reports_total", of, run["reports"]
        yield "train_attempts_total", of, run["attempts"]
        yield "train_checkpoints", of, run["checkpoints"]
        yield "train_productive_ratio", of, run["productive_ratio"]
        numbers = [each for each in run["metrics"].items() if isinstance(each[1], (int, float))]
        for metric, value in numbers[:_MOST]:
            yield "train_metric", of | {"metric": metric}, value
