"""How a run ended, and the file in its folder that says so after its controller has gone.

A detached run writes that file for drivers that attach when its controller has gone.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import pickle
from typing import TYPE_CHECKING, Any

from miniray.train.base.exceptions import ControllerError, TrainingFailedError, WorkerGroupError
from miniray.train.base.policies import RunState

if TYPE_CHECKING:
    from miniray.train.base.failures import WorkerFailure
    from miniray.train.storage.manifests import CheckpointRecord
    from miniray.train.storage.storage import RunStorage

logger = logging.getLogger(__name__)

#: What the error of a run says that the user has stopped.
STOPPED = "The run was stopped before it had finished."

#: What the user reads when a run does not stop at once.
STOPPING = (
    "Stopping the run once the checkpoints that are being uploaded are complete. "
    "Press Ctrl-C again to stop at once."
)

#: Name of the file in the run's folder.
OUTCOME_FILE = "outcome.json"


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


def write_outcome(storage: RunStorage, run_id: str, outcome: RunOutcome) -> None:
    """Store how a run ended: for a reader, and pickled for ``read_outcome``."""
    import cloudpickle

    facts = {
        "run_id": run_id,
        "state": outcome.state.value,
        "message": outcome.message,
        "pickled": base64.b64encode(cloudpickle.dumps(outcome)).decode(),
    }
    storage.write_text(OUTCOME_FILE, json.dumps(facts, indent=1))


def read_outcome(storage: RunStorage, run_id: str) -> RunOutcome | None:
    """Return how a run ended; None if it has not, or if it was another run of the same name."""
    try:
        facts = json.loads(storage.read_text(OUTCOME_FILE) or "{}")
        if facts.get("run_id") == run_id:
            outcome: RunOutcome = pickle.loads(base64.b64decode(facts["pickled"]))
            return outcome
    except Exception:  # it was cut off, so that the run had not ended, or has metrics of other code
        logger.debug("%s is no outcome.", storage.files.at(OUTCOME_FILE), exc_info=True)
    return None
