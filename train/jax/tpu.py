"""What each host of TPU slices is told about the others, in variables of libtpu.

Pure. Sources: TPU_WORKER_ID and TPU_WORKER_HOSTNAMES in "Deploy TPU workloads in GKE",
MEGASCALE_* in "Cloud TPU Multislice Overview", both of Google Cloud's documentation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.train.base.ranks import SLICE_LABEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.train.base.ranks import WorkerInfo

#: Port on which slices find each other, on the first host of the first one.
MEGASCALE_PORT = 8081

#: What only the run knows: a platform tells each host of the slices that it was started with, and
#: libtpu waits for those also when the run has fewer.
DECIDED_HERE = frozenset(
    {"MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"}
)


def slice_environments(workers: Sequence[WorkerInfo]) -> list[dict[str, str]]:
    """The variables of each worker, one worker on each host.

    Hosts without the name of a slice form one slice together.

    Args:
        workers: All workers, in order of rank: those of a slice follow each other.

    Returns:
        Variables in order of rank. MEGASCALE_* are there if there are several slices.

    Raises:
        ValueError: A host runs several workers, or slices have different numbers of hosts.
    """
    slices: dict[str, list[WorkerInfo]] = {}
    for worker in workers:
        slices.setdefault(worker.labels.get(SLICE_LABEL, ""), []).append(worker)
    _check(workers, slices)
    environments = []
    for number, hosts in enumerate(slices.values()):
        names = ",".join(host.address for host in hosts)
        for position in range(len(hosts)):
            variables = {"TPU_WORKER_ID": str(position), "TPU_WORKER_HOSTNAMES": names}
            if len(slices) > 1:
                variables |= {
                    "MEGASCALE_COORDINATOR_ADDRESS": workers[0].address,
                    "MEGASCALE_PORT": str(MEGASCALE_PORT),
                    "MEGASCALE_NUM_SLICES": str(len(slices)),
                    "MEGASCALE_SLICE_ID": str(number),
                }
            environments.append(variables)
    return environments


def _check(workers: Sequence[WorkerInfo], slices: dict[str, list[WorkerInfo]]) -> None:
    if len({worker.node_id for worker in workers}) < len(workers) and len(workers) > 1:
        raise ValueError(
            "Several workers were placed on one TPU host. JAX runs one process on each host: "
            "leave resources_per_worker out, so that each worker has all chips of its host."
        )
    sizes = {name: len(hosts) for name, hosts in slices.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"The workers were placed on slices with different numbers of hosts: {sizes}. "
            f"num_workers must be a multiple of the number of hosts of a slice, of one topology."
        )
