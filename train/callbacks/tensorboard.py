"""Writes reported metrics as TensorBoard events."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.train.callbacks.base import Callback
from miniray.train.callbacks.libraries import choose
from miniray.train.callbacks.values import scalars, step_of

if TYPE_CHECKING:
    import os

    from miniray.train.base.state import RunState
    from miniray.train.callbacks.base import RunContext
    from miniray.train.storage.checkpoint import Checkpoint

#: Seconds after which what was written is in the file; a controller that is killed loses no more.
_FLUSH_AFTER = 10


def _writer_module() -> str:
    # tensorboardX comes first: PyTorch would be loaded into the controller for nothing else.
    choices = {
        "tensorboardX": ["tensorboardX"],
        "torch.utils.tensorboard": ["torch", "tensorboard"],
    }
    return choose("TensorBoardCallback", choices, "tensorboardX")


class TensorBoardCallback(Callback):
    """Writes the numbers that rank 0 reports, as scalars over the number of the report.

    Keys of nested dictionaries are joined by ``/``; what is no number is left out. Why workers
    failed is written as text.

    Args:
        log_dir: A local folder for the events. Default: ``tensorboard`` in the run's folder.
        step_key: A metric that counts steps, to be used in place of the number of the report.

    Raises:
        ImportError: Neither tensorboardX nor tensorboard is installed.
    """

    def __init__(
        self, log_dir: str | os.PathLike[str] | None = None, *, step_key: str | None = None
    ) -> None:
        _writer_module()
        self.log_dir = None if log_dir is None else str(Path(log_dir).expanduser().absolute())
        self.step_key = step_key
        self._writer: Any = None
        self._step = 0

    def on_start(self, run_context: RunContext) -> None:
        """Open the file of events."""
        writer = importlib.import_module(_writer_module()).SummaryWriter
        self._writer = writer(self._folder(run_context), flush_secs=_FLUSH_AFTER)

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Write the numbers of rank 0."""
        self._step = step_of(self, self.step_key, run_context, metrics[0])
        for key, value in scalars(metrics[0]).items():
            self._writer.add_scalar(key, value, self._step)

    def after_exception(
        self, run_context: RunContext, worker_exceptions: dict[int, BaseException]
    ) -> None:
        """Write why workers failed."""
        lines = [f"rank {rank}: {error!r}" for rank, error in sorted(worker_exceptions.items())]
        self._writer.add_text("failure", "\n\n".join(lines), self._step)

    def on_end(self, run_context: RunContext, state: RunState, error: str | None) -> None:
        """Write what is not yet written."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _folder(self, run_context: RunContext) -> str:
        if self.log_dir is not None:
            return self.log_dir
        from miniray.train.storage.filesystem import is_local

        if not is_local(run_context.filesystem):
            raise ValueError(
                f"The run is stored in {run_context.path}, which is not local. Say where to write "
                f"events: TensorBoardCallback(log_dir=...)."
            )
        return f"{run_context.path}/tensorboard"
