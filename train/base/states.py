"""The states of a run, and how many workers it starts. Pure: the controller acts on it."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


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


@dataclasses.dataclass(frozen=True)
class ScalingDecision:
    """The worker group to start.

    Attributes:
        num_workers: Number of workers, or of an elastic group the most.
        resources_per_worker: What each holds, by resource name.
        least: The group starts with as few as this when no more fit. None: it waits for all.
        step: The size is a multiple of this, as are ``num_workers`` and ``least``.
    """

    num_workers: int
    resources_per_worker: Mapping[str, float]
    least: int | None = None
    step: int = 1

    def wanted(self, size: int) -> int:
        """Return how many workers more an elastic group of this size could use."""
        return 0 if self.least is None else max(0, self.num_workers - size)

    def grown(self, size: int, reserved: int) -> ScalingDecision | None:
        """Return the group with the reserved workers, in whole steps; None if that adds no worker.

        Args:
            size: Number of workers that run.
            reserved: For how many more the cluster has set resources aside.
        """
        larger = min(self.num_workers, size + reserved // self.step * self.step)
        return dataclasses.replace(self, num_workers=larger) if larger > size else None
