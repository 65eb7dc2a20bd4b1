"""How a run ended, as its controller tells the driver."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.train.base.exceptions import ControllerError, TrainingFailedError, WorkerGroupError
from miniray.train.base.states import RunState

if TYPE_CHECKING:
    from miniray.train.base.failures import WorkerFailure
    from miniray.train.storage.manifests import CheckpointRecord

#: What the error of a run says that the user has stopped.
STOPPED = "The run was stopped before it had finished."

#: What the user reads when a run does not stop at once.
STOPPING = (
    "Stopping the run once the checkpoints that are being uploaded are complete. "
    "Press Ctrl-C again to stop at once."
)


@dataclasses.dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        state: FINISHED, ERRORED or ABORTED.
        metrics: Metrics of the last step, None if there was none.
        checkpoints: Checkpoints that were kept, the best last.
        return_value: What rank 0's train loop returned, pickled; empty for None.
        message: For ERRORED by workers, what happened on each rank.
        controller_failure: For ERRORED otherwise, the failure.
    """

    state: RunState
    metrics: dict[str, Any] | None = None
    checkpoints: list[CheckpointRecord] = dataclasses.field(default_factory=list)
    return_value: bytes = b""
    message: str = ""
    worker_failures: dict[int, WorkerFailure] = dataclasses.field(default_factory=dict)
    controller_failure: WorkerFailure | None = None


def make_error(outcome: RunOutcome) -> TrainingFailedError | None:
    if (failure := outcome.controller_failure) is not None:
        return ControllerError(failure.exception(), failure.traceback)
    if outcome.state is RunState.ERRORED:
        failures = {rank: failure.exception() for rank, failure in outcome.worker_failures.items()}
        return WorkerGroupError(outcome.message, failures)
    if outcome.state is RunState.ABORTED:
        return TrainingFailedError(STOPPED)
    return None
