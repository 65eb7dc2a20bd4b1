"""The calls that ranks make to the controller: reports, uploads, collectives.

``ControllerClient`` is the other end of them. Each is passed to the attempt that runs; ranks of
earlier attempts are turned away. What becomes of complete steps is not decided here.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, TypeVar

from miniray.train.base.exceptions import CollectiveError
from miniray.train.controller.attempt import UploadPlace
from miniray.train.controller.blocking_work import BlockingWork
from miniray.train.controller.rendezvous import CollectiveOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.train.base.failures import WorkerFailure
    from miniray.train.base.questions import Question
    from miniray.train.base.reports import Report, Step
    from miniray.train.controller.attempt import Attempt
    from miniray.train.controller.recorder import RunRecorder
    from miniray.train.progress.progress_feed import ProgressFeed
    from miniray.train.storage.checkpoint_book import CheckpointRecord

T = TypeVar("T")


class RankCalls:
    """The controller as its ranks see it.

    Args:
        feed: Where the user is told what is odd about the reports.
        recorder: Knows the checkpoints that the run has.
        collective_timeout: Seconds that ranks wait for each other; 0 is no limit.
    """

    def __init__(
        self, feed: ProgressFeed, recorder: RunRecorder, collective_timeout: float
    ) -> None:
        self._feed = feed
        self._recorder = recorder
        self._collective_timeout = collective_timeout
        self._attempt: Attempt | None = None
        #: Steps that every rank has reported and that are to be recorded.
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        self._work = BlockingWork()

    async def report(self, attempt: int, rank: int, index: int, report: Report) -> None:
        """Take the report of a rank; those of ended attempts are dropped."""
        current = self._current(attempt)
        if current is not None:
            self._take(current.report(rank, index, report))

    async def announce_upload(self, attempt: int, rank: int, index: int) -> None:
        """Take note that a rank will upload a checkpoint in the background."""
        if (current := self._current(attempt)) is not None:
            current.announce_upload(rank, index)

    async def begin_upload(
        self, attempt: int, rank: int, index: int, name: str, in_place: bool = False
    ) -> UploadPlace:
        """Tell a rank where to upload the checkpoint of a report.

        What an earlier attempt or run has under this name is taken away before.
        """
        current = self._current(attempt)
        if current is None:
            return UploadPlace(refusal="other workers have taken its place")
        await current.may_upload(index)
        place = current.begin_upload(rank, index, name)
        if self._recorder.is_taken(place.folder):
            make_way = functools.partial(self._recorder.make_way, in_place=in_place)
            await self._blocking(make_way, place.folder)
        return place

    async def upload_failed(
        self, attempt: int, rank: int, index: int, failure: WorkerFailure | None
    ) -> None:
        """Take note that an upload has ended in vain."""
        if (current := self._current(attempt)) is not None:
            current.upload_failed(rank, index, failure)

    async def join(
        self, attempt: int, rank: int, number: int, call: str, value: bytes
    ) -> CollectiveOutcome:
        """Let a rank wait in a collective call for the others."""
        current = self._current(attempt)
        if current is None:
            return CollectiveOutcome(error=CollectiveError("Other workers run in place of these."))
        return await current.join(rank, number, call, value)

    async def use_keys(self, attempt: int, rank: int, operation: str, *arguments: Any) -> Any:
        """Let a rank read or set keys of its attempt."""
        del rank  # every call says whose it is
        current = self._current(attempt)
        if current is None:
            raise CollectiveError("Other workers run in place of these.")
        return await getattr(current.keys, operation)(*arguments)

    async def await_question(self, attempt: int, rank: int, heard: int) -> Question | None:
        """Wait for what the ranks are asked after so many questions; None if nothing more."""
        del rank  # every call says whose it is
        current = self._current(attempt)
        return None if current is None else await current.questions.next(heard)

    async def show_stacks(self, attempt: int, rank: int, stacks: str) -> None:
        """Take the stacks of a rank."""
        if (current := self._current(attempt)) is not None:
            current.stacks.answer(rank, stacks)

    async def tell_stall(self, attempt: int, rank: int, stacks: str) -> None:
        """Take note that a rank waits in vain, or, without stacks, that it goes on."""
        if (current := self._current(attempt)) is not None:
            current.stalls.enter(rank, stacks)

    async def reported_checkpoints(
        self, attempt: int, rank: int, count: int, timeout: float | None
    ) -> tuple[list[CheckpointRecord], list[int]]:
        """The run's checkpoints once so many reports are recorded, and who has not made them."""
        del rank  # every call says whose it is
        limit = self._collective_timeout if timeout is None else timeout
        current = self._current(attempt)
        missing = [] if current is None else await current.until_recorded(count, limit)
        return self._recorder.checkpoints, missing

    def _current(self, attempt: int) -> Attempt | None:
        """The attempt of this number, if it is the one that runs."""
        current = self._attempt
        return current if current is not None and current.number == attempt else None

    def _take(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._steps.put_nowait(step)

    async def _blocking(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function that blocks, in the one thread for such work."""
        return await self._work.do(function, *args)
