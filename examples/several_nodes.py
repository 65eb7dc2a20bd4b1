"""A cluster of two nodes on one machine, as tests of programs for clusters use it.

To miniray the nodes are different machines: each has its own daemon, its own
workers and its own shared memory.

    python examples/several_nodes.py
"""

from __future__ import annotations

import miniray
from miniray import ActorHandle
from miniray.cluster_utils import Cluster


@miniray.remote
class Store:
    """Keeps blocks of bytes."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []

    def add(self, block: bytes) -> int:
        """Keep a block; how many bytes are kept now."""
        self.blocks.append(block)
        return sum(len(block) for block in self.blocks)

    def node(self) -> str:
        """Where this actor lives."""
        return miniray.get_runtime_context().get_node_id()


@miniray.remote
def fill(store: ActorHandle[Store]) -> tuple[str, int]:
    """Send a block of 1 MiB to the store, from wherever this runs."""
    size = miniray.get(store.add.remote(bytes(1024 * 1024)))
    return miniray.get_runtime_context().get_node_id(), size


def main() -> None:
    with Cluster(initialize_head=True, head_node_args={"num_cpus": 2}) as cluster:
        second = cluster.add_node(num_cpus=2, resources={"disk": 1})
        miniray.init(address=cluster.address)
        print("nodes:", len(miniray.nodes()), "CPUs:", miniray.cluster_resources()["CPU"])

        # Only the second node has the resource, so the actor lives there.
        store = Store.options(resources={"disk": 1}).remote()
        print("on the second node:", miniray.get(store.node.remote()) == second.node_id)

        # One task on each node: calls and values go where they are needed.
        tasks = [fill.options(scheduling_strategy="SPREAD").remote(store) for _ in range(2)]
        nodes, sizes = zip(*miniray.get(tasks), strict=True)
        print("tasks ran on nodes:", len(set(nodes)), "stored MiB:", max(sizes) // 2**20)


if __name__ == "__main__":
    main()
