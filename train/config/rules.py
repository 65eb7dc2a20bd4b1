"""Rules for checkpoints, failures and logs: parts of ``RunConfig``."""

from __future__ import annotations

import dataclasses
import logging
from typing import Literal

from miniray.system import option_checks as check
from miniray.train.config.checks import above_zero, check_field, refuses

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
        """Return whether workers are started again after so many failures, or losses at the start.

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
        logging.getLogger("miniray.train").setLevel(self.log_level)
