"""``DataParallelTrainer``: starts a run's controller, shows its progress, returns its result."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import pickle
from typing import TYPE_CHECKING, Any, TypedDict

from miniray.common.config import config as tunables
from miniray.common.config import parse
from miniray.train.config import FailureConfig, RunConfig, ScalingConfig, instance_of
from miniray.train.controller.run_spec import RunSpec, describe_run, make_error
from miniray.train.data.adapt import adapt_all
from miniray.train.data.shards import DataConfig, Datasets
from miniray.train.run.result import Result
from miniray.train.storage.filesystem import refuse_memory
from miniray.train.storage.storage import RunStorage
from miniray.train.worker.backend import BackendConfig
from miniray.train.worker.worker import TrainLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

#: Variable that makes every run of a program a local one.
LOCAL_VARIABLE = "MINIRAY_TRAIN_LOCAL"

_GOES_ON = (
    "Make the trainer as before and call fit(): a run goes on from its newest checkpoint when it "
    "is started with the same RunConfig(name=..., storage_path=...)."
)

_REFUSED = {
    "metadata": "Put the values into train_loop_config, or into checkpoints with set_metadata().",
    "resume_from_checkpoint": "Pass the checkpoint in train_loop_config. An interrupted run goes "
    "on from its newest checkpoint when it is started with the same RunConfig(name=...).",
    "validation_config": "Validate in the train loop, or in a task that the train loop starts.",
}


class TrainerArguments(TypedDict, total=False):
    """The arguments of ``DataParallelTrainer`` that trainers of frameworks pass on to it."""

    train_loop_config: dict[str, Any] | None
    scaling_config: ScalingConfig | None
    run_config: RunConfig | None
    datasets: Mapping[str, Any] | None
    dataset_config: DataConfig | None


class DataParallelTrainer:
    """Runs a function on several workers at once.

    Args:
        train_loop_per_worker: The function; called on every worker with ``train_loop_config`` if
            it takes a parameter.
        train_loop_config: What the function is called with.
        backend_config: What connects the workers. Default: nothing.
        scaling_config: How many workers, and the resources of each. Default: one with 1 CPU.
        run_config: Name, storage and rules of the run.
        datasets: Datasets by name, of which each worker gets its part from
            ``get_dataset_shard(name)``: PyTorch datasets, Arrow tables, paths of Parquet files,
            ``pyarrow.dataset`` datasets, DataFrames, Hugging Face datasets, or functions that
            return one, which are called here.
        dataset_config: Which of them are split and shuffled. Default: all.

    Raises:
        TypeError: An unknown argument, one of Ray's that is not supported, or no dataset.
        ValueError: The function takes more than one required parameter, or a configuration is of
            the wrong class.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        backend_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        **unsupported: Any,
    ) -> None:
        refuse_unsupported(type(self).__name__, unsupported)
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.backend_config = instance_of("backend_config", backend_config, BackendConfig)
        self.scaling_config = instance_of("scaling_config", scaling_config, ScalingConfig)
        self.run_config = instance_of("run_config", run_config, RunConfig)
        self.datasets = datasets
        self.dataset_config = instance_of("dataset_config", dataset_config, DataConfig)
        loop = make_train_loop(train_loop_per_worker, train_loop_config)
        size = 1 if is_local(self.scaling_config) else self.scaling_config.max_workers
        sources = adapt_all(datasets, self.dataset_config, size)
        self._loop = dataclasses.replace(loop, datasets=Datasets(sources, self.dataset_config))

    def fit(self) -> Result:
        """Run to the end.

        Again with the same trainer, it goes on from the newest checkpoint of its run.

        Starts an embedded cluster if this process is attached to none; not so in local mode
        (``num_workers=0`` or ``MINIRAY_TRAIN_LOCAL=1``), where the train loop runs in this
        process. Ctrl-C stops the run after the uploads that have begun, twice at once. If this
        process ends otherwise, so does the run; ``fit()`` with the same name and storage path goes
        on from its newest checkpoint. A run that is to outlive a terminal belongs into a job:
        ``miniray job submit``, with ``--retries`` for the loss of a node.

        Returns:
            The results.

        Raises:
            WorkerGroupError: Workers failed more often than ``FailureConfig`` allows.
            ControllerError: Storage, a callback or the runtime failed.
            KeyboardInterrupt: The user stopped the run.
            RuntimeError: In local mode, another thread of this process runs a train loop.
        """
        from miniray.train.run.driver import run_on_cluster
        from miniray.train.run.local import LocalEnd, run_locally

        spec = self._make_spec()
        if is_local(self.scaling_config):
            end = run_locally(spec, self._loop)
        else:
            end = LocalEnd(run_on_cluster(spec, self._loop), spec.storage, None)
        error = make_error(end.outcome)
        if error is not None:
            raise error from end.error
        assert self.run_config.checkpoint_config is not None
        value = pickle.loads(end.outcome.return_value) if end.outcome.return_value else None
        return Result.kept(
            end.storage,
            end.outcome.metrics,
            end.outcome.checkpoints,
            self.run_config.checkpoint_config,
            return_value=value,
        )

    @classmethod
    def restore(cls, *_: Any, **__: Any) -> DataParallelTrainer:
        """Refuse, as Ray does: an interrupted run goes on when it is started again."""
        raise DeprecationWarning(f"{cls.__name__}.restore() is not supported. {_GOES_ON}")

    @classmethod
    def can_restore(cls, *_: Any, **__: Any) -> bool:
        """Refuse, as Ray does: an interrupted run goes on when it is started again."""
        raise DeprecationWarning(
            f"{cls.__name__}.can_restore() is not supported. {_GOES_ON} Result.from_path(path) "
            f"shows what the folder of a run holds."
        )

    def _make_spec(self) -> RunSpec:
        config = self.run_config
        failures = config.failure_config
        assert failures is not None
        assert config.name is not None
        storage = RunStorage(config.storage_url, config.name, config.storage_filesystem)
        if is_local(self.scaling_config):
            # The processes run once (torchrun has --max-restarts), and a debugger may hold one.
            failures = FailureConfig(controller_failure_limit=0)
        else:
            refuse_memory(storage.filesystem, config.storage_url)
        return RunSpec(
            storage=storage,
            run_config=config,
            scaling_config=self.scaling_config,
            backend=self.backend_config.make_backend(),
            failures=failures,
            group=self.scaling_config.group,
            collective_timeout=tunables().train_collective_timeout,
            preload=self._loop.datasets.modules,
            configuration=describe_run(
                name=config.name,
                train_loop=self.train_loop_per_worker,
                train_loop_config=self.train_loop_config,
                scaling_config=self.scaling_config,
                run_config=config,
                backend_config=self.backend_config,
            ),
        )


def is_local(config: ScalingConfig) -> bool:
    """Return whether a run with this configuration happens in the driver's process.

    Raises:
        ValueError: ``MINIRAY_TRAIN_LOCAL`` is neither 0 nor 1.
    """
    text = os.environ.get(LOCAL_VARIABLE) or "0"
    return bool(parse("train_local", bool, text)) or config.num_workers == 0


def refuse_unsupported(trainer: str, given: dict[str, Any]) -> None:
    """Raise TypeError for arguments that a trainer does not take; None counts as not given."""
    for name, value in given.items():
        if name not in _REFUSED:
            raise TypeError(f"{trainer}() got an unexpected argument {name!r}.")
        if value is not None:
            raise TypeError(f"{trainer}({name}=...) is not supported. {_REFUSED[name]}")


def make_train_loop(function: Any, config: dict[str, Any] | None) -> TrainLoop:
    """Return the train loop of a function that takes a config or no argument.

    Raises:
        ValueError: The value is no function, one that a call does not run, or takes more than one
            required parameter.
    """
    if not callable(function):
        raise ValueError(
            f"train_loop_per_worker must be a function, not {function!r}. "
            f"Pass the function itself and not its result."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(
            f"train_loop_per_worker {function!r} is an async function, which a call does not run. "
            f"Pass a function that runs it: `def train_loop(): asyncio.run(...)`."
        )
    if inspect.isgeneratorfunction(function):
        raise ValueError(
            f"train_loop_per_worker {function!r} has a `yield`, so a call does not run it. Report "
            f"with miniray.train.report() instead."
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without a text signature: print, in Python 3.10
        return TrainLoop(function, () if config is None else (config,))
    parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
    ]
    if len(required) > 1:
        raise ValueError(
            f"train_loop_per_worker {function!r} takes {len(required)} required parameters. "
            f"It is called with train_loop_config or with nothing: take one parameter or none."
        )
    if required or (parameters and config is not None):
        return TrainLoop(function, (config if config is not None else {},))
    if config is not None:
        logger.warning("train_loop_config is not used: %r takes no parameter.", function)
    return TrainLoop(function, ())
