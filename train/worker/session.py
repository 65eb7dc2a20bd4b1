"""The session of a rank: where its reports go, and its setup.

A report is sent and not waited for. It waits only for the upload of the rank's
own files, and when the rank is far ahead of the controller.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import queue
import shutil
import threading
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from miniray.common.exception_transport import add_note
from miniray.common.series import COUNTED
from miniray.common.spans import SPANS
from miniray.train.base.exceptions import CollectiveTimeoutError, WorkerFailure
from miniray.train.base.ranks import listed
from miniray.train.base.reports import Report, plain_metrics
from miniray.train.storage.checkpoint import Checkpoint, CheckpointUploadMode, ReportedCheckpoint
from miniray.train.storage.filesystem import is_local, protocols
from miniray.train.storage.storage import check_folder_name, default_checkpoint_name
from miniray.train.worker.controller_client import rank_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from miniray.train.base.ranks import Ranks
    from miniray.train.base.reports import Upload
    from miniray.train.storage.storage import RunStorage
    from miniray.train.worker.controller_client import Carrier

logger = logging.getLogger(__name__)


#: So many reports of a rank may be on their way before it waits for the controller.
REPORT_WINDOW = 1000


#: A train loop that is this many checkpoints ahead of the storage waits: each is on local disk.
MAX_PENDING = 8


class BackgroundUploads:
    """The uploads of one rank. After one has failed, those behind it are not begun.

    A process does not wait for them when it ends: call ``wait`` before that.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._slots = threading.BoundedSemaphore(MAX_PENDING)
        #: None ends the thread.
        self._pending: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = self._cancelled = False
        self._failure: BaseException | None = None

    def submit(self, upload: Callable[[], None]) -> None:
        """Begin an upload as soon as those before it have ended; wait if too many are pending.

        Raises:
            RuntimeError: No more are taken.
        """
        if self._closed:
            raise RuntimeError("No checkpoint is uploaded any more: the train loop is over.")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="train-upload", daemon=True)
            self._thread.start()
        self._slots.acquire()
        self._pending.put(upload)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Take no more, wait until all have ended; raise why one failed, if one did."""
        self.close(wait=True, cancel=False)
        self.raise_failure()

    def close(self, *, wait: bool = False, cancel: bool = True) -> None:
        """Take no more of them; those that go on are waited for if so wished.

        Args:
            wait: Return when they have ended.
            cancel: Only the one that runs goes on.
        """
        self._closed = True
        self._cancelled = self._cancelled or cancel
        if self._thread is not None:
            self._pending.put(None)
            if wait:
                self._thread.join()

    def _run(self) -> None:
        while (upload := self._pending.get()) is not None:
            self._end(upload)
            self._slots.release()

    def _end(self, upload: Callable[[], None]) -> None:
        try:
            if self._failure is None and not self._cancelled:
                upload()
        except BaseException as error:  # noqa: BLE001 - raised in the train loop's thread
            self._failure = error


@dataclasses.dataclass(frozen=True)
class SessionSetup:
    """What the controller gives a rank for one attempt.

    Attributes:
        token: Proves that the run is still that of this driver.
        first_number: Number of the first report among all reports of the run.
        checkpoint: Where to begin from; None at the beginning.
        pools: The actors of datasets' pools that all ranks use, as ``Shards`` has them.
    """

    storage: RunStorage
    token: str
    attempt: int
    first_number: int
    checkpoint: Checkpoint | None
    pools: Mapping[str, Sequence[Sequence[Any]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CheckpointReport:
    """A checkpoint and how it is to be stored."""

    checkpoint: Checkpoint
    name: str | None
    mode: CheckpointUploadMode
    delete_local: bool  # not heeded with NO_UPLOAD, where the local files are the checkpoint
    upload_fn: Callable[[Checkpoint, str], Checkpoint] | None

    def check(self, storage: RunStorage) -> None:
        """Raise TypeError or ValueError if ``report()`` was given what can't be used."""
        if not isinstance(self.checkpoint, Checkpoint):
            raise TypeError(
                f"report() got the checkpoint {self.checkpoint!r}. "
                f"Pass miniray.train.Checkpoint.from_directory(path)."
            )
        if self.name is not None:
            check_folder_name("report(checkpoint_dir_name", self.name)
        if self.upload_fn is not None and not callable(self.upload_fn):
            raise TypeError(
                f"report(checkpoint_upload_fn={self.upload_fn!r}) must be a function of a "
                f"checkpoint and the name of its folder."
            )
        if self.delete_local and self.mode is not CheckpointUploadMode.NO_UPLOAD:
            _check_deletable(storage, self.checkpoint)


class RankSession:
    """A rank's side of an attempt. Thread-safe."""

    def __init__(self, setup: SessionSetup, ranks: Ranks, carrier: Carrier) -> None:
        self.storage = setup.storage
        self.ranks = ranks
        self._setup = setup
        self._controller = rank_calls(carrier, setup.attempt, ranks.world_rank)
        #: Reentrant, so that a signal handler that reports gets an error and does not deadlock.
        self._lock = threading.RLock()
        self._reporting = False
        self.blocked = 0.0  # seconds that the train loop has spent in report()
        self._last_report = 0.0
        self._tags = (("run", setup.storage.name),)
        self._reported = 0
        #: Why the upload of a report has failed, and its metrics, until the rank repeats it.
        self._failed: tuple[BaseException, str] | None = None
        #: The newest checkpoint: where the attempt began, or what this rank has uploaded since.
        self.checkpoint = setup.checkpoint
        self._checkpoint_index = -1  # of its report
        self._uploads = BackgroundUploads()
        self._sending = threading.Lock()
        self._unconfirmed: collections.deque[Callable[[], None]] = collections.deque()
        self._collectives = itertools.count()

    def report(self, metrics: Mapping[str, Any], given: CheckpointReport | None) -> None:
        """Upload the checkpoint if there is one, or have it uploaded, then send the report."""
        plain = plain_metrics(metrics)
        with self._lock:
            if self._reporting:
                raise RuntimeError(
                    "report() was called while another report() of this thread has not returned, "
                    "as by a signal handler during the upload of a checkpoint. Have the handler "
                    "set a flag, and report in the train loop when it is set."
                )
            self._reporting = True
            began = time.perf_counter()
            if self._last_report:
                passed = began - self._last_report
                COUNTED.took("train_report_interval_seconds", passed, self._tags)
            self._last_report = began
            try:
                with SPANS.timed("report", f"report {self._reported}"):
                    self._report(plain, given)
            finally:
                self._reporting = False
                self.blocked += time.perf_counter() - began

    def _report(self, plain: dict[str, Any], given: CheckpointReport | None) -> None:
        self._uploads.raise_failure()
        if self._failed is not None and (given is None or self._failed[1] != repr(plain)):
            raise self._failed[0]  # without that report, ranks would be matched by wrong numbers
        self._failed = None
        index = self._reported
        if given is None:
            self._send(index, Report(plain))
        elif given.mode is CheckpointUploadMode.ASYNC:
            self._controller.announce_upload(index)
            self._uploads.submit(functools.partial(self._upload_later, index, plain, given))
        else:
            self._upload_now(index, plain, given)
        self._reported += 1

    def _upload_now(self, index: int, plain: dict[str, Any], given: CheckpointReport) -> None:
        try:
            upload = self._upload(index, given)
        except BaseException as error:
            self._controller.upload_failed(index, None)
            self._failed = error, repr(plain)
            raise
        self._send(index, Report(plain, upload))

    def finish(self) -> None:
        """Wait until all uploads have ended and the controller has every report."""
        if self._failed is not None:
            raise self._failed[0]
        self._uploads.wait()
        self.confirm_reports()

    def confirm_reports(self) -> None:
        """Wait until the controller has every report that was sent."""
        with self._sending:
            while self._unconfirmed:
                self._unconfirmed.popleft()()

    def close(self, *, wait: bool = False, upload_rest: bool = False) -> None:
        """Take no more uploads: the train loop has failed.

        Args:
            wait: Wait for those that are to end.
            upload_rest: Upload what has been reported. Else only the upload that runs goes on.
        """
        self._uploads.close(wait=wait, cancel=not upload_rest)

    def reported_checkpoints(self, timeout: float | None) -> list[ReportedCheckpoint]:
        """Return the complete checkpoints, once this rank's reports so far are in the storage."""
        found, missing = self._controller.reported_checkpoints(self._reported, timeout)()
        self._uploads.raise_failure()
        if missing and timeout is None:
            raise CollectiveTimeoutError(
                f"get_all_reported_checkpoints() waited for reports that {listed(missing)} did not "
                f"make. MINIRAY_TRAIN_COLLECTIVE_TIMEOUT sets the limit."
            )
        return [
            ReportedCheckpoint(self.storage.checkpoint(record.name), dict(record.metrics))
            for record in found
        ]

    def _upload(self, index: int, given: CheckpointReport) -> Upload:
        if given.mode is CheckpointUploadMode.NO_UPLOAD:
            name = PurePosixPath(given.checkpoint.path).name
        else:
            name = given.name or default_checkpoint_name(self._setup.first_number + index)
        in_place = given.mode is CheckpointUploadMode.NO_UPLOAD or _lies_in(
            given.checkpoint, self.storage.checkpoint(name)
        )
        folder = self._controller.begin_upload(index, name, in_place)()
        self.storage.require_owner(self._setup.token)
        if given.mode is CheckpointUploadMode.NO_UPLOAD:
            upload = self.storage.adopt(given.checkpoint)
        elif given.upload_fn is not None:
            self.storage.begin(folder)
            uploaded = given.upload_fn(given.checkpoint, folder)
            if not isinstance(uploaded, Checkpoint):
                raise ValueError(
                    f"checkpoint_upload_fn returned {uploaded!r}. "
                    f"It must return the miniray.train.Checkpoint that it made in the run's folder."
                )
            upload = self.storage.adopt(uploaded)
        else:
            with SPANS.timed("upload", name):
                upload = self.storage.upload(given.checkpoint, folder)
        stored = self.storage.checkpoint(upload.name)
        with self._sending:
            if index > self._checkpoint_index:
                self._checkpoint_index, self.checkpoint = index, stored
        # With NO_UPLOAD it lies there by itself.
        if given.delete_local and not _lies_in(given.checkpoint, stored):
            _delete(given.checkpoint)
        return upload

    def _upload_later(self, index: int, metrics: dict[str, Any], given: CheckpointReport) -> None:
        """Upload and report, in the thread for uploads."""
        try:
            upload = self._upload(index, given)
        except BaseException as error:  # also sys.exit() in the user's own upload
            note = f"Raised in the background upload of report {index}."
            if isinstance(error, FileNotFoundError):
                note += (
                    " With CheckpointUploadMode.ASYNC the folder has to stay after report(): it "
                    "can't be in `with tempfile.TemporaryDirectory()`. It is deleted after the "
                    "upload."
                )
            add_note(error, note)
            self._controller.upload_failed(index, WorkerFailure.of(error))
            raise
        self._send(index, Report(metrics, upload))

    def _send(self, index: int, report: Report) -> None:
        with self._sending:
            self._unconfirmed.append(self._controller.report(index, report))
            if len(self._unconfirmed) > REPORT_WINDOW:
                self._unconfirmed.popleft()()

    def join(self, call: str, value: bytes) -> bytes:
        """Wait in a collective call for the other ranks; return rank 0's value, pickled."""
        outcome = self._controller.join(next(self._collectives), call, value)()
        if outcome.error is not None:
            raise outcome.error
        return outcome.value


def _check_deletable(storage: RunStorage, checkpoint: Checkpoint) -> None:
    """Raise ValueError if deleting a checkpoint after its upload would delete what must stay."""
    if _lies_in(storage.checkpoint(""), checkpoint):
        raise ValueError(
            f"report(checkpoint={checkpoint!r}, delete_local_checkpoint_after_upload=True) would "
            f"delete the run's folder {storage.path}, which is inside the checkpoint. Write the "
            f"checkpoint to a temporary folder, or do not have it deleted."
        )


def _lies_in(inner: Checkpoint, outer: Checkpoint) -> bool:
    """Return whether, by their names, one checkpoint lies in the folder of another."""
    one, other = inner.fsspec_filesystem, outer.fsspec_filesystem
    if is_local(one) and is_local(other):
        return Path(inner.path).resolve().is_relative_to(Path(outer.path).resolve())
    # The same store may be reached by another client, such as one of pyarrow.
    if not protocols(one) & protocols(other):
        return False
    folder = PurePosixPath("/", outer.path.strip("/"))
    return PurePosixPath("/", inner.path.strip("/")).is_relative_to(folder)


def _delete(checkpoint: Checkpoint) -> None:
    """Delete files that were uploaded; log what can't be deleted, and leave it."""
    try:
        if is_local(checkpoint.fsspec_filesystem):
            shutil.rmtree(checkpoint.path)
        else:
            checkpoint.fsspec_filesystem.rm(checkpoint.path, recursive=True)
    except Exception:  # clients of stores raise what they like
        logger.warning("%r was uploaded and can't be deleted.", checkpoint, exc_info=True)
