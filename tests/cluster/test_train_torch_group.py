"""How the ranks of a ``TorchTrainer`` find each other, and what models and loaders do there."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import miniray
from miniray import train
from miniray.train import (
    ControllerError,
    FailureConfig,
    PlacementTimeoutError,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from miniray.train.torch import TorchConfig, TorchTrainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from miniray.train import Result

pytest.importorskip("torch")
# Some of what the loops import takes seconds of CPU in each rank, and others may use the cores.
pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(180)]

CLUSTER = {"num_cpus": 4, "num_gpus": 2, "labels": {"zone": "a"}}


@pytest.fixture
def fit(fit: Any) -> Callable[..., Result]:
    """Runs a train loop on two workers with a process group."""

    def run(loop: Any, config: Any = None, torch_config: Any = None, **scaling: Any) -> Any:
        given = {"torch_config": torch_config}
        failures = FailureConfig(controller_failure_limit=0)
        return fit(
            loop,
            config,
            trainer=TorchTrainer,
            scaling=scaling,
            given=given,
            failure_config=failures,
        )

    return run


class DiesOnRankOne(TorchConfig):
    """A process group whose rank 1 is killed while rank 0 waits for it."""

    def make_backend(self) -> Any:
        from miniray.train.torch.torch_trainer import TorchBackend

        class Backend(TorchBackend):
            def on_start(self, member: Any) -> None:
                if member.ranks.world_rank == 1:
                    os._exit(9)
                super().on_start(member)

        return Backend(self)


def test_a_rank_that_dies_while_the_group_connects_is_noticed_at_once(fit: Any) -> None:
    # The other rank waits for it in the meantime, much longer than this test may take.
    with pytest.raises(WorkerGroupError, match=r"\[Rank 1\]") as caught:
        fit(lambda: None, torch_config=DiesOnRankOne(timeout_s=600))
    assert list(caught.value.worker_failures) == [1]


def test_ranks_talk_over_the_interface_of_their_nodes_address(fit: Any) -> None:
    def loop() -> dict[str, str]:
        names = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "ACCELERATE_TORCH_DEVICE")
        return {name: os.environ[name] for name in names}

    told = fit(loop).return_value
    (node,) = miniray.nodes()
    assert told["MASTER_ADDR"] == node["NodeManagerAddress"]
    interface = psutil.net_if_addrs()[told["GLOO_SOCKET_IFNAME"]]
    assert told["MASTER_ADDR"] in {entry.address for entry in interface}
    assert told["ACCELERATE_TORCH_DEVICE"] == "cpu"


def test_groups_of_one_machine_do_not_take_each_others_ports(tmp_path: Path) -> None:
    def loop(config: dict[str, int]) -> int:
        import torch
        import torch.distributed as dist

        found = torch.tensor([config["run"]])
        dist.all_reduce(found)
        return int(found)

    results: dict[int, int] = {}

    def start(run: int) -> None:
        results[run] = (
            TorchTrainer(
                loop,
                train_loop_config={"run": run},
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(storage_path=tmp_path, name=f"run{run}"),
            )
            .fit()
            .return_value
        )

    threads = [threading.Thread(target=start, args=[run]) for run in (1, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: 2, 10: 20}


def test_a_rank_listens_for_the_data_of_its_group_only(fit: Any) -> None:
    def loop() -> list[tuple[int, bool]]:
        import socket

        import torch.distributed as dist

        listening = [
            connection
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        with socket.socket() as stranger:
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            refused = stranger.connect_ex(place) == errno.ECONNREFUSED
        found: list[Any] = [None, None]
        dist.all_gather_object(found, (len(listening), refused))
        return found

    # gloo has one port per process; nobody answers where PyTorch's own store would be.
    assert fit(loop).return_value == [(1, True), (1, True)]


def test_groups_within_a_group_find_each_other_too(fit: Any) -> None:
    def loop() -> list[int]:
        import torch
        import torch.distributed as dist

        sums = []
        for _ in range(3):
            part = dist.new_group([0, 1])
            value = torch.tensor([dist.get_rank() + 1])
            dist.all_reduce(value, group=part)
            sums.append(int(value))
            dist.destroy_process_group(part)
        return sums

    assert fit(loop).return_value == [3, 3, 3]


def test_a_library_may_open_the_port_that_the_variables_name(fit: Any) -> None:
    def loop() -> bytes:
        import torch.distributed as dist

        store, rank, _ = next(dist.rendezvous("env://"))
        if rank == 0:
            store.set("key", "value")
        value = bytes(store.get("key"))
        dist.barrier()  # the store goes with rank 0
        return value

    assert fit(loop).return_value == b"value"


def test_a_model_is_sharded_and_still_learns_as_one(fit: Any) -> None:
    def loop() -> dict[str, Any]:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import FSDPModule

        torch.manual_seed(0)
        alone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        kwargs = {"layer_classes": (torch.nn.Linear,), "reshard_after_forward": True}
        model = train.torch.prepare_model(
            model, parallel_strategy="fsdp2", parallel_strategy_kwargs=kwargs
        )
        data = torch.arange(16.0).reshape(4, 4)
        for net, batch in ((alone, data), (model, data[dist.get_rank() :: 2])):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            net(batch).mean().backward()
            optimizer.step()
        local = sum(p.to_local().numel() for p in model.parameters())
        same = [
            torch.allclose(mine.full_tensor(), theirs)
            for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True)
        ]
        kinds = [isinstance(module, FSDPModule) for module in (model, model[0], model[1])]
        total = sum(p.numel() for p in alone.parameters())
        return {"share": local / total, "same": all(same), "kinds": kinds}

    value = fit(loop).return_value
    assert 0.4 < value["share"] < 0.6
    assert value["same"]
    assert value["kinds"] == [True, True, False]


def test_a_wrapped_model_takes_the_arguments_of_its_wrapper(fit: Any) -> None:
    def loop() -> dict[str, Any]:
        import torch

        torch_train = train.torch
        model = torch_train.prepare_model(
            torch.nn.Linear(2, 1), parallel_strategy_kwargs={"static_graph": True}
        )
        out = model(torch.ones(1, 2))
        out.sum().backward()
        return {
            "type": type(model).__name__,
            "static": model.static_graph,
            "keys": list(model.module.state_dict()),
        }

    assert fit(loop).return_value == {
        "type": "DistributedDataParallel",
        "static": True,
        "keys": ["weight", "bias"],
    }


def test_a_group_that_does_not_fit_says_what_is_short_and_fails_in_time(fit: Any) -> None:
    with pytest.raises(ControllerError) as caught:
        fit(lambda: None, num_workers=4, use_gpu=True, placement_timeout_s=0.5)
    assert isinstance(caught.value.controller_failure, PlacementTimeoutError)
    text = str(caught.value)
    assert "not placed in 0.5 s" in text
    assert "GPU is short by 2: 4 are needed, 2 of the cluster's 2 are free." in text
    assert "the 4 bundles need GPU 4 in all; the nodes of the cluster have 2" in text


def test_workers_run_only_where_the_labels_are(fit: Any) -> None:
    assert fit(lambda: "ran", label_selector={"zone": "in(a, b)"}).return_value == "ran"
    with pytest.raises(ControllerError, match="no node matches the labels"):
        fit(
            lambda: None,
            label_selector=[{"zone": "a"}, {"zone": "b"}],
            placement_timeout_s=0.5,
        )


def test_workers_that_share_a_gpu_get_a_group_that_lets_them(fit: Any) -> None:
    def loop() -> list[Any]:
        import torch.distributed as dist

        return [dist.get_backend(), os.environ["CUDA_VISIBLE_DEVICES"]]

    value = fit(loop, use_gpu=True, resources_per_worker={"GPU": 0.5}).return_value
    assert value[0] == "gloo"
    assert len(value[1].split(",")) == 1
