"""Worker groups over several nodes: where they run, and that ranks find each other there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import miniray
from miniray.cluster_utils import Cluster
from miniray.train.torch import TorchTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("torch")
# Each node loads PyTorch for its workers, which takes long where others use the cores.
pytestmark = [pytest.mark.usefixtures("hosts"), pytest.mark.timeout(180)]

#: What GKE tells the hosts of a slice: its kind, its name, and which of its hosts this is.
SLICES = (("v4-8", "small", "0"), ("v4-16", "large", "0"), ("v4-16", "large", "1"))


@pytest.fixture(scope="module")
def hosts(session_root: Path) -> Iterator[None]:
    """The hosts of two TPU slices, and a node without TPUs."""
    del session_root
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        for kind, name, worker in SLICES:
            with pytest.MonkeyPatch.context() as environment:
                environment.setenv("TPU_ACCELERATOR_TYPE", kind)
                environment.setenv("TPU_NAME", name)
                environment.setenv("TPU_WORKER_ID", worker)
                cluster.add_node(num_cpus=2, resources={"TPU": 4})
        miniray.init(address=cluster.address)
        cluster.wait_for_nodes()
        yield
    finally:
        miniray.shutdown()
        cluster.shutdown()


def test_the_workers_of_a_tpu_slice_are_its_hosts(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> None:
        context = miniray.get_runtime_context()
        rank = miniray.train.get_context().get_node_rank()
        chips = context.get_accelerator_ids()["TPU"]
        with open(os.path.join(config["folder"], str(rank)), "w") as file:
            file.write(f"{context.get_node_id()} {len(chips)}")

    (tmp_path / "places").mkdir()
    scaling = {"use_tpu": True, "topology": "2x2x2", "accelerator_type": "TPU-V4"}
    fit(loop, {"folder": str(tmp_path / "places")}, scaling=scaling)
    found = [path.read_text().split() for path in (tmp_path / "places").iterdir()]
    assert [chips for _, chips in found] == ["4", "4"]
    slices = {node["NodeID"]: node["Labels"].get("ray.io/tpu-pod-type") for node in miniray.nodes()}
    assert [slices[node_id] for node_id, _ in found] == ["v4-16", "v4-16"]
    assert len({node_id for node_id, _ in found}) == 2


def test_ranks_of_several_nodes_form_one_group(fit: Any) -> None:
    def loop() -> Any:
        import torch
        import torch.distributed as dist

        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total)
        context = miniray.train.get_context()
        place = [context.get_local_rank(), context.get_local_world_size(), context.get_node_rank()]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, place)
        return [total.item(), found]

    scaling = {"placement_strategy": "STRICT_SPREAD"}
    result = fit(loop, workers=2, trainer=TorchTrainer, scaling=scaling)
    assert result.return_value == [3, [[0, 1, 0], [0, 1, 1]]]
