"""``Callback``: what a user's code can learn of a run while it goes on.

Callbacks observe; they decide nothing. The controller calls them, in its own
process, one at a time and in the order given.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miniray.train.checkpoint import Checkpoint
    from miniray.train.config import RunConfig, ScalingConfig
    from miniray.train.state import RunState


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The run that a callback is told about.

    Attributes:
        name: Name of the run.
        path: Path of its folder in the storage.
        run_config: As given to the trainer.
        scaling_config: As given to the trainer.
    """

    name: str
    path: str
    run_config: RunConfig
    scaling_config: ScalingConfig

    def get_run_config(self) -> RunConfig:
        """The run's configuration."""
        return self.run_config


class Callback:
    """Base of callbacks; override what is of interest.

    An exception in a hook ends the run with a ControllerError.
    """

    def on_state_change(self, run_context: RunContext, old: RunState, new: RunState) -> None:
        """Called when the run goes from one state to another."""

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Called when all workers have made a report.

        Args:
            run_context: The run.
            metrics: What each worker reported, by world rank.
            checkpoint: The checkpoint in the storage, complete; None if no worker reported one.
        """

    def after_exception(
        self, run_context: RunContext, worker_exceptions: dict[int, BaseException]
    ) -> None:
        """Called when workers have failed.

        Args:
            run_context: The run.
            worker_exceptions: The exception of each worker that failed, by world rank.
        """


#: Ray's name of the same class.
UserCallback = Callback
