"""``TorchTrainer``: the data parallel trainer with PyTorch's process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.train.config import instance_of
from miniray.train.data_parallel_trainer import DataParallelTrainer
from miniray.train.torch.config import TorchConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

    from miniray.train.data_parallel_trainer import TrainerArguments


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
        torch_config: TorchConfig | None = None,
        **others: Unpack[TrainerArguments],
    ) -> None:
        config = instance_of("torch_config", torch_config, TorchConfig)
        super().__init__(train_loop_per_worker, backend_config=config, **others)
