"""``TorchTrainer``: the data parallel trainer with PyTorch's process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.train.config import instance_of
from miniray.train.data_parallel_trainer import DataParallelTrainer
from miniray.train.torch.config import TorchConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.train.config import RunConfig, ScalingConfig
    from miniray.train.data import DataConfig


class TorchTrainer(DataParallelTrainer):
    """Runs a PyTorch train loop on several workers, connected by a process group.

    The group is ready when the loop begins, and the variables of ``torchrun`` are set (RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).

    Args:
        train_loop_per_worker: The function; called on every worker with ``train_loop_config`` if
            it takes a parameter.
        train_loop_config: What the function is called with.
        torch_config: How the process group is made.
        scaling_config: How many workers, and what each holds. Default: one with 1 CPU.
        run_config: Name, storage and rules of the run.
        datasets: Datasets by name, of which each worker gets its part from
            ``get_dataset_shard(name)``.
        dataset_config: Which of them are split and shuffled. Default: all.

    Raises:
        TypeError: An unknown argument, or one of Ray's that is not supported.
        ValueError: A configuration makes no sense.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        **unsupported: Any,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=instance_of("torch_config", torch_config, TorchConfig),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            **unsupported,
        )
