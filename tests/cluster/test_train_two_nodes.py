"""A training run on two nodes."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from running_cluster import running_cluster
from train_helpers import printed

import miniray
from miniray import train
from miniray.train import FailureConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.cluster_utils import Cluster


@pytest.fixture(scope="module")
def two_nodes(session_root: Path) -> Iterator[Cluster]:
    """Two nodes with two CPUs each."""
    with running_cluster({"num_cpus": 2}, {"num_cpus": 2}) as cluster:
        yield cluster


@pytest.mark.usefixtures("two_nodes")
def test_ranks_of_two_nodes_share_checkpoints_values_and_the_folder_of_their_output(
    fit: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, Any]) -> dict[str, Any]:
        context = train.get_context()
        rank = context.get_world_rank()
        print(f"rank {rank} on node {context.get_node_rank()}")
        own = miniray.get_runtime_context().get_node_id()
        first = train.collective.broadcast_from_rank_zero(own)
        folder = Path(config["folder"], str(rank))
        folder.mkdir()
        (folder / f"shard{rank}").write_text("x")
        train.report({"same node": own == first}, train.Checkpoint.from_directory(folder))
        train.collective.barrier()
        (reported,) = train.get_all_reported_checkpoints()
        with reported.checkpoint.as_directory() as files:
            return {"files": sorted(path.name for path in Path(files).iterdir())}

    result = fit(loop, {"folder": str(tmp_path)}, workers=4, name="run")
    assert result.return_value == {"files": [f"shard{rank}" for rank in range(4)]}
    logs = tmp_path / "results" / "run" / "logs" / "attempt_001"
    assert [printed(logs / f"rank_{rank}.out") for rank in range(4)] == [
        f"rank {rank} on node {rank // 2}\n" for rank in range(4)
    ]


def test_a_rank_whose_node_is_lost_begins_again_on_another_one_from_the_newest_checkpoint(
    fit: Any, two_nodes: Cluster
) -> None:
    nodes = [two_nodes.add_node(num_cpus=1, resources={"spare": 1}) for _ in range(2)]

    def loop(config: dict[str, Any]) -> list[str]:
        own = miniray.get_runtime_context().get_node_id()
        checkpoint = train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as files:
                return [Path(files, "node").read_text(), own]
        with tempfile.TemporaryDirectory() as files:
            Path(files, "node").write_text(own)
            train.report({}, train.Checkpoint.from_directory(files))
        train.get_all_reported_checkpoints()  # waits until it is complete
        os.kill(config["daemons"][own], signal.SIGKILL)
        signal.pause()
        raise AssertionError("the rank outlived its node")

    daemons = {node.unique_id: node.pids["node"] for node in nodes}
    scaling = {"resources_per_worker": {"spare": 1}}
    failures = FailureConfig(max_failures=1)
    result = fit(loop, {"daemons": daemons}, 1, scaling=scaling, failure_config=failures)
    assert sorted(result.return_value) == sorted(node.unique_id for node in nodes)
