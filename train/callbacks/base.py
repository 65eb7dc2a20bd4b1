"""``Callback``: what a user's code can learn of a run while it goes on.

Callbacks observe; they decide nothing. Who calls them, and what an exception in
one means, is in ``runner.py``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miniray.train.base.policies import RunState
    from miniray.train.config import RunConfig, ScalingConfig
    from miniray.train.storage.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The run that a callback is told about.

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
            the run's folder has it: what JSON has no form for is text, and secrets are left out.
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
        """The run's configuration."""
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
            run_context: The run.
            metrics: What each worker reported, by world rank; empty for one that did not report.
            checkpoint: The checkpoint in the storage, complete; None if no worker reported one.
        """

    def after_checkpoint(
        self, run_context: RunContext, checkpoint: Checkpoint, metrics: dict[str, Any]
    ) -> None:
        """Called when a checkpoint is complete, before ``after_report`` of the same report.

        Args:
            run_context: The run.
            checkpoint: The checkpoint in the storage.
            metrics: What rank 0 reported with it.
        """

    def after_exception(
        self, run_context: RunContext, worker_exceptions: dict[int, BaseException]
    ) -> None:
        """Called when workers have failed, before it is decided whether the run goes on.

        Args:
            run_context: The run.
            worker_exceptions: The exception of each worker that failed, by world rank.
        """

    def after_resize(self, run_context: RunContext, old_size: int, new_size: int) -> None:
        """Called when the workers are connected and are not as many as before.

        Args:
            run_context: The run.
            old_size: World size of the group before.
            new_size: World size of the group that now begins.
        """

    def on_end(self, run_context: RunContext, state: RunState, error: str | None) -> None:
        """Called once at the end of the run, however it ends, after ``on_start`` was called.

        Args:
            run_context: The run.
            state: FINISHED, ERRORED or ABORTED.
            error: For ERRORED, what happened.
        """


#: Ray's name of the same class.
UserCallback = Callback
