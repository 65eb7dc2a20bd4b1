"""``RunConfig`` and its parts: name, storage, checkpoints, failures and logging of a run."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from miniray.train.config.checks import (
    NOT_GIVEN,
    check_flag,
    check_folder_name,
    instance_of,
    is_amount,
    is_whole,
    refuse_given,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.train.base.policies import FailurePolicy, ScalingPolicy
    from miniray.train.callbacks import Callback

#: Where runs are kept when ``RunConfig(storage_path)`` is not given.
DEFAULT_STORAGE_PATH = "~/miniray_results"


@dataclasses.dataclass
class CheckpointConfig:
    """Which checkpoints are kept.

    Args:
        num_to_keep: At most this many are kept: the newest, or with a score attribute the best.
            The latest one always stays, since a restart begins from it. None keeps all.
        checkpoint_score_attribute: Key of the reported metrics that scores a checkpoint; keys of
            nested dictionaries are joined by ``/``.
        checkpoint_score_order: ``"max"`` if a higher score is better, else ``"min"``.
        checkpoint_frequency: Refused: the train loop decides when it reports a checkpoint.
        checkpoint_at_end: Refused for the same reason.

    Raises:
        ValueError: A value makes no sense; the message says what is allowed.
        DeprecationWarning: An argument that is refused was given. It is a ValueError too.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"
    checkpoint_frequency: dataclasses.InitVar[Any] = NOT_GIVEN
    checkpoint_at_end: dataclasses.InitVar[Any] = NOT_GIVEN

    def __post_init__(self, checkpoint_frequency: Any, checkpoint_at_end: Any) -> None:
        instead = "The train loop decides: pass a checkpoint to report() where one is due."
        refuse_given(
            "CheckpointConfig",
            {
                "checkpoint_frequency": (checkpoint_frequency, instead),
                "checkpoint_at_end": (checkpoint_at_end, instead),
            },
        )
        if self.num_to_keep is not None and not is_whole(self.num_to_keep, least=1):
            raise ValueError(
                f"CheckpointConfig(num_to_keep={self.num_to_keep!r}) must be 1 or more, "
                f"or None to keep all."
            )
        if self.checkpoint_score_order not in ("max", "min"):
            raise ValueError(
                f"CheckpointConfig(checkpoint_score_order={self.checkpoint_score_order!r}) must be "
                f"'max' (higher is better) or 'min'."
            )
        attribute = self.checkpoint_score_attribute
        if attribute is not None and (not isinstance(attribute, str) or not attribute):
            raise ValueError(
                f"CheckpointConfig(checkpoint_score_attribute={attribute!r}) must be a key of the "
                f"metrics that the train loop reports."
            )


@dataclasses.dataclass
class FailureConfig:
    """What happens when workers or the controller fail.

    Args:
        max_failures: How many times a run starts its workers again, from its newest
            checkpoint, after some of them failed. 0: never; -1: without end.
        controller_failure_limit: How many times the controller begins again after processes or
            nodes were lost while it started the workers; from the second time on after a pause.
            These do not count as ``max_failures``. In a detached run it is also how many times a
            controller that was killed or lost with its node is started again, which counts as one
            of them; the run goes on from its newest checkpoint. It is not started if the node
            where ``fit()`` was called is lost too and had the train loop or the data, as it has if
            they take more than 100 KiB. 0: never; -1: without end.
        hang_timeout_s: Seconds without progress after which the workers count as hung, such as in
            a collective call that one of them never makes. Progress is a report, the beginning or
            end of an upload, or a call of ``collective`` on any rank, so this has to be longer
            than what lies between two of them, and than the first report takes. The stacks of all
            ranks are written to the run's folder, and the workers have failed. Default: no limit.
        fail_fast: Refused: it is ``max_failures=0``.
        max_preemption_failures: Refused, as the three below: nodes that are drained are not told
            apart from others that are lost.
        relax_collectives_on_preemption: Refused.
        preemption_grace_s: Refused.

    Raises:
        ValueError: A value makes no sense; the message says what is allowed.
        DeprecationWarning: An argument that is refused was given. It is a ValueError too.
    """

    max_failures: int = 0
    _: dataclasses.KW_ONLY
    controller_failure_limit: int = -1
    hang_timeout_s: float | None = None
    fail_fast: dataclasses.InitVar[Any] = NOT_GIVEN
    max_preemption_failures: dataclasses.InitVar[Any] = NOT_GIVEN
    relax_collectives_on_preemption: dataclasses.InitVar[Any] = NOT_GIVEN
    preemption_grace_s: dataclasses.InitVar[Any] = NOT_GIVEN

    def __post_init__(
        self,
        fail_fast: Any,
        max_preemption_failures: Any,
        relax_collectives_on_preemption: Any,
        preemption_grace_s: Any,
    ) -> None:
        preempted = "The loss of a node counts like any other failure: set max_failures."
        refuse_given(
            "FailureConfig",
            {
                "fail_fast": (
                    fail_fast,
                    "max_failures=0, the default, ends a run at the first failure.",
                ),
                "max_preemption_failures": (max_preemption_failures, preempted),
                "relax_collectives_on_preemption": (relax_collectives_on_preemption, preempted),
                "preemption_grace_s": (preemption_grace_s, preempted),
            },
        )
        for name in ("max_failures", "controller_failure_limit"):
            value = getattr(self, name)
            if not is_whole(value, least=-1):
                raise ValueError(
                    f"FailureConfig({name}={value!r}) must be a number of restarts: "
                    f"0 for none, -1 for no limit."
                )
        limit = self.hang_timeout_s
        if limit is not None and (not is_amount(limit) or limit == 0):
            raise ValueError(
                f"FailureConfig(hang_timeout_s={limit!r}) must be a number of seconds above 0, or "
                f"None for no limit."
            )


@dataclasses.dataclass
class LoggingConfig:
    """What the train layer itself logs, in the controller and on every rank.

    Args:
        log_level: Least level of what the logger ``miniray.train`` passes on, by the names of
            Python's ``logging``. Other loggers are not touched.

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
        """Set the level in this process."""
        logging.getLogger("miniray.train").setLevel(self.log_level)


def default_run_name() -> str:
    """A name for a run whose user gave none: the time, and a part that makes it unique."""
    now = datetime.datetime.now(tz=datetime.timezone.utc).astimezone()
    return f"train_run-{now:%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(3)}"


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
        failure_policy: Decides whether the run goes on after a failure. Default: by the limits of
            ``failure_config``.
        scaling_policy: Decides how many workers a group has. Default: by ``ScalingConfig``.
        detached: The run outlives its driver, in a cluster that was started with ``miniray start``:
            when the driver is killed or loses its terminal, the run goes on, and ``fit()`` with
            the same name and storage path follows it to its end. One name in one storage path is
            one run: a driver that comes while it runs starts no second one. Ctrl-C in a driver
            that follows the run stops it, as does ``train.stop_run``. How it ended is in the
            run's folder, for ``Result.from_path``. Ray has no such option; a job does it there.
        sync_config: Refused, as the four below: they were Ray Tune's.
        verbose: Refused.
        stop: Refused.
        progress_reporter: Refused.
        log_to_file: Refused.

    Raises:
        ValueError: A value makes no sense; the message says what is allowed.
        DeprecationWarning: An argument that is refused was given. It is a ValueError too.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: Any = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    callbacks: list[Callback] | None = None
    worker_runtime_env: Mapping[str, Any] | None = None
    logging_config: LoggingConfig | None = None
    _: dataclasses.KW_ONLY
    failure_policy: FailurePolicy | None = None
    scaling_policy: ScalingPolicy | None = None
    detached: bool = False
    sync_config: dataclasses.InitVar[Any] = NOT_GIVEN
    verbose: dataclasses.InitVar[Any] = NOT_GIVEN
    stop: dataclasses.InitVar[Any] = NOT_GIVEN
    progress_reporter: dataclasses.InitVar[Any] = NOT_GIVEN
    log_to_file: dataclasses.InitVar[Any] = NOT_GIVEN

    def __post_init__(
        self, sync_config: Any, verbose: Any, stop: Any, progress_reporter: Any, log_to_file: Any
    ) -> None:
        shown = "Add a callback that shows what you want to see."
        refuse_given(
            "RunConfig",
            {
                "sync_config": (
                    sync_config,
                    "What is reported is in the storage when report() has returned.",
                ),
                "verbose": (verbose, shown),
                "stop": (stop, "The train loop decides when it ends: return from it."),
                "progress_reporter": (progress_reporter, shown),
                "log_to_file": (log_to_file, "What ranks print is in the logs of their workers."),
            },
        )
        if self.name is None:
            self.name = default_run_name()
        check_folder_name("RunConfig(name", self.name)
        self.failure_config = instance_of("failure_config", self.failure_config, FailureConfig)
        self.checkpoint_config = instance_of(
            "checkpoint_config", self.checkpoint_config, CheckpointConfig
        )
        self.logging_config = instance_of("logging_config", self.logging_config, LoggingConfig)
        check_flag("RunConfig(detached", self.detached)
        self._check_callbacks()
        self._check_policies()
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
            from miniray.train.callbacks import Callback

            strange = [entry for entry in self.callbacks if not isinstance(entry, Callback)]
            if strange:
                raise ValueError(
                    f"RunConfig(callbacks) holds {strange[0]!r}. "
                    f"A callback is an instance of a subclass of miniray.train.Callback."
                )

    def _check_policies(self) -> None:
        from miniray.train.base.policies import FailurePolicy, ScalingPolicy

        kinds = {"failure_policy": FailurePolicy, "scaling_policy": ScalingPolicy}
        for name, kind in kinds.items():
            given = getattr(self, name)
            if given is not None and not isinstance(given, kind):
                raise ValueError(
                    f"RunConfig({name}={given!r}) must be an instance of a subclass of "
                    f"miniray.train.{kind.__name__}."
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
        from miniray.system.option_checks import runtime_env

        try:
            runtime_env("worker_runtime_env", self.worker_runtime_env)
        except (TypeError, ValueError) as error:
            raise ValueError(f"RunConfig(worker_runtime_env): {error}") from None

    @property
    def storage_url(self) -> str:
        """The storage path as text, with ``~`` expanded."""
        assert self.storage_path is not None
        path = os.fspath(self.storage_path)
        return str(Path(path).expanduser()) if path.startswith("~") else path
