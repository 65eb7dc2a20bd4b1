"""The functions of a train loop: ``report``, ``get_checkpoint``, ``get_context``.

These names work only inside a train loop, in the process of a rank.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

from miniray.train.storage.checkpoint import (
    Checkpoint,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    ReportedCheckpoint,
    member,
)
from miniray.train.worker.session import CheckpointReport, RankSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from miniray.train.storage.storage import RunStorage

_session: RankSession | None = None
#: The thread that runs the train loop of the session.
_thread: int | None = None
#: Held by the thread that has a run in local mode.
_local = threading.RLock()


def set_session(session: RankSession | None) -> None:
    """Make this the session of the process; None when its train loop is over."""
    global _session, _thread
    _session = session
    _thread = None if session is None else threading.get_ident()


@contextlib.contextmanager
def process_of_a_run(name: str) -> Iterator[None]:
    """Take this process for a run in local mode, from the thread that runs its train loop.

    A train loop that starts such a run itself has its own session again afterwards.

    Raises:
        RuntimeError: Another thread runs a train loop. There is one session for all threads of a
            process, as a train loop may report from threads of its own.
    """
    global _session, _thread
    if _thread not in (None, threading.get_ident()) or not _local.acquire(blocking=False):
        raise RuntimeError(
            f"Run {name} can't begin in this process, where another thread runs a train loop. "
            f"In local mode, call fit() for one run after the other, or give runs that go on "
            f"at the same time workers: ScalingConfig(num_workers=1)."
        )
    earlier = _session, _thread
    try:
        yield
    finally:
        _session, _thread = earlier
        _local.release()


def current_session(name: str) -> RankSession:
    """Return the session of this process, for the public function of this name."""
    if _session is None:
        raise RuntimeError(
            f"miniray.train.{name}() works only inside a train loop, in a process that a trainer "
            f"started. Call it in the function given as train_loop_per_worker."
        )
    return _session


class TrainContext:
    """The place of this process in the run. Get one with ``get_context()``."""

    def __init__(self, session: RankSession) -> None:
        self._session = session

    def get_experiment_name(self) -> str:
        """Name of the run."""
        return self._session.storage.name

    def get_world_size(self) -> int:
        """Return the number of workers of the run."""
        return self._session.ranks.world_size

    def get_world_rank(self) -> int:
        """Return the rank of this worker among all, from 0."""
        return self._session.ranks.world_rank

    def get_local_rank(self) -> int:
        """Return the rank of this worker among those of its node, from 0."""
        return self._session.ranks.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of workers on this node."""
        return self._session.ranks.local_world_size

    def get_node_rank(self) -> int:
        """Return the rank of this node among those of the run, from 0."""
        return self._session.ranks.node_rank

    def get_storage(self) -> RunStorage:
        """Return the run's folder in the storage."""
        return self._session.storage

    # Names of Ray's that have no meaning for a run, and raise as they do there.

    def get_metadata(self) -> dict[str, Any]:
        """Refuse: pass values in ``train_loop_config``, or with a checkpoint."""
        raise DeprecationWarning(
            "TrainContext.get_metadata() is not supported. Pass values in train_loop_config, or "
            "keep them with a checkpoint: Checkpoint.set_metadata()."
        )

    def _no_trials(self, name: str) -> Any:
        raise DeprecationWarning(
            f"TrainContext.{name}() belongs to hyperparameter search, which is not part of a "
            f"training run. get_experiment_name() names the run, get_storage() its folder."
        )

    get_trial_name = functools.partialmethod(_no_trials, "get_trial_name")
    get_trial_id = functools.partialmethod(_no_trials, "get_trial_id")
    get_trial_resources = functools.partialmethod(_no_trials, "get_trial_resources")
    get_trial_dir = functools.partialmethod(_no_trials, "get_trial_dir")


def get_context() -> TrainContext:
    """Return the place of this process in the run.

    Raises:
        RuntimeError: Called outside a train loop.
    """
    return TrainContext(current_session("get_context"))


def get_checkpoint() -> Checkpoint | None:
    """Return the newest checkpoint: of this run, or of an earlier one that it continues.

    Returns:
        None at the beginning of a new run. After a restart, every rank gets the same.

    Raises:
        RuntimeError: Called outside a train loop.
    """
    return current_session("get_checkpoint").checkpoint


def report(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
    validation: bool = False,
) -> None:
    """Report metrics, and a checkpoint if there is one.

    Reports of the ranks are matched by their order. The call does not wait for other ranks:
    without a checkpoint it returns at once. A checkpoint is complete when every rank has made
    this report, with files of its own or with ``checkpoint=None``. Files of all ranks go into one
    folder; of equal names the one written last stays. Of the metrics, those of rank 0 are kept:
    those that come with a checkpoint once it is complete, others also if the run fails.

    A report whose upload has raised can be repeated with the same metrics, before all others. What
    raises before an upload has begun counts as not made.

    Args:
        metrics: Numbers, strings, lists and dictionaries by name.
        checkpoint: A folder of files to keep.
        checkpoint_dir_name: Name of the checkpoint's folder in the run's folder, the same on all
            ranks. A checkpoint that has this name from before the workers were started is replaced:
            deleted when the first rank begins its upload. Default: ``checkpoint_`` and a number.
        checkpoint_upload_mode: ``SYNC`` returns after this rank's files are in the storage.
            ``ASYNC`` returns at once; a thread uploads one checkpoint after the other, and the
            folder has to stay until then. A failed upload ends the run, as an exception in the
            train loop does. ``NO_UPLOAD`` takes files that are in a folder of the run's folder
            already: see ``get_context().get_storage()``. What else is in that folder is kept.
        delete_local_checkpoint_after_upload: Delete the folder after. Default: with ``ASYNC``.
        checkpoint_upload_fn: Uploads instead: called with the checkpoint and the name of its
            folder, it returns the checkpoint that it made in the run's folder.
        validation: Not supported.

    Raises:
        RuntimeError: Called outside a train loop.
        TypeError: The metrics are not a dictionary with string keys, or hold what can't be pickled,
            or the checkpoint is none.
        ValueError: The metrics hold a tensor, an argument can't be used, or a checkpoint that these
            workers have reported has the name.
        FileNotFoundError: The checkpoint's folder does not exist.
        Exception: What the upload of an earlier report has raised that was not repeated; of one in
            the background, with a note that says so.
    """
    session = current_session("report")
    refuse_validation("report", validation)
    mode = member(CheckpointUploadMode, "report(checkpoint_upload_mode", checkpoint_upload_mode)
    given = None
    if checkpoint is not None:
        delete = delete_local_checkpoint_after_upload
        if delete is None:
            delete = mode.default_delete_local_checkpoint_after_upload()
        given = CheckpointReport(
            checkpoint, checkpoint_dir_name, mode, delete, checkpoint_upload_fn
        )
        given.check(session.storage)
    session.report(metrics, given)


def refuse_validation(where: str, validation: Any) -> None:
    """Raise ValueError if Ray's validation of checkpoints is requested, in ``where``."""
    if validation:
        raise ValueError(
            f"{where}(validation=...) is not supported. Validate in the train loop, or in a task "
            f"that the train loop starts, and report what it gives."
        )


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | None = None,
) -> list[ReportedCheckpoint]:
    """Return the checkpoints of the run that are kept, the best last.

    Waits until every report that this rank has made is in the storage, which needs the same
    report of the other ranks.

    Args:
        consistency_mode: Both modes mean the same, as checkpoints are not validated later.
        timeout_s: Seconds after which the list is as it is then. Default: the limit of
            collective calls, after which it is an error.

    Raises:
        RuntimeError: Called outside a train loop.
        CollectiveTimeoutError: Other ranks did not make the reports that this one made.
    """
    session = current_session("get_all_reported_checkpoints")
    argument = "get_all_reported_checkpoints(consistency_mode"
    member(CheckpointConsistencyMode, argument, consistency_mode)
    return session.reported_checkpoints(timeout_s)
