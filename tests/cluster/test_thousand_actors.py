"""A thousand actors over ten nodes, on every device that there is and on no wrong one."""

from __future__ import annotations

import collections
import os
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import wait_until

import miniray
from miniray.cluster_utils import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NODES, GPUS = 10, 8
#: (GPU, how many actors): together exactly what the nodes have.
ACTORS = ((1.0, 10), (0.5, 10), (0.25, 80), (0.05, 900))


@pytest.fixture
def cluster(session_root: Path) -> Iterator[Cluster]:
    """Ten nodes of eight logical GPUs each."""
    node = {"num_cpus": 100, "num_gpus": GPUS}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    for _ in range(NODES - 1):
        cluster.add_node(**node)
    miniray.init(address=cluster.address)
    cluster.wait_for_nodes()
    yield cluster
    miniray.shutdown()
    cluster.shutdown()


@miniray.remote(num_cpus=0)
class Actor:
    def place(self) -> tuple[str, str]:
        node_id = miniray.get_runtime_context().get_node_id()
        return node_id, os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("cluster")
def test_a_thousand_actors_fill_ten_nodes_without_one_wrong_device() -> None:
    amounts = [amount for amount, count in ACTORS for _ in range(count)]
    assert (len(amounts), round(sum(amounts), 6)) == (1000, NODES * GPUS)
    actors = [Actor.options(num_gpus=amount).remote() for amount in amounts]
    places = miniray.get([actor.place.remote() for actor in actors], timeout=500)
    held: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for place, amount in zip(places, amounts, strict=True):
        held[place].append(amount)
    assert len(held) == NODES * GPUS
    assert {round(sum(shares), 6) for shares in held.values()} == {1.0}
    assert miniray.available_resources().get("GPU") is None
    del actors
    wait_until(lambda: miniray.available_resources().get("GPU") == NODES * GPUS, timeout=120)
