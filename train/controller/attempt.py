"""One attempt: a worker group from the start of its train loops until its outcome is clear.

It collects and judges the reports of ranks, and their hangs; the controller starts and ends the
processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.train.base.exceptions import AttemptOverError, WorkerFailure, WorkerHungError
from miniray.train.base.ranks import listed
from miniray.train.base.reports import ReportBoard, ReportMismatchError
from miniray.train.controller.rendezvous import NOTE_AFTER, GroupKeys, Rendezvous
from miniray.train.controller.waits import within

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from miniray.train.base.reports import Report, Step
    from miniray.train.controller.recorder import RunRecorder
    from miniray.train.controller.waits import BlockingWork
    from miniray.train.storage.storage import CheckpointRecord, RunStorage
    from miniray.train.worker.controller_client import CollectiveOutcome

#: Seconds after which a rank counts as waiting for a key of another one.
KEYS_PATIENCE = 2.0


class _Uploading(NamedTuple):
    """An upload that a rank has begun."""

    folder: str
    since: float


@dataclasses.dataclass(eq=False)
class Attempt:
    """What the ranks of one worker group have reported, returned and raised.

    Args:
        number: 1 for the first attempt of a run.
        steps: Gets what every rank has reported, to be recorded.
        tell: Called with a sentence for the user.
        collective_timeout: Seconds that ranks wait for each other in a collective; 0: no limit.
        unsafe_names: Checkpoints that ranks of earlier attempts may still be writing.

    Attributes:
        first_number: Number of its first report among all reports of the run.
        return_value: What that of rank 0 returned, pickled.
        over: Set when every rank has returned, one has failed, or the attempt is to end.
        all_ended: Set when no rank runs any more.
        last_progress: When a rank has last reported or made another call, by time.monotonic().
    """

    number: int
    world_size: int
    recorder: RunRecorder
    work: BlockingWork
    steps: asyncio.Queue[Step]
    tell: Callable[[str], None]
    collective_timeout: float = 0
    unsafe_names: Collection[str] = ()

    def __post_init__(self) -> None:
        self.first_number = self.recorder.next_number
        self.failures: dict[int, WorkerFailure] = {}
        self.returned: set[int] = set()
        self.return_value = b""
        self.keys = GroupKeys()
        self.over = asyncio.Event()
        self.all_ended = asyncio.Event()
        self.last_progress = time.monotonic()
        self._activities: dict[int, str] = {}
        self._began = False
        self._closed = False
        self._board = ReportBoard(self.world_size)
        self._warned_uneven = False
        #: The timer for the first checkpoint that was not complete at once.
        self._late: asyncio.TimerHandle | None = None
        self._warned_late = False
        self._rendezvous = Rendezvous(self.world_size, self.collective_timeout, self.tell)
        #: Ranks that wait for a key which another one sets.
        self._awaiting_keys: set[int] = set()
        self._uploading: dict[tuple[int, int], _Uploading] = {}
        #: Uploads in the background, by rank and index, until they have ended.
        self._announced: set[tuple[int, int]] = set()
        #: Ranks whose processes are gone.
        self._lost: set[int] = set()
        self._last_report = [0.0] * self.world_size
        self._draining = False
        self._highest = -1  # index of the last report that a rank has begun
        self._recorded = 0
        #: Set, and replaced by a new one, at each change that a call may wait for.
        self._changed = asyncio.Event()

    def begin(self) -> None:
        self._began = True
        self.last_progress = time.monotonic()

    # --- the calls of ranks -----------------------------------------------------------------

    async def report(self, rank: int, index: int, report: Report) -> None:
        """Enter a report; reports after the attempt was closed are dropped."""
        if self._closed:
            return
        now = self._last_report[rank] = self.last_progress = time.monotonic()
        self._highest = max(self._highest, index)
        self._end_upload(rank, index)
        try:
            steps = self._board.add(rank, index, report, now)
        except ReportMismatchError as error:
            self.fail(rank, WorkerFailure.of(error))
            return
        if report.upload is not None and not steps and not (self._late or self._warned_late):
            loop = asyncio.get_running_loop()
            self._late = loop.call_later(NOTE_AFTER, self._tell_late, index, report.upload.name)
        self._check_counts()
        self._complete(steps)

    async def announce_upload(self, rank: int, index: int) -> None:
        """Enter that a rank will upload the checkpoint of a report in the background."""
        self._announced.add((rank, index))

    async def begin_upload(self, rank: int, index: int, name: str, in_place: bool) -> str:
        """Enter that a rank is about to upload the checkpoint of a report; return its folder.

        What an earlier attempt or run has under this name is taken away before, without its files
        if those of the new one are in their folder already (``in_place``). While a run is being
        stopped, only uploads of reports begin that other ranks upload already.

        Raises:
            AttemptOverError: The attempt is over.
        """
        if self._draining and index not in {begun for _, begun in self._uploading}:
            await self._until(lambda: False)
        if self._closed:
            raise AttemptOverError(
                f"Rank {rank} of attempt {self.number} may not upload checkpoint {name!r}: the run "
                f"has given up this group of workers."
            )
        self._highest = max(self._highest, index)
        self.last_progress = time.monotonic()
        # A process that is cut off from the cluster may still write to the folder of that name.
        folder = f"{name}_attempt_{self.number}" if name in self.unsafe_names else name
        self._uploading[rank, index] = _Uploading(folder, time.monotonic())
        self.recorder.begin_upload(folder)
        if self.recorder.is_taken(folder):
            make_way = functools.partial(self.recorder.make_way, in_place=in_place)
            await self.work.do(make_way, folder)
        return folder

    async def upload_failed(self, rank: int, index: int, failure: WorkerFailure | None) -> None:
        """Enter that an upload has failed; with a failure, the rank has failed by it."""
        self.last_progress = time.monotonic()
        self._end_upload(rank, index)
        if failure is not None:
            # Those behind it are not begun.
            self._announced = {upload for upload in self._announced if upload[0] != rank}
            if not self._closed:
                self.fail(rank, failure)

    async def reported_checkpoints(
        self, rank: int, count: int, timeout: float | None
    ) -> tuple[list[CheckpointRecord], list[int]]:
        """Return the run's checkpoints once the first ``count`` reports are in the storage.

        Without a timeout in seconds, the limit of collective calls holds.

        Returns:
            The checkpoints, and the ranks that have not made these reports if time ran out.
        """
        limit = timeout if timeout is not None else self.collective_timeout or None
        in_time = await within(limit, self._until(lambda: self._recorded >= count))
        return self.recorder.checkpoints, [] if in_time else self._board.missing(count - 1)

    async def join(self, rank: int, number: int, call: str, value: bytes) -> CollectiveOutcome:
        """Wait in a collective call for the other ranks; see ``Rendezvous.join``."""
        self.last_progress = time.monotonic()
        return await self._rendezvous.join(rank, number, call, value)

    async def use_keys(self, rank: int, operation: str, *arguments: Any) -> Any:
        """Do something with the keys of the attempt; the operations are those of ``GroupKeys``.

        Raises:
            CollectiveError: The rank waits for a key that no rank is left to set.
        """
        call = asyncio.ensure_future(getattr(self.keys, operation)(*arguments))
        try:
            await asyncio.wait({call}, timeout=KEYS_PATIENCE)
            if not call.done():
                self._awaiting_keys.add(rank)
                self._check_keys()
            return await call
        finally:
            call.cancel()
            self._awaiting_keys.discard(rank)

    # --- how ranks end ----------------------------------------------------------------------

    def finish(self, rank: int, return_value: bytes) -> None:
        """Enter that the train loop of a rank returned this value, pickled."""
        if self._closed:
            return
        self.last_progress = time.monotonic()
        self.returned.add(rank)
        steps = self._board.returned(rank)
        if rank == 0:
            self.return_value = return_value
        self._check_counts()
        self._complete(steps)
        self._rendezvous.leave(rank, "returned from its train loop")
        self._check_keys()
        self._check_ended()

    def fail(self, rank: int, failure: WorkerFailure) -> None:
        """Enter that a rank failed; its first failure counts."""
        if self._began and not self.failures:
            self._activities = self._look_around()
        self.failures.setdefault(rank, failure)
        self._change()
        self._rendezvous.leave(rank, f"failed ({failure.summary.splitlines()[0]})")
        self.over.set()
        self._check_ended()

    def lose(self, rank: int, failure: WorkerFailure) -> None:
        """Enter that the process of a rank is gone, or could not begin its train loop."""
        self._lost.add(rank)
        self.fail(rank, failure)

    async def drain(self) -> None:
        """Wait until the uploads that have begun have ended; others may not begin."""
        self._draining = True
        await self._until(lambda: not self._uploading or bool(self.failures))

    async def settle(self) -> None:
        """Wait, after a failure, for uploads that complete a step which every rank has made."""
        await self._until(lambda: not self._board.completes_with(self._coming()))

    def _coming(self) -> set[tuple[int, int]]:
        """Return reports that come as soon as an upload has ended, by rank and index."""
        begun = self._announced | self._uploading.keys()
        return {(rank, index) for rank, index in begun if rank not in self._lost}

    def _end_upload(self, rank: int, index: int) -> None:
        self._uploading.pop((rank, index), None)
        self._announced.discard((rank, index))
        self._change()

    async def _until(self, done: Callable[[], bool]) -> None:
        """Wait until this is so, or the attempt is closed."""
        while not (self._closed or done()):
            await self._changed.wait()

    def _change(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    # --- what has become of it --------------------------------------------------------------

    def close(self) -> None:
        """Take no more reports: the attempt has achieved what was reported by now."""
        self._complete([] if self._closed else self._board.close(time.monotonic()))
        self._closed = True
        self._change()
        if self._late is not None:
            self._late.cancel()

    def replace(self) -> None:
        """Fail what its ranks wait for, as others run in their place."""
        why = "Other workers run in place of these."
        self.keys.close(why)
        self._rendezvous.close(why)

    @property
    def running(self) -> list[int]:
        """The ranks that have neither returned nor failed."""
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
        """Return checkpoints that ranks whose processes may live may be writing."""
        ended = self.returned | self._lost
        return {upload.folder for (rank, _), upload in self._uploading.items() if rank not in ended}

    def lags(self) -> dict[str, list[Any]]:
        """Return what ``ReportBoard.lags`` does, with numbers of reports of the run."""
        return self._board.lags(self.first_number)

    def ranks(self) -> list[dict[str, Any]]:
        """Return how far each rank is, as JSON values, in order of rank."""
        counts = [self._board.count(rank) for rank in range(self.world_size)]
        doing = {} if self._closed else self._look_around()
        most, clock = max(counts), time.time() - time.monotonic()
        return [
            {
                "rank": rank,
                "state": "FAILED"
                if rank in self.failures
                else "RETURNED"
                if rank in self.returned
                else "RUNNING",
                "reports": count,
                "behind": most - count,
                "last_report": clock + self._last_report[rank] if count else None,
                "doing": doing.get(rank, ""),
            }
            for rank, count in enumerate(counts)
        ]

    def recorded(self, index: int) -> None:
        """Enter that the step of this index is in the storage, and all before it."""
        self._recorded = index + 1
        self._change()

    def activities(self) -> dict[int, str]:
        """Return what ranks that had not ended did, where it is known, when another one failed."""
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
        """Warn the user, once, of a checkpoint that stays incomplete."""
        self._late = None
        absent = self._board.absent(index)
        if not absent or self._closed:
            return
        self._warned_late = True
        self.tell(
            f"The checkpoint {name!r} is not complete: for {NOTE_AFTER:g} s it has waited for "
            f"{listed(absent)} to make report number {index}, counted from 0. A checkpoint needs "
            f"that report of every rank; ranks without files of their own report with "
            f"checkpoint=None."
        )

    def _complete(self, steps: Iterable[Step]) -> None:
        """Queue complete steps to be recorded; warn once of ranks that report unevenly."""
        for step in steps:
            self.steps.put_nowait(step)
        if self._board.uneven is not None and not self._warned_uneven:
            self._warned_uneven = True
            self.tell(self._board.uneven)

    def _check_keys(self) -> None:
        """Fail the waits for keys when all ranks that run wait for them, and others are gone."""
        if self.returned and self._awaiting_keys.issuperset(self.running):
            have = "has" if len(self.returned) == 1 else "have"
            self.keys.close(
                f"{listed(self.returned).capitalize()} {have} returned from the train loop, while "
                f"{listed(self.running)} waited for the others in a collective call. All ranks "
                f"have to make the same collective calls: give each of them the same number of "
                f"steps."
            )

    def _check_counts(self) -> None:
        mismatch = None if self.failures else self._board.mismatch()
        if mismatch is not None:
            rank, reason = mismatch
            self.fail(rank, WorkerFailure.of(ReportMismatchError(reason)))

    def _check_ended(self) -> None:
        if len(self.returned | self.failures.keys()) == self.world_size:
            self.over.set()
            self.all_ended.set()


#: An error shows the stacks of at most this many ranks; the file has all.
MOST_STACKS = 8

#: Seconds that writing the stacks may take.
WRITE_TIMEOUT = 10.0


async def watch_for_hang(
    attempt: Attempt,
    limit: float,
    look: Callable[[Collection[int]], dict[int, str]],
    storage: RunStorage,
) -> None:
    """Fail the ranks of an attempt when it makes no progress for ``limit`` seconds.

    Args:
        look: Returns the stacks of ranks as text; blocks.
        storage: Where the stacks are written.
    """
    while (left := attempt.last_progress + limit - time.monotonic()) > 0:  # noqa: ASYNC110 - not an event
        await asyncio.sleep(left)
    found = await asyncio.to_thread(look, attempt.running)
    # A rank that ended meanwhile was not hung, and says itself how it ended.
    stacks = {rank: text for rank, text in sorted(found.items()) if rank in attempt.running}
    if not stacks:
        return
    where = await _keep(stacks, f"stacks_attempt_{attempt.number}.txt", storage)
    message = (
        f"No rank has reported, uploaded or met the others for {limit:g} s "
        f"(FailureConfig(hang_timeout_s)), while {listed(stacks)} ran. {where}"
    )
    for number, (rank, text) in enumerate(stacks.items()):
        failure = WorkerFailure.of(WorkerHungError(message))
        shown = text.partition("\n\n")[0] if number < MOST_STACKS else ""  # the main thread's
        attempt.fail(rank, dataclasses.replace(failure, traceback=shown))


async def _keep(stacks: dict[int, str], name: str, storage: RunStorage) -> str:
    """Write all stacks into one file; return a sentence that says where they are."""
    text = "\n".join(f"=== rank {rank} ===\n{each}" for rank, each in stacks.items())
    # The storage may be what hangs.
    writing = asyncio.ensure_future(asyncio.to_thread(storage.files.write, name, text))
    await asyncio.wait({writing}, timeout=WRITE_TIMEOUT)
    if not writing.done():
        writing.cancel()
        return f"They could not be written to {storage.path} within {WRITE_TIMEOUT:g} s."
    if (error := writing.exception()) is not None:
        return f"They could not be written to {storage.path}: {error}"
    return f"All stacks are in {storage.path}/{name}."
