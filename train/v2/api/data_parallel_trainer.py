"""Names at the path where Ray has them."""

from miniray.train import DataParallelTrainer

__all__ = ["DataParallelTrainer"]
