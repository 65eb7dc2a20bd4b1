"""The metrics of the whole cluster as one text in Prometheus' format, collected when it is read.

Names: base units, ``_total`` for counters, no id of a process or an actor as a label.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.metrics.listed import samples
from miniray.profiling.targets import answers

if TYPE_CHECKING:
    from miniray.common.series import Row
    from miniray.profiling.targets import ClusterSource

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
#: Seconds that nodes may take.
_PATIENCE = 2.0
#: What is said of the metrics whose name does not say it.
_HELP = {
    "node_up": "Whether a node lives and answers.",
    "node_heartbeat_age_seconds": "Seconds since the head has heard of a node.",
    "node_oom_kills_total": "Processes of the machine that the kernel has killed for memory.",
    "daemon_event_loop_lag_seconds": "How late the last heartbeat of a daemon was.",
    "node_memory_limit_bytes": "Memory of the container, or of the machine.",
    "node_pressure_seconds_total": "How long tasks of the machine have waited for a resource.",
    "resource_used": "What leases hold of a resource.",
    "resource_waiting": "What tasks, actors and groups wait for of a resource.",
    "device_granted_ratio": "How much of a device is granted.",
    "device_utilization_ratio": "How much of the time a device was at work lately.",
    "device_info": "Model of a device, and its UUID where the driver reports it.",
    "device_quarantined": "Whether a device is out of service as its process cannot be killed.",
    "pending_oldest_seconds": "Wait of the oldest pending request for resources.",
    "process_cpu_seconds_total": "CPU time of processes that live or have ended, by what they ran.",
    "actor_busy_seconds_total": "Seconds that ended calls have run, failed ones included.",
    "actor_calls_total": "Calls that have ended, counted where they were made.",
    "actor_call_seconds": "How long finished calls ran, counted at their callers.",
    "actor_queued_calls": "Calls of actors that wait, for arguments or for their turn.",
    "actor_oldest_call_seconds": "Age of the longest running call of an actor.",
    "tasks": "Tasks that have not ended.",
    "task_retries_total": "How often tasks and calls of actors were begun once more.",
    "actor_starts_total": "How often an actor's constructor has ended.",
    "actor_start_seconds": "Seconds until it was placed, had a process, and was constructed.",
    "tasks_finished_total": "Tasks that have ended, counted where they were called.",
    "task_seconds": "How long finished tasks ran, counted at their callers.",
    "object_store_used_bytes": "Memory of values, also freed or not complete, and of none yet.",
    "object_spill_bytes_total": "Bytes of values that were written to disk to free memory.",
    "object_transfer_bytes_total": "Bytes of values that came from other nodes.",
    "object_room_wait_seconds_total": "How long values have waited for memory in the object store.",
    "object_store_full_errors_total": "How often a process got an error as the store was full.",
    "object_room_waiters": "Values that wait for memory in the object store.",
    "objects_lost_total": "How often a lost value could not be made again.",
    "objects_remade_total": "Results of tasks that are made again, as they were lost.",
    "relay_resent_total": "Messages that were sent once more, as their stream had broken.",
    "head_restarts_total": "How often the head was lost and started again.",
    "head_requests_total": "Requests and notices of processes to the head.",
    "head_demands_waiting": "Requests for leases and groups that the head has not granted.",
    "head_decision_seconds": "How long the scheduler took for a request for a lease.",
    "head_event_loop_lag_seconds": "How late the head's last timer was.",
    "train_workers": "Ranks of a run that runs.",
    "train_reports_total": "Reports that all ranks of a run have made.",
    "train_attempts_total": "Groups of workers that a run has had.",
    "train_failures_total": "Attempts that ranks have failed, by the first exception's class.",
    "train_report_interval_seconds": "Seconds between two reports of a rank.",
    "train_checkpoint_seconds": "Seconds in which ranks uploaded, and its manifest was written.",
    "train_productive_ratio": "Part of a run's time in train loops whose work no failure can lose.",
    "train_steps_total": "Steps of optimizers that prepare_optimizer() has returned.",
    "train_step_seconds": "Seconds between two such steps.",
    "train_metric": "The last reported number of each metric of a run.",
}


def text(cluster: ClusterSource, *, openmetrics: bool = False) -> str:
    """Return all metrics of a cluster; a node that does not answer has ``node_up`` 0.

    Args:
        cluster: To ask.
        openmetrics: Return what has the type ``OPENMETRICS``, not ``CONTENT_TYPE``.
    """
    told, _ = answers(cluster, "metrics", (), _PATIENCE)
    known = {node["node_id"] for node in cluster.listing("node_states")}
    told = {node: answer for node, answer in told.items() if node in known}  # of no driver outside
    families = _Families(f"{config().metrics_prefix}_")
    for sample in samples(cluster, told):
        families.add_sample(*sample)
    for head in cluster.listing("head"):
        for row in head["counted"]:
            families.add({}, row)
    for node, (rows, found) in told.items():
        for name, labels, value in found:
            families.add_sample(name, {"node": node, **labels}, value)
        for row in rows:
            families.add({"node": node}, row)
    return families.text(openmetrics)


class _Families:
    """Samples by metric, as the format wants them."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        #: By name: type, help, and lines by the text before the value.
        self._known: dict[str, tuple[str, str, dict[str, float]]] = {}

    def add(self, labels: dict[str, Any], row: Row) -> None:
        """Add a series as processes report it (common/series.py), with further labels."""
        kind, name, about, boundaries, tags, value = row
        about = about or _HELP.get(name) or name.replace("_", " ").capitalize() + "."
        name = self._prefix + name.replace(":", "_")
        if kind == "counter" and not name.endswith("_total"):
            name += "_total"
        known, _, samples = self._known.setdefault(name, (kind, about, {}))
        if known != kind:
            return  # another process has a metric of this name and another kind
        labels = {**labels, **{_label(key): value for key, value in tags}}
        if kind != "histogram":
            samples[_series(name, labels)] = value[0]
            return
        *counts, total = value
        count = 0.0
        for boundary, more in zip((*boundaries, math.inf), counts, strict=True):
            count += more
            samples[_series(f"{name}_bucket", {**labels, "le": _number(boundary)})] = count
        samples[_series(f"{name}_sum", labels)] = total
        samples[_series(f"{name}_count", labels)] = count

    def add_sample(self, name: str, labels: dict[str, Any], value: float) -> None:
        """Add a value of a metric of miniray's."""
        kind = "counter" if name.endswith("_total") else "gauge"
        self.add(labels, (kind, name, "", (), (), [value]))

    def text(self, openmetrics: bool) -> str:
        """Return the whole text."""
        lines = []
        for family, (kind, about, values) in sorted(self._known.items()):
            name, one_line = family, about.replace("\\", "\\\\").replace("\n", "\\n")
            if openmetrics:  # there, a counter's name lacks what its samples end in
                one_line = one_line.replace('"', '\\"')
                name = name.removesuffix("_total") if kind == "counter" else name
            lines += [f"# HELP {name} {one_line}", f"# TYPE {name} {kind}"]
            lines += [f"{sample} {_number(value)}" for sample, value in values.items()]
        text = "".join(f"{line}\n" for line in [*lines, *["# EOF"] * openmetrics])
        return text.encode(errors="replace").decode()  # names of files may be no Unicode


def _series(name: str, labels: dict[str, Any]) -> str:
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inner}}}" if inner else name


def _label(key: str) -> str:
    """Return the key of a user's tag as a label that is allowed, and is none of miniray's own."""
    name = re.sub(r"[^a-zA-Z0-9_]", "_", key)
    if name in ("node", "le") or name.startswith("__"):
        return f"exported_{name}"
    return name if name and not name[0].isdigit() else f"_{name}"


def _escaped(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
