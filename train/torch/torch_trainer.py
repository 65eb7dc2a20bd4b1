"""``TorchTrainer``, its ``TorchConfig``, and the backend that makes and ends the process group.

PyTorch is loaded in the processes of ranks only.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.common.amounts import ACCELERATORS
from miniray.system import option_checks as check
from miniray.train.config import instance_of
from miniray.train.config.checks import above_zero, check_field
from miniray.train.data_parallel_trainer import DataParallelTrainer
from miniray.train.worker.backend import Backend, BackendConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Unpack

    from miniray.train.config import ScalingConfig
    from miniray.train.data_parallel_trainer import TrainerArguments
    from miniray.train.worker.backend import GroupMember, LocalPlace


@dataclasses.dataclass
class TorchConfig(BackendConfig):
    """How the process group of a run is made.

    Args:
        backend: ``"gloo"``, ``"nccl"`` or another that PyTorch supports, also one for each device
            as in ``"cpu:gloo,cuda:nccl"``. Default: nccl when workers hold GPUs that PyTorch can
            use, else gloo. NCCL refuses two ranks on one device, so workers that share a GPU get
            gloo as well.
        init_method: ``"env"`` or ``"tcp"``, as in Ray. The ranks meet in the same way for both:
            at a port on which rank 0 listens, named by MASTER_ADDR and MASTER_PORT.
        timeout_s: Seconds after which operations of the group fail.

    Raises:
        ValueError: A value makes no sense; the message says what is allowed.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        check_field(self, "backend", check.text, or_none="takes the best")
        check_field(self, "init_method", check.one_of("env", "tcp"))
        check_field(self, "timeout_s", above_zero)

    def make_backend(self) -> TorchBackend:
        return TorchBackend(self)


#: What every rank needs.
_PRELOAD = ("torch", "psutil", "miniray.train.torch.process_group")


class TorchBackend(Backend):
    """Makes the process group before the train loop and ends it afterwards."""

    def __init__(self, config: TorchConfig) -> None:
        self._config = config
        self._store: Any = None
        self._leave: contextlib.ExitStack | None = None
        self._made_group = False

    def preload(self, resources: Mapping[str, float]) -> tuple[str, ...]:
        del resources
        return _PRELOAD

    def preload_later(self, resources: Mapping[str, float]) -> tuple[str, ...]:
        """Name the compiler's front end on CPUs.

        It is loaded by the first DistributedDataParallel or optimizer step of a process anyway,
        and takes almost as long as PyTorch itself. With accelerators it brings kernels' compilers
        along, which may touch the devices when they are imported.
        """
        return () if ACCELERATORS & resources.keys() else ("torch._dynamo",)

    def prepare(self) -> None:
        import torch.distributed  # noqa: F401

    def on_start(self, member: GroupMember) -> None:
        from miniray.train.torch.process_group import make_group

        self._store = make_group(member, self._config.backend, self._config.timeout_s)
        self._made_group = True

    def on_shutdown(self) -> None:
        """End the process group, unless it is the program's; a rank that still waits gets an error.

        Where something keeps the group's connections open, as DistributedDataParallel does, it gets
        that when this process ends.
        """
        import torch.distributed as dist

        if self._made_group and dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    def join_local(self, config: ScalingConfig) -> LocalPlace:
        """Make a process group in this process, or take the place that torchrun gave it."""
        import torch.distributed as dist

        from miniray.train.torch.process_group import join

        self._leave = contextlib.ExitStack()
        given = dist.is_initialized()
        place = join(self._config.backend, self._config.timeout_s, config, self._leave)
        self._made_group = not given
        return place

    def leave_local(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave.close()

    def __getstate__(self) -> dict[str, Any]:
        # Goes to the workers, each of which makes its own.
        return {**self.__dict__, "_store": None, "_leave": None}


class TorchTrainer(DataParallelTrainer):
    """Runs a PyTorch train loop on several workers, connected by a process group.

    The group is ready when the loop begins, and the variables of ``torchrun`` are set (RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...). ``torch_config`` says how it is made; the other
    arguments, and errors, are those of ``DataParallelTrainer``.
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
