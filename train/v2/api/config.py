"""The configurations of a run, under the path at which Ray has them."""

from __future__ import annotations

from miniray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig

__all__ = ["CheckpointConfig", "FailureConfig", "LoggingConfig", "RunConfig", "ScalingConfig"]
