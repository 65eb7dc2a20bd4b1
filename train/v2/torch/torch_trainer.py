"""Names at the path where Ray has them."""

from miniray.train.torch import TorchTrainer

__all__ = ["TorchTrainer"]
