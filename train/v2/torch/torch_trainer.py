"""``TorchTrainer``, under the path at which Ray has it."""

from __future__ import annotations

from miniray.train.torch import TorchTrainer

__all__ = ["TorchTrainer"]
