"""The errors of ``fit()``, under the path at which Ray has them."""

from __future__ import annotations

from miniray.train import ControllerError, TrainingFailedError, WorkerGroupError

__all__ = ["ControllerError", "TrainingFailedError", "WorkerGroupError"]
