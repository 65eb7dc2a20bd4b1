"""The last hour of a cluster, as charts: each node keeps its own points."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from miniray.profiling.targets import answers

if TYPE_CHECKING:
    from miniray.profiling.targets import ClusterSource

#: Seconds between two points (node/metrics.py), and that nodes may take.
INTERVAL, _PATIENCE = 10, 2.0
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
    nodes = [(node[:8], *answer) for node, answer in told.items() if answer[0]]
    if not nodes:
        return {"interval": INTERVAL, "times": [], "charts": []}
    last = max(slot for _, slot, _ in nodes)
    length = max(len(points) for _, _, series in nodes for points in series.values())
    # What no node has yet is left out.
    have = [
        length - index + last - slot
        for _, slot, series in nodes
        for points in series.values()
        for index, value in enumerate(points)
        if not math.isnan(value)
    ]
    shown = min(length, max(have, default=0))
    found = []
    for title, unit, name in _CHARTS:
        lines = []
        for node, slot, series in nodes:
            points = [*series.get(name, [math.nan] * length), *[math.nan] * (last - slot)]
            values = [None if math.isnan(value) else value for value in points[-shown:]]
            lines.append({"name": node, "values": values})
        found.append({"title": title, "unit": unit, "series": lines})
    times = [INTERVAL * (last - shown + 1 + index) for index in range(shown)]
    return {"interval": INTERVAL, "times": times, "charts": found}
