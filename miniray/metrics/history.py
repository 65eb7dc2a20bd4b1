"""The last hour of a cluster, as charts: each node keeps its own points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.profiling.targets import answers

if TYPE_CHECKING:
    from miniray.profiling.targets import ClusterSource

#: Seconds between two points, and how many are kept (node/metrics.py).
INTERVAL, _POINTS = 10, 360
#: Seconds that nodes may take.
_PATIENCE = 2.0
#: Title, unit and series of each chart.
_CHARTS = (
    ("CPU", "ratio", "cpu"),
    ("Memory", "ratio", "memory"),
    ("Load", "count", "load"),
    ("Workers", "count", "workers"),
    ("Memory of workers", "bytes", "workers_memory"),
    ("Object store", "bytes", "store"),
    ("Spilled to disk", "bytes", "spilled"),
    ("Received", "bytes/s", "received"),
    ("Sent", "bytes/s", "sent"),
)


def charts(cluster: ClusterSource) -> dict[str, Any]:
    """Return the points of each node, the oldest first.

    Returns:
        ``{"interval": seconds, "times": [epoch], "charts": [{"title", "unit", "series": [{"name":
        node, "values": [number or None]}]}]}``.
    """
    told, _ = answers(cluster, "history", (), _PATIENCE)
    nodes = {node[:8]: dict(points) for node, points in told.items()}
    slots = [slot for points in nodes.values() for slot in points]
    last = max(slots, default=0)
    shown = range(max(min(slots, default=1), last - _POINTS + 1), last + 1)
    found = []
    for title, unit, name in _CHARTS if slots else ():
        lines = [
            {"name": node, "values": [points.get(slot, {}).get(name) for slot in shown]}
            for node, points in nodes.items()
        ]
        found.append({"title": title, "unit": unit, "series": lines})
    return {"interval": INTERVAL, "times": [INTERVAL * slot for slot in shown], "charts": found}
