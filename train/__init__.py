"""The train layer: distributed training on miniray actors, with the public names of Ray Train.

Names are loaded when they are first used, so that importing this module costs
nothing. What needs PyTorch is in ``miniray.train.torch``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from miniray.common.absent import absent, tell_imports

if TYPE_CHECKING:
    from miniray.train.base.exceptions import (
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
    from miniray.train.base.policies import (
        FailureDecision,
        FailurePolicy,
        GroupFailure,
        ScalingDecision,
        ScalingPolicy,
    )
    from miniray.train.callbacks import (
        Callback,
        CSVCallback,
        JSONCallback,
        MLflowCallback,
        ProgressCallback,
        TensorBoardCallback,
        UserCallback,
    )
    from miniray.train.config import (
        CheckpointConfig,
        FailureConfig,
        LoggingConfig,
        RunConfig,
        ScalingConfig,
    )
    from miniray.train.data import DataConfig, get_dataset_shard
    from miniray.train.data.config import TRAIN_DATASET_KEY
    from miniray.train.data_parallel_trainer import DataParallelTrainer
    from miniray.train.run.attach import stop_run
    from miniray.train.run.result import Result
    from miniray.train.storage.checkpoint import (
        Checkpoint,
        CheckpointConsistencyMode,
        CheckpointUploadMode,
        ReportedCheckpoint,
        ReportedCheckpointStatus,
    )
    from miniray.train.worker.backend import Backend, BackendConfig
    from miniray.train.worker.context import (
        TrainContext,
        get_all_reported_checkpoints,
        get_checkpoint,
        get_context,
        report,
    )

_HOMES = {
    "Backend": "worker.backend",
    "BackendConfig": "worker.backend",
    "CSVCallback": "callbacks",
    "Callback": "callbacks",
    "CallbackError": "base.exceptions",
    "Checkpoint": "storage.checkpoint",
    "CheckpointConfig": "config",
    "CheckpointConsistencyMode": "storage.checkpoint",
    "CheckpointUploadMode": "storage.checkpoint",
    "CollectiveError": "base.exceptions",
    "CollectiveTimeoutError": "base.exceptions",
    "ControllerError": "base.exceptions",
    "ControllerLostError": "base.exceptions",
    "DataConfig": "data",
    "DataParallelTrainer": "data_parallel_trainer",
    "FailureConfig": "config",
    "FailureDecision": "base.policies",
    "FailurePolicy": "base.policies",
    "GroupFailure": "base.policies",
    "JSONCallback": "callbacks",
    "LoggingConfig": "config",
    "MLflowCallback": "callbacks",
    "PlacementTimeoutError": "base.exceptions",
    "ProgressCallback": "callbacks",
    "ReportedCheckpoint": "storage.checkpoint",
    "ReportedCheckpointStatus": "storage.checkpoint",
    "Result": "run.result",
    "RunConfig": "config",
    "ScalingConfig": "config",
    "ScalingDecision": "base.policies",
    "ScalingPolicy": "base.policies",
    "StorageNotSharedError": "base.exceptions",
    "StorageUnusableError": "base.exceptions",
    "TRAIN_DATASET_KEY": "data.config",
    "TensorBoardCallback": "callbacks",
    "TrainContext": "worker.context",
    "TrainingFailedError": "base.exceptions",
    "UserCallback": "callbacks",
    "WorkerGroupError": "base.exceptions",
    "WorkerHungError": "base.exceptions",
    "get_all_reported_checkpoints": "worker.context",
    "get_checkpoint": "worker.context",
    "get_context": "worker.context",
    "get_dataset_shard": "data",
    "report": "worker.context",
    "stop_run": "run.attach",
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
