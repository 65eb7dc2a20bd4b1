"""Reports: metrics as plain Python values, and the matching of those of all ranks by their index.

Pure bookkeeping. A step with a checkpoint is complete when every rank has reported its
index. One with metrics alone does not wait for ranks that returned, or that report far less
often. Steps are given out in order of their index, regardless of the order in which reports arrive.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from miniray.train.base.ranks import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics with NumPy numbers as Python ones.

    Raises:
        TypeError: The metrics are not a dictionary with string keys, or hold values that can't be
            sent or kept.
        ValueError: They hold a tensor.
    """
    if not hasattr(metrics, "items"):
        raise TypeError(
            f"report() got metrics of type {type(metrics).__name__}; "
            f'metrics are a dictionary, such as {{"loss": 0.1}}.'
        )
    plain = {}
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(f"report() got the key {key!r}; keys of metrics are strings.")
        plain[key] = _plain(key, value)
    return plain


def _plain(key: str, value: Any) -> Any:
    if type(value) in (int, float, str, bool, type(None)):
        return value
    if isinstance(value, dict):
        # JSON has only string keys.
        return {str(name): _plain(f"{key}/{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, inner) for inner in value]
    # What was never imported can't be the type of a value.
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if torch is not None and isinstance(value, torch.Tensor):
        raise ValueError(
            f"report() got a tensor as the metric {key!r}. Report a number "
            f"(`{key.rsplit('/', 1)[-1]}.item()`), or save the tensor in a checkpoint."
        )
    _check(key, value)
    return value


def _check(key: str, value: Any) -> None:
    """Raise TypeError for a value that can't be sent to the controller, or kept as text."""
    from miniray.values.serialization import pickled

    try:
        pickled(value)  # refs in it are not kept, as it is only looked at
        str(value)
    except Exception as error:  # whatever a user's class raises
        raise TypeError(
            f"report() got a {type(value).__name__} as the metric {key!r}, which can't be pickled "
            f"and kept as text ({type(error).__name__}: {error}). Metrics are numbers, strings, "
            f"lists and dictionaries; other things belong into checkpoints."
        ) from error


#: Metrics alone wait at least this long, in seconds, for a rank whose train loop still runs.
PATIENCE = 5.0
#: They wait longer for a rank that is at most this many reports behind.
MAX_LAG = 100
#: And for one that has not reported at all, while others have at most this often.
SILENT_LAG = 10

#: Reports whose times of arrival, by rank, are kept.
LAGS_KEPT = 50


@dataclasses.dataclass(frozen=True)
class Upload:
    """What one rank has put into the folder of a checkpoint.

    Attributes:
        files: Size in bytes of each file, by its path in that folder.
        in_place: The train loop wrote there by itself, so the folder says what there is.
    """

    name: str
    files: Mapping[str, int]
    in_place: bool = False


@dataclasses.dataclass(frozen=True)
class Report:
    """One call of ``report()`` by one rank.

    Attributes:
        upload: What the rank has put into the checkpoint; None if it has no files for it.
    """

    metrics: dict[str, Any]
    upload: Upload | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """What the ranks reported under one index of an attempt, by rank.

    Every rank is there if the step has a checkpoint.
    """

    index: int
    by_rank: Mapping[int, Report]
    world_size: int

    @property
    def metrics_of_all(self) -> list[dict[str, Any]]:
        """A copy of the metrics of each rank, by rank; empty for one that did not report."""
        absent = Report({})
        ranks = range(self.world_size)
        return [dict(self.by_rank.get(rank, absent).metrics) for rank in ranks]

    @property
    def reports(self) -> list[Report]:
        return [self.by_rank[rank] for rank in sorted(self.by_rank)]

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of rank 0, which stand for the step; without it, those of the next rank."""
        return self.reports[0].metrics

    @property
    def uploads(self) -> list[Upload]:
        """What the ranks put into the folder of the step's checkpoint; empty if it has none."""
        return [report.upload for report in self.reports if report.upload is not None]


class ReportMismatchError(ValueError):
    """Ranks did not all report a checkpoint, or not under the same name."""


class ReportBoard:
    """The reports of one attempt that wait for those of other ranks.

    Attributes:
        uneven: A sentence, as soon as ranks were found to report different numbers of times.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._counts = [0] * world_size
        self._most = 0
        self._returned: set[int] = set()
        self._waiting: dict[int, dict[int, Report]] = {}
        self._since: dict[int, float] = {}  # when the first report of each index came
        self._with_upload: set[int] = set()  # indexes of `_waiting` that have a checkpoint
        self._next = 0
        self._arrivals: dict[int, list[float | None]] = {}  # of the newest indexes, by rank
        self.uneven: str | None = None

    def add(self, rank: int, index: int, report: Report, now: float = 0.0) -> list[Step]:
        """Enter the report of this index; return the steps that are complete now, in order.

        Raises:
            ReportMismatchError: The ranks named different folders for one checkpoint, or a rank
                reported a checkpoint so late that its step has gone.
        """
        self._note_arrival(rank, index, now)
        self._counts[rank] += 1
        self._most = max(self._most, self._counts[rank])
        if index < self._next:  # the others did not wait for this rank
            if report.upload is not None:
                raise ReportMismatchError(
                    f"Rank {rank} reported the checkpoint {report.upload.name!r} as its report "
                    f"number {index}, after others had gone on to number {self._next}. A "
                    f"checkpoint belongs to one report of every rank: call report() on all ranks "
                    f"each time, or on rank 0 alone with metrics alone."
                )
            return []
        entry = self._waiting.setdefault(index, {})
        self._since.setdefault(index, now)
        if report.upload is not None:
            self._check_name(index, entry, report.upload)
            self._with_upload.add(index)
        entry[rank] = report
        return self._release(now)

    def returned(self, rank: int) -> list[Step]:
        """Enter that a rank's train loop has returned; return the steps that this completes."""
        self._returned.add(rank)
        return self._release(0.0)

    def close(self, now: float = 0.0) -> list[Step]:
        """Give out what the ranks have reported by the end of their attempt, in order.

        Metrics alone need no other rank, unless rank 0, whose metrics stand for a step, was about
        to report it. A report with a checkpoint counts only if that is complete, as a run goes on
        from the one before and makes it again.
        """
        steps = self._release(now)
        for index in sorted(self._waiting.keys() - self._with_upload):
            entry = self._waiting[index]
            if all(self._is_silent(rank) for rank in range(min(entry))):
                self._note_uneven(index, now)
                steps.append(Step(index, entry, self._world_size))
        self._waiting.clear()
        return steps

    def completes_with(self, coming: Collection[tuple[int, int]]) -> bool:
        """Return whether these reports, as (rank, index), would complete the next step."""
        return all((rank, self._next) in coming for rank in self._absent(self._next))

    def lags(self, first_number: int = 0) -> dict[str, list[Any]]:
        """Return by how many seconds each rank made the newest reports after the first that did.

        Returns:
            ``reports``: their numbers; the first of the attempt has ``first_number``. ``seconds``:
            a list for each rank; None for a report that it has not made.
        """
        came = sorted(self._arrivals.items())
        lags = [_after_first(each) for _, each in came]
        return {
            "reports": [first_number + index for index, _ in came],
            "seconds": [[lag[rank] for lag in lags] for rank in range(self._world_size)],
        }

    def _note_arrival(self, rank: int, index: int, now: float) -> None:
        came = self._arrivals.get(index)
        if came is None:
            if index <= self._most - LAGS_KEPT:
                return  # long gone
            came = self._arrivals[index] = [None] * self._world_size
            if len(self._arrivals) > LAGS_KEPT:
                del self._arrivals[min(self._arrivals)]
        came[rank] = now

    def count(self, rank: int) -> int:
        return self._counts[rank]

    def missing(self, index: int) -> list[int]:
        return [rank for rank, count in enumerate(self._counts) if count <= index]

    def absent(self, index: int) -> list[int]:
        """Return the ranks for which the step of this index waits; none if it is given out."""
        return self._absent(index) if index in self._waiting else []

    def mismatch(self) -> tuple[int, str] | None:
        """Return a rank that returned without its report of a checkpoint's step, and the reason.

        None while every checkpoint can still become complete.
        """
        if not self._with_upload:
            return None
        for rank in sorted(self._returned):
            lost = [index for index in self._with_upload if index >= self._counts[rank]]
            if lost:
                index = min(lost)
                who = listed(self._waiting[index])
                return rank, (
                    f"Rank {rank} returned after {self._counts[rank]} reports, while {who} "
                    f"reported a checkpoint as report number {index}, counted from 0. A checkpoint "
                    f"needs that report of every rank; ranks without files of their own report "
                    f"with checkpoint=None."
                )
        return None

    def _release(self, now: float) -> list[Step]:
        steps = []
        while (entry := self._waiting.get(self._next)) is not None and self._is_due(entry, now):
            entry = self._waiting.pop(self._next)
            steps.append(Step(self._next, entry, self._world_size))
            del self._since[self._next]
            self._with_upload.discard(self._next)
            self._next += 1
        return steps

    def _is_due(self, entry: Mapping[int, Report], now: float) -> bool:
        if len(entry) == self._world_size:
            return True
        if self._next in self._with_upload:
            return False
        waited = now - self._since[self._next] >= PATIENCE
        if not waited and len(entry) + len(self._returned) < self._world_size:
            return False
        absent = self._absent(self._next)
        if not all(self._is_passed(rank, waited) for rank in absent):
            return False
        self._tell_uneven(self._next, absent)
        return True

    def _note_uneven(self, index: int, now: float) -> None:
        """Distinguish, at the end, ranks that never report from those that had no time to."""
        absent = self._absent(index)
        late = now - self._since[index] >= PATIENCE
        if late and absent and all(self._is_silent(rank) for rank in absent):
            self._tell_uneven(index, absent)

    def _tell_uneven(self, index: int, absent: Collection[int]) -> None:
        if self.uneven is None:
            self.uneven = (
                f"The ranks do not report equally often: report number {index} is missing on "
                f"{listed(absent)}, and others have made {self._most} reports. Metrics go on "
                f"without them; a checkpoint needs the report of every rank."
            )

    def _absent(self, index: int) -> list[int]:
        entry = self._waiting.get(index, {})
        return [rank for rank in range(self._world_size) if rank not in entry]

    def _is_silent(self, rank: int) -> bool:
        """Return whether no report of this rank is to be expected."""
        return rank in self._returned or not self._counts[rank]

    def _is_passed(self, rank: int, waited: bool) -> bool:
        if rank in self._returned:
            return True
        limit = MAX_LAG if self._counts[rank] else SILENT_LAG
        return waited and self._most - self._next > limit

    def _check_name(self, index: int, entry: Mapping[int, Report], upload: Upload) -> None:
        names = {each.upload.name for each in entry.values() if each.upload is not None}
        names.add(upload.name)
        if len(names) > 1:
            raise ReportMismatchError(
                f"The ranks reported one checkpoint, that of report number {index}, under "
                f"different names: {sorted(names)}. Give every rank the same checkpoint_dir_name."
            )


def _after_first(came: list[float | None]) -> list[float | None]:
    first = min(at for at in came if at is not None)
    return [None if at is None else round(at - first, 4) for at in came]
