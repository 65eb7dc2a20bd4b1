"""Reports metrics and a checkpoint at the end of each epoch of Lightning."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from miniray.train.checkpoint import Checkpoint
from miniray.train.context import report
from miniray.train.lightning.library import lightning

_Callback: Any = lightning().callbacks.Callback


class RayTrainReportCallback(_Callback):  # type: ignore[misc]
    """Reports after each training epoch: what was logged, epoch, step, and a checkpoint.

    The checkpoint holds the file ``CHECKPOINT_NAME``, from which ``trainer.fit(ckpt_path=...)``
    goes on.
    """

    #: Name of Lightning's checkpoint in ours.
    CHECKPOINT_NAME = "checkpoint.ckpt"

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save and report; all ranks take part in saving, some of them write."""
        metrics: dict[str, Any] = {
            name: value.item() if hasattr(value, "item") else value
            for name, value in trainer.callback_metrics.items()
        }
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        with tempfile.TemporaryDirectory(prefix="miniray_lightning_") as folder:
            trainer.save_checkpoint(f"{folder}/{self.CHECKPOINT_NAME}", weights_only=False)
            written = any(Path(folder).iterdir())
            report(metrics, checkpoint=Checkpoint.from_directory(folder) if written else None)
