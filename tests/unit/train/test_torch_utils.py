from __future__ import annotations

import os
import socket

import pytest

torch = pytest.importorskip("torch")

from miniray.train.backend import Member  # noqa: E402
from miniray.train.ranks import Ranks  # noqa: E402
from miniray.train.torch import config as torch_config  # noqa: E402
from miniray.train.torch.data_loader import DeviceDataLoader, move  # noqa: E402
from miniray.train.torch.train_loop_utils import device_indexes  # noqa: E402


def member(**changes):
    values = {
        "ranks": Ranks(1, 4, 1, 2, 0),
        "master_address": "10.0.0.1",
        "master_port": 2000,
        "listener": None,
        "resources": {"CPU": 2},
        "node_devices": {},
        **changes,
    }
    return Member(**values)


def test_the_variables_of_torchrun_are_set():
    assert torch_config.environment(member()) == {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "2000",
    }


def test_on_one_machine_gloo_uses_the_loopback_interface(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    on_loopback = member(master_address="127.0.0.1")
    assert torch_config.environment(on_loopback)["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert "GLOO_SOCKET_IFNAME" not in torch_config.environment(on_loopback)


def test_workers_of_a_node_see_the_gpus_of_all(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    torch_config.share_devices(member(node_devices={"GPU": ["2", "3"]}))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_nccl_is_used_on_gpus_and_gloo_elsewhere():
    assert torch_config.default_backend(member()) == "gloo"
    assert torch_config.default_backend(member(resources={"GPU": 0.5})) == "nccl"


def test_a_process_group_of_one_is_made_and_ended(monkeypatch):
    import torch.distributed as dist

    for name in torch_config.environment(member(master_address="127.0.0.1")):
        monkeypatch.setenv(name, "")  # so that what the backend sets is undone
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    backend = torch_config.TorchConfig().make_backend()
    backend.on_start(
        member(
            ranks=Ranks(0, 1, 0, 1, 0),
            master_address="127.0.0.1",
            master_port=port,
            listener=listener,
        )
    )
    assert dist.get_world_size() == 1
    assert os.environ["MASTER_PORT"] == str(port)
    backend.on_shutdown()
    assert not dist.is_initialized()


def test_devices_are_numbered_by_their_place_in_what_is_visible():
    assert device_indexes(["3"], "2,3") == [1]
    assert device_indexes(["3", "2"], "2,3") == [0, 1]
    assert device_indexes(["1"], None) == [1]
    assert device_indexes(["GPU-b"], "GPU-a,GPU-b") == [1]


def test_a_device_that_is_not_visible_is_named():
    with pytest.raises(RuntimeError, match="holds the devices 5"):
        device_indexes(["5"], "0,1")


def test_batches_of_any_shape_are_moved():
    import collections

    pair = collections.namedtuple("pair", "a b")
    device = torch.device("meta")
    batch = {"x": [torch.ones(1), (torch.ones(1), "text")], "y": pair(torch.ones(1), 3)}
    moved = move(batch, device)
    assert moved["x"][0].device == device
    assert moved["x"][1][0].device == device
    assert moved["x"][1][1] == "text"
    assert moved["y"].a.device == device
    assert moved["y"].b == 3


def test_a_wrapped_loader_is_otherwise_the_loader():
    loader = torch.utils.data.DataLoader(range(10), batch_size=4)
    wrapped = DeviceDataLoader(loader, torch.device("cpu"), prefetch=True)
    assert len(wrapped) == 3
    assert wrapped.batch_size == 4
    assert torch.cat(list(wrapped)).tolist() == list(range(10))
