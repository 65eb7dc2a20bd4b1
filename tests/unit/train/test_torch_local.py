"""Local mode with PyTorch, in this process alone."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from miniray import train  # noqa: E402
from miniray.train import RunConfig, ScalingConfig  # noqa: E402
from miniray.train.data import devices  # noqa: E402
from miniray.train.torch import TorchConfig, TorchTrainer  # noqa: E402
from miniray.train.torch.process_group import changed_environment, local_devices  # noqa: E402


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
