"""Gives each worker its rank.

Pure: workers of one node get neighbouring ranks, nodes keep the order of their
first worker, and on a node the order follows the accelerators' ids. The hosts of a TPU
slice follow each other, in the order that the slice itself gives them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


#: Node labels of TPU hosts: name of the slice, and the host's number there.
SLICE_LABEL = "miniray.io/tpu-slice-name"
WORKER_LABEL = "miniray.io/tpu-worker-id"


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """Where a worker runs, as it says itself.

    Attributes:
        node_id: Hex id of its node.
        address: Address of that node.
        port: Port on which the worker listens, for rank 0 to be found by the others.
        pid: Process id on its node.
        accelerator_ids: Ids of its devices, by resource name.
        labels: Labels of its node.
    """

    node_id: str
    address: str
    port: int
    pid: int
    accelerator_ids: dict[str, list[str]]
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The place of a worker among all workers of a group."""

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


def assign_ranks(workers: Sequence[WorkerInfo]) -> list[Ranks]:
    """The ranks of each worker, in the order given."""
    nodes: dict[str, list[int]] = {}
    for position, worker in enumerate(workers):
        nodes.setdefault(worker.node_id, []).append(position)
    ranks: dict[int, Ranks] = {}
    for node_rank, positions in enumerate(_slices_together(workers, nodes)):
        positions.sort(key=lambda position: _device_order(workers[position]))
        for local_rank, position in enumerate(positions):
            ranks[position] = Ranks(len(ranks), len(workers), local_rank, len(positions), node_rank)
    return [ranks[position] for position in range(len(workers))]


def _slices_together(
    workers: Sequence[WorkerInfo], nodes: Mapping[str, list[int]]
) -> list[list[int]]:
    """The workers of each node; slices in the order of their first worker."""
    firsts: dict[str, int] = {}

    def place(positions: list[int]) -> tuple[int, int]:
        first = positions[0]
        labels = workers[first].labels
        name, number = labels.get(SLICE_LABEL), labels.get(WORKER_LABEL, "")
        if name is None:
            return first, 0
        return firsts.setdefault(name, first), int(number) if number.isdecimal() else first

    return sorted(nodes.values(), key=place)


def _device_order(worker: WorkerInfo) -> list[tuple[str, int, str]]:
    """A sort key: the devices by resource, then by number (``"10"`` after ``"9"``)."""
    return sorted(
        (name, int(id) if id.isdecimal() else -1, id)
        for name, ids in worker.accelerator_ids.items()
        for id in ids
    )


def shared_devices(workers: Sequence[WorkerInfo], node_id: str) -> dict[str, list[str]]:
    """The devices of all workers of a node, by resource name, lowest first."""
    shared: dict[str, set[tuple[int, str]]] = {}
    for worker in workers:
        if worker.node_id == node_id:
            for name, ids in worker.accelerator_ids.items():
                numbered = ((int(id) if id.isdecimal() else -1, id) for id in ids)
                shared.setdefault(name, set()).update(numbered)
    return {name: [id for _, id in sorted(pairs)] for name, pairs in shared.items()}
