"""Train runs and the datasets that their ranks read, as rows for the page.

What a run shows, and where all of it comes from, is said in ``train/run/page.py``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from miniray.train.run.page import RunPage, listed
from miniray.util.task_records import ask_processes, dataset_rows

if TYPE_CHECKING:
    from miniray.common.runtime import RuntimeHead
    from miniray.web.tables import Asked

Row = dict[str, Any]

#: Seconds that processes have to report which datasets they execute.
_PATIENCE = 1.0


def look_at(run: RunPage, source: RuntimeHead) -> Asked:
    """Request the news of one run: its ranks are the rows."""
    facts = dict(run.look(source))
    return {str(rank["rank"]): rank for rank in facts.pop("ranks")}, facts


class DatasetTable:
    """The operators of datasets that are executed now, and the datasets of ranks."""

    def __init__(self) -> None:
        self._runs: dict[str, RunPage] = {}
        #: By row: how many rows were read, and when.
        self._before: dict[str, tuple[float, int]] = {}

    def __call__(self, source: RuntimeHead) -> Asked:
        """Ask all processes, and the ranks of all runs that go on."""
        processes, _ = ask_processes(source, _PATIENCE, 0)
        found: dict[str, Row] = {row["key"]: row for row in dataset_rows(processes)}
        rows = listed(source.listing("runs"))
        names = {row["run_id"]: row["name"] for row in rows if row["ended"] is None}
        self._runs = {run_id: self._runs.get(run_id) or RunPage(run_id) for run_id in names}
        for run_id, run in self._runs.items():
            for rank in run.look(source)["ranks"]:
                for dataset, read in (rank.get("datasets") or {}).items():
                    key = f"{run_id}/{rank['rank']}/{dataset}"
                    found[key] = {
                        "name": dataset,
                        "operator": f"rank {rank['rank']} of {names[run_id]}",
                        "run_id": run_id,
                        "pid": rank.get("pid"),
                        "node_id": rank.get("node_id"),
                        "rows": read["rows"],
                        "position": read["taken"],
                        "total": read["of"],
                        "rows_per_second": self._rate(key, read["rows"]),
                        "wait_seconds": read["waited"],
                    }
        return found, {}

    def _rate(self, key: str, rows: int) -> float | None:
        now = time.monotonic()
        since, before = self._before.get(key, (now, rows))
        self._before[key] = now, rows
        return (rows - before) / (now - since) if now > since else None
