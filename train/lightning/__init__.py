"""Training with PyTorch Lightning in the train loop of a ``TorchTrainer``.

The names are those of Ray Train's module. Lightning is loaded when this module is;
the train loop imports it.
"""

from __future__ import annotations

from miniray.train.lightning.callback import RayTrainReportCallback
from miniray.train.lightning.setup import (
    RayDDPStrategy,
    RayDeepSpeedStrategy,
    RayFSDPStrategy,
    RayLightningEnvironment,
    prepare_trainer,
)

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
