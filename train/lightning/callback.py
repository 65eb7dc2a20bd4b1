"""Reports metrics and a checkpoint at the end of each epoch of Lightning."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from miniray.train.base.report_options import CheckpointUploadMode, member
from miniray.train.lightning.library import lightning
from miniray.train.storage.checkpoint import Checkpoint
from miniray.train.worker.context import refuse_validation, report

_Callback: Any = lightning().callbacks.Callback


class RayTrainReportCallback(_Callback):  # type: ignore[misc]
    """Reports after each training epoch: what was logged, epoch, step, and a checkpoint.

    The checkpoint holds the file ``CHECKPOINT_NAME``, from which ``trainer.fit(ckpt_path=...)``
    goes on.

    Args:
        checkpoint_upload_mode: ``SYNC`` or ``ASYNC``, as for ``report()``. Default: ``SYNC``.
        validation: Not supported.

    Raises:
        ValueError: Another mode, or validation.
    """

    #: Name of Lightning's checkpoint in ours.
    CHECKPOINT_NAME = "checkpoint.ckpt"

    def __init__(
        self, checkpoint_upload_mode: CheckpointUploadMode | None = None, validation: Any = False
    ) -> None:
        super().__init__()
        where = "RayTrainReportCallback(checkpoint_upload_mode"
        mode = (
            CheckpointUploadMode.SYNC if checkpoint_upload_mode is None else checkpoint_upload_mode
        )
        self.checkpoint_upload_mode = member(CheckpointUploadMode, where, mode)
        if mode is CheckpointUploadMode.NO_UPLOAD:
            raise ValueError(
                f"{where}={mode}) makes no sense: the checkpoint is saved to a temporary folder. "
                f"Use SYNC or ASYNC."
            )
        refuse_validation("RayTrainReportCallback", validation)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save and report; all ranks take part in saving, some of them write."""
        metrics: dict[str, Any] = {
            name: value.item() if hasattr(value, "item") else value
            for name, value in trainer.callback_metrics.items()
        }
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        folder = tempfile.mkdtemp(prefix="miniray_lightning_")
        kept = False  # until the upload is done, which then deletes it
        try:
            trainer.save_checkpoint(f"{folder}/{self.CHECKPOINT_NAME}", weights_only=False)
            written = any(Path(folder).iterdir())
            report(
                metrics,
                checkpoint=Checkpoint.from_directory(folder) if written else None,
                checkpoint_upload_mode=self.checkpoint_upload_mode,
                delete_local_checkpoint_after_upload=True,
            )
            kept = written
        finally:
            if not kept:
                shutil.rmtree(folder, ignore_errors=True)
