"""Local mode with PyTorch: the driver's process as a rank, alone or beside others of torchrun."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from miniray.train.base.ranks import Ranks
from miniray.train.data.devices import set_local_devices
from miniray.train.torch import environment
from miniray.train.worker.backend import LocalPlace
from miniray.train.worker.local_link import LinkClient, LinkServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from miniray.train.config import ScalingConfig

#: The store of torchrun with this process's rank and their number, and how many groups used it.
_rendezvous: tuple[Any, int, int] | None = None
_groups = 0


def join(
    backend: str | None, timeout: float, scaling: ScalingConfig, leave: contextlib.ExitStack
) -> LocalPlace:
    """Make a process group in this process, or take the place that torchrun gave it.

    A group that the program has made itself is used as it is, and left standing.
    """
    by_torchrun = environment.started_by_torchrun(os.environ)
    local_rank = int(os.environ["LOCAL_RANK"]) if by_torchrun else 0
    chosen = local_rank if by_torchrun else None
    if chosen is None and dist.is_initialized() and torch.cuda.is_available():
        chosen = torch.cuda.current_device()  # chosen by the program that made the group
    devices = local_devices(scaling, chosen)
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
    leave.callback(set_local_devices, set_local_devices(devices))
    if not dist.is_initialized():
        _make_group(backend, timeout, devices[0], leave, by_torchrun=by_torchrun)
    size = dist.get_world_size()
    if size == 1:
        return LocalPlace(Ranks(0, 1, 0, 1, 0), None)
    rank, local_size = dist.get_rank(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    node_rank = int(os.environ.get("GROUP_RANK", rank // local_size))
    ranks = Ranks(rank, size, local_rank, local_size, node_rank)
    link = _connect(rank, size, local_size, timeout)
    return LocalPlace(ranks, link)


def local_devices(scaling: ScalingConfig, chosen: int | None) -> list[torch.device]:
    """Return the devices of a rank in local mode; ``chosen`` is its GPU if it is not alone."""
    if not scaling.use_gpu or not torch.cuda.is_available():
        return [torch.device("cpu")]
    if chosen is not None:
        return [torch.device("cuda", chosen)]
    count = min(max(1, int(scaling.num_gpus_per_worker)), torch.cuda.device_count())
    return [torch.device("cuda", index) for index in range(count)]


def _make_group(
    chosen: str | None,
    seconds: float,
    device: torch.device,
    leave: contextlib.ExitStack,
    *,
    by_torchrun: bool,
) -> None:
    nccl = device.type == "cuda" and environment.has_nccl()
    backend = chosen or ("nccl" if nccl else "gloo")
    timeout = datetime.timedelta(seconds=seconds)
    if by_torchrun:
        store, rank, size = _torchruns_store(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    else:
        variables = environment.gloo_variables(
            "127.0.0.1", os.environ, environment.interface_addresses()
        )
        place = dict.fromkeys(("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"), "0")
        place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
        leave.enter_context(changed_environment({**variables, **place}))
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    leave.callback(_end_group)


def _torchruns_store(timeout: datetime.timedelta) -> tuple[Any, int, int]:
    """Return where the processes of torchrun meet, and this one's rank among how many.

    The store outlives a group, and what an older group left in it must not be read by a newer one.
    """
    global _rendezvous, _groups
    if _rendezvous is None:
        _rendezvous = next(dist.rendezvous("env://", timeout=timeout))
    _groups += 1
    store, rank, size = _rendezvous
    return dist.PrefixStore(f"miniray/{_groups}", store), rank, size


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _connect(rank: int, size: int, local_size: int, timeout: float) -> LinkServer | LinkClient:
    """Connect the ranks with rank 0; every rank of the process group has to call this."""
    listener: socket.socket | None = None
    where: list[tuple[str, int, bytes] | None] = [None]
    if rank == 0:
        here = "127.0.0.1"
        if local_size == size:
            listener = socket.create_server((here, 0))
        else:  # the others reach this machine as they have reached it for the process group
            here = os.environ.get("MASTER_ADDR") or socket.gethostname()
            listener = (
                socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
                if socket.has_dualstack_ipv6()
                else socket.create_server(("", 0))
            )
        _, port, *_ = listener.getsockname()
        where = [(here, port, secrets.token_bytes(32))]
    dist.broadcast_object_list(where, src=0)
    assert where[0] is not None
    host, port, secret = where[0]
    if listener is not None:
        return LinkServer(listener, secret, timeout)
    return LinkClient((host, port), secret, rank, timeout)
