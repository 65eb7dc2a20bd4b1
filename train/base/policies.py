"""What a run decides: how many workers to start, and whether to go on after a failure; its states.

Policies are pure: they get the facts and return a decision; the controller acts
on it. A user replaces one by a subclass, in ``RunConfig``.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.train.base.failures import WorkerFailure
    from miniray.train.config import FailureConfig, ScalingConfig


class RunState(enum.Enum):
    """Where a run stands."""

    INITIALIZING = "INITIALIZING"  # storage is opened, old checkpoints are read
    SCHEDULING = "SCHEDULING"  # workers are placed, started and connected
    RUNNING = "RUNNING"  # the train loop runs on every rank
    RESTARTING = "RESTARTING"  # workers failed and are ended, to be started again
    RESIZING = "RESIZING"  # workers are ended at a checkpoint, to start as a larger group
    FINISHED = "FINISHED"
    ERRORED = "ERRORED"
    ABORTED = "ABORTED"  # the user stopped it

    @property
    def terminal(self) -> bool:
        """Whether the run is over."""
        return not _FOLLOWING[self]


_ENDS = {RunState.ERRORED, RunState.ABORTED}
_FOLLOWING: dict[RunState, set[RunState]] = {
    RunState.INITIALIZING: {RunState.SCHEDULING, *_ENDS},
    RunState.SCHEDULING: {RunState.RUNNING, RunState.RESTARTING, *_ENDS},
    RunState.RUNNING: {RunState.FINISHED, RunState.RESTARTING, RunState.RESIZING, *_ENDS},
    RunState.RESTARTING: {RunState.SCHEDULING, *_ENDS},
    RunState.RESIZING: {RunState.SCHEDULING, *_ENDS},
    RunState.FINISHED: set(),
    RunState.ERRORED: set(),
    RunState.ABORTED: set(),
}


def check_transition(old: RunState, new: RunState) -> None:
    """Raise RuntimeError if a run can't go from one state to the other."""
    if new not in _FOLLOWING[old]:
        raise RuntimeError(f"A run can't go from {old.value} to {new.value}.")


class FailureDecision(enum.Enum):
    """What the controller does after a failure."""

    RETRY = "retry"  # start the workers again, from the newest checkpoint
    RAISE = "raise"  # end the run with the error


@dataclasses.dataclass(frozen=True)
class GroupFailure:
    """A worker group that failed.

    Attributes:
        by_rank: Why, for each rank that failed; ``by_rank[rank].exception()`` is the exception.
        at_start: Whether processes or nodes were lost before any train loop began. What code of
            the user raises at the start is a failure of the workers.
        worker_failures: How many times workers of this run have failed, this time included.
        start_failures: How many times a start was lost, this time included.
    """

    by_rank: Mapping[int, WorkerFailure]
    at_start: bool
    worker_failures: int
    start_failures: int


class FailurePolicy(abc.ABC):
    """Decides whether a run goes on after workers failed. Pickled on its way to the controller."""

    @abc.abstractmethod
    def decide(self, failure: GroupFailure) -> FailureDecision:
        """Decide what follows.

        Args:
            failure: What has happened.
        """


class LimitedRetries(FailurePolicy):
    """Goes on until ``max_failures`` or ``controller_failure_limit`` is used up."""

    def __init__(self, config: FailureConfig) -> None:
        self._config = config

    def decide(self, failure: GroupFailure) -> FailureDecision:
        """Retry while the limit of this kind of failure is not passed; -1 is no limit."""
        if failure.at_start:
            limit, count = self._config.controller_failure_limit, failure.start_failures
        else:
            limit, count = self._config.max_failures, failure.worker_failures
        return FailureDecision.RETRY if limit < 0 or count <= limit else FailureDecision.RAISE


@dataclasses.dataclass(frozen=True)
class ScalingDecision:
    """The worker group to start.

    Attributes:
        num_workers: Number of workers, or of an elastic group the most.
        resources_per_worker: What each holds, by resource name.
        least: The group starts with as few as this when there is no room for more. None: it waits
            for room for all.
        step: The size is a multiple of this, as are ``num_workers`` and ``least``.
    """

    num_workers: int
    resources_per_worker: Mapping[str, float]
    least: int | None = None
    step: int = 1


class ScalingPolicy(abc.ABC):
    """Decides how many workers a group has. Pickled on its way to the controller."""

    @abc.abstractmethod
    def next_group(self) -> ScalingDecision:
        """The group to start, at the beginning of a run and after each failure."""

    def wanted(self, size: int) -> int:
        """How many workers more a group of this size could use; by default none.

        The controller asks the cluster for the room of so many and keeps what it gets.
        """
        del size
        return 0

    def grow(self, size: int, room: int) -> ScalingDecision | None:
        """Called when a checkpoint is complete while there is room for more workers.

        Args:
            size: Number of workers that run.
            room: For how many more the cluster has set resources aside.

        Returns:
            The group to go on with from that checkpoint, or None to leave it as it is.
        """
        del size, room
        return None


class FixedScaling(ScalingPolicy):
    """Always the number of workers that ``ScalingConfig`` names."""

    def __init__(self, config: ScalingConfig) -> None:
        self._decision = ScalingDecision(config.max_workers, config.worker_resources)

    def next_group(self) -> ScalingDecision:
        """The group of the configuration."""
        return self._decision


class ElasticScaling(ScalingPolicy):
    """As many workers as there is room for, between the bounds of ``ScalingConfig``.

    Args:
        config: With a pair as ``num_workers``.
    """

    def __init__(self, config: ScalingConfig) -> None:
        self._group = ScalingDecision(
            config.max_workers, config.worker_resources, config.min_workers, config.workers_step
        )

    def next_group(self) -> ScalingDecision:
        """The largest that there is room for."""
        return self._group

    def wanted(self, size: int) -> int:
        """What is missing to the most."""
        return max(0, self._group.num_workers - size)

    def grow(self, size: int, room: int) -> ScalingDecision | None:
        """Take all the room that makes whole steps."""
        step = self._group.step
        larger = min(self._group.num_workers, size + room // step * step)
        return dataclasses.replace(self._group, num_workers=larger) if larger > size else None


def default_scaling(config: ScalingConfig) -> ScalingPolicy:
    """The policy of a configuration."""
    return ElasticScaling(config) if config.elasticity_enabled else FixedScaling(config)
