"""The metrics of the whole cluster as one text in Prometheus' format, asked for when it is read.

Names: base units, ``_total`` for what only grows, no id of a process or an actor as a label.
"""

from __future__ import annotations

import collections
import math
import re
import time
from typing import TYPE_CHECKING, Any

from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from miniray.profiling.targets import ClusterSource

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_PREFIX = "miniray_"
#: Seconds that nodes may take.
_PATIENCE = 2.0
#: Series of one metric, runs, and metrics of a run that are shown: the newest runs.
_MOST_SERIES, _MOST_RUNS, _MOST = 1000, 100, 50
#: What is said of the metrics whose name does not say it.
_HELP = {
    "node_info": "A node; its value is always 1.",
    "node_up": "Whether a node lives and answers.",
    "node_silent_seconds": "Seconds since the head has heard of a node, if that is long.",
    "node_memory_limit_bytes": "Memory of the container, or of the machine.",
    "node_pressure_seconds_total": "How long tasks of the machine have waited for a resource.",
    "resource_used": "What leases hold of a resource.",
    "resource_waiting": "What tasks, actors and groups wait for of a resource.",
    "device_granted_ratio": "How much of a device is granted.",
    "device_utilization_ratio": "How much of the time a device was at work lately.",
    "device_power_watts": "What a device draws.",
    "device_errors_total": "Errors that a device has counted, by kind.",
    "device_quarantined": "Whether a device is out of service as its process cannot be killed.",
    "pending_demands": "Tasks, actors and groups that wait for resources.",
    "pending_oldest_seconds": "How long the oldest of them has waited.",
    "process_cpu_seconds": "CPU time of the processes that live now.",
    "process_open_fds": "Files that the processes that live now have open.",
    "worker_forks_total": "Processes of workers that were started.",
    "worker_exits_total": "Workers that have ended, by why.",
    "worker_fork_seconds": "How long it took to start processes of workers.",
    "actor_calls_total": "Calls that have ended, counted where they were made.",
    "actor_call_seconds": "How long calls ran that have finished, told to where they were made.",
    "actor_starts_total": "How often an actor's constructor has ended.",
    "actor_start_seconds": "Seconds until it was placed, had a process, and was constructed.",
    "actor_restarts_total": "How often actors were started again.",
    "actor_deaths_total": "Actors that have ended, by why.",
    "tasks_finished_total": "Tasks that have ended, counted where they were called.",
    "task_seconds": "How long tasks ran that have finished, told to where they were called.",
    "object_store_spilled_bytes": "Bytes of values that are on disk.",
    "object_spill_bytes_total": "Bytes of values that were written to disk for want of memory.",
    "object_restore_bytes_total": "Bytes of values that were read back from disk.",
    "object_transfer_bytes_total": "Bytes of values that came from other nodes.",
    "object_transfer_seconds": "How long values took to come from other nodes.",
    "object_room_waiters": "Values that wait for room in the object store.",
    "objects_lost_total": "How often a value was found lost that cannot be made again.",
    "objects_remade_total": "Results of tasks that are made again, as they were lost.",
    "head_restarts_total": "How often the head was lost and started again.",
    "head_info": "The head; its value is always 1.",
    "head_sessions": "Nodes that the head has.",
    "head_requests_total": "What processes have asked of the head or told it.",
    "head_decision_seconds": "How long the scheduler took for a request for a lease.",
    "head_storage_write_seconds": "How long it took to write the cluster's state to disk.",
    "head_event_loop_lag_seconds": "How late the head's last timer was.",
    "train_run_info": "A training run; its value is always 1.",
    "train_workers": "Ranks of a run that runs.",
    "train_reports_total": "Reports that all ranks of a run have made.",
    "train_attempts_total": "Groups of workers that a run has had.",
    "train_checkpoints": "Checkpoints that a run keeps.",
    "train_checkpoints_total": "Checkpoints that a run has made.",
    "train_checkpoint_seconds": "Seconds from the first rank's upload to the checkpoint.",
    "train_steps_total": "Steps of optimizers that prepare_optimizer() has returned.",
    "train_step_seconds": "Seconds between two such steps.",
    "train_metric": "The last reported number of each metric of a run.",
}
Sample = tuple[str, dict[str, Any], float]


def text(cluster: ClusterSource, *, openmetrics: bool = False) -> str:
    """Return all metrics of a cluster; a node that does not answer has ``node_up`` 0.

    Args:
        cluster: To ask.
        openmetrics: Return what has the type ``OPENMETRICS``, not ``CONTENT_TYPE``.
    """
    told = cluster.ask_nodes("metrics", (), _PATIENCE)
    families = _Families()
    for name, labels, value in _of_head(cluster):
        families.add(name, labels, value)
    for head in cluster.listing("head"):
        for row in head["counted"]:
            families.add_row({}, *row)
    answers = {node.hex(): answer for node, answer, why in told if not why}
    for node in cluster.listing("node_states"):
        id = node["node_id"]
        families.add("node_up", {"node": id}, float(id in answers))
        rows, sample = answers.get(id, ((), ()))
        for name, labels, value in sample:
            families.add(name, {"node": id, **labels}, value)
        for row in rows:
            families.add_row({"node": id}, *row)
    return families.text(openmetrics)


def _of_head(cluster: ClusterSource) -> Iterator[Sample]:
    """Yield what the head knows."""
    now = time.time()
    for node in cluster.listing("node_states"):
        id = {"node": node["node_id"]}
        yield "node_info", id | {"host": node["hostname"], "address": node["address"]}, 1
        yield "node_state", id | {"state": node["state"]}, 1
        yield "node_silent_seconds", id, node["silent"]
        for resource, amount in node["total"].items():
            yield "resource_total", id | {"resource": resource}, amount
            used = node["used"].get(resource, 0.0)
            yield "resource_used", id | {"resource": resource}, used
    for device in cluster.listing("devices"):
        labels = {key: device[key] for key in ("resource", "device")}
        labels["node"] = device["node_id"]
        yield "device_granted_ratio", labels, sum(each["share"] for each in device["held"])
        yield "device_quarantined", labels, float(bool(device["quarantined"]))
    actors = ((each["class_name"], each["state"]) for each in cluster.listing("actors"))
    yield from _counted("actors", ("class", "state"), actors)
    pending = cluster.listing("pending")
    for kind in ("actor", "job", "placement_group", "task"):
        waiting = [each for each in pending if each["kind"] == kind]
        for infeasible in (False, True):
            count = sum(each["count"] for each in waiting if each["infeasible"] is infeasible)
            labels = {"kind": kind, "infeasible": str(infeasible).lower()}
            yield "pending_demands", labels, count
        oldest = min((each["since"] for each in waiting), default=now)
        yield "pending_oldest_seconds", {"kind": kind}, max(0.0, now - oldest)
    wanted: collections.Counter[str] = collections.Counter()
    for demand in pending:
        for shape in demand["shape"]:
            wanted.update({name: amount * demand["count"] for name, amount in shape.items()})
    for resource, amount in wanted.items():
        yield "resource_waiting", {"resource": resource}, amount
    groups = ((each["strategy"], each["state"]) for each in cluster.listing("placement_groups"))
    yield from _counted("placement_groups", ("strategy", "state"), groups)
    jobs = ((each["state"],) for each in cluster.listing("jobs"))
    yield from _counted("jobs", ("state",), jobs)
    leases = ((each["node_id"],) for each in cluster.listing("leases"))
    yield from _counted("leases", ("node",), leases)
    for head in cluster.listing("head"):
        yield "head_info", {"version": VERSION}, 1
        yield "head_start_time_seconds", {}, head["started"]
        yield "head_restarts_total", {}, head["restarts"]
        yield "head_sessions", {}, head["sessions"]
    yield from _of_runs(cluster.listing("runs"))


def _of_runs(runs: list[dict[str, Any]]) -> Iterator[Sample]:
    """Yield what train runs have told; the oldest first, as the last of a name counts."""
    for run in runs[-_MOST_RUNS:]:
        name, state = {"run": run.get("name", "")}, run.get("state", "")
        yield "train_run_info", name | {"id": run["run_id"], "state": state}, 1
        workers = run.get("workers", 0) if state == "RUNNING" and run["alive"] else 0
        yield "train_workers", name, workers
        yield "train_reports_total", name, run.get("reports", 0)
        yield "train_attempts_total", name, run.get("attempts", 0)
        yield "train_checkpoints", name, run.get("checkpoints", 0)
        numbers = [
            (metric, value)
            for metric, value in (run.get("metrics") or {}).items()
            if isinstance(value, (int, float))
        ]
        for metric, value in numbers[:_MOST]:
            yield "train_metric", name | {"metric": metric}, value


def _counted(name: str, keys: tuple[str, ...], of: Iterable[tuple[str, ...]]) -> Iterator[Sample]:
    counts = collections.Counter(of).most_common()
    for values, count in sorted(counts[:_MOST_SERIES]):
        yield name, dict(zip(keys, values, strict=True)), count
    if others := sum(count for _, count in counts[_MOST_SERIES:]):
        yield name, {"overflow": "true"}, others


class _Families:
    """Samples by metric, as the format wants them."""

    def __init__(self) -> None:
        #: By name: type, help, and lines by what is before the value.
        self._known: dict[str, tuple[str, str, dict[str, float]]] = {}

    def add(self, name: str, labels: dict[str, Any], value: float) -> None:
        """Add a metric of miniray's."""
        kind = "counter" if name.endswith("_total") else "gauge"
        self._add(_PREFIX + name, kind, _about(name), labels, value)

    def add_row(
        self,
        labels: dict[str, str],
        kind: str,
        name: str,
        about: str,
        boundaries: tuple[float, ...],
        tags: Iterable[tuple[str, str]],
        value: list[float],
    ) -> None:
        """Add a series as processes tell it (common/series.py)."""
        about = about or _about(name)
        name = _PREFIX + name.replace(":", "_")
        labels = {**labels, **{_label(key): value for key, value in tags}}
        if kind == "counter":
            name = name if name.endswith("_total") else f"{name}_total"
        if kind != "histogram":
            self._add(name, kind, about, labels, value[0])
            return
        *counts, total = value
        count = 0.0
        for boundary, more in zip((*boundaries, math.inf), counts, strict=True):
            count += more
            le = labels | {"le": _number(boundary)}
            self._add(name, kind, about, le, count, "_bucket")
        self._add(name, kind, about, labels, total, "_sum")
        self._add(name, kind, about, labels, count, "_count")

    def _add(
        self,
        name: str,
        kind: str,
        about: str,
        labels: dict[str, Any],
        value: float,
        suffix: str = "",
    ) -> None:
        known, _, samples = self._known.setdefault(name, (kind, about, {}))
        if known == kind:  # else another process has a metric of this name and another kind
            inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            samples[f"{name}{suffix}{{{inner}}}" if inner else name + suffix] = value

    def text(self, openmetrics: bool) -> str:
        """Return the whole text."""
        lines = []
        for family, (kind, about, samples) in sorted(self._known.items()):
            name, one_line = family, about.replace("\\", "\\\\").replace("\n", "\\n")
            if openmetrics:  # there, a counter's name lacks what its samples end in
                one_line = one_line.replace('"', '\\"')
                name = name.removesuffix("_total") if kind == "counter" else name
            lines += [f"# HELP {name} {one_line}", f"# TYPE {name} {kind}"]
            lines += [f"{sample} {_number(value)}" for sample, value in samples.items()]
        text = "".join(f"{line}\n" for line in [*lines, *["# EOF"] * openmetrics])
        return text.encode(errors="replace").decode()  # names of files may be no Unicode


def _about(name: str) -> str:
    return _HELP.get(name) or name.replace("_", " ").capitalize() + "."


def _label(key: str) -> str:
    """Return the key of a user's tag as a label that is allowed, and is none of miniray's own."""
    name = re.sub(r"[^a-zA-Z0-9_]", "_", key)
    if name in ("node", "le") or name.startswith("__"):
        return f"exported_{name}"
    return name if name and not name[0].isdigit() else f"_{name}"


def _escaped(value: Any) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
