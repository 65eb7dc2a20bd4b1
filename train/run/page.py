"""What a page shows of train runs: the list of them, and one run, while it goes on and afterwards.

A reader in any process of the cluster uses it so, the web process for one::

    rows = listed(cluster.listing("runs"))   # or what the head pushes of that listing
    page = RunPage(run_id)
    show(page.look(cluster))                 # as often as somebody looks

Nothing is sent or kept between two looks. Everything is bounded, however much a run reports.
"""

from __future__ import annotations

import json
import logging
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from miniray.profiling.targets import answers_of_processes
from miniray.train.controller.board import public, question_about, shown_checkpoint
from miniray.train.storage.metrics_log import History
from miniray.train.storage.storage import RunStorage
from miniray.train.worker.rank_logs import FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from miniray.profiling.targets import ClusterSource

logger = logging.getLogger(__name__)

#: Seconds that controllers and ranks have to answer: user code may keep ranks busy.
_PATIENCE, _RANK_PATIENCE = 1.0, 0.5

_ENDED = ("FINISHED", "ERRORED", "ABORTED")
_LOST = (
    "Its controller is gone, and did not say how it ended: it was killed, or its node was lost. "
    "fit() with the same name and storage path goes on from the newest checkpoint."
)


def listed(runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a list of runs, newest first, from the head's listing "runs".

    A run that went on in the folder of an older one stands for both. A state beside those of runs
    is LOST, for one whose controller is gone without having said how it ended.
    """
    rows: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: float(run["started"]), reverse=True):
        rows.setdefault(run["path"], run_row(run))
    return list(rows.values())


def run_row(run: Mapping[str, Any]) -> dict[str, Any]:
    row = {**run, "ended": run["written"] if run["state"] in _ENDED else None}
    if row["ended"] is None and not row["alive"]:
        row |= {"state": "LOST", "error": _LOST}
    return row


class RunPage:
    """One run, for as long as a page shows it.

    Args:
        run_id: As it is in the list.
    """

    def __init__(self, run_id: str) -> None:
        self._id = run_id
        #: What its folder held when it had ended, and the row's state and time of then.
        self._ended: dict[str, Any] = {}
        self._written: tuple[str, float] | None = None
        #: The newest answer of the controller while the run goes on.
        self._newest: dict[str, Any] = {}
        self._of_ranks: dict[str, dict[str, Any]] = {}  # by the id of the rank's process

    def look(self, cluster: ClusterSource) -> dict[str, Any]:
        """Return the run as JSON values, with the fields that ``ended`` describes.

        Its controller and ranks are queried while it goes on, its folder is read afterwards.

        Raises:
            ValueError: There is no such run in the cluster's list.
        """
        rows = (run_row(run) for run in cluster.listing("runs") if run["run_id"] == self._id)
        row = next(rows, None)  # also of one that another went on from
        if row is None:
            raise ValueError(f"There is no run {self._id} in the list of this cluster.")
        if row["ended"] is None and row["alive"]:
            problem = self._of_controller(cluster, row)
            if problem is not None:
                return self._living(cluster, row, problem)
        written = row["state"], row["written"]
        if written != self._written:
            self._written, self._ended = written, ended(row)
        return self._ended

    def _of_controller(self, cluster: ClusterSource, row: Mapping[str, Any]) -> str | None:
        """Take the controller's answer; return why there is none, and None if it is gone."""
        question, known = question_about(self._id), (self._newest.get("version", -1),)
        ids, nodes = [bytes.fromhex(row["worker_id"])], [bytes.fromhex(row["node_id"])]
        told, silent = answers_of_processes(cluster, question, known, _PATIENCE, ids, nodes)
        for each in told:
            if each.told is not None:
                self._newest |= json.loads(each.told)
        return next(iter([*(each.missing for each in told), *silent.values()]), None)

    def _living(
        self, cluster: ClusterSource, row: Mapping[str, Any], problem: str
    ) -> dict[str, Any]:
        """Return the state of a run that goes on; a silent rank keeps its last answer."""
        ranks = self._newest.get("ranks", ())
        placed = [rank for rank in ranks if rank.get("worker_id")]
        ids = [bytes.fromhex(rank["worker_id"]) for rank in placed]
        nodes = sorted({bytes.fromhex(rank["node_id"]) for rank in placed})
        told, _ = answers_of_processes(cluster, "train_rank", (), _RANK_PATIENCE, ids, nodes)
        for each in told:
            found = self._of_ranks.setdefault(each.process.hex(), {})
            found |= {**(each.told or {}), "problem": each.missing}
        shown = [{**rank, **self._of_ranks.get(rank.get("worker_id", ""), {})} for rank in ranks]
        return _page({**row, "config": {}, **self._newest, "problem": problem, "ranks": shown})


def ended(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run as its folder records it; blocks while it is read.

    Returns:
        ``run``: the row, corrected by the folder, with ``config`` and ``problem``: why a part is
        missing. ``series``: a list of values by metric, and under ``step`` the numbers of the
        reports; at most ``MAX_SHOWN`` long. ``ranks`` of the last attempt, while it goes on with
        seconds that they have waited (``data_wait``, ``blocked`` in ``report()``),
        ``device_memory`` in bytes, and ``datasets``. ``checkpoints`` (name, path, number, size in
        bytes, seconds, time, metrics), ``attempts`` (number, state, workers, started, ended,
        reason, logs), ``heat`` (``ReportBoard.lags``), ``logs`` (folders of ranks' output), and
        ``notes``.
    """
    page = {**row, "problem": ""}
    try:
        storage = RunStorage.of_run(str(row["path"]))
        facts = storage.run_facts() if storage.exists() else {}
        if not facts:
            page["problem"] = (
                f"There is no run in {row['path']}: its folder is gone, or is on the disk of node "
                f"{row['node_id'][:8]}, which this process does not reach."
            )
        elif facts.get("run_id") != row["run_id"]:
            page["problem"] = "Another run of the same name went on in the folder of this one."
        else:
            page |= _of_folder(row, storage, facts)
    except Exception as error:  # clients of stores raise what they like
        logger.debug("%s can't be read", row["path"], exc_info=True)
        page["problem"] = f"{row['path']} can't be read: {type(error).__name__}: {error}"
    return _page(page)


def _of_folder(
    row: Mapping[str, Any], storage: RunStorage, facts: dict[str, Any]
) -> dict[str, Any]:
    history = History()
    history.read(storage)
    reports = max(history.reports, row.get("reports") or 0)  # some may not be written yet
    page = {**public(facts), "rows": history.shown(), "reports": reports}
    if facts.get("state") in _ENDED:
        page["ended"] = facts["written"]
    elif not row["alive"]:
        page |= {"state": "LOST", "error": _LOST}
    printed = storage.files.names(FOLDER)  # an attempt whose ranks print nothing has none
    for attempt in page.get("history", ()):
        if PurePosixPath(attempt["logs"]).name not in printed:
            attempt["logs"] = ""
    page["kept"] = [shown_checkpoint(each) for each in storage.records()]
    try:
        page["config"] = json.loads(storage.files.read("config.json") or "{}")
    except ValueError:
        page["config"] = {}
    return page


def _page(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what ``ended`` describes, of all that is known of a run."""
    path, attempts = facts["path"], facts.get("history", [])
    page = {name: facts.pop(name, default) for name, default in _PARTS.items()}
    rows = page.pop("rows")
    names = dict.fromkeys(key for row in rows for key in row["metrics"] if key != "step")
    kept = [{**each, "path": f"{path}/{each['name']}"} for each in facts.get("kept", ())]
    facts |= {"reports": facts.get("reports") or 0, "checkpoints": len(kept)}
    if attempts:
        facts["workers"] = attempts[-1]["workers"]
    return {
        **page,
        "run": {key: value for key, value in facts.items() if key not in _ELSEWHERE},
        "series": {
            "step": [row["number"] for row in rows],
            **{name: [_number(row["metrics"].get(name)) for row in rows] for name in names},
        },
        "checkpoints": kept,
        "attempts": attempts,
        "logs": [f"{path}/{each['logs']}" for each in attempts if each["logs"]],
    }


#: Parts of a page beside the run itself, with defaults; and facts shown under another name, or not.
_PARTS: dict[str, Any] = {"ranks": [], "heat": {}, "notes": [], "rows": []}
_ELSEWHERE = ("history", "kept", "version")


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None
