"""A controller's run: its spec, the facts that are stored, and the outcome.

``config.json`` and ``run.json`` are for a person, or a page, that looks into the folder later.
"""

from __future__ import annotations

import dataclasses
import itertools
import platform
import re
import secrets
import sys
import time
from typing import TYPE_CHECKING, Any

from miniray.train.base.exceptions import ControllerError, TrainingFailedError, WorkerGroupError
from miniray.train.base.states import RunState
from miniray.train.callbacks import RunContext

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from miniray.train.base.exceptions import WorkerFailure
    from miniray.train.base.states import ScalingDecision
    from miniray.train.config import FailureConfig, RunConfig, ScalingConfig
    from miniray.train.data.datasets import PoolSpec
    from miniray.train.storage.storage import CheckpointRecord, RunStorage
    from miniray.train.worker.backend import Backend


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """Everything that the controller needs of a run."""

    storage: RunStorage
    run_config: RunConfig
    scaling_config: ScalingConfig
    backend: Backend
    failures: FailureConfig
    group: ScalingDecision
    #: Seconds that ranks wait for each other in a collective; 0 is no limit.
    collective_timeout: float = 0
    #: Modules that reading the datasets needs, with which processes of ranks begin.
    preload: Sequence[str] = ()
    #: Pools of its datasets, whose actors all ranks are to use.
    pools: Sequence[PoolSpec] = ()
    #: What the user configured, as JSON values for a person to read.
    configuration: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: Tells it from other runs of the same name.
    run_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))

    @property
    def name(self) -> str:
        return self.storage.name

    def context(self) -> RunContext:
        """Return the run as callbacks get it."""
        return RunContext(
            self.name,
            self.storage.path,
            self.run_config,
            self.scaling_config,
            self.storage.filesystem,
            run_id=self.run_id,
            train_loop_config=self.configuration.get("train_loop_config"),
        )


#: The longest pause, in seconds, before workers are started again whose start was lost.
MOST_PAUSE = 10.0


#: Attempts in a run's facts, the newest ones; and characters of why each ended.
MAX_ATTEMPTS, MAX_REASON = 20, 2000


@dataclasses.dataclass
class AttemptFacts:
    """What is stored of an attempt; times by time.time(), ``ended`` None while it goes on.

    Attributes:
        workers: How many it had.
        state: RUNNING, FINISHED, FAILED, RESIZED or ABORTED.
        reason: Why it ended; empty if its train loops returned.
        logs: Folder, in the run's folder, of its ranks' output; empty if there is none.
    """

    number: int
    workers: int
    state: str = "RUNNING"
    started: float = dataclasses.field(default_factory=time.time)
    ended: float | None = None
    reason: str = ""
    logs: str = ""


@dataclasses.dataclass
class RunFacts:
    """What a controller counts, and stores for readers of the folder.

    Attributes:
        attempts: How many worker groups were placed.
        worker_failures: How many of them failed after their train loops had begun.
        start_failures: How many starts were lost.
        lost_in_a_row: How many starts were lost one after the other by now.
        kept: Seconds in train loops whose work is in a checkpoint, or was the end of the run.
        since: When the work begins that is not kept yet, by time.time().
        started: When the run began, by time.time().
        history: The attempts, oldest first.
    """

    name: str
    run_id: str
    token: str
    attempts: int = 0
    worker_failures: int = 0
    start_failures: int = 0
    lost_in_a_row: int = 0
    kept: float = 0.0
    since: float = 0.0
    started: float = dataclasses.field(default_factory=time.time)
    history: list[AttemptFacts] = dataclasses.field(default_factory=list)

    def begin_attempt(self, workers: int) -> int:
        """Enter that workers were placed; return the attempt's number."""
        self.attempts += 1
        self.history = [*self.history, AttemptFacts(self.attempts, workers)][-MAX_ATTEMPTS:]
        return self.attempts

    def end_attempt(self, state: str, reason: str, logs: str = "") -> None:
        """Enter how the attempt has ended that goes on, if one does."""
        last = self.history[-1] if self.history else None
        if last is not None and last.ended is None:
            last.ended, last.state, last.logs = time.time(), state, logs
            last.reason = reason[:MAX_REASON]
            if state == "FINISHED":
                self.keep()

    def keep(self) -> None:
        """Count the time in train loops until now as kept: a later failure does not lose it."""
        now = time.time()
        self.kept, self.since = self.kept + now - self.since, now

    def productive_ratio(self) -> float:
        """Return for which part of its time the run was in train loops whose work is kept."""
        return self.kept / max(time.time() - self.started, 1e-9)

    def count_failure(self, *, at_start: bool) -> int:
        """Count a failure, or a start that was lost; return how many of them there were."""
        if at_start:
            self.start_failures += 1
            self.lost_in_a_row += 1
            return self.start_failures
        self.worker_failures += 1
        return self.worker_failures

    def as_json(self, state: RunState, message: str) -> dict[str, Any]:
        """Return the counts, the state, and why the run failed if it has, as JSON values."""
        return {
            **dataclasses.asdict(self),
            "state": state.value,
            "written": time.time(),
            "error": message if state is RunState.ERRORED else None,
        }


def pause_after(lost: int) -> float:
    """Return seconds to wait before a start after ``lost`` lost ones in a row."""
    return min(MOST_PAUSE, 0.5 * 2.0 ** min(lost - 2, 10)) if lost > 1 else 0


#: The error of a run that the user has stopped.
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


_SECRET = re.compile(r"(^|_)(key|token|secret|password|credentials?|auth)($|_)", re.IGNORECASE)
_HIDDEN = "(hidden)"

#: Longer text is cut, and so are longer lists.
_MAX_TEXT, _MAX_ITEMS = 2000, 200
#: Deeper values become text.
_MAX_DEPTH = 12


def describe_run(*, name: str, train_loop: Any, **configs: Any) -> dict[str, Any]:
    """Return a run's configuration as JSON values, without what looks like a secret."""
    from miniray.version import VERSION

    function = getattr(train_loop, "func", train_loop)  # of functools.partial
    described = {
        "name": name,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "train_loop": f"{function.__module__}.{getattr(function, '__qualname__', function)}",
        **{key: plain(value) for key, value in configs.items()},
        "program": sys.argv[0] if sys.argv else "",  # arguments may hold secrets
        "python": platform.python_version(),
        "miniray": VERSION,
    }
    versions = {
        module: str(getattr(sys.modules[module], "__version__", ""))
        for module in ("torch", "numpy", "jax", "transformers", "lightning")
        if module in sys.modules  # what was never imported is not imported for this
    }
    return {**described, "libraries": versions}


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON values."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _text(value)
    if depth < _MAX_DEPTH:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            shown = [field.name for field in dataclasses.fields(value) if field.repr]
            return _mapping({name: getattr(value, name) for name in shown}, depth)
        if isinstance(value, dict):
            return _mapping(value, depth)
        if isinstance(value, list | tuple | set | frozenset):
            items = [plain(item, depth + 1) for item in itertools.islice(value, _MAX_ITEMS)]
            more = len(value) - len(items)
            return [*items, f"... and {more} more"] if more else items
    # A filesystem's text may hold the keys that it was made with.
    if type(value).__module__.partition(".")[0] in ("fsspec", "pyarrow", "s3fs", "gcsfs", "adlfs"):
        return type(value).__name__
    try:
        return _text(repr(value))
    except Exception:  # noqa: BLE001 - code of the user, and no reason to refuse a run
        return type(value).__name__


def _mapping(values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    return {
        str(key): _HIDDEN
        if isinstance(value, str) and _SECRET.search(str(key))
        else plain(value, depth + 1)
        for key, value in values.items()
    }


def _text(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."
