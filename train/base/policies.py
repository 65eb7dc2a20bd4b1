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
        """Decide what follows."""


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
        """Return the group to start, at the beginning of a run and after each failure."""

    def wanted(self, size: int) -> int:
        """Return how many workers more a group of this size could use; by default none.

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
