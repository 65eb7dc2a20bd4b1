"""What a train loop can ask and say: ``report``, ``get_checkpoint``, ``get_context``.

These names work only inside a train loop, in the process of a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.train.checkpoint import Checkpoint
    from miniray.train.session import Session
    from miniray.train.storage import RunStorage

_session: Session | None = None


def set_session(session: Session | None) -> None:
    """Make this the session of the process; None when its train loop is over."""
    global _session
    _session = session


def current_session(name: str) -> Session:
    """The session of this process, for the public function of this name."""
    if _session is None:
        raise RuntimeError(
            f"miniray.train.{name}() works only inside a train loop, in a process that a trainer "
            f"started. Call it in the function given as train_loop_per_worker."
        )
    return _session


class TrainContext:
    """The place of this process in the run. Get one with ``get_context()``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def get_experiment_name(self) -> str:
        """Name of the run."""
        return self._session.storage.name

    def get_world_size(self) -> int:
        """Number of workers of the run."""
        return self._session.ranks.world_size

    def get_world_rank(self) -> int:
        """Rank of this worker among all, from 0."""
        return self._session.ranks.world_rank

    def get_local_rank(self) -> int:
        """Rank of this worker among those of its node, from 0."""
        return self._session.ranks.local_rank

    def get_local_world_size(self) -> int:
        """Number of workers on this node."""
        return self._session.ranks.local_world_size

    def get_node_rank(self) -> int:
        """Rank of this node among those of the run, from 0."""
        return self._session.ranks.node_rank

    def get_storage(self) -> RunStorage:
        """The run's folder in the storage."""
        return self._session.storage


def get_context() -> TrainContext:
    """The place of this process in the run.

    Raises:
        RuntimeError: Called outside a train loop.
    """
    return TrainContext(current_session("get_context"))


def get_checkpoint() -> Checkpoint | None:
    """The newest checkpoint: of this run, or of an earlier one that it continues.

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
) -> None:
    """Report metrics, and a checkpoint if there is one.

    Every rank has to report equally often; reports are matched by their order. The call does not
    wait for other ranks: without a checkpoint it returns at once, with one after this rank's
    files are in the storage. The checkpoint is complete when all ranks have reported it. Ranks
    may add different files to it; of the metrics, those of rank 0 are kept with it.

    Args:
        metrics: Numbers, strings, lists and dictionaries by name.
        checkpoint: A folder of files to keep. It may be deleted after the call.
        checkpoint_dir_name: Name of the checkpoint's folder in the run's folder, new for each
            checkpoint and the same on all ranks. Default: ``checkpoint_`` and a number.

    Raises:
        RuntimeError: Called outside a train loop.
        TypeError: The metrics are not a dictionary with string keys, or the checkpoint is none.
        ValueError: The metrics hold a tensor, or the name can't be used.
        FileNotFoundError: The checkpoint's folder does not exist.
    """
    current_session("report").report(metrics, checkpoint, checkpoint_dir_name)
