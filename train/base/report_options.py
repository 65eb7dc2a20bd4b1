"""What a train loop can choose when it reports, and what it is told of reported checkpoints.

Names and values as in Ray Train; validation of checkpoints by the trainer is not part of it.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miniray.train.storage.checkpoint import Checkpoint


class CheckpointUploadMode(enum.Enum):
    """How ``report()`` brings a checkpoint into the storage."""

    #: ``report()`` returns after this rank's files are there.
    SYNC = "SYNC"
    #: ``report()`` returns at once; a thread uploads the files, one checkpoint after the other.
    ASYNC = "ASYNC"
    #: The files are in a folder of the run's folder already.
    NO_UPLOAD = "NO_UPLOAD"

    def default_delete_local_checkpoint_after_upload(self) -> bool:
        """Whether the local files are deleted after the upload unless the user says otherwise."""
        return self is CheckpointUploadMode.ASYNC


class CheckpointConsistencyMode(enum.Enum):
    """What ``get_all_reported_checkpoints()`` waits for.

    Both wait until every report that was made before is in the storage: nothing is validated
    later.
    """

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"


class ReportedCheckpointStatus(enum.Enum):
    """Where a reported checkpoint stands."""

    COMMITTED = "COMMITTED"


@dataclasses.dataclass
class ReportedCheckpoint:
    """A checkpoint that is complete.

    Attributes:
        checkpoint: The checkpoint in the storage.
        metrics: What rank 0 reported with it.
        status: Always COMMITTED.
    """

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED


def member(kind: type[enum.Enum], argument: str, value: Any) -> Any:
    """The value, if it is of this enumeration; else raise ValueError that names what is allowed."""
    matches = isinstance(value, kind)
    if not matches:
        allowed = ", ".join(f"{kind.__name__}.{each.name}" for each in kind)
        raise ValueError(f"{argument}={value!r}) is not known. Use one of {allowed}.")
    return value
