"""What a run shows outside of its processes: a row in the cluster's list of runs, and its page.

The row is in the head's key-values, and changes with the run's state. This process answers the page
on request, from its memory. The requests are made in ``run/page.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING, Any

from miniray.common.runtime import runtime_or_none
from miniray.common.state_types import TRAIN_RUNS
from miniray.exceptions import EngineError
from miniray.train.storage.metrics_log import shown_row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from miniray.train.base.ranks import WorkerInfo
    from miniray.train.base.states import RunState
    from miniray.train.controller.attempt import Attempt
    from miniray.train.controller.feed import ProgressFeed
    from miniray.train.controller.recorder import RunRecorder
    from miniray.train.controller.run_spec import RunFacts, RunSpec
    from miniray.train.storage.storage import CheckpointRecord

#: Runs that the list of a cluster has; older ones are in their folders only.
MAX_RUNS = 1000
#: Ranks that are shown of a run, and characters of an error in the list.
MAX_RANKS, MAX_ERROR = 1024, 500
#: Seconds for which the event loop may delay an answer.
MAX_WAIT = 30.0
#: Metrics in a run's row, and seconds between two updates of it by reports.
MAX_LISTED, LIST_INTERVAL = 8, 5.0


@dataclasses.dataclass(eq=False)
class RunBoard:
    """Shows one run; its methods but ``write`` are for the controller's event loop."""

    spec: RunSpec
    facts: RunFacts
    recorder: RunRecorder
    feed: ProgressFeed

    def __post_init__(self) -> None:
        self._runtime = runtime_or_none()
        self._attempt: Attempt | None = None
        self._infos: Sequence[WorkerInfo] = ()
        self._place: dict[str, Any] = {}
        self._row: dict[str, Any] = {}  # of the cluster's list, as of the last state
        self._row_sent = 0.0
        self._due: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Answer from now on."""
        if self._runtime is None:
            return  # in local mode there need be no cluster
        context = self._runtime.context()
        names = ("node_id", "worker_id", "actor_id", "job_id")
        self._place = {name: getattr(context, name) for name in names} | {"pid": os.getpid()}
        loop = asyncio.get_running_loop()

        def page_of(version: int) -> Callable[[], str]:
            page = asyncio.run_coroutine_threadsafe(self._page(version), loop)
            return lambda: page.result(MAX_WAIT)

        self._runtime.answer(question_about(self.spec.run_id), page_of)
        self._runtime.answer(f"metrics of run {self.spec.run_id}", self._metrics)

    def close(self) -> None:
        """Answer no more."""
        if self._due is not None:
            self._due.cancel()
        if self._runtime is not None:
            self._runtime.answer(question_about(self.spec.run_id), None)
            self._runtime.answer(f"metrics of run {self.spec.run_id}", None)
            self._runtime.tell_counts()  # its driver kills the controller next

    def watch(self, attempt: Attempt, infos: Sequence[WorkerInfo]) -> None:
        """Show this attempt from now on."""
        self._attempt, self._infos = attempt, infos

    def write(self, state: RunState, message: str) -> None:
        """Store the run's facts in its folder, and in the cluster's list; blocks."""
        facts = {**self.facts.as_json(state, message), "ranks": self._ranks()}
        self.spec.storage.write_run_facts(facts)
        if not self._place:
            return
        row = {key: value for key, value in facts.items() if key in _LISTED}
        row |= {
            "path": self.spec.storage.url,
            "error": (facts["error"] or "")[:MAX_ERROR],
            "framework": type(self.spec.backend).__name__.removesuffix("Backend").lower(),
            **self._place,
        }
        self._row = row
        self._send_row()

    def reported(self) -> None:
        """Update the run's row in the cluster's list, at most every ``LIST_INTERVAL``."""
        if self._row and self._due is None:
            left = self._row_sent + LIST_INTERVAL - time.monotonic()
            self._due = asyncio.get_running_loop().call_later(left, self._send_due)

    def _send_due(self) -> None:
        self._due = None
        self._send_row()

    def _send_row(self) -> None:
        assert self._runtime is not None
        self._row_sent = time.monotonic()
        history, attempt = self.recorder.history, self._attempt
        row = self._row | {
            "reports": history.reports,
            "metrics": dict([*shown_row(history.newest)["metrics"].items()][:MAX_LISTED]),
            "checkpoints": len(self.recorder.checkpoints),
            "workers": attempt.world_size if attempt is not None else 0,
            "productive_ratio": self.facts.productive_ratio(),
        }
        key = f"{self.facts.started:017.6f}-{self.spec.run_id}"
        self._runtime.head.tell("kv_put", TRAIN_RUNS, key, json.dumps(row).encode())

    def forget_old(self) -> None:
        """Take the oldest runs out of the cluster's list if they are too many; blocks."""
        if self._runtime is not None and self._place.get("actor_id"):
            with contextlib.suppress(EngineError):  # another engine has no such list
                known = self._runtime.head.head_call("kv_keys", TRAIN_RUNS, "")
                for key in known[:-MAX_RUNS]:
                    self._runtime.head.tell("kv_del", TRAIN_RUNS, key)

    async def _page(self, version: int) -> str:
        """Return the run as JSON; long parts only if the reader has an older version of them."""
        page = {
            **public(self.facts.as_json(self.feed.state, "")),
            "ranks": self._ranks(),
            "kept": [shown_checkpoint(each) for each in self.recorder.checkpoints],
            "reports": self.recorder.history.reports,
            "heat": self._attempt.lags() if self._attempt is not None else {},
        }
        if self.feed.version != version:
            page |= {
                "version": self.feed.version,
                "notes": self.feed.notes,
                "rows": self.recorder.history.shown(),
                "config": dict(self.spec.configuration),
            }
        return json.dumps(page, default=str)

    def _metrics(self) -> list[tuple[Any, ...]]:
        """Return as series how late each rank made its newest report, and a checkpoint's age."""
        attempt, run = self._attempt, ("run", self.spec.name)
        late = attempt.lags()["seconds"][:MAX_RANKS] if attempt is not None else []
        about = "By how much a rank made its newest report after the first rank that did."
        lag = "gauge", "train_rank_lag_seconds", about, ()
        found: list[tuple[Any, ...]] = [
            (*lag, (run, ("rank", str(rank))), [made[-1]])
            for rank, lags in enumerate(late)
            if (made := [lag for lag in lags if lag is not None])
        ]
        if made_at := max((each.time for each in self.recorder.checkpoints), default=0):
            about = "How long ago the newest checkpoint was made."
            age = "gauge", "train_checkpoint_age_seconds", about, ()
            found.append((*age, (run,), [time.time() - made_at]))
        return found

    def _ranks(self) -> list[dict[str, Any]]:
        """Return where each rank runs, and how far it is."""
        attempt = self._attempt
        if attempt is None:
            return []
        found = attempt.ranks()[:MAX_RANKS]
        for rank, info in zip(found, self._infos, strict=False):
            rank |= {
                name: getattr(info, name) for name in ("node_id", "address", "pid", "worker_id")
            }
            rank["devices"] = info.accelerator_ids
        return found


#: The facts of a run that are in its row.
_LISTED = {"run_id", "name", "state", "started", "written", "attempts"}


def question_about(run_id: str) -> str:
    """Return the name of the question that the controller of a run answers."""
    return f"train_run {run_id}"


def public(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's facts without what proves to ranks that they belong to it."""
    return {key: value for key, value in facts.items() if key != "token"}


def shown_checkpoint(record: CheckpointRecord) -> dict[str, Any]:
    row = shown_row({"number": record.number, "metrics": dict(record.metrics)})
    about = {"name": record.name, "size": record.size, "seconds": record.seconds}
    return {**row, **about, "time": record.time}
