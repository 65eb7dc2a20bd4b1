"""Which host of an allocation this is: one pure function per scheduler, of the environment alone.

Hosts are told apart by the rank that the scheduler gives them, never by an address or a name.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: What gives the allocation by hand, where no scheduler does.
RANK_VARIABLE, SIZE_VARIABLE = "MINIRAY_INDEX", "MINIRAY_NODES"
#: Where the first host is found, as ``HOST`` or ``HOST:PORT``.
HEAD_VARIABLE = "MINIRAY_HEAD"


class AllocationError(ValueError):
    """An environment is that of a scheduler, and says too little or the impossible."""


@dataclasses.dataclass(frozen=True)
class HostAllocation:
    """The place of this process among the hosts of a run."""

    #: The scheduler, as it is told to users.
    launcher: str
    #: Of this host, from 0, which has the head and the program.
    rank: int
    #: How many hosts there are.
    size: int
    #: Equal on all hosts of this run, and different from that of any other; empty: unknown.
    run_id: str = ""
    #: Where the head may be found, as ``HOST`` or ``HOST:PORT``; empty: by rendezvous.
    head: tuple[str, ...] = ()
    #: Which process of this host this is; only the first one starts a node.
    local_rank: int = 0
    #: CPUs of this host that the allocation has, if the scheduler tells.
    cpus: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise AllocationError(
                f"{self.launcher} says that this is host {self.rank} of {self.size}; the first is "
                f"0, the last {self.size - 1}."
            )


#: The allocation of a program that no scheduler has started.
ALONE = HostAllocation("this machine", 0, 1)


def find_allocation(environ: Mapping[str, str]) -> HostAllocation:
    """Return the place that the environment gives this process, else that of a lone machine.

    Raises:
        AllocationError: A scheduler's variables are incomplete, or need another command.
    """
    found = next(filter(None, (read(environ) for read in _LAUNCHERS)), ALONE)
    size = environ.get(SIZE_VARIABLE, "1")
    if found is ALONE and size != "1":
        raise AllocationError(
            f"Nothing tells which of {size} hosts this is: give --index, or {RANK_VARIABLE}."
        )
    return found


def by_hand(environ: Mapping[str, str]) -> HostAllocation | None:
    """Read ``MINIRAY_INDEX``, ``MINIRAY_NODES`` and ``MINIRAY_HEAD``."""
    if RANK_VARIABLE not in environ:
        return None
    read = _Variables("The environment", environ)
    return HostAllocation(
        "by hand", read.number(RANK_VARIABLE), read.number(SIZE_VARIABLE), head=_head(environ)
    )


def kubernetes_job(environ: Mapping[str, str]) -> HostAllocation | None:
    """Read the index of an Indexed Job; the manifest gives the other two (`kubernetes.py`)."""
    index = "JOB_COMPLETION_INDEX"
    if index not in environ or SIZE_VARIABLE not in environ:
        return None
    read = _Variables("The Kubernetes Job", environ)
    return HostAllocation(
        "Kubernetes", read.number(index), read.number(SIZE_VARIABLE), head=_head(environ)
    )


def leader_worker_set(environ: Mapping[str, str]) -> HostAllocation | None:
    """Read what a LeaderWorkerSet gives the pods of a group."""
    if "LWS_GROUP_SIZE" not in environ:
        return None
    read = _Variables("LeaderWorkerSet", environ)
    return HostAllocation(
        "LeaderWorkerSet",
        read.number("LWS_WORKER_INDEX"),
        read.number("LWS_GROUP_SIZE"),
        head=(read.text("LWS_LEADER_ADDRESS"),),
    )


def open_mpi(environ: Mapping[str, str]) -> HostAllocation | None:
    """Read what ``mpirun`` of Open MPI gives."""
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    read = _Variables("Open MPI", environ)
    _require_one_per_host(read.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1), "mpirun -N 1")
    return HostAllocation(
        "Open MPI",
        read.number("OMPI_COMM_WORLD_RANK"),
        read.number("OMPI_COMM_WORLD_SIZE"),
        run_id=_joined(
            "mpi", environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
        ),
    )


def slurm(environ: Mapping[str, str]) -> HostAllocation | None:
    """Read what ``srun`` gives the tasks of a step; the batch script itself is no step."""
    if "SLURM_JOB_ID" not in environ:
        return None
    read = _Variables("Slurm", environ)
    size = read.number("SLURM_NNODES", read.number("SLURM_JOB_NUM_NODES", 1))
    if "SLURM_STEP_ID" not in environ:
        if size > 1:
            raise AllocationError(
                f"You have {size} nodes and this runs on one: write `srun miniray run -- ...`."
            )
        return None
    rank = read.number("SLURM_NODEID")
    return HostAllocation(
        "Slurm",
        rank,
        read.number("SLURM_STEP_NUM_NODES", size),
        run_id=_joined(
            # Clusters that share homes count their jobs apart.
            "-".join(filter(None, ("slurm", environ.get("SLURM_CLUSTER_NAME")))),
            environ["SLURM_JOB_ID"],
            environ["SLURM_STEP_ID"],
            environ.get("SLURM_RESTART_COUNT", "0"),  # a job that is requeued keeps its id
        ),
        local_rank=read.number("SLURM_LOCALID", 0),
        cpus=_cpus_of(rank, environ.get("SLURM_JOB_CPUS_PER_NODE", "")),
    )


def pmi(environ: Mapping[str, str]) -> HostAllocation | None:
    """Read what the Hydra of MPICH and Intel MPI gives, and other launchers with PMI."""
    if "PMI_RANK" not in environ:
        return None
    read = _Variables("MPI", environ)
    _require_one_per_host(read.number("MPI_LOCALNRANKS", 1), "mpiexec -ppn 1")
    job = next(filter(None, map(environ.get, ("PMI_JOBID", "PBS_JOBID", "LSB_JOBID"))), None)
    return HostAllocation(
        "MPI", read.number("PMI_RANK"), read.number("PMI_SIZE"), run_id=_joined("pmi", job)
    )


def sky_pilot(environ: Mapping[str, str]) -> HostAllocation | None:
    """Read what SkyPilot gives the hosts of a task."""
    if "SKYPILOT_NODE_RANK" not in environ:
        return None
    read = _Variables("SkyPilot", environ)
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    return HostAllocation(
        "SkyPilot",
        read.number("SKYPILOT_NODE_RANK"),
        read.number("SKYPILOT_NUM_NODES"),
        run_id=_joined("sky", environ.get("SKYPILOT_TASK_ID")),
        head=tuple(addresses[:1]),
    )


#: The innermost first: mpirun may run inside of a step of Slurm, and SkyPilot on both.
_LAUNCHERS: tuple[Callable[[Mapping[str, str]], HostAllocation | None], ...] = (
    by_hand,
    leader_worker_set,
    kubernetes_job,
    open_mpi,
    sky_pilot,
    slurm,
    pmi,
)


def few_cpus(allocation: HostAllocation, usable: int) -> str:
    """Say that this process may use less than the allocation has; empty if all is well.

    Args:
        allocation: Of this process.
        usable: CPUs that the process may use.
    """
    if allocation.cpus is None or usable >= allocation.cpus:
        return ""
    return (
        f"This step has {usable} of the {allocation.cpus} CPUs that the job has on this host: srun "
        f"does not take --cpus-per-task from sbatch. Write `srun --cpus-per-task={allocation.cpus} "
        "miniray run -- ...`."
    )


def _head(environ: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(environ.get(HEAD_VARIABLE, "").replace(",", " ").split())


def _joined(launcher: str, *parts: str | None) -> str:
    """Return an id that can be the name of a file; empty if a part of it is unknown."""
    if not all(parts):
        return ""
    text = "-".join((launcher, *filter(None, parts)))
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in text)


def _cpus_of(rank: int, text: str) -> int | None:
    """Return one host's CPUs from Slurm's ``16(x3),8``; None if that is not told."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[rank] if rank < len(counts) else None


def _require_one_per_host(count: int, remedy: str) -> None:
    if count > 1:
        raise AllocationError(
            f"{count} processes of the run are on this host, and each starts a node: write "
            f"`{remedy} miniray run -- ...`."
        )


@dataclasses.dataclass(frozen=True)
class _Variables:
    """Variables of a scheduler; what is missing or no number is named."""

    scheduler: str
    environ: Mapping[str, str]

    def text(self, name: str) -> str:
        """Return a variable that has to be there."""
        if not self.environ.get(name):
            raise AllocationError(f"{self.scheduler} has not set {name}, which is needed.")
        return self.environ[name]

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number; the default, if there is one, where it is not set."""
        if default is not None and not self.environ.get(name):
            return default
        text = self.text(name)
        if not text.isdecimal():
            raise AllocationError(f"{name} must be a whole number, not {text!r}.")
        return int(text)
