"""Train runs and the datasets that their ranks read, as rows and series for the page.

What a run shows, and where all of it comes from, is said in ``train/run/page.py``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from miniray.train.run.page import RunPage, ended, listed, run_row
from miniray.util.state import datasets
from miniray.web.asked import Asked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.web.feed import Feed

Row = dict[str, Any]

#: Seconds that the controller of a run may wait for news where others are asked too; and where
#: it alone is followed.
_PATIENCE, _PATIENCE_FOR_NEWS = 0.1, 5.0
#: Seconds that processes have to tell which datasets they execute.
_PATIENCE_OF_PROCESSES = 1.0
#: Runs that are drawn over each other, at most.
_MOST_RUNS = 12


class Run:
    """One run, for as long as somebody looks at it: its ranks are the rows.

    Args:
        run_id: As it is in the list.
        patience: Seconds that its controller may wait for news.
    """

    def __init__(self, run_id: str, patience: float = _PATIENCE) -> None:
        self._id = run_id
        self._patience = patience
        self._page: RunPage | None = None
        #: What its folder told, once it has ended, and when that was written.
        self._written: Any = None
        self._ended: Row = {}

    def __call__(self, feed: Feed) -> Asked:
        """Ask for what is new of it.

        Raises:
            ValueError: There is no such run.
        """
        row = _row(feed, self._id)
        shown = self._living(feed, row)
        if shown is None:
            written = row["state"], row["written"]
            if written != self._written:
                self._written, self._ended = written, ended(row)
            shown = self._ended
        facts = {name: value for name, value in shown.items() if name != "ranks"}
        return Asked({str(rank["rank"]): rank for rank in shown["ranks"]}, facts)

    def _living(self, feed: Feed, row: Row) -> Row | None:
        """Return what the run's controller and ranks tell; None if there is nobody to ask."""
        if self._page is None or not self._page.live:  # a controller may be started again
            self._page = RunPage(row)
        if self._page.live:
            self._page.take(feed.source.ask_nodes(*self._page.question(self._patience)))
        if not self._page.live:
            return None
        self._page.take_ranks(feed.source.ask_nodes(*self._page.question_to_ranks()))
        return self._page.shown()


class DatasetTable:
    """What each operator of a dataset does that is executed now, and what ranks read of theirs."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        #: By row: how many rows were read, and when.
        self._before: dict[str, tuple[float, int]] = {}

    def __call__(self, feed: Feed) -> Asked:
        """Ask all processes, and the ranks of all runs that go on."""
        told = datasets(feed.source, _PATIENCE_OF_PROCESSES)
        found: dict[str, Row] = {row["key"]: row for row in told}
        names = {row["run_id"]: row["name"] for row in _listed(feed) if row["ended"] is None}
        self._runs = {run_id: self._runs.get(run_id) or Run(run_id) for run_id in names}
        for run_id, run in self._runs.items():
            for rank in run(feed).rows.values():
                for dataset, read in (rank.get("datasets") or {}).items():
                    key = f"{run_id}/{rank['rank']}/{dataset}"
                    found[key] = {
                        "name": dataset,
                        "operator": f"rank {rank['rank']} of {names[run_id]}",
                        "run_id": run_id,
                        "rows": read["rows"],
                        "position": read["taken"],
                        "total": read["of"],
                        "rows_per_second": self._rate(key, read["rows"]),
                        "wait_seconds": read["waited"],
                    }
        return Asked(found, {})

    def _rate(self, key: str, rows: int) -> float | None:
        now = time.monotonic()
        since, before = self._before.get(key, (now, rows))
        self._before[key] = now, rows
        return (rows - before) / (now - since) if now > since else None


def compared(feed: Feed, wanted: Iterable[str]) -> Row:
    """Return the series of several runs: ``{"runs": {id: {"name": ..., "series": ...}}}``."""
    found = {}
    for run_id in list(dict.fromkeys(wanted))[:_MOST_RUNS]:
        try:
            facts = Run(run_id)(feed).facts
        except ValueError:
            continue  # the list has forgotten it
        found[run_id] = {"name": facts["run"]["name"], "series": facts["series"]}
    return {"runs": found}


def _listed(feed: Feed) -> list[Row]:
    return listed(feed.source.listing("runs"))


def _row(feed: Feed, run_id: str) -> Row:
    for run in feed.source.listing("runs"):  # also one that another went on from
        if run["run_id"] == run_id:
            return run_row(run)
    raise ValueError(f"There is no run {run_id} in the list of this cluster.")


def source_of(topic: str) -> Callable[[Feed], Asked] | None:
    """Return what asks for a topic; None if there is none of this name."""
    if topic.startswith("run:"):
        return Run(topic.removeprefix("run:"), _PATIENCE_FOR_NEWS)
    if topic == "datasets":
        return DatasetTable()
    return None
