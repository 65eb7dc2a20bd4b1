"""The process group of a rank: on a cluster, and in local mode, alone or beside others of torchrun.

Also sets up the process first: variables, devices, the network interface. On a cluster the
ranks meet by a store that the run's controller keeps: PyTorch's own ``TCPStore`` listens on the
network and lets any peer read and set its keys.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from miniray.common import process_state
from miniray.train.base.ranks import Ranks
from miniray.train.data.devices import own_devices, set_local_devices, visibility_variable
from miniray.train.worker.backend import LocalPlace
from miniray.train.worker.local_link import LinkClient, LinkServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from miniray.train.config import ScalingConfig
    from miniray.train.worker.backend import GroupMember
    from miniray.train.worker.controller_client import RankCalls


logger = logging.getLogger(__name__)

#: Variables of torchrun with a process's place (PyTorch's page "torchrun").
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def torchrun_variables(member: GroupMember) -> dict[str, str]:
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
    return bool(torch.cuda.is_available() and dist.is_nccl_available())


def interface_addresses() -> dict[str, list[str]]:
    """Return the IP addresses of each network interface of this machine."""
    import psutil

    return {
        name: [
            entry.address.partition("%")[0]
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        for name, entries in psutil.net_if_addrs().items()
    }


class GroupStore(dist.Store):  # type: ignore[misc]  # torch is Any to mypy here
    """A store for ``init_process_group``. Thread-safe, as the threads of NCCL use it too.

    Keep a reference beside the one given to PyTorch: C++ does not keep the Python part alive.
    """

    def __init__(self, controller: RankCalls, timeout: datetime.timedelta) -> None:
        super().__init__()
        self._controller = controller
        self.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        encoded = map(_encoded, values)
        self._use("set", dict(zip(keys, encoded, strict=True)))

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait for it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys; wait for them."""
        timeout = self.timeout.total_seconds()
        values, absent = self._use("get", list(keys), timeout)
        _check(absent, timeout)
        return list(values)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all these keys have a value.

        Raises:
            DistStoreError: A key has no value in time.
        """
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        _check(self._use("wait", list(keys), seconds), seconds)

    def check(self, keys: Sequence[str]) -> bool:
        return not self._use("absent", list(keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._use("add", key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        self._use("append", key, _encoded(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; its value then."""
        value: bytes = self._use("compare_set", key, _encoded(expected), _encoded(desired))
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._use("delete", key))

    # The names that C++ uses.
    deleteKey = delete_key  # noqa: N815

    def num_keys(self) -> int:
        return int(self._use("count"))

    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Return whether there are ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def clone(self) -> GroupStore:
        """Return this store: its calls do not wait for each other."""
        return self

    def _use(self, operation: str, *arguments: Any) -> Any:
        return self._controller.use_keys(operation, *arguments)()


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _check(absent: list[str], seconds: float) -> None:
    if absent:
        error: Any = dist.DistStoreError
        raise error(
            f"Waited {seconds:g} s for the key {absent[0]!r} ({len(absent)} keys in all), which "
            f"another rank has not set yet. TorchConfig(timeout_s=...) is the limit."
        )


#: The key under which rank 0 stores the group's backend for the others.
_BACKEND_KEY = "miniray/backend"


def make_group(member: GroupMember, backend: str | None, seconds: float) -> Any:
    """Set the variables of torchrun, share the node's GPUs, make the process group.

    Args:
        member: The place of this process in the group.
        backend: The group's backend; None for the one that suits the workers.
        seconds: Time limit of the group's operations.

    Returns:
        The store of the group, which has to be kept as long as the group.
    """
    os.environ.update(torchrun_variables(member))
    os.environ.update(gloo_variables(member.address, os.environ, interface_addresses()))
    # This works only before CUDA is first used; a worker's process is new.
    rocm = torch.version.hip is not None
    os.environ.update(shared_visibility(member, os.environ, rocm=rocm))
    ranks = member.ranks
    if not process_state.threads_given():
        cores = len(os.sched_getaffinity(0))
        cpus = member.resources.get("CPU", 0)
        torch.set_num_threads(thread_count(cpus, cores, ranks.local_world_size))
    if member.listener is not None:
        member.listener.close()  # MASTER_PORT is for sockets of the user's libraries
    timeout = datetime.timedelta(seconds=seconds)
    store: Any = dist.HashStore()  # for a single rank
    if ranks.world_size > 1:
        assert member.controller is not None
        store = GroupStore(member.controller, timeout)
    device = own_devices()[0]
    # Makes Hugging Face Accelerate use this device and not one by its own rules.
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend or _agree_on_backend(member, store),
        store=store,
        rank=ranks.world_rank,
        world_size=ranks.world_size,
        timeout=timeout,
    )
    return store


def _agree_on_backend(member: GroupMember, store: Any) -> str:
    """Return the backend that rank 0 chooses for all."""
    if member.ranks.world_rank != 0:
        return str(store.get(_BACKEND_KEY).decode())
    backend = default_backend(member, cuda=has_nccl())
    if member.resources.get("GPU") and backend != "nccl":
        why = (
            "workers share GPUs, which NCCL refuses"
            if member.shares_devices
            else "PyTorch finds no GPU here, or has no NCCL"
        )
        logger.warning("The process group uses gloo instead of NCCL: %s.", why)
    store.set(_BACKEND_KEY, backend)
    return backend


#: The store of torchrun with this process's rank and their number, and how many groups used it.
_rendezvous: tuple[Any, int, int] | None = None
_groups = 0


def join(
    backend: str | None, timeout: float, scaling: ScalingConfig, leave: contextlib.ExitStack
) -> LocalPlace:
    """Make a process group in this process, or take the place that torchrun gave it.

    A group that the program has made itself is used as it is, and left standing.
    """
    by_torchrun = started_by_torchrun(os.environ)
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
    nccl = device.type == "cuda" and has_nccl()
    backend = chosen or ("nccl" if nccl else "gloo")
    timeout = datetime.timedelta(seconds=seconds)
    if by_torchrun:
        store, rank, size = _torchruns_store(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    else:
        variables = gloo_variables("127.0.0.1", os.environ, interface_addresses())
        place = dict.fromkeys(("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"), "0")
        place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
        leave.enter_context(changed_environment({**variables, **place}))
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    leave.callback(_end_group)


def _torchruns_store(timeout: datetime.timedelta) -> tuple[Any, int, int]:
    """Return where the processes of torchrun meet, and this one's rank among how many.

    The store outlives a group, and keys of an older group must not be read by a newer one.
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
