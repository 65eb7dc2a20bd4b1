"""``TorchConfig`` and the backend that makes PyTorch's process group on every rank."""

from __future__ import annotations

import dataclasses
import datetime
import os
from typing import TYPE_CHECKING, ClassVar

from miniray.train.backend import Backend, BackendConfig

if TYPE_CHECKING:
    from miniray.train.backend import Member

INIT_METHODS = ("env", "tcp")


@dataclasses.dataclass
class TorchConfig(BackendConfig):
    """How the process group of a run is made.

    Args:
        backend: ``"gloo"``, ``"nccl"`` or another that PyTorch knows. Default: nccl when workers
            hold GPUs, else gloo.
        init_method: ``"env"`` or ``"tcp"``, as in Ray. The ranks meet in the same way for both:
            at a port on which rank 0 listens, named by MASTER_ADDR and MASTER_PORT.
        timeout_s: Seconds after which operations of the group fail.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: int = 1800

    def __post_init__(self) -> None:
        if self.init_method not in INIT_METHODS:
            raise ValueError(
                f"TorchConfig(init_method={self.init_method!r}) is not known. "
                f"Use one of {', '.join(INIT_METHODS)}."
            )
        if self.timeout_s <= 0:
            raise ValueError(f"TorchConfig(timeout_s={self.timeout_s}) must be above 0 seconds.")

    def make_backend(self) -> TorchBackend:
        """The backend that makes this process group."""
        return TorchBackend(self)


class TorchBackend(Backend):
    """Makes the process group before the train loop and ends it afterwards."""

    preload: ClassVar[tuple[str, ...]] = ("torch", "torch.distributed")

    def __init__(self, config: TorchConfig) -> None:
        self._config = config
        self._store: object = None

    def prepare(self) -> None:
        """Load PyTorch."""
        import torch.distributed  # noqa: F401

    def on_start(self, member: Member) -> None:
        """Set the variables of torchrun, share the node's GPUs, make the process group."""
        os.environ.update(environment(member))
        share_devices(member)
        set_threads(member)
        self._make_group(member)

    def on_shutdown(self) -> None:
        """End the process group; a rank that still waits in it gets an error."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def _make_group(self, member: Member) -> None:
        import torch
        import torch.distributed as dist

        ranks = member.ranks
        timeout = datetime.timedelta(seconds=self._config.timeout_s)
        listen = {} if member.listener is None else {"master_listen_fd": member.listener.detach()}
        # The port was bound when rank 0 was found, so nobody can take it before the store does.
        self._store = dist.TCPStore(
            member.master_address,
            member.master_port,
            ranks.world_size,
            is_master=ranks.world_rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            **listen,
        )
        if torch.cuda.is_available() and member.resources.get("GPU"):
            from miniray.train.torch.train_loop_utils import own_devices

            torch.cuda.set_device(own_devices()[0])
        dist.init_process_group(
            self._config.backend or default_backend(member),
            store=self._store,
            rank=ranks.world_rank,
            world_size=ranks.world_size,
            timeout=timeout,
        )


def default_backend(member: Member) -> str:
    """The backend of process groups that suits what the workers hold."""
    return "nccl" if member.resources.get("GPU") else "gloo"


def environment(member: Member) -> dict[str, str]:
    """The variables that torchrun sets, for this process."""
    ranks = member.ranks
    variables = {
        "RANK": str(ranks.world_rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_RANK": str(ranks.local_rank),
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "NODE_RANK": str(ranks.node_rank),
        "GROUP_RANK": str(ranks.node_rank),
        "MASTER_ADDR": member.master_address,
        "MASTER_PORT": str(member.master_port),
    }
    if member.master_address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ:
        # All ranks are on this machine; its host name may resolve to an address without a route.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables


def share_devices(member: Member) -> None:
    """Let the process see the GPUs of all workers of its node.

    Then ``cuda:<local rank>`` is its own, as libraries that follow torchrun expect, and NCCL can
    reach its neighbours directly. It works only before CUDA is first used.
    """
    ids = member.node_devices.get("GPU")
    if ids and "CUDA_VISIBLE_DEVICES" in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)


def set_threads(member: Member) -> None:
    """Give PyTorch as many threads as the worker holds CPUs, unless OMP_NUM_THREADS is set.

    Without CPUs, the machine's cores are shared by the workers of the node.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    import torch

    cores = len(os.sched_getaffinity(0)) // member.ranks.local_world_size
    torch.set_num_threads(max(1, int(member.resources.get("CPU", 0)) or cores))
