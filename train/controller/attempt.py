"""One attempt: a worker group from the start of its train loops until it is known how it ended.

It collects what the ranks say and judges it; starting and ending processes is
the controller's part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from miniray.train.base.failures import WorkerFailure
from miniray.train.base.group_keys import GroupKeys
from miniray.train.base.questions import QuestionBoard
from miniray.train.base.ranks import listed
from miniray.train.base.reports import ReportBoard, ReportMismatchError
from miniray.train.base.stacks import StackBoard
from miniray.train.controller.rendezvous import NOTE_AFTER, CollectiveOutcome, Rendezvous
from miniray.train.controller.stalls import StallBoard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from miniray.train.base.reports import Report, Step

logger = logging.getLogger(__name__)


class _Uploading(NamedTuple):
    """An upload that a rank has begun."""

    folder: str
    since: float


class UploadPlace(NamedTuple):
    """Where a rank may upload to, or why it may not."""

    folder: str = ""
    refusal: str = ""


class Attempt:
    """What the ranks of one worker group have reported, returned and raised.

    Args:
        number: 1 for the first attempt of a run.
        world_size: Number of ranks.
        first_number: Number of its first report among all reports of the run.
        collective_timeout: Seconds that ranks wait for each other in a collective; 0: no limit.
        unsafe_names: Checkpoints that ranks of earlier attempts may still be writing.
        tell: Called with a sentence that the user should read.

    Attributes:
        failures: Why ranks failed, by world rank.
        returned: Ranks whose train loop returned.
        keys: By which its ranks find each other.
        over: Set as soon as every rank has returned, or one has failed, or it is to be ended.
        all_ended: Set when no rank runs any more.
        last_progress: When a rank has last reported or made another call, by time.monotonic().
        first_return: Set when the train loop of a rank has returned.
        questions: What ranks are asked while they run.
        stacks: Where ranks show their stacks.
        stalls: Which ranks wait in vain.
    """

    def __init__(
        self,
        number: int,
        world_size: int,
        first_number: int,
        collective_timeout: float = 0,
        unsafe_names: Collection[str] = (),
        tell: Callable[[str], None] = logger.warning,
    ) -> None:
        self.number = number
        self.world_size = world_size
        self.first_number = first_number
        self.failures: dict[int, WorkerFailure] = {}
        self.returned: set[int] = set()
        self.return_value = b""
        self._activities: dict[int, str] = {}
        self.keys = GroupKeys()
        self.over = asyncio.Event()
        self.all_ended = asyncio.Event()
        self._began = False
        self._closed = False
        self._unsafe_names = frozenset(unsafe_names)
        self._board = ReportBoard(world_size)
        self._told_uneven = False
        #: The timer for the first checkpoint that was not complete at once.
        self._late: asyncio.TimerHandle | None = None
        self._told_late = False
        self._tell = tell
        self._rendezvous = Rendezvous(world_size, collective_timeout, tell)
        self._uploading: dict[tuple[int, int], _Uploading] = {}
        #: Uploads in the background, by rank and index, until they have ended.
        self._announced: set[tuple[int, int]] = set()
        #: Ranks whose processes are gone.
        self._lost: set[int] = set()
        self._last_report = [0.0] * world_size
        self.last_progress = time.monotonic()
        self.first_return = asyncio.Event()
        self.questions = QuestionBoard()
        self.stacks = StackBoard(self.questions)
        self.stalls = StallBoard()
        self._draining = False
        self._given_up = asyncio.Event()
        self._uploads_ended = asyncio.Event()
        self._highest = -1  # index of the last report that a rank has begun
        self._recorded = 0
        self._recording: asyncio.Event = asyncio.Event()

    def begin(self) -> None:
        """Enter that the train loops have begun."""
        self._began = True
        self.last_progress = time.monotonic()

    # --- what ranks say -------------------------------------------------------------------

    def report(self, rank: int, index: int, report: Report) -> list[Step]:
        """Enter a report; return the steps that are complete now."""
        if self._closed:
            return []
        now = self._last_report[rank] = self.last_progress = time.monotonic()
        self._highest = max(self._highest, index)
        self._end_upload(rank, index)
        try:
            steps = self._board.add(rank, index, report, now)
        except ReportMismatchError as error:
            self.fail(rank, WorkerFailure.of(error))
            return []
        if report.upload is not None and not steps and not (self._late or self._told_late):
            loop = asyncio.get_running_loop()
            self._late = loop.call_later(NOTE_AFTER, self._tell_late, index, report.upload.name)
        self._check_counts()
        self._tell_uneven()
        return steps

    async def may_upload(self, index: int) -> None:
        """Wait until a rank may begin the upload of this report, or the attempt is given up.

        While a run is being stopped, only what other ranks upload already is taken.
        """
        if self._draining and index not in {begun for _, begun in self._uploading}:
            await self._given_up.wait()

    def announce_upload(self, rank: int, index: int) -> None:
        """Enter that a rank will upload the checkpoint of a report in the background."""
        self._announced.add((rank, index))

    def begin_upload(self, rank: int, index: int, name: str) -> UploadPlace:
        """Enter that a rank is about to upload the checkpoint of a report under this name."""
        if self._closed:
            return UploadPlace(refusal="the run has given up this group of workers")
        self._highest = max(self._highest, index)
        self.last_progress = time.monotonic()
        # A process that is cut off from the cluster may still write to the folder of that name.
        folder = f"{name}_attempt_{self.number}" if name in self._unsafe_names else name
        self._uploading[rank, index] = _Uploading(folder, time.monotonic())
        return UploadPlace(folder)

    def upload_failed(self, rank: int, index: int, failure: WorkerFailure | None) -> None:
        """Enter that an upload has ended in vain; with a failure, the rank has failed by it."""
        self.last_progress = time.monotonic()
        self._end_upload(rank, index)
        if failure is not None:
            # Those behind it are not begun.
            self._announced = {upload for upload in self._announced if upload[0] != rank}
            if not self._closed:
                self.fail(rank, failure)

    async def join(self, rank: int, number: int, call: str, value: bytes) -> CollectiveOutcome:
        """Wait in a collective call for the other ranks."""
        self.last_progress = time.monotonic()
        return await self._rendezvous.join(rank, number, call, value)

    def finish(self, rank: int, return_value: bytes) -> list[Step]:
        """Enter that the train loop of a rank returned this value, pickled.

        Returns:
            The steps that are complete by that.
        """
        if self._closed:
            return []
        self.last_progress = time.monotonic()
        self.returned.add(rank)
        self.first_return.set()
        self.stalls.look()
        steps = self._board.returned(rank)
        if rank == 0:
            self.return_value = return_value
        self._check_counts()
        self._tell_uneven()
        self._rendezvous.leave(rank, "returned from its train loop")
        self._check_ended()
        return steps

    def fail(self, rank: int, failure: WorkerFailure) -> None:
        """Enter that a rank failed; its first failure counts."""
        if self._began and not self.failures:
            self._activities = self._look_around()
        self.failures.setdefault(rank, failure)
        self._uploads_ended.set()  # who waits for them looks again
        self._rendezvous.leave(rank, f"failed ({failure.summary.splitlines()[0]})")
        self.over.set()
        self._check_ended()

    def lose(self, rank: int, failure: WorkerFailure) -> None:
        """Enter that the process of a rank is gone, or could not begin its train loop."""
        self._lost.add(rank)
        self.fail(rank, failure)

    def end(self) -> None:
        """End it although its ranks run."""
        self.over.set()

    async def drain(self) -> None:
        """Wait until the uploads that have begun have ended; others may not begin."""
        self._draining = True
        while self._uploading and not self._closed and not self.failures:
            self._uploads_ended.clear()
            await self._uploads_ended.wait()

    async def settle(self) -> None:
        """After a failure, wait for uploads that make a step complete which every rank has made."""
        while not self._closed and self._board.completes_with(self._coming()):
            self._uploads_ended.clear()
            await self._uploads_ended.wait()

    def _coming(self) -> set[tuple[int, int]]:
        """Reports that come as soon as an upload has ended, by rank and index."""
        begun = self._announced | self._uploading.keys()
        return {(rank, index) for rank, index in begun if rank not in self._lost}

    def _end_upload(self, rank: int, index: int) -> None:
        self._uploading.pop((rank, index), None)
        self._announced.discard((rank, index))
        self._uploads_ended.set()

    # --- what has become of it --------------------------------------------------------------

    def close(self) -> list[Step]:
        """Take no more reports: what was reported by now is what the attempt has achieved.

        Returns:
            The steps of it that need nothing more.
        """
        steps = [] if self._closed else self._board.close(time.monotonic())
        self._tell_uneven()
        self._closed = True
        self._given_up.set()
        self._recording.set()
        self._uploads_ended.set()
        self.questions.close()
        if self._late is not None:
            self._late.cancel()
        return steps

    @property
    def running(self) -> list[int]:
        """The ranks of which no end is known."""
        ended = self.returned | self.failures.keys()
        return [rank for rank in range(self.world_size) if rank not in ended]

    @property
    def can_resize(self) -> bool:
        """Whether all its ranks run, so that a larger group could go on in their place."""
        return not (self._closed or self.failures or self.returned or self.over.is_set())

    @property
    def next_number(self) -> int:
        """A number that no report of this attempt has."""
        return self.first_number + self._highest + 1

    def unfinished_uploads(self) -> set[str]:
        """Names of checkpoints that ranks whose processes may live may be writing."""
        ended = self.returned | self._lost
        return {upload.folder for (rank, _), upload in self._uploading.items() if rank not in ended}

    def recorded(self, index: int) -> None:
        """Enter that the step of this index is in the storage, and all before it."""
        self._recorded = index + 1
        event, self._recording = self._recording, asyncio.Event()
        event.set()

    async def until_recorded(self, count: int, timeout: float | None) -> list[int]:
        """Wait until the first ``count`` reports are in the storage, or for so many seconds.

        Returns:
            The ranks that have not made these reports, if time ran out.
        """
        deadline = None if not timeout else time.monotonic() + timeout
        while self._recorded < count and not self._closed:
            left = None if deadline is None else deadline - time.monotonic()
            try:
                await asyncio.wait_for(self._recording.wait(), left)
            except asyncio.TimeoutError:
                return self._board.missing(count - 1)
        return []

    def activities(self) -> dict[int, str]:
        """What ranks did, as far as is known, when another one failed; without those that ended."""
        ended = self.returned | self.failures.keys()
        return {rank: doing for rank, doing in self._activities.items() if rank not in ended}

    def _look_around(self) -> dict[int, str]:
        uploads = {rank: upload for (rank, _), upload in self._uploading.items()}
        return {
            rank: self._activity(rank, uploads.get(rank))
            for rank in range(self.world_size)
            if rank not in self.returned
        }

    def _activity(self, rank: int, upload: _Uploading | None) -> str:
        now = time.monotonic()
        waiting = self._rendezvous.waiting(rank)
        if waiting is not None:
            call, seconds, missing = waiting
            return f"waited in {call} for {listed(missing)}, {seconds:.1f} s by then"
        if upload is not None:
            seconds = now - upload.since
            return f"uploaded the checkpoint {upload.folder!r}, {seconds:.1f} s by then"
        count = self._board.count(rank)
        if count == 0:
            return "was in its train loop and had not reported"
        seconds = now - self._last_report[rank]
        return f"was in its train loop, {seconds:.1f} s after report number {count - 1}"

    def _tell_late(self, index: int, name: str) -> None:
        """Tell, once, that a checkpoint has not become complete for long."""
        self._late = None
        absent = self._board.absent(index)
        if not absent or self._closed:
            return
        self._told_late = True
        self._tell(
            f"The checkpoint {name!r} is not complete: for {NOTE_AFTER:g} s it has waited for "
            f"{listed(absent)} to make report number {index}, counted from 0. A checkpoint needs "
            f"that report of every rank; ranks without files of their own report with "
            f"checkpoint=None."
        )

    def _tell_uneven(self) -> None:
        if self._board.uneven is not None and not self._told_uneven:
            self._told_uneven = True
            self._tell(self._board.uneven)

    def _check_counts(self) -> None:
        mismatch = None if self.failures else self._board.mismatch()
        if mismatch is not None:
            rank, reason = mismatch
            self.fail(rank, WorkerFailure.of(ReportMismatchError(reason)))

    def _check_ended(self) -> None:
        if len(self.returned | self.failures.keys()) == self.world_size:
            self.over.set()
            self.all_ended.set()
