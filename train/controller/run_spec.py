"""What a controller is told of its run, and what it counts and stores in ``run.json``.

A controller that was started again counts on from there. What follows from the
counts is decided by policies.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import TYPE_CHECKING, Any

from miniray.train.base.policies import RunState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.train.base.policies import FailurePolicy, ScalingPolicy
    from miniray.train.config import RunConfig, ScalingConfig
    from miniray.train.storage.storage import RunStorage
    from miniray.train.worker.backend import Backend


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """Everything that the controller needs to know of a run."""

    name: str
    storage: RunStorage
    run_config: RunConfig
    scaling_config: ScalingConfig
    backend: Backend
    failure_policy: FailurePolicy
    scaling_policy: ScalingPolicy
    #: Seconds that ranks wait for each other in a collective; 0 is no limit.
    collective_timeout: float = 0
    #: Seconds without progress after which the workers count as hung; None is no limit.
    hang_timeout: float | None = None
    #: What the user configured, as JSON values for a person to read.
    configuration: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: Tells it from other runs of the same name; a controller that was started again keeps it.
    run_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))


#: The longest pause, in seconds, before workers are started again whose start was lost.
MOST_PAUSE = 10.0


@dataclasses.dataclass
class RunFacts:
    """What a controller counts, and stores for the next one.

    Attributes:
        attempts: How many worker groups were placed.
        worker_failures: How many of them failed after their train loops had begun.
        start_failures: How many starts were lost, those of the controller included.
        lost_in_a_row: How many starts were lost one after the other by now.
        started: When the run began, by time.time().
    """

    storage: RunStorage
    run_id: str
    token: str
    attempts: int = 0
    worker_failures: int = 0
    start_failures: int = 0
    lost_in_a_row: int = 0
    started: float = dataclasses.field(default_factory=time.time)

    def take_up(self, facts: Mapping[str, Any]) -> None:
        """Count on from where an earlier controller of this run was when it was killed."""
        if facts.get("run_id") == self.run_id:
            # Its ranks may live for a moment: no attempt of this one has a number of theirs.
            self.attempts = int(facts.get("attempts", 0))
            self.worker_failures = int(facts.get("worker_failures", 0))
            self.start_failures = int(facts.get("start_failures", 0)) + 1
            self.started = float(facts.get("started", self.started))

    def count_failure(self, *, at_start: bool) -> None:
        if at_start:
            self.start_failures += 1
            self.lost_in_a_row += 1
        else:
            self.worker_failures += 1

    def count_start(self) -> None:
        self.lost_in_a_row = 0

    def write(self, state: RunState, message: str) -> None:
        """Store the counts, the state, and why the run failed if it has."""
        self.storage.write_run_facts(
            {
                "name": self.storage.name,
                "run_id": self.run_id,
                "token": self.token,
                "state": state.value,
                "started": self.started,
                "written": time.time(),
                "attempts": self.attempts,
                "worker_failures": self.worker_failures,
                "start_failures": self.start_failures,
                "error": message if state is RunState.ERRORED else None,
            }
        )


def pause_after(lost: int) -> float:
    """Return seconds to wait before a start, when so many were lost."""
    return min(MOST_PAUSE, 0.5 * 2.0 ** min(lost - 2, 10)) if lost > 1 else 0
