"""What a user says about a run: scale, storage, checkpoints, failures, logging.

Each class refuses nonsense when it is made, with the reason and the fix. What
follows from the values is decided elsewhere.
"""

from __future__ import annotations

from miniray.train.config.checks import instance_of
from miniray.train.config.run import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig
from miniray.train.config.scaling import ScalingConfig

__all__ = [
    "CheckpointConfig",
    "FailureConfig",
    "LoggingConfig",
    "RunConfig",
    "ScalingConfig",
    "instance_of",
]
