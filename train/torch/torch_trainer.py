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
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...). ``torch_config`` says how it is made; the other
    arguments, and what is raised, are those of ``DataParallelTrainer``.
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
