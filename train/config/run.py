"""``RunConfig`` and its parts; ``Callback``: the hooks of a run for users' code.

Callbacks observe; they decide nothing. Their caller, and the effect of an exception in one, is in
``callbacks/__init__.py``.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from miniray.system import option_checks as check
from miniray.train.config.checks import above_zero, check_field, instance_of, refuses
from miniray.train.storage.storage import check_folder_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.train.base.states import RunState
    from miniray.train.config.scaling import ScalingConfig
    from miniray.train.storage.checkpoint import Checkpoint


_WHERE_DUE = "The train loop decides: pass a checkpoint to report() where one is due."
_PREEMPTED = "The loss of a node counts like any other failure: set max_failures."


@refuses(checkpoint_frequency=_WHERE_DUE, checkpoint_at_end=_WHERE_DUE)
@dataclasses.dataclass
class CheckpointConfig:
    """Which checkpoints are kept.

    Args:
        num_to_keep: At most this many are kept: the newest, or with a score attribute the best.
            The latest one always stays, since a restart begins from it. None keeps all.
        checkpoint_score_attribute: Key of the reported metrics that scores a checkpoint; keys of
            nested dictionaries are joined by ``/``.
        checkpoint_score_order: ``"max"`` if a higher score is better, else ``"min"``.

    Raises:
        ValueError: A value makes no sense; the message says what is allowed.
        DeprecationWarning: An argument of Ray's that is refused was given. It is a ValueError too.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        check_field(self, "num_to_keep", check.whole(1), or_none="keeps all")
        check_field(self, "checkpoint_score_attribute", check.text, or_none="keeps the newest")
        check_field(self, "checkpoint_score_order", check.one_of("max", "min"))


@refuses(
    fail_fast="max_failures=0, the default, ends a run at the first failure.",
    max_preemption_failures=_PREEMPTED,
    relax_collectives_on_preemption=_PREEMPTED,
    preemption_grace_s=_PREEMPTED,
)
@dataclasses.dataclass
class FailureConfig:
    """What happens when workers or the controller fail.

    Args:
        max_failures: How many times a run starts its workers again, from its newest
            checkpoint, after some of them failed. 0: never; -1: without end.
        controller_failure_limit: How many times the controller begins again after processes or
            nodes were lost while it started the workers; from the second time on after a pause.
            These do not count as ``max_failures``. 0: never; -1: without end.
        hang_timeout_s: Seconds without progress after which the workers count as hung, such as in
            a collective call that one of them never makes. Progress is a report, the beginning or
            end of an upload, or a call of ``collective`` on any rank, so this has to be longer
            than what lies between two of them, and than the first report takes. The stacks of all
            ranks are written to the run's folder, and the workers have failed. Default: no limit.

    Raises:
        ValueError: A value makes no sense; the message says what is allowed.
        DeprecationWarning: An argument of Ray's that is refused was given. It is a ValueError too.
    """

    max_failures: int = 0
    _: dataclasses.KW_ONLY
    controller_failure_limit: int = -1
    hang_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_failures", "controller_failure_limit"):
            check_field(self, name, check.whole(-1, "-1 for no limit"))
        check_field(self, "hang_timeout_s", above_zero, or_none="sets no limit")

    def allows(self, failures: int, *, at_start: bool) -> bool:
        """Return whether workers start again after this many failures, or lost starts.

        Args:
            failures: How many of this kind there were, the last one included.
            at_start: Whether processes or nodes were lost before any train loop began.
        """
        limit = self.controller_failure_limit if at_start else self.max_failures
        return limit < 0 or failures <= limit


@dataclasses.dataclass
class LoggingConfig:
    """What the train layer itself logs, in the controller and on every rank.

    Args:
        log_level: Least level of records that the logger ``miniray.train`` passes on, by the names
            of Python's ``logging``. Other loggers are not touched.

    Raises:
        ValueError: There is no such level.
    """

    log_level: str = "INFO"

    def __post_init__(self) -> None:
        level = self.log_level.upper() if isinstance(self.log_level, str) else None
        if level is None or not isinstance(logging.getLevelName(level), int):
            raise ValueError(
                f"LoggingConfig(log_level={self.log_level!r}) is not known. Use one of "
                f"DEBUG, INFO, WARNING, ERROR, CRITICAL."
            )
        self.log_level = level

    def apply(self) -> None:
        logging.getLogger("miniray.train").setLevel(self.log_level)


#: Where runs are kept when ``RunConfig(storage_path)`` is not given.
DEFAULT_STORAGE_PATH = "~/miniray_results"


def default_run_name() -> str:
    """Return a name for a run whose user gave none: the time, and a part that makes it unique."""
    now = datetime.datetime.now(tz=datetime.timezone.utc).astimezone()
    return f"train_run-{now:%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(3)}"


_SHOWN = "Add a callback that shows what you want to see."


@refuses(
    sync_config="What is reported is in the storage when report() has returned.",
    verbose=_SHOWN,
    stop="The train loop decides when it ends: return from it.",
    progress_reporter=_SHOWN,
    log_to_file="What ranks print is in the logs of their workers.",
)
@dataclasses.dataclass
class RunConfig:
    """Name, storage and rules of a run.

    Args:
        name: Name of the run and of its folder in the storage. A run with the name of an older
            one continues it: ``get_checkpoint()`` gives its newest checkpoint. Default: a new one
            for each ``RunConfig``, so that ``fit()`` again with the same one continues its run.
        storage_path: Folder or URL that holds the folders of runs. Workers on several machines
            need one that all of them reach. Default: ``~/miniray_results``, with ``~`` expanded.
        storage_filesystem: An fsspec or pyarrow filesystem for ``storage_path``, which is then a
            path on it and not a URL.
        failure_config: What happens when workers fail.
        checkpoint_config: Which checkpoints are kept.
        callbacks: Callbacks that the controller of the run calls.
        worker_runtime_env: Runtime environment of the workers.
        logging_config: What the train layer itself logs.

    Raises:
        ValueError: A value makes no sense; the message says what is allowed.
        DeprecationWarning: An argument of Ray's that is refused was given. It is a ValueError too.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: Any = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    callbacks: list[Callback] | None = None
    worker_runtime_env: Mapping[str, Any] | None = None
    logging_config: LoggingConfig | None = None

    def __post_init__(self) -> None:
        if self.name is None:
            self.name = default_run_name()
        check_folder_name("RunConfig(name", self.name)
        self.failure_config = instance_of("failure_config", self.failure_config, FailureConfig)
        self.checkpoint_config = instance_of(
            "checkpoint_config", self.checkpoint_config, CheckpointConfig
        )
        self.logging_config = instance_of("logging_config", self.logging_config, LoggingConfig)
        self._check_callbacks()
        self._check_storage()
        self._check_runtime_env()

    def _check_callbacks(self) -> None:
        given = self.callbacks if self.callbacks is not None else []
        if not isinstance(given, list | tuple):
            raise ValueError(
                f"RunConfig(callbacks={given!r}) must be a list. Write callbacks=[{given!r}]."
            )
        self.callbacks = list(given)
        if self.callbacks:
            strange = [entry for entry in self.callbacks if not isinstance(entry, Callback)]
            if strange:
                raise ValueError(
                    f"RunConfig(callbacks) holds {strange[0]!r}. "
                    f"A callback is an instance of a subclass of miniray.train.Callback."
                )

    def _check_storage(self) -> None:
        path = self.storage_path
        if path is None:
            path = Path(DEFAULT_STORAGE_PATH).expanduser()
        if not isinstance(path, str | os.PathLike) or not str(os.fspath(path)).strip():
            raise ValueError(
                f"RunConfig(storage_path={path!r}) must be a folder or a URL, such as "
                f"'/mnt/runs' or 's3://bucket/runs'."
            )
        self.storage_path = os.fspath(path)

    def _check_runtime_env(self) -> None:
        if self.worker_runtime_env is None:
            self.worker_runtime_env = {}
        try:
            check.runtime_env("worker_runtime_env", self.worker_runtime_env)
        except (TypeError, ValueError) as error:
            raise ValueError(f"RunConfig(worker_runtime_env): {error}") from None

    @property
    def storage_url(self) -> str:
        """The storage path as text, with ``~`` expanded."""
        assert self.storage_path is not None
        path = os.fspath(self.storage_path)
        return str(Path(path).expanduser()) if path.startswith("~") else path


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The run that a callback observes.

    Attributes:
        name: Name of the run.
        path: Path of its folder in the storage.
        run_config: As given to the trainer.
        scaling_config: As given to the trainer.
        filesystem: The fsspec filesystem that holds ``path``.
        report_number: Number of the report that ``after_report`` and ``after_checkpoint`` are
            about, from 0. It goes on after a restart, and when a later run of the same name
            continues this one. None in other hooks.
        run_id: Tells the run from others of the same name.
        train_loop_config: As given to the trainer, with JSON values, as ``config.json`` of
            the run's folder has it: values without a JSON form are text, and secrets are left out.
    """

    name: str
    path: str
    run_config: RunConfig
    scaling_config: ScalingConfig
    filesystem: Any = None
    report_number: int | None = None
    run_id: str = ""
    train_loop_config: Any = None

    def get_run_config(self) -> RunConfig:
        """Return the run's configuration."""
        return self.run_config


class Callback:
    """Base of callbacks; override what is of interest.

    Hooks run in the controller's process, one at a time, in the order of
    ``RunConfig(callbacks)``. Checkpoints become complete in the same thread, so a hook that takes
    long delays them. An exception in a hook ends the run with a ControllerError that names the
    callback and the hook. Callbacks are pickled on their way to the controller: open files and
    connections in ``on_start``, not in the constructor.
    """

    def on_start(self, run_context: RunContext) -> None:
        """Called once, before any worker is started."""

    def on_state_change(self, run_context: RunContext, old: RunState, new: RunState) -> None:
        """Called when the run goes from one state to another."""

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Called when a report is recorded: when all workers have made it.

        One with metrics alone does not wait for workers that report far less often.

        Args:
            metrics: What each worker reported, by world rank; empty for one that did not report.
            checkpoint: The checkpoint in the storage, complete; None if no worker reported one.
        """

    def after_checkpoint(
        self, run_context: RunContext, checkpoint: Checkpoint, metrics: dict[str, Any]
    ) -> None:
        """Called when a checkpoint is complete, before ``after_report`` of the same report.

        Args:
            checkpoint: The checkpoint in the storage.
            metrics: What rank 0 reported with it.
        """

    def after_exception(
        self, run_context: RunContext, worker_exceptions: dict[int, BaseException]
    ) -> None:
        """Called when workers have failed, before it is decided whether the run goes on.

        Args:
            worker_exceptions: The exception of each worker that failed, by world rank.
        """

    def after_resize(self, run_context: RunContext, old_size: int, new_size: int) -> None:
        """Called when the workers are connected and are not as many as before.

        Args:
            old_size: World size of the group before.
            new_size: World size of the group that now begins.
        """

    def on_end(self, run_context: RunContext, state: RunState, error: str | None) -> None:
        """Called once at the end of the run, however it ends, after ``on_start`` was called.

        Args:
            state: FINISHED, ERRORED or ABORTED.
            error: For ERRORED, what happened.
        """


#: Ray's name of the same class.
UserCallback = Callback


@dataclasses.dataclass(eq=False)
class ProgressCallback(Callback):
    """Tells the driver's display how far a run is to go, so that it can say the time left.

    The display is there without it too: on a terminal a line that is kept up to date with epoch,
    steps per second, and the newest metrics, elsewhere plain lines. The driver shows it, since the
    controller has no terminal.

    Args:
        total_steps: Steps that the run is going to make.
        total_epochs: Epochs that the run is going to make.
        step_key: The metric that counts steps. If it is not reported, each report is a step.
        epoch_key: The metric that counts epochs, from 0.

    Raises:
        ValueError: A total is not a whole number of 1 or more.
    """

    total_steps: int | None = None
    total_epochs: int | None = None
    _: dataclasses.KW_ONLY
    step_key: str = "step"
    epoch_key: str = "epoch"

    def __post_init__(self) -> None:
        for name in ("total_steps", "total_epochs"):
            check_field(self, name, check.whole(1), or_none="says that it is not known")
