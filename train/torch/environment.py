"""What the process of a rank needs to know before PyTorch starts: variables, devices, interface.

Computed from what is given, but for the last two; ``TorchBackend`` applies it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.train.data.devices import visibility_variable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from miniray.train.worker.backend import GroupMember

#: Variables of torchrun that tell a process its place (PyTorch's page "torchrun").
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def torchrun_variables(member: GroupMember) -> dict[str, str]:
    """Return the variables that torchrun sets, for this process."""
    ranks = member.ranks
    return {
        "RANK": str(ranks.world_rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_RANK": str(ranks.local_rank),
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "NODE_RANK": str(ranks.node_rank),
        "GROUP_RANK": str(ranks.node_rank),
        "MASTER_ADDR": member.master_address,
        "MASTER_PORT": str(member.master_port),
    }


def started_by_torchrun(environ: Mapping[str, str]) -> bool:
    """Return whether this process was given a place in a group by torchrun or the like."""
    return all(environ.get(name) for name in PLACE)


def gloo_variables(
    address: str, environ: Mapping[str, str], interfaces: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the interface that gloo is to use: the one that has the node's address.

    gloo's own choice is the address of the host's name, which often is 127.0.1.1 or of another
    network than the cluster's. An interface that the user chose stays.
    """
    if environ.get(_GLOO_INTERFACE):
        return {}
    for interface, addresses in interfaces.items():
        if address in addresses:
            return {_GLOO_INTERFACE: interface}
    # Any address of 127.0.0.0/8 is the loopback interface's, also those that are not listed.
    if address.startswith("127."):
        loopback = next((name for name, has in interfaces.items() if "127.0.0.1" in has), None)
        return {_GLOO_INTERFACE: loopback} if loopback is not None else {}
    return {}


def shared_visibility(
    member: GroupMember, environ: Mapping[str, str], *, rocm: bool
) -> dict[str, str]:
    """Return the variable that lets the process see the GPUs of all workers of its node.

    Then ``cuda:<local rank>`` is its own, as libraries that follow torchrun expect, and NCCL can
    reach its neighbours directly.
    """
    ids = member.node_devices.get("GPU")
    variable = visibility_variable(environ, rocm=rocm)
    return {variable: ",".join(ids)} if ids and variable is not None else {}


def default_backend(member: GroupMember, *, cuda: bool) -> str:
    """Return the backend of process groups that suits what the workers hold."""
    holds_gpus = bool(member.resources.get("GPU"))
    return "nccl" if holds_gpus and cuda and not member.shares_devices else "gloo"


def thread_count(cpus: float, cores: int, local_world_size: int) -> int:
    """Return a worker's number of threads: its CPUs, or without any its share of the cores."""
    return max(1, int(cpus) or cores // local_world_size)


def has_nccl() -> bool:
    """Return whether this process can use NCCL; on AMD GPUs, RCCL."""
    import torch
    import torch.distributed as dist

    return bool(torch.cuda.is_available() and dist.is_nccl_available())


def interface_addresses() -> dict[str, list[str]]:
    """Return the IP addresses of each network interface of this machine."""
    import socket

    import psutil

    return {
        name: [
            entry.address.partition("%")[0]
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        for name, entries in psutil.net_if_addrs().items()
    }
