"""Which host of an allocation this is, from the environment alone: one entry per scheduler.

Hosts are distinguished by the rank that the scheduler gives them, never by an address or a name.
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

    #: The scheduler's name, as shown to users.
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
    #: CPUs of this host that the allocation has, if the scheduler reports them.
    cpus: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise AllocationError(
                f"{self.launcher}: this is host {self.rank} of {self.size}; the first is 0, the "
                f"last {self.size - 1}."
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
            f"Nothing says which of {size} hosts this is: give --index, or {RANK_VARIABLE}."
        )
    return found


@dataclasses.dataclass(frozen=True)
class _Scheduler:
    """The variables of a scheduler that numbers the processes which it starts."""

    name: str
    rank: str
    size: str
    #: Addresses of the first host: all words of the first line are tried.
    head: str = ""
    #: Variables, the first of which that is set identifies this run.
    ids: tuple[str, ...] = ()
    #: How many processes are on this host, and how to have one.
    local_size: str = ""
    remedy: str = ""

    def read(self, environ: Mapping[str, str]) -> HostAllocation | None:
        """Return the place of this process; None if another scheduler has started it."""
        if self.rank not in environ:
            return None
        if self.size not in environ:
            raise AllocationError(f"{self.rank} is set and {self.size} is not: give both.")
        local = _number(environ, self.local_size, 1)
        if local > 1:
            raise AllocationError(
                f"{local} processes of the run are on this host, and each starts a node: write "
                f"`{self.remedy} miniray run -- ...`."
            )
        return HostAllocation(
            self.name,
            _number(environ, self.rank),
            _number(environ, self.size),
            run_id=_joined(self.name, next(filter(None, map(environ.get, self.ids)), None)),
            head=tuple(environ.get(self.head, "").partition("\n")[0].replace(",", " ").split()),
        )


def _slurm(environ: Mapping[str, str]) -> HostAllocation | None:
    """Read what ``srun`` gives the tasks of a step; the batch script itself is not a step."""
    if "SLURM_JOB_ID" not in environ:
        return None
    size = _number(environ, "SLURM_NNODES", _number(environ, "SLURM_JOB_NUM_NODES", 1))
    if "SLURM_STEP_ID" not in environ:
        if size > 1:
            raise AllocationError(
                f"You have {size} nodes and this runs on one: write `srun miniray run -- ...`."
            )
        return None
    rank = _number(environ, "SLURM_NODEID")
    return HostAllocation(
        "Slurm",
        rank,
        _number(environ, "SLURM_STEP_NUM_NODES", size),
        run_id=_joined(
            # Clusters that share homes count their jobs apart.
            "-".join(filter(None, ("slurm", environ.get("SLURM_CLUSTER_NAME")))),
            environ["SLURM_JOB_ID"],
            environ["SLURM_STEP_ID"],
            environ.get("SLURM_RESTART_COUNT", "0"),  # a job that is requeued keeps its id
        ),
        local_rank=_number(environ, "SLURM_LOCALID", 0),
        cpus=_cpus_of(rank, environ.get("SLURM_JOB_CPUS_PER_NODE", "")),
    )


def _kubernetes_job(environ: Mapping[str, str]) -> HostAllocation | None:
    """Read the index of an Indexed Job; the manifest gives the other two (`kubernetes.py`)."""
    job = _Scheduler("Kubernetes", "JOB_COMPLETION_INDEX", SIZE_VARIABLE, HEAD_VARIABLE)
    return job.read(environ) if SIZE_VARIABLE in environ else None  # a Job of something else


#: The innermost first: mpirun may run inside of a step of Slurm, and SkyPilot on both.
_LAUNCHERS: tuple[Callable[[Mapping[str, str]], HostAllocation | None], ...] = (
    _Scheduler("by hand", RANK_VARIABLE, SIZE_VARIABLE, HEAD_VARIABLE).read,
    _Scheduler("LeaderWorkerSet", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS").read,
    _kubernetes_job,
    _Scheduler(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ids=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        remedy="mpirun -N 1",
    ).read,
    _Scheduler(
        "SkyPilot",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NODE_IPS",
        ids=("SKYPILOT_TASK_ID",),
    ).read,
    _slurm,
    # The Hydra of MPICH and Intel MPI, and others with PMI, below PBS or LSF.
    _Scheduler(
        "MPI",
        "PMI_RANK",
        "PMI_SIZE",
        ids=("PMI_JOBID", "PBS_JOBID", "LSB_JOBID"),
        local_size="MPI_LOCALNRANKS",
        remedy="mpiexec -ppn 1",
    ).read,
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


def _joined(launcher: str, *parts: str | None) -> str:
    """Return an id that can be the name of a file; empty if a part of it is unknown."""
    if not all(parts):
        return ""
    text = "-".join((launcher, *filter(None, parts)))
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in text)


def _cpus_of(rank: int, text: str) -> int | None:
    """Return one host's CPUs from Slurm's ``16(x3),8``; None if the scheduler does not say."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[rank] if rank < len(counts) else None


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a whole number; the default, if there is one, where it is not set."""
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise AllocationError(f"{name} must be a whole number, not {text!r}.")
    return int(text)
