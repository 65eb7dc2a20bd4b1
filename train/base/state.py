"""The states of a run and which may follow which.

Nothing here acts; the controller does, and tells callbacks of each change.
"""

from __future__ import annotations

import enum


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
