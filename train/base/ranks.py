"""Gives each worker its rank.

Pure: workers of one node get neighbouring ranks, nodes keep the order of their
first worker, and on a node the order follows the accelerators' ids. The hosts of a TPU
slice follow each other, in the order that the slice itself gives them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from miniray.system.boot_options import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


#: Node labels of TPU hosts: name of the slice, and the host's number there.
SLICE_LABEL = "miniray.io/tpu-slice-name"
WORKER_LABEL = "miniray.io/tpu-worker-id"


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """Where a worker runs, as it reports itself.

    Attributes:
        node_id: Hex id of its node.
        port: Port on which the worker listens, for rank 0 to be found by the others.
        pid: Process id on its node.
        accelerator_ids: Ids of its devices, by resource name.
        worker_id: Hex id of its process in the cluster.
        output: Path on its node of its output files, without ``.out`` and ``.err``;
            empty if there are none.
    """

    node_id: str
    address: str
    port: int
    pid: int
    accelerator_ids: dict[str, list[str]]
    worker_id: str = ""
    output: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The place of a worker among all workers of a group."""

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


def listed(ranks: Iterable[int], most: int = 10) -> str:
    """Ranks for a sentence: ``rank 3``, ``ranks 0, 1 and 2``; not all if they are many."""
    ordered = sorted(ranks)
    names = [str(rank) for rank in ordered]
    if len(names) > most:
        names[most:] = [f"{len(names) - most} more"]
    *first, last = names or ["none"]
    shown = f"{', '.join(first)} and {last}" if first else last
    return f"rank {shown}" if len(ordered) == 1 else f"ranks {shown}"


def assign_ranks(workers: Sequence[WorkerInfo]) -> list[Ranks]:
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
    """Return the workers of each node; slices in the order of their first worker."""
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
    """Return a sort key: the devices by resource, then by number (``"10"`` after ``"9"``)."""
    return sorted(
        (name, *pair) for name, ids in worker.accelerator_ids.items() for pair in _numbered(ids)
    )


def _numbered(ids: Iterable[str]) -> list[tuple[int, str]]:
    return [(int(id) if id.isdecimal() else -1, id) for id in ids]


def shared_devices(workers: Sequence[WorkerInfo], node_id: str) -> dict[str, list[str]]:
    """Return the devices of all workers of a node, by resource name, lowest first."""
    shared: dict[str, set[tuple[int, str]]] = {}
    for worker in workers:
        if worker.node_id == node_id:
            for name, ids in worker.accelerator_ids.items():
                shared.setdefault(name, set()).update(_numbered(ids))
    return {name: [id for _, id in sorted(pairs)] for name, pairs in shared.items()}


def shares_devices(workers: Sequence[WorkerInfo]) -> bool:
    """Return whether two workers hold parts of the same device."""
    held: set[tuple[str, str, str]] = set()
    for worker in workers:
        for name, ids in worker.accelerator_ids.items():
            devices = {(worker.node_id, name, id) for id in ids}
            if held & devices:
                return True
            held |= devices
    return False


def unreachable_address(workers: Sequence[WorkerInfo]) -> str | None:
    """Return why the workers' nodes can't reach each other by their addresses; None if they may.

    A loopback address means another machine on each machine, so it serves only when all nodes
    have one, which is the case for several nodes of one machine.
    """
    local = {info.node_id: info.address for info in workers if is_loopback(info.address)}
    others = {info.node_id: info.address for info in workers if not is_loopback(info.address)}
    if not local or not others:
        return None
    node, address = next(iter(local.items()))
    other = next(iter(others.values()))
    return (
        f"Node {node[:8]} is known by {address}, which other machines of this run (such as "
        f"{other}) can't reach. Start its daemon with --host and an address of its network."
    )
