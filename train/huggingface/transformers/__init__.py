"""Training with Hugging Face Transformers in the train loop of a ``TorchTrainer``.

The names are those of Ray Train's module. Transformers is loaded when this module is;
the train loop imports it.
"""

from __future__ import annotations

from miniray.train.huggingface.transformers.callback import RayTrainReportCallback
from miniray.train.huggingface.transformers.trainer import prepare_trainer

MinirayTrainReportCallback = RayTrainReportCallback

__all__ = ["MinirayTrainReportCallback", "RayTrainReportCallback", "prepare_trainer"]
