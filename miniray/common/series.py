"""What a process counts: counters, gauges and histograms by metric and tags, as its node gets them.

A row is (kind, name, description, boundaries, tags, values). Values are one number, or of a
histogram the counts of its buckets, the last of which has no boundary, and the sum.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: (kind, name, description, boundaries).
Metric = tuple[str, str, str, tuple[float, ...]]
Tags = tuple[tuple[str, str], ...]
Row = tuple[str, str, str, tuple[float, ...], Tags, list[float]]

#: Metrics, and series of one metric, at most: further series are one with the tag ``overflow``,
#: and further metrics, whose names are made of values, are left out.
MOST = 1000
OVERFLOW: Tags = (("overflow", "true"),)
#: Boundaries of how long things take, in seconds.
SECONDS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
#: The first of them.
QUICK = SECONDS[0]


def no_values(boundaries: tuple[float, ...] = SECONDS) -> list[float]:
    """Return the values of an empty histogram."""
    return [0.0] * (len(boundaries) + 2)


def took(values: list[float], value: float, boundaries: tuple[float, ...] = SECONDS) -> None:
    """Count a value in those of a histogram: how long something took, or of other boundaries."""
    values[bisect_left(boundaries, value)] += 1
    values[-1] += value


def how_many(values: list[float]) -> int:
    """Return how many values a histogram has counted."""
    return int(sum(values[:-1]))


class Series:
    """Values by metric and tags, a bounded number of them. Thread-safe."""

    def __init__(self) -> None:
        self.known: dict[Metric, dict[Tags, list[float]]] = {}
        self.lock = threading.RLock()

    def count(self, name: str, tags: Tags = (), by: float = 1.0) -> None:
        """Add to a counter."""
        self.change(("counter", name, "", ()), tags, by)

    def took(self, name: str, seconds: float, tags: Tags = ()) -> None:
        """Count how long something took."""
        self.change(("histogram", name, "", SECONDS), tags, seconds)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self.change(("gauge", name, "", ()), (), value)

    def change(self, metric: Metric, tags: Tags, value: float) -> None:
        """Add to a counter, set a gauge, or count in a histogram; too many are left out."""
        kind, _, _, boundaries = metric
        with self.lock:
            if metric not in self.known and len(self.known) >= MOST:
                return
            values = self._find(metric, tags)
            if kind == "histogram":
                took(values, value, boundaries)
            elif kind == "counter":
                values[0] += value
            else:
                values[0] = value

    def values(self, metric: Metric, tags: Tags) -> list[float]:
        """Return the values of a series, for one who counts often and changes them himself."""
        with self.lock:
            return self._find(metric, tags)

    def _find(self, metric: Metric, tags: Tags) -> list[float]:
        kind, _, _, boundaries = metric
        series = self.known.setdefault(metric, {})
        if tags not in series and len(series) - (OVERFLOW in series) >= MOST:
            tags = OVERFLOW
        if tags not in series:
            series[tags] = no_values(boundaries) if kind == "histogram" else [0.0]
        return series[tags]

    def add(self, rows: Iterable[Row]) -> None:
        """Add what others have counted; of gauges, the last value counts."""
        with self.lock:
            for kind, name, about, boundaries, tags, more in rows:
                metric = (kind, name, about, tuple(boundaries))
                if metric in self.known or len(self.known) < MOST:
                    values = self._find(metric, tuple([(key, value) for key, value in tags]))
                    is_gauge = kind == "gauge"
                    values[:] = more if is_gauge else map(sum, zip(values, more, strict=True))

    def rows(self) -> list[Row]:
        """Return a copy of each series as a row."""
        with self.lock:
            return [
                (*metric, tags, list(values))
                for metric, series in self.known.items()
                for tags, values in series.items()
            ]

    def clear(self) -> None:
        """Count from zero, also in a forked process."""
        self.known, self.lock = {}, threading.RLock()


#: Counts of this process.
COUNTED = Series()
os.register_at_fork(after_in_child=COUNTED.clear)
