"""The process group of a rank: what its process gets before, and local mode in this process."""

from __future__ import annotations

import os
import socket

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch_helpers import member  # noqa: E402

from miniray import train  # noqa: E402
from miniray.train import RunConfig, ScalingConfig  # noqa: E402
from miniray.train.base.ranks import Ranks  # noqa: E402
from miniray.train.data import devices  # noqa: E402
from miniray.train.data.devices import device_indexes, visibility_variable  # noqa: E402
from miniray.train.torch import TorchConfig, TorchTrainer  # noqa: E402
from miniray.train.torch.process_group import (  # noqa: E402
    changed_environment,
    default_backend,
    gloo_variables,
    local_devices,
    shared_visibility,
    started_by_torchrun,
    thread_count,
    torchrun_variables,
)

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.2", "fd00::2"],
    "docker0": ["172.17.0.1"],
}


def test_the_variables_of_torchrun_are_set():
    assert torchrun_variables(member(ranks=Ranks(5, 6, 1, 3, 2))) == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "NODE_RANK": "2",
        "GROUP_RANK": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "2000",
    }


def test_a_process_of_torchrun_is_known_by_its_variables():
    variables = torchrun_variables(member())
    assert started_by_torchrun(variables)
    assert not started_by_torchrun({**variables, "MASTER_PORT": ""})
    assert not started_by_torchrun({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("address", "interface"),
    [("10.0.0.2", "eth0"), ("fd00::2", "eth0"), ("127.0.0.1", "lo"), ("127.0.1.1", "lo")],
)
def test_gloo_uses_the_interface_of_the_nodes_address(address, interface):
    assert gloo_variables(address, {}, INTERFACES) == {"GLOO_SOCKET_IFNAME": interface}


def test_gloo_is_left_alone_where_the_user_or_nobody_knows_the_interface():
    assert gloo_variables("10.0.0.2", {"GLOO_SOCKET_IFNAME": "ib0"}, INTERFACES) == {}
    assert gloo_variables("192.0.2.7", {}, INTERFACES) == {}


@pytest.mark.parametrize(
    ("environ", "rocm", "name"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, False, "CUDA_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "0"}, True, "ROCR_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}, True, "HIP_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "0"}, False, None),
        ({}, True, None),
    ],
)
def test_the_variable_of_visible_gpus_is_that_of_their_maker(environ, rocm, name):
    assert visibility_variable(environ, rocm=rocm) == name


def test_workers_of_a_node_see_the_gpus_of_all():
    group = member(node_devices={"GPU": ["2", "3"]})
    assert shared_visibility(group, {"CUDA_VISIBLE_DEVICES": "3"}, rocm=False) == {
        "CUDA_VISIBLE_DEVICES": "2,3"
    }
    assert shared_visibility(group, {"ROCR_VISIBLE_DEVICES": "3"}, rocm=True) == {
        "ROCR_VISIBLE_DEVICES": "2,3"
    }
    assert shared_visibility(group, {}, rocm=False) == {}
    assert shared_visibility(member(), {"CUDA_VISIBLE_DEVICES": ""}, rocm=False) == {}


def test_nccl_is_used_on_gpus_of_their_own_and_gloo_elsewhere():
    gpus = member(resources={"GPU": 0.5})
    assert default_backend(member(), cuda=True) == "gloo"
    assert default_backend(gpus, cuda=True) == "nccl"
    assert default_backend(gpus, cuda=False) == "gloo"
    shared = member(resources={"GPU": 0.5}, shares_devices=True)
    assert default_backend(shared, cuda=True) == "gloo"


def test_devices_are_numbered_by_their_place_in_what_is_visible():
    assert device_indexes(["3"], "2,3") == [1]
    assert device_indexes(["3", "2"], "2,3") == [0, 1]
    assert device_indexes(["1"], None) == [1]
    assert device_indexes(["GPU-b"], "GPU-a,GPU-b") == [1]


def test_a_device_that_is_not_visible_is_named():
    with pytest.raises(RuntimeError, match="holds the devices 5"):
        device_indexes(["5"], "0,1")


def test_a_worker_has_a_thread_for_each_cpu_it_holds_or_its_share_of_the_cores():
    assert thread_count(3.0, 16, 4) == 3
    assert thread_count(0, 16, 4) == 4
    assert thread_count(0, 2, 8) == 1
    assert thread_count(0.5, 16, 4) == 4


def test_on_cpus_what_an_optimizer_step_loads_is_loaded_beside_the_first_ranks():
    backend = TorchConfig().make_backend()
    assert "torch" in backend.preload({"CPU": 1})
    assert "torch._dynamo" not in backend.preload({"CPU": 1})
    assert backend.preload_later({"CPU": 1, "disk": 1}) == ("torch._dynamo",)
    for name in ("GPU", "NPU", "HPU", "TPU", "neuron_cores"):
        assert "torch" in backend.preload({"CPU": 1, name: 1})
        assert backend.preload_later({"CPU": 1, name: 1}) == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init_method": "file"}, "'env', 'tcp'"),
        ({"timeout_s": 0}, "above 0"),
        ({"timeout_s": float("nan")}, "above 0"),
        ({"timeout_s": "60"}, "above 0"),
        ({"backend": ""}, "empty"),
    ],
)
def test_nonsense_in_a_torch_config_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TorchConfig(**arguments)


def test_a_process_group_of_one_is_made_and_ended(monkeypatch):
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    names = [*torchrun_variables(member()), "GLOO_SOCKET_IFNAME", "ACCELERATE_TORCH_DEVICE"]
    for name in names:
        monkeypatch.setenv(name, "")  # so that what the backend sets is undone
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    backend = TorchConfig(timeout_s=77).make_backend()
    backend.on_start(
        member(
            ranks=Ranks(0, 1, 0, 1, 0),
            address="127.0.0.1",
            master_address="127.0.0.1",
            master_port=port,
            listener=listener,
        )
    )
    assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
    group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert group.options._timeout.total_seconds() == 77
    assert os.environ["MASTER_PORT"] == str(port)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "cpu"
    backend.on_shutdown()
    assert not dist.is_initialized()


@pytest.fixture
def fit(tmp_path):
    """Runs a train loop in this process."""

    def run(loop, torch_config=None, **scaling):
        return TorchTrainer(
            loop,
            torch_config=torch_config,
            scaling_config=ScalingConfig(num_workers=0, **scaling),
            run_config=RunConfig(storage_path=tmp_path),
        ).fit()

    return run


def test_a_loop_finds_a_process_group_of_one_and_leaves_none(fit):
    def loop():
        model = train.torch.prepare_model(torch.nn.Linear(1, 1))
        loader = train.torch.prepare_data_loader(torch.utils.data.DataLoader(range(4)))
        total = torch.ones(1)
        dist.all_reduce(total)
        return [
            total.item(),
            dist.get_world_size(),
            os.environ["RANK"],
            type(model).__name__,
            len(list(loader)),
            str(train.torch.get_device()),
        ]

    before = dict(os.environ)
    for _ in range(2):
        assert fit(loop).return_value == [1.0, 1, "0", "Linear", 4, "cpu"]
    assert not dist.is_initialized()
    assert dict(os.environ) == before


def test_a_process_group_of_the_programs_own_stays(fit):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert fit(dist.get_world_size).return_value == 1
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_loop_that_fails_leaves_no_process_group(fit):
    with pytest.raises(train.WorkerGroupError):
        fit(lambda: 1 / 0)
    assert not dist.is_initialized()


def test_the_backend_of_the_group_can_be_chosen(fit):
    assert fit(dist.get_backend, TorchConfig(backend="gloo")).return_value == "gloo"


@pytest.mark.parametrize(
    ("scaling", "chosen", "expected"),
    [
        ({"use_gpu": True}, None, ["cuda:0"]),
        ({"use_gpu": True}, 3, ["cuda:3"]),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 2}}, None, ["cuda:0", "cuda:1"]),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0.5}}, None, ["cuda:0"]),
        (
            {"use_gpu": True, "resources_per_worker": {"GPU": 8}},
            None,
            [f"cuda:{n}" for n in range(4)],
        ),
        ({}, 3, ["cpu"]),
    ],
)
def test_the_devices_are_those_that_a_worker_would_have(monkeypatch, scaling, chosen, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = ScalingConfig(num_workers=0, **scaling)
    assert [str(device) for device in local_devices(config, chosen)] == expected


def test_without_cuda_the_device_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_devices(ScalingConfig(num_workers=0, use_gpu=True), 1) == [torch.device("cpu")]


def test_devices_of_a_local_run_are_forgotten_after_it(fit):
    fit(lambda: None)
    assert devices._local is None


def test_variables_are_set_for_a_while(monkeypatch):
    monkeypatch.setenv("MINIRAY_TEST_A", "old")
    monkeypatch.delenv("MINIRAY_TEST_B", raising=False)
    with changed_environment({"MINIRAY_TEST_A": "new", "MINIRAY_TEST_B": "new"}):
        assert os.environ["MINIRAY_TEST_A"] == os.environ["MINIRAY_TEST_B"] == "new"
    assert os.environ["MINIRAY_TEST_A"] == "old"
    assert "MINIRAY_TEST_B" not in os.environ
