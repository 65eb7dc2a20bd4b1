"""One attempt: a worker group from the start of its train loops until it is known how it ended.

It collects what the ranks say and judges it; starting and ending processes is
the controller's part.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from miniray.train.failures import WorkerFailure
from miniray.train.reports import ReportBoard, ReportMismatchError

if TYPE_CHECKING:
    from miniray.train.reports import Report, Step


class Attempt:
    """What the ranks of one worker group have reported, returned and raised.

    Attributes:
        number: 1 for the first attempt of a run.
        first_number: Number of its first report among all reports of the run.
        failures: Why ranks failed, by world rank.
        returned: Ranks whose train loop returned.
        over: Set as soon as every rank has returned, or one has failed.
        all_ended: Set when no rank runs any more.
    """

    def __init__(self, number: int, world_size: int, first_number: int) -> None:
        self.number = number
        self.first_number = first_number
        self.failures: dict[int, WorkerFailure] = {}
        self.returned: set[int] = set()
        self.return_value = b""
        self.over = asyncio.Event()
        self.all_ended = asyncio.Event()
        self._closed = False
        self._world_size = world_size
        self._board = ReportBoard(world_size)

    def report(self, rank: int, index: int, report: Report) -> list[Step]:
        """Enter a report; return the steps that every rank has reported now."""
        if self._closed:
            return []
        try:
            steps = self._board.add(rank, index, report)
        except ReportMismatchError as error:
            self.fail(rank, WorkerFailure.of(error))
            return []
        self._check_counts()
        return steps

    def finish(self, rank: int, return_value: bytes) -> None:
        """Enter that the train loop of a rank returned this value, pickled."""
        self.returned.add(rank)
        self._board.returned(rank)
        if rank == 0:
            self.return_value = return_value
        self._check_counts()
        self._check_ended()

    def fail(self, rank: int, failure: WorkerFailure) -> None:
        """Enter that a rank failed; its first failure counts."""
        self.failures.setdefault(rank, failure)
        self.over.set()
        self._check_ended()

    def close(self) -> None:
        """Take no more reports: what was reported by now is what the attempt has achieved."""
        self._closed = True

    def _check_counts(self) -> None:
        mismatch = None if self.failures else self._board.mismatch()
        if mismatch is not None:
            rank, reason = mismatch
            self.fail(rank, WorkerFailure.of(ReportMismatchError(reason)))

    def _check_ended(self) -> None:
        if len(self.returned | self.failures.keys()) == self._world_size:
            self.over.set()
            self.all_ended.set()
