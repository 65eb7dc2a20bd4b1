"""Local mode with PyTorch: the driver's process as a rank, alone or beside others of torchrun."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import os
import pickle
import secrets
import socket
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from miniray.train.backend import LocalLink, LocalPlace
from miniray.train.ranks import Ranks
from miniray.train.torch import environment
from miniray.train.torch.backend import has_nccl, interface_addresses
from miniray.train.torch.devices import set_local_devices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from miniray.train.config import ScalingConfig
    from miniray.train.torch.config import TorchConfig

#: A rank may train for very long while another waits for it; torchrun ends them all if one dies.
_WITHOUT_LIMIT = datetime.timedelta(days=365)

#: The store of torchrun with this process's rank and their number, and how many groups used it.
_rendezvous: tuple[Any, int, int] | None = None
_groups = 0


def join(
    torch_config: TorchConfig, scaling: ScalingConfig, leave: contextlib.ExitStack
) -> LocalPlace:
    """Make a process group in this process, or take the place that torchrun gave it.

    A group that the program has made itself is used as it is, and left standing.

    Args:
        torch_config: How the group is made.
        scaling: Whether it is to use GPUs, and how many.
        leave: Gets what undoes all of it.
    """
    by_torchrun = environment.started_by_torchrun(os.environ)
    local_rank = int(os.environ["LOCAL_RANK"]) if by_torchrun else 0
    chosen = local_rank if by_torchrun else None
    if chosen is None and dist.is_initialized() and torch.cuda.is_available():
        chosen = torch.cuda.current_device()  # by whoever has made the group
    devices = local_devices(scaling, chosen)
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
    set_local_devices(devices)
    leave.callback(set_local_devices, None)
    if not dist.is_initialized():
        _make_group(torch_config, devices[0], leave, by_torchrun=by_torchrun)
    size = dist.get_world_size()
    if size == 1:
        return LocalPlace(Ranks(0, 1, 0, 1, 0), None)
    rank, local_size = dist.get_rank(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    node_rank = int(os.environ.get("GROUP_RANK", rank // local_size))
    ranks = Ranks(rank, size, local_rank, local_size, node_rank)
    return LocalPlace(ranks, StoreLink.open(rank))


def local_devices(scaling: ScalingConfig, chosen: int | None) -> list[torch.device]:
    """The devices of a rank in local mode.

    Args:
        scaling: Whether it is to use GPUs, and how many.
        chosen: The GPU of a rank beside others; under torchrun, that of its local rank. None if
            it is alone.
    """
    if not scaling.use_gpu or not torch.cuda.is_available():
        return [torch.device("cpu")]
    if chosen is not None:
        return [torch.device("cuda", chosen)]
    count = min(max(1, int(scaling.num_gpus_per_worker)), torch.cuda.device_count())
    return [torch.device("cuda", index) for index in range(count)]


def _make_group(
    config: TorchConfig, device: torch.device, leave: contextlib.ExitStack, *, by_torchrun: bool
) -> None:
    backend = config.backend or ("nccl" if device.type == "cuda" and has_nccl() else "gloo")
    timeout = datetime.timedelta(seconds=config.timeout_s)
    if by_torchrun:
        store, rank, size = _torchruns_store(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    else:
        variables = environment.gloo_variables("127.0.0.1", os.environ, interface_addresses())
        place = dict.fromkeys(("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"), "0")
        place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
        leave.enter_context(changed_environment({**variables, **place}))
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    leave.callback(_end_group)


def _torchruns_store(timeout: datetime.timedelta) -> tuple[Any, int, int]:
    """Where the processes of torchrun meet, and this one's rank among how many.

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


class StoreLink(LocalLink):
    """Messages between ranks by way of a store of PyTorch's, which rank 0 serves.

    What is read from it is unpickled, so each value carries a proof that a rank wrote it.

    Args:
        reading: Client that only ``receive`` uses, since it blocks.
        writing: Client for the rest.
        secret: What the ranks of the run share.
    """

    def __init__(self, reading: Any, writing: Any, secret: bytes) -> None:
        self._reading = reading
        self._writing = writing
        self._secret = secret
        self._lock = threading.Lock()
        self._received = 0

    @classmethod
    def open(cls, rank: int) -> StoreLink:
        """Connect this rank with the others; every rank of the process group has to call it."""
        served = None
        where: list[Any] = [None]
        if rank == 0:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            served = _store(host, 0, serve=True)
            where = [(host, served.port, secrets.token_bytes(32))]
        dist.broadcast_object_list(where, src=0)
        host, port, secret = where[0]
        client = _store(host, port)
        return cls(served if served is not None else client, client, secret)

    def send(self, message: Any) -> None:
        """Give rank 0 a message."""
        data = self._sealed(message)
        with self._lock:
            number = self._writing.add("messages", 1)
            self._writing.set(f"message/{number}", data)

    def receive(self) -> Any:
        """Wait for the next message to rank 0; called there only, in one thread."""
        self._received += 1
        key = f"message/{self._received}"
        message = self._opened(self._reading.get(key))
        self._reading.delete_key(key)
        return message

    def publish(self, name: str, value: Any) -> None:
        """Give all ranks a value under a name; called on rank 0 only."""
        with self._lock:
            self._writing.set(f"value/{name}", self._sealed(value))

    def wait_for(self, name: str) -> Any:
        """Wait until rank 0 has published a value under this name."""
        return self._opened(self._writing.get(f"value/{name}"))

    def _sealed(self, value: Any) -> bytes:
        data = pickle.dumps(value)
        return hmac.digest(self._secret, data, hashlib.sha256) + data

    def _opened(self, sealed: bytes) -> Any:
        proof, data = sealed[:32], sealed[32:]
        if not hmac.compare_digest(proof, hmac.digest(self._secret, data, hashlib.sha256)):
            raise RuntimeError("A message between the ranks of this run was not written by a rank.")
        return pickle.loads(data)


def _store(host: str, port: int, *, serve: bool = False) -> Any:
    return dist.TCPStore(
        host, port, None, is_master=serve, timeout=_WITHOUT_LIMIT, wait_for_workers=False
    )
