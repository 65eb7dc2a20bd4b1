"""``DataParallelTrainer``, under the path at which Ray has it."""

from __future__ import annotations

from miniray.train import DataParallelTrainer

__all__ = ["DataParallelTrainer"]
