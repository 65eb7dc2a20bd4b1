"""What all benchmarks share: the engines, the rows, and timing.

A row is one function that measures one or more figures on an engine it is given.
It uses only names that every engine has, so that all do the same work. This module
imports no engine: the child process that runs a row does.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Logical CPUs that every engine is started with.
CPUS = 8
MIB = 1024 * 1024
GIB = 1024 * MIB


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of the table."""

    title: str
    unit: str  # "/s", "GiB/s", "s", "MiB", "%", "x" for a ratio or "" for a count
    target: float | None = None  # what miniray must reach

    @property
    def less_is_better(self) -> bool:
        """Whether this is a duration, a size or a count, not a rate."""
        return not self.unit.endswith("/s")


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement that runs in a process and a cluster of its own."""

    key: str
    module: str  # where the function is, so that a child can find it
    figures: tuple[Figure, ...]
    measure: Callable[[Engine], list[float]]
    limit: float  # seconds until it counts as failed
    once: bool  # too slow to repeat


ROWS: dict[str, Row] = {}


def row(
    key: str, *figures: Figure, limit: float = 60.0, once: bool = False
) -> Callable[[Callable[[Engine], Any]], Callable[[Engine], Any]]:
    """Register a function that measures these figures, in this order."""

    def register(measure: Callable[[Engine], Any]) -> Callable[[Engine], Any]:
        def as_list(engine: Engine) -> list[float]:
            found = measure(engine)
            return list(found) if isinstance(found, (tuple, list)) else [found]

        ROWS[key] = Row(key, measure.__module__, figures, as_list, limit, once)
        return measure

    return register


def load_rows(modules: Sequence[str]) -> dict[str, Row]:
    """The rows of these modules, in the order of the table."""
    for module in modules:
        importlib.import_module(module)
    return {key: row for key, row in ROWS.items() if row.module in modules}


class Engine:
    """An engine with Ray's public API, by the name of its package."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._package: Any = None
        self._cluster: Any = None

    @property
    def api(self) -> Any:
        """The package; imported on first use, so that rows can time that too."""
        if self._package is None:
            self._package = importlib.import_module(self.name)
        return self._package

    def module(self, path: str) -> Any:
        """A module of the package: ``engine.module("util.placement_group")``."""
        return importlib.import_module(f"{self.name}.{path}")

    def start(self) -> Any:
        """Start an embedded cluster and return the package."""
        self.api.init(address="local", num_cpus=CPUS)
        return self.api

    def start_nodes(self, nodes: Sequence[Mapping[str, Any]]) -> Any:
        """Start a cluster of several nodes on this machine and return the package.

        Args:
            nodes: Arguments of each node; the first one is the head's.
        """
        self._cluster = self.module("cluster_utils").Cluster(
            initialize_head=True, head_node_args=dict(nodes[0])
        )
        for node in nodes[1:]:
            self._cluster.add_node(**node)
        self.api.init(address=self._cluster.address)
        return self.api

    @property
    def cluster(self) -> Any:
        """What `start_nodes` has started."""
        return self._cluster

    def stop(self) -> None:
        """End what was started."""
        self.api.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()


def rate(work: Callable[[], Any], operations: int = 1, seconds: float = 2.0) -> float:
    """Operations per second: ``work`` does so many, and runs again and again."""
    work()  # whatever happens only once is not what is measured
    runs = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or runs == 0:
        work()
        runs += 1
    return runs * operations / elapsed


def at_once(api: Any, call: Callable[[], Any], count: int = 1000) -> Callable[[], Any]:
    """Work that has ``count`` calls in flight and waits for all of them."""
    return lambda: api.get([call() for _ in range(count)])
