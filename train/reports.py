"""Matches the reports of all ranks by their index.

Pure bookkeeping: a step is complete when every rank has reported its
index. Steps are given out in order of their index, in whatever order reports arrive.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Upload:
    """What one rank has put into the folder of a checkpoint.

    Attributes:
        name: Name of the checkpoint's folder.
        files: Size in bytes of each file, by its path in that folder.
    """

    name: str
    files: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Report:
    """One call of ``report()`` by one rank."""

    metrics: dict[str, Any]
    upload: Upload | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """What all ranks reported under one index of an attempt, in order of rank."""

    index: int
    reports: tuple[Report, ...]

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of rank 0, which stand for the step."""
        return self.reports[0].metrics

    @property
    def uploads(self) -> list[Upload]:
        """What the ranks that reported a checkpoint put into its folder."""
        return [report.upload for report in self.reports if report.upload is not None]


class ReportMismatchError(ValueError):
    """Ranks did not report the same number of times, or not the same checkpoint."""


class ReportBoard:
    """The reports of one attempt that wait for those of other ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._counts = [0] * world_size
        self._returned: set[int] = set()
        self._waiting: dict[int, dict[int, Report]] = {}
        self._next = 0

    def add(self, rank: int, index: int, report: Report) -> list[Step]:
        """Enter a report; return the steps that are complete now, in order.

        Raises:
            ReportMismatchError: The ranks named different folders for one checkpoint.
        """
        self._counts[rank] += 1
        self._waiting.setdefault(index, {})[rank] = report
        steps = []
        while len(self._waiting.get(self._next, ())) == self._world_size:
            reports = self._waiting.pop(self._next)
            step = Step(self._next, tuple(reports[rank] for rank in range(self._world_size)))
            self._next += 1
            _check_names(step)
            steps.append(step)
        return steps

    def returned(self, rank: int) -> None:
        """Enter that the train loop of a rank has returned."""
        self._returned.add(rank)

    def count(self, rank: int) -> int:
        """How many times a rank has reported."""
        return self._counts[rank]

    def mismatch(self) -> tuple[int, str] | None:
        """The rank that returned before it reported as often as another, and the reason.

        None while every rank can still do as many reports as the others.
        """
        most = max(self._counts)
        ahead = self._counts.index(most)
        for rank in sorted(self._returned):
            if self._counts[rank] < most:
                return rank, (
                    f"Rank {rank} returned after {self._counts[rank]} reports, while rank {ahead} "
                    f"has reported {most} times. Every rank must call report() the same number "
                    f"of times; ranks without a checkpoint report with checkpoint=None."
                )
        return None


def _check_names(step: Step) -> None:
    names = {upload.name for upload in step.uploads}
    if len(names) > 1:
        raise ReportMismatchError(
            f"The ranks reported one checkpoint under different names: {sorted(names)}. "
            f"Give every rank the same checkpoint_dir_name."
        )
