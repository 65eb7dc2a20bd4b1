"""The train layer: distributed training on miniray actors, with the public names of Ray Train.

Names are loaded when they are first used, so that importing this module costs
nothing. What needs PyTorch is in ``miniray.train.torch``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from miniray.common.absent import absent, tell_imports

if TYPE_CHECKING:
    from miniray.train.attach import stop_run
    from miniray.train.backend import Backend, BackendConfig
    from miniray.train.callbacks import (
        Callback,
        CSVCallback,
        JSONCallback,
        MLflowCallback,
        ProgressCallback,
        TensorBoardCallback,
        UserCallback,
    )
    from miniray.train.checkpoint import Checkpoint
    from miniray.train.config import (
        CheckpointConfig,
        FailureConfig,
        LoggingConfig,
        RunConfig,
        ScalingConfig,
    )
    from miniray.train.context import (
        TrainContext,
        get_all_reported_checkpoints,
        get_checkpoint,
        get_context,
        report,
    )
    from miniray.train.data import DataConfig, get_dataset_shard
    from miniray.train.data.config import TRAIN_DATASET_KEY
    from miniray.train.exceptions import (
        CallbackError,
        CollectiveError,
        CollectiveTimeoutError,
        ControllerError,
        ControllerLostError,
        PlacementTimeoutError,
        StorageNotSharedError,
        StorageUnusableError,
        TrainingFailedError,
        WorkerGroupError,
        WorkerHungError,
    )
    from miniray.train.policies import (
        FailureDecision,
        FailurePolicy,
        GroupFailure,
        ScalingDecision,
        ScalingPolicy,
    )
    from miniray.train.report_options import (
        CheckpointConsistencyMode,
        CheckpointUploadMode,
        ReportedCheckpoint,
        ReportedCheckpointStatus,
    )
    from miniray.train.result import Result
    from miniray.train.trainer import DataParallelTrainer

_HOMES = {
    "Backend": "backend",
    "BackendConfig": "backend",
    "CSVCallback": "callbacks",
    "Callback": "callbacks",
    "CallbackError": "exceptions",
    "Checkpoint": "checkpoint",
    "CheckpointConfig": "config",
    "CheckpointConsistencyMode": "report_options",
    "CheckpointUploadMode": "report_options",
    "CollectiveError": "exceptions",
    "CollectiveTimeoutError": "exceptions",
    "ControllerError": "exceptions",
    "ControllerLostError": "exceptions",
    "DataConfig": "data",
    "DataParallelTrainer": "trainer",
    "FailureConfig": "config",
    "FailureDecision": "policies",
    "FailurePolicy": "policies",
    "GroupFailure": "policies",
    "JSONCallback": "callbacks",
    "LoggingConfig": "config",
    "MLflowCallback": "callbacks",
    "PlacementTimeoutError": "exceptions",
    "ProgressCallback": "callbacks",
    "ReportedCheckpoint": "report_options",
    "ReportedCheckpointStatus": "report_options",
    "Result": "result",
    "RunConfig": "config",
    "ScalingConfig": "config",
    "ScalingDecision": "policies",
    "ScalingPolicy": "policies",
    "StorageNotSharedError": "exceptions",
    "StorageUnusableError": "exceptions",
    "TRAIN_DATASET_KEY": "data.config",
    "TensorBoardCallback": "callbacks",
    "TrainContext": "context",
    "TrainingFailedError": "exceptions",
    "UserCallback": "callbacks",
    "WorkerGroupError": "exceptions",
    "WorkerHungError": "exceptions",
    "get_all_reported_checkpoints": "context",
    "get_checkpoint": "context",
    "get_context": "context",
    "get_dataset_shard": "data",
    "report": "context",
    "stop_run": "attach",
}

#: Names of Ray Train that are not here, and what to do instead.
_VALIDATE = "validate in the train loop, or in a task that the train loop starts"
_FRAMEWORK = "DataParallelTrainer runs any train loop; connect its processes in a train.Backend"
_HERE = "import from miniray.train itself what is public"
_NODE_LOST = "the loss of a node counts like any other failure: set FailureConfig(max_failures=...)"
_ABSENT = {
    "NCCLHangError": "FailureConfig(hang_timeout_s=...) ends a hang with WorkerHungError",
    "PreemptionError": _NODE_LOST,
    "PreemptionInfo": _NODE_LOST,
    "SyncConfig": "what is reported is in the storage when report() has returned",
    "ValidationConfig": _VALIDATE,
    "ValidationFn": _VALIDATE,
    "ValidationTaskConfig": _VALIDATE,
    "base_trainer": _HERE,
    "constants": _HERE,
    "error": _HERE,
    "get_preemption_info": _NODE_LOST,
    "horovod": _FRAMEWORK,
    "lightgbm": _FRAMEWORK,
    "tensorflow": _FRAMEWORK,
    "xgboost": _FRAMEWORK,
}
tell_imports(__name__, _ABSENT)

#: Modules that are reached as attributes, without an import of their own.
_MODULES = {"collective", "data", "jax", "torch"}

__all__ = [
    "TRAIN_DATASET_KEY",
    "Backend",
    "BackendConfig",
    "CSVCallback",
    "Callback",
    "CallbackError",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "CollectiveError",
    "CollectiveTimeoutError",
    "ControllerError",
    "ControllerLostError",
    "DataConfig",
    "DataParallelTrainer",
    "FailureConfig",
    "FailureDecision",
    "FailurePolicy",
    "GroupFailure",
    "JSONCallback",
    "LoggingConfig",
    "MLflowCallback",
    "PlacementTimeoutError",
    "ProgressCallback",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "ScalingDecision",
    "ScalingPolicy",
    "StorageNotSharedError",
    "StorageUnusableError",
    "TensorBoardCallback",
    "TrainContext",
    "TrainingFailedError",
    "UserCallback",
    "WorkerGroupError",
    "WorkerHungError",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "report",
    "stop_run",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"miniray.train.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise absent(__name__, name, _ABSENT)
    value = getattr(importlib.import_module(f"miniray.train.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
