"""A node that is lost in the middle of a data set: no row is lost, none comes twice."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until
from running_cluster import running_cluster

import miniray
from miniray import data

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.cluster_utils import Cluster

np = pytest.importorskip("numpy")
pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A head node on which nothing runs but the driver."""
    with running_cluster({"num_cpus": 0}) as cluster:
        yield cluster


def made(batch: dict[str, Any]) -> dict[str, Any]:
    ids = batch["id"]
    return {"id": ids, "data": np.repeat(ids[:, None], 8000, axis=1)}


class Made:
    """The same in an actor."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return made(batch)


@pytest.mark.parametrize("read", [1, 12])
@pytest.mark.parametrize("pool", [False, True], ids=["tasks", "pool"])
def test_what_a_lost_node_had_is_made_again(nodes: Cluster, pool: bool, read: int) -> None:
    while len(nodes.worker_nodes) < 2:  # of the test before there is one
        nodes.add_node(num_cpus=1)
    first = nodes.worker_nodes[0]
    wait_until(lambda: miniray.cluster_resources().get("CPU") == 2)
    context = data.DataContext.get_current()
    before, context.target_max_block_size = context.target_max_block_size, 2**20
    try:
        found: list[int] = []
        dataset = data.range(400).map_batches(made, batch_size=10)
        if pool:
            dataset = data.range(400).map_batches(Made, batch_size=10, concurrency=2)
        for number, batch in enumerate(dataset.iter_batches(batch_size=10)):
            assert (batch["data"] == batch["id"][:, None]).all()
            found += batch["id"].tolist()
            if number == read:
                os.kill(first.pids["node"], signal.SIGKILL)
                nodes.remove_node(first, allow_graceful=False)
        assert found == list(range(400))
    finally:
        context.target_max_block_size = before
