"""Reports metrics and a checkpoint whenever a Transformers trainer saves."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from miniray.train.storage.checkpoint import Checkpoint
from miniray.train.worker.context import get_context, report


class RayTrainReportCallback(TrainerCallback):  # type: ignore[misc]
    """Reports when the trainer saves: its newest logs, epoch, step, and the checkpoint.

    The checkpoint holds the folder ``CHECKPOINT_NAME``, from which
    ``trainer.train(resume_from_checkpoint=...)`` goes on. Rank 0's files are in it, and of the
    other ranks those that differ by rank, such as the state of random numbers.
    """

    #: Name of the trainer's checkpoint in ours.
    CHECKPOINT_NAME = "checkpoint"

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Report the checkpoint that was just saved."""
        metrics: dict[str, Any] = {}
        for log in state.log_history:
            metrics.update(log)
        metrics |= {"epoch": state.epoch, "step": state.global_step}
        source = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        with tempfile.TemporaryDirectory(prefix="miniray_transformers_") as folder:
            written = self._copy(source, Path(folder))
            report(metrics, checkpoint=Checkpoint.from_directory(folder) if written else None)

    def _copy(self, source: Path, folder: Path) -> bool:
        """Copy what this rank adds to the checkpoint; False if that is nothing."""
        rank = get_context().get_world_rank()
        pattern = "*" if rank == 0 else f"*_{rank}.pth"
        target = folder / self.CHECKPOINT_NAME
        for path in source.glob(pattern):
            target.mkdir(exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target / path.name)
            else:
                shutil.copyfile(path, target / path.name)
        return target.exists()
