"""The train layer: distributed training on miniray actors, with the public names of Ray Train.

Names are loaded when they are first used, so that importing this module costs
nothing. What needs PyTorch is in ``miniray.train.torch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.absent import lazy

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
    from miniray.train.data.shards import TRAIN_DATASET_KEY, DataConfig, get_dataset_shard
    from miniray.train.data_parallel_trainer import DataParallelTrainer
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

#: By module: which public names it has.
_HOMES: dict[str, str] = {}
for _home, _names in {
    "base.exceptions": (
        "CallbackError CollectiveError CollectiveTimeoutError ControllerError "
        "ControllerLostError PlacementTimeoutError StorageNotSharedError StorageUnusableError "
        "TrainingFailedError WorkerGroupError WorkerHungError"
    ),
    "callbacks": (
        "CSVCallback Callback JSONCallback MLflowCallback ProgressCallback TensorBoardCallback "
        "UserCallback"
    ),
    "config": "CheckpointConfig FailureConfig LoggingConfig RunConfig ScalingConfig",
    "data.shards": "DataConfig TRAIN_DATASET_KEY get_dataset_shard",
    "data_parallel_trainer": "DataParallelTrainer",
    "run.result": "Result",
    "storage.checkpoint": (
        "Checkpoint CheckpointConsistencyMode CheckpointUploadMode ReportedCheckpoint "
        "ReportedCheckpointStatus"
    ),
    "worker.backend": "Backend BackendConfig",
    "worker.context": (
        "TrainContext get_all_reported_checkpoints get_checkpoint get_context report"
    ),
}.items():
    _HOMES |= dict.fromkeys(_names.split(), f"miniray.train.{_home}")

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
    **dict.fromkeys(
        ("_checkpoint", "backend", "base_trainer", "constants", "context", "error", "trainer"),
        _HERE,
    ),
    "get_preemption_info": _NODE_LOST,
    "horovod": _FRAMEWORK,
    "lightgbm": _FRAMEWORK,
    "session": "report(), get_checkpoint() and get_context() are in miniray.train",
    "tensorflow": _FRAMEWORK,
    "xgboost": _FRAMEWORK,
}
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
]

__getattr__, __dir__ = lazy(__name__, _HOMES, _MODULES, _ABSENT)
