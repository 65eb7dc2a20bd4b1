"""What a page shows of train runs: the list of them, and one run, while it goes on and afterwards.

A reader in any process of the cluster uses it so, the web process for one::

    rows = listed(ask_head("state", "runs"))     # or what the head pushes of that listing
    page = RunPage(row)
    while page.live:                             # and as long as somebody looks
        page.take(ask_nodes(*page.question()))   # returns at news, and after ``PATIENCE``
        page.take_ranks(ask_nodes(*page.question_to_ranks()))
        show(page.shown())                       # then wait a moment: reports may be many
    show(ended(row))                             # of a new ``listed``; blocks: in a thread

``ask_nodes`` is that of ``CommandConnection`` and of ``RuntimeHead``: (what, arguments, seconds,
nodes) to a list of (node, answer, why there is none). Nothing is sent, and nothing is kept for
it, while nobody looks. Everything is bounded, whatever a run reports.
"""

from __future__ import annotations

import json
import logging
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from miniray.train.controller.board import public, question_about, shown_checkpoint
from miniray.train.storage.metrics_log import History
from miniray.train.storage.storage import RunStorage
from miniray.train.worker.rank_logs import FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    #: What ``ask_nodes`` takes, and one of what it returns.
    Question = tuple[str, tuple[Any, ...], float, list[bytes]]
    Told = tuple[bytes, Any, str]

logger = logging.getLogger(__name__)

#: Seconds that the controller of a run waits for news before it answers.
PATIENCE = 10.0
#: Seconds that ranks have to tell how far they are: their user code may keep them busy.
RANK_PATIENCE = 1.0

_GONE = "Its controller is gone."
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
    """Return one row of the list."""
    row = {**run, "ended": run["written"] if run["state"] in _ENDED else None}
    if row["ended"] is None and not row["alive"]:
        row |= {"state": "LOST", "error": _LOST}
    return row


class RunPage:
    """A run that goes on, as its controller and its ranks tell of it.

    Args:
        row: Of the run, as ``listed`` has it.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = dict(row)
        self._facts: dict[str, Any] = {}
        self._history = History()
        self._notes: list[str] = []
        self._config: dict[str, Any] = {}
        self._seen: list[Any] = ["", 0, 0, 0]
        self._of_ranks: dict[str, dict[str, Any]] = {}  # by the id of the rank's process
        self._problem = ""
        #: Whether there is a controller to be asked.
        self.live = bool(row["ended"] is None and row["alive"])

    def question(self, patience: float = PATIENCE) -> Question:
        """Return what to ask for news of the run, for which its controller may wait so long."""
        arguments = (self._seen, self._history.reports - 1, patience)
        about = question_about(self._row["run_id"]), arguments, [_id(self._row["worker_id"])]
        return "processes", about, patience + 1, [_id(self._row["node_id"])]

    def take(self, told: Sequence[Told]) -> None:
        """Take the answer to ``question``."""
        answers = _answers(told)
        self.live = bool(answers)
        self._problem = next((why for _, _, why in answers), _GONE)
        for _, answer, _ in answers:
            if answer is None:
                continue
            facts = json.loads(answer)
            self._seen = facts.pop("seen", self._seen)
            self._config = facts.pop("config", self._config)
            self._notes = [*self._notes, *facts.pop("notes", ())][-_MAX_NOTES:]
            for row in facts.pop("rows", ()):
                self._history.add(row)
            self._facts = facts

    def question_to_ranks(self) -> Question:
        """Return what to ask the processes of ranks: of their data, and their devices' memory."""
        ranks = self._facts.get("ranks", ())
        ids = [_id(rank["worker_id"]) for rank in ranks if rank.get("worker_id")]
        nodes = sorted({_id(rank["node_id"]) for rank in ranks if rank.get("node_id")})
        return "processes", ("train_rank", (), ids), RANK_PATIENCE, nodes

    def take_ranks(self, told: Sequence[Told]) -> None:
        """Take the answers to ``question_to_ranks``; who gives none keeps what it told."""
        for process, answer, why in _answers(told):
            found = self._of_ranks.setdefault(process.hex(), {})
            found |= {**(answer or {}), "problem": why}

    def shown(self) -> dict[str, Any]:
        """Return the run as JSON values, with the fields that ``ended`` describes."""
        facts = {**self._row, **self._facts, "config": self._config, "problem": self._problem}
        ranks = [
            {**rank, **self._of_ranks.get(rank.get("worker_id", ""), {})}
            for rank in self._facts.get("ranks", ())
        ]
        return _page({**facts, "ranks": ranks, "notes": self._notes}, self._history)


#: Remarks that are kept, the newest.
_MAX_NOTES = 50


def ended(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run as its folder tells of it; blocks while it is read.

    Returns:
        ``run``: the row, of which the folder knows better, with ``config`` and ``problem``: why
        something can't be told. ``series``: a list of values by metric, and under ``step`` the
        numbers of the reports; at most ``MAX_SHOWN`` long. ``ranks`` of the last attempt, while it
        goes on with seconds that they have waited (``data_wait``, ``blocked`` in ``report()``),
        ``device_memory`` in bytes, and ``datasets``. ``checkpoints`` (name, path, number, size in
        bytes, seconds, time, metrics), ``attempts`` (number, state, workers, started, ended,
        reason, logs), ``heat`` (``ReportBoard.lags``), ``logs`` (folders of what ranks have
        printed), and ``notes``.
    """
    page = {**row, "problem": ""}
    history = History()
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
            page |= _of_folder(row, storage, facts, history)
    except Exception as error:  # clients of stores raise what they like
        logger.debug("%s can't be read", row["path"], exc_info=True)
        page["problem"] = f"{row['path']} can't be read: {type(error).__name__}: {error}"
    return _page(page, history)


def _of_folder(
    row: Mapping[str, Any], storage: RunStorage, facts: dict[str, Any], history: History
) -> dict[str, Any]:
    history.read(storage)
    page = public(facts)
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
        page["config"] = json.loads(storage.read_text("config.json") or "{}")
    except ValueError:
        page["config"] = {}
    return page


def _page(facts: dict[str, Any], history: History) -> dict[str, Any]:
    """Return what ``ended`` describes, of all that is known of a run."""
    rows = history.shown()
    names = dict.fromkeys(key for row in rows for key in row["metrics"] if key != "step")
    path, attempts = facts["path"], facts.get("history", [])
    page = {name: facts.pop(name, default) for name, default in _PARTS.items()}
    kept = [{**each, "path": f"{path}/{each['name']}"} for each in facts.get("kept", ())]
    facts |= {"reports": max(history.reports, facts.get("reports") or 0), "checkpoints": len(kept)}
    if attempts:
        facts["workers"] = attempts[-1]["workers"]
    return {
        **page,
        "run": {key: value for key, value in facts.items() if key not in ("history", "kept")},
        "series": {
            "step": [row["number"] for row in rows],
            **{name: [_number(row["metrics"].get(name)) for row in rows] for name in names},
        },
        "checkpoints": kept,
        "attempts": attempts,
        "logs": [f"{path}/{each['logs']}" for each in attempts if each["logs"]],
    }


#: Parts of a page beside the run itself, and what they are where nothing is known.
_PARTS: dict[str, Any] = {"ranks": [], "heat": {}, "notes": []}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def _id(text: str) -> bytes:
    return bytes.fromhex(text)


def _answers(told: Sequence[Told]) -> list[Told]:
    """Return the answers of processes, of what nodes tell of the question that they passed on."""
    found = []
    for node, answers, missing in told:
        if answers is None:
            found.append((node, None, missing))
            continue
        found += [(process, answer, why) for process, *_, answer, why in answers]
    return found
