"""Records completed steps: commits checkpoints, writes metrics, calls callbacks.

All its work is blocking I/O, done in one thread at a time; the controller
decides when.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import numbers
import time
from typing import TYPE_CHECKING, Any

from miniray.common.series import COUNTED
from miniray.train.storage.metrics_log import History, MetricsLog, flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from miniray.train.base.reports import Step
    from miniray.train.callbacks import CallbackRunner
    from miniray.train.config import CheckpointConfig
    from miniray.train.storage.checkpoint import Checkpoint
    from miniray.train.storage.storage import CheckpointRecord, RunStorage

logger = logging.getLogger(__name__)


def lookup(metrics: Mapping[str, Any], key: str) -> Any:
    """Return a metric or None; the key ``a/b`` also finds ``metrics["a"]["b"]``."""
    if key in metrics:
        return metrics[key]
    head, slash, rest = key.partition("/")
    inner = metrics.get(head) if slash else None
    return lookup(inner, rest) if isinstance(inner, dict) else None


def score(metrics: Mapping[str, Any], key: str, order: str) -> float:
    """Return how good metrics are: higher is better, -inf without such a number."""
    value = lookup(metrics, key)
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        return -math.inf
    return float(value) if order == "max" else -float(value)


class CheckpointBook:
    """The complete checkpoints of a run, in order of quality, and the rule which to keep.

    Without a score attribute a later checkpoint is a better one. Of equal scores the
    later one is the better. Pure; files are the storage's concern.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._keep = config.num_to_keep
        self._attribute = config.checkpoint_score_attribute
        self._order = config.checkpoint_score_order
        self._records: list[CheckpointRecord] = []  # worst first

    def restore(self, records: Iterable[CheckpointRecord]) -> None:
        """Take over checkpoints that the storage holds from before; none is deleted by this."""
        self._records = sorted([*self._records, *records], key=self._rank)

    def add(self, record: CheckpointRecord) -> list[CheckpointRecord]:
        """Enter a new checkpoint; return those that the rule no longer keeps, worst first.

        The latest checkpoint always stays: a restart begins from it. One of the same name is
        struck out: its files were lost, else the name would not have been given again.
        """
        self.remove(record.name)
        self._records = sorted([*self._records, record], key=self._rank)
        if self._keep is None:
            return []
        latest = self.latest
        surplus = [kept for kept in self._records[: -self._keep] if kept is not latest]
        self._records = [kept for kept in self._records if kept not in surplus]
        return surplus

    def remove(self, name: str) -> None:
        """Strike out a checkpoint whose name a new one takes."""
        self._records = [record for record in self._records if record.name != name]

    @property
    def best(self) -> list[CheckpointRecord]:
        """The best ones that the rule keeps, the best last; without the latest if that is worse."""
        return list(self._records if self._keep is None else self._records[-self._keep :])

    @property
    def latest(self) -> CheckpointRecord | None:
        return max(self._records, key=lambda record: record.number, default=None)

    @property
    def records(self) -> list[CheckpointRecord]:
        """All checkpoints, the best last; the latest is among them."""
        return list(self._records)

    def _rank(self, record: CheckpointRecord) -> tuple[float, int]:
        if self._attribute is None:
            return 0.0, record.number
        return score(record.metrics, self._attribute, self._order), record.number


@dataclasses.dataclass(eq=False)
class RunRecorder:
    """Records the steps of a run in its folder, and has its checkpoints and metrics in memory.

    Attributes:
        next_number: Number of the next report among all reports of the run.
        history: Its reports, also those of an earlier run of the same name.
    """

    storage: RunStorage
    config: CheckpointConfig
    callbacks: CallbackRunner
    token: str

    def __post_init__(self) -> None:
        self._log = MetricsLog(self.storage)
        self._book = CheckpointBook(self.config)
        self._tags = (("run", self.storage.name),)
        self._noted_unscored = False
        self.next_number = 0
        #: Names of checkpoints that earlier attempts and runs have left.
        self._earlier: set[str] = set()
        self.history = History()
        #: When the first rank began to upload a checkpoint that is not complete, by its name.
        self._begun: dict[str, float] = {}

    def open(self) -> None:
        """Take up what an earlier run of this name left, without what it left incomplete."""
        self.clear_incomplete(0)
        records = self.storage.records()
        self._book.restore(records)
        self.history.read(self.storage)
        for record in records[-1:]:  # a killed run may not have written its row
            if record.number >= self.history.reports:
                self.history.add({"number": record.number, "metrics": dict(record.metrics)})
        self.next_number = max(self.next_number, self.history.reports)

    def clear_incomplete(self, least: int) -> None:
        """Delete what ended workers left incomplete; later reports begin at ``least`` or above."""
        self.storage.require_owner(self.token)
        self._begun.clear()
        free = self.storage.delete_incomplete()
        self.next_number = max(self.next_number, least, free)
        self._earlier = self.storage.committed()

    def begin_upload(self, name: str) -> None:
        self._begun.setdefault(name, time.monotonic())

    def is_taken(self, name: str) -> bool:
        """Return whether a checkpoint of an earlier attempt or run has this name already."""
        return name in self._earlier

    def make_way(self, name: str, *, in_place: bool) -> None:
        """Take a checkpoint of an earlier attempt or run away, for a new one of its name.

        Of several calls for one name, the first does it. ``in_place``: files of the new one are in
        its folder already, so none is deleted.
        """
        if self.is_taken(name):
            self.storage.require_owner(self.token)
            self._book.remove(name)  # first: one that is half away is none to go on from
            if in_place:
                self.storage.revoke(name)
            else:
                self.storage.delete(name)
            self._earlier.discard(name)

    @property
    def latest_metrics(self) -> dict[str, Any] | None:
        """Metrics of the newest step; None before the first."""
        return dict(self.history.newest["metrics"]) if self.history.reports else None

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest complete checkpoint, from which workers begin."""
        record = self._book.latest
        return None if record is None else self.storage.checkpoint(record.name)

    @property
    def checkpoints(self) -> list[CheckpointRecord]:
        """The checkpoints that the run has, the best last."""
        return self._book.records

    def record(self, first_number: int, steps: Sequence[Step]) -> list[str]:
        """Record steps of an attempt whose first report has this number; return notes."""
        rows, notes = [], []
        for step in steps:
            number = first_number + step.index
            checkpoint = self._commit(number, step) if step.uploads else None
            if checkpoint is not None:
                notes += self._unscored(step)
            rows.append(
                {
                    "number": number,
                    "time": time.time(),
                    "checkpoint": step.uploads[0].name if step.uploads else None,
                    "metrics": step.metrics,
                }
            )
            self.next_number = number + 1
            if self.callbacks:
                # Copies: a callback that changes them does not change what is kept.
                self.callbacks.tell_report(number, step.metrics_of_all, checkpoint)
        self._log.append(rows)
        for row in rows:
            self.history.add(row)
        if any(step.uploads for step in steps):
            self._log.sync()
        return notes

    def _unscored(self, step: Step) -> list[str]:
        """Return a note on the first checkpoint without a score; nothing on later ones."""
        attribute = self.config.checkpoint_score_attribute
        if attribute is None or self._noted_unscored:
            return []
        if score(step.metrics, attribute, "max") > -math.inf:
            return []
        self._noted_unscored = True
        known = ", ".join(flatten(step.metrics)) or "none"
        note = (
            f"Checkpoint {step.uploads[0].name} has no number as metric {attribute!r}, by which "
            f"CheckpointConfig(checkpoint_score_attribute=...) says which checkpoints are better, "
            f"and counts as the worst. Rank 0 reported the metrics: {known}."
        )
        return [note]

    @property
    def owned(self) -> bool:
        """Whether no other driver has started this run meanwhile."""
        return self.storage.owned_by(self.token)

    def close(self) -> None:
        self._log.close()
        self._tidy(self.storage.delete_incomplete)

    def _commit(self, number: int, step: Step) -> Checkpoint:
        name = step.uploads[0].name
        self.storage.require_owner(self.token)
        begun = self._begun.pop(name, None)
        seconds = 0.0 if begun is None else round(time.monotonic() - begun, 3)
        began = time.monotonic()
        record = self.storage.commit(number, step.uploads, step.metrics, seconds)
        COUNTED.count("train_checkpoints_total", (*self._tags, ("outcome", "complete")))
        COUNTED.count("train_checkpoint_bytes_total", self._tags, record.size)
        for phase, took in (("upload", seconds), ("commit", time.monotonic() - began)):
            COUNTED.took("train_checkpoint_seconds", took, (*self._tags, ("phase", phase)))
        for surplus in self._book.add(record):
            self._tidy(self.storage.delete, surplus.name)
        return self.storage.checkpoint(name)

    def _tidy(self, delete: Callable[..., Any], *names: str) -> None:
        """Delete old files; a failure does not end the run, as a later one tries again."""
        try:
            delete(*names)
        except Exception:  # clients of stores raise what they like
            logger.warning("Old files in %s can't be deleted.", self.storage.path, exc_info=True)
