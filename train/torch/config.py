"""``TorchConfig``: how the process group of a run is made; ``TorchBackend`` makes and ends it.

What a process needs to be told follows from ``environment``; here it is applied. PyTorch is loaded
in the processes of ranks only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
from typing import TYPE_CHECKING, Any

from miniray.common import process_state
from miniray.common.amounts import ACCELERATORS
from miniray.system import option_checks as check
from miniray.train.config.checks import above_zero, check_field
from miniray.train.torch import environment
from miniray.train.worker.backend import Backend, BackendConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.train.config import ScalingConfig
    from miniray.train.worker.backend import GroupMember, LocalPlace

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class TorchConfig(BackendConfig):
    """How the process group of a run is made.

    Args:
        backend: ``"gloo"``, ``"nccl"`` or another that PyTorch knows, also one for each device as
            in ``"cpu:gloo,cuda:nccl"``. Default: nccl when workers hold GPUs that PyTorch can
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
_PRELOAD = ("torch", "psutil", "miniray.train.torch.group_store")

#: Where rank 0 tells the others which backend the group uses.
_BACKEND_KEY = "miniray/backend"


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
        along, of which it is not known whether they leave the devices alone until they are used.
        """
        return () if ACCELERATORS & resources.keys() else ("torch._dynamo",)

    def prepare(self) -> None:
        import torch.distributed  # noqa: F401

    def on_start(self, member: GroupMember) -> None:
        """Set the variables of torchrun, share the node's GPUs, make the process group."""
        import torch

        rocm = torch.version.hip is not None
        os.environ.update(environment.torchrun_variables(member))
        os.environ.update(
            environment.gloo_variables(
                member.address, os.environ, environment.interface_addresses()
            )
        )
        # This works only before CUDA is first used; a worker's process is new.
        os.environ.update(environment.shared_visibility(member, os.environ, rocm=rocm))
        if not process_state.threads_given():
            cores = len(os.sched_getaffinity(0))
            cpus = member.resources.get("CPU", 0)
            torch.set_num_threads(
                environment.thread_count(cpus, cores, member.ranks.local_world_size)
            )
        self._make_group(member)

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

        from miniray.train.torch.local import join

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

    def _make_group(self, member: GroupMember) -> None:
        import torch
        import torch.distributed as dist

        from miniray.train.data.devices import own_devices

        ranks = member.ranks
        timeout = datetime.timedelta(seconds=self._config.timeout_s)
        if member.listener is not None:
            member.listener.close()  # MASTER_PORT is for what libraries of the user open there
        self._store = _store(member, timeout)
        device = own_devices()[0]
        # Makes Hugging Face Accelerate use this device and not one by its own rules.
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            self._agree_on_backend(member),
            store=self._store,
            rank=ranks.world_rank,
            world_size=ranks.world_size,
            timeout=timeout,
        )
        self._made_group = True

    def _agree_on_backend(self, member: GroupMember) -> str:
        """Return the backend that was asked for, or else the one that rank 0 chooses for all."""
        if self._config.backend is not None:
            return self._config.backend
        if member.ranks.world_rank != 0:
            return str(self._store.get(_BACKEND_KEY).decode())
        backend = environment.default_backend(member, cuda=environment.has_nccl())
        if member.resources.get("GPU") and backend != "nccl":
            why = (
                "workers share GPUs, which NCCL refuses"
                if member.shares_devices
                else "PyTorch finds no GPU here, or has no NCCL"
            )
            logger.warning("The process group uses gloo instead of NCCL: %s.", why)
        self._store.set(_BACKEND_KEY, backend)
        return backend


def _store(member: GroupMember, timeout: datetime.timedelta) -> Any:
    """Return the store of the group: the controller's, or for a single rank one of its own."""
    if member.ranks.world_size == 1:
        import torch.distributed as dist

        return dist.HashStore()
    from miniray.train.torch.group_store import GroupStore

    assert member.controller is not None
    return GroupStore(member.controller, timeout)
