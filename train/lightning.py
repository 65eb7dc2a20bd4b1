"""Training with PyTorch Lightning in the train loop of a ``TorchTrainer``.

The names are those of Ray Train's module. Lightning is loaded when this module is;
the train loop imports it. The process group is that of the ``TorchTrainer``; Lightning neither
makes nor ends it. Strategies take the arguments of Lightning's own.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.train.storage.checkpoint import Checkpoint, CheckpointUploadMode, member
from miniray.train.torch import get_device
from miniray.train.worker.context import get_context, refuse_validation, report

if TYPE_CHECKING:
    import torch


def lightning() -> Any:
    """Return the module ``lightning.pytorch`` or ``pytorch_lightning``, whichever the user loaded.

    Classes of the one are strange to the other, so the choice matters where both are installed.

    Raises:
        ImportError: Neither is installed.
    """
    names = ["lightning.pytorch", "pytorch_lightning"]
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        names.reverse()
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:  # noqa: PERF203 - there are two
            if error.name not in ("lightning", "pytorch_lightning"):
                raise
    raise ImportError(
        "miniray.train.lightning needs PyTorch Lightning, which is not installed. "
        "Run `pip install lightning`."
    )


_pl = lightning()
_plugins = importlib.import_module(f"{_pl.__name__}.plugins.environments")
_LightningEnvironment: Any = _plugins.LightningEnvironment
_DDPStrategy: Any = _pl.strategies.DDPStrategy
_FSDPStrategy: Any = _pl.strategies.FSDPStrategy
_DeepSpeedStrategy: Any = _pl.strategies.DeepSpeedStrategy


class RayLightningEnvironment(_LightningEnvironment):  # type: ignore[misc]
    """The worker group as Lightning's cluster environment. For ``pl.Trainer(plugins=[...])``."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return get_context().get_world_size()

    def global_rank(self) -> int:
        return get_context().get_world_rank()

    def local_rank(self) -> int:
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        return get_context().get_node_rank()

    def set_world_size(self, size: int) -> None:
        """Nothing to set: the trainer has decided it."""

    def set_global_rank(self, rank: int) -> None:
        """Nothing to set: the trainer has decided it."""

    def teardown(self) -> None:
        """Leave the variables of the group as they are; it goes on after this fit."""


class _InGroup:
    """What all strategies take from the worker group; before Lightning's class among the bases."""

    world_size: int
    global_rank: int

    @property
    def root_device(self) -> torch.device:
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}


class RayDDPStrategy(_InGroup, _DDPStrategy):  # type: ignore[misc]
    """DistributedDataParallel over the worker group. For ``pl.Trainer(strategy=...)``."""


class RayFSDPStrategy(_InGroup, _FSDPStrategy):  # type: ignore[misc]
    """FullyShardedDataParallel over the worker group, on GPUs. For ``pl.Trainer(strategy=...)``."""


class RayDeepSpeedStrategy(_InGroup, _DeepSpeedStrategy):  # type: ignore[misc]
    """DeepSpeed over the worker group, on GPUs. For ``pl.Trainer(strategy=...)``.

    Needs DeepSpeed.
    """


_STRATEGIES = (RayDDPStrategy, RayFSDPStrategy, RayDeepSpeedStrategy)


def prepare_trainer(trainer: Any) -> Any:
    """Check that a ``pl.Trainer`` is set up for the worker group.

    Args:
        trainer: The trainer.

    Returns:
        The trainer itself.

    Raises:
        RuntimeError: It has another strategy or environment; the message says what to pass.
    """
    if not isinstance(trainer.strategy, _STRATEGIES):
        raise RuntimeError(
            f"The strategy of the Lightning trainer is {type(trainer.strategy).__name__}, which "
            f"does not know the worker group. Pass "
            f"pl.Trainer(strategy=miniray.train.lightning.RayDDPStrategy(), ...), or another of "
            f"{', '.join(kind.__name__ for kind in _STRATEGIES)}."
        )
    environment = trainer.strategy.cluster_environment
    if not isinstance(environment, RayLightningEnvironment):
        raise RuntimeError(
            f"The cluster environment of the Lightning trainer is {type(environment).__name__}, "
            f"which does not know the worker group. Pass "
            f"pl.Trainer(plugins=[miniray.train.lightning.RayLightningEnvironment()], ...)."
        )
    return trainer


_Callback: Any = lightning().callbacks.Callback


class RayTrainReportCallback(_Callback):  # type: ignore[misc]
    """Reports after each training epoch: logged metrics, epoch, step, and a checkpoint.

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


MinirayDDPStrategy = RayDDPStrategy
MinirayDeepSpeedStrategy = RayDeepSpeedStrategy
MinirayFSDPStrategy = RayFSDPStrategy
MinirayLightningEnvironment = RayLightningEnvironment
MinirayTrainReportCallback = RayTrainReportCallback

__all__ = [
    "MinirayDDPStrategy",
    "MinirayDeepSpeedStrategy",
    "MinirayFSDPStrategy",
    "MinirayLightningEnvironment",
    "MinirayTrainReportCallback",
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "prepare_trainer",
]
