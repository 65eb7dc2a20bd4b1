"""Which checkpoints a run has, which is the best, and which are to be deleted.

Pure bookkeeping over names and metrics; files are the storage's concern.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from miniray.train.config import CheckpointConfig


@dataclasses.dataclass(frozen=True)
class CheckpointRecord:
    """A complete checkpoint.

    Attributes:
        name: Name of its folder in the run's folder.
        number: Its place in the order of the run's reports.
        metrics: What rank 0 reported with it.
    """

    name: str
    number: int
    metrics: Mapping[str, Any]


def lookup(metrics: Mapping[str, Any], key: str) -> Any:
    """The metric of this key; ``a/b`` also finds ``metrics["a"]["b"]``. None if there is none."""
    if key in metrics:
        return metrics[key]
    head, slash, rest = key.partition("/")
    inner = metrics.get(head) if slash else None
    return lookup(inner, rest) if isinstance(inner, dict) else None


def has_score(metrics: Mapping[str, Any], key: str) -> bool:
    """Whether metrics have a number of this key."""
    return score(metrics, key, "max") > -math.inf


def score(metrics: Mapping[str, Any], key: str, order: str) -> float:
    """How good metrics are: higher is better; what has no such number is worst of all."""
    value = lookup(metrics, key)
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        return -math.inf
    return float(value) if order == "max" else -float(value)


class CheckpointBook:
    """The complete checkpoints of a run, in order of quality, and the rule which to keep.

    Without a score attribute a later checkpoint is a better one. Of equal scores the
    later one is the better.
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
        """As many of the best as the rule keeps, the best last: not the latest if it is worse."""
        return list(self._records if self._keep is None else self._records[-self._keep :])

    @property
    def latest(self) -> CheckpointRecord | None:
        """The checkpoint reported last."""
        return max(self._records, key=lambda record: record.number, default=None)

    @property
    def records(self) -> list[CheckpointRecord]:
        """All checkpoints, the best last; the latest is among them."""
        return list(self._records)

    def _rank(self, record: CheckpointRecord) -> tuple[float, int]:
        if self._attribute is None:
            return 0.0, record.number
        return score(record.metrics, self._attribute, self._order), record.number
