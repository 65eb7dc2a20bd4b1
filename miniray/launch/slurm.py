"""`miniray slurm script`: what a user gives to sbatch. Slurm itself is never asked for anything."""

from __future__ import annotations

import dataclasses
import re
import shlex

#: Seconds before the time limit, beyond the grace of the run, at which Slurm sends SIGTERM.
_RESERVE = 10


@dataclasses.dataclass(frozen=True)
class SlurmJob:
    """The job of a script."""

    command: tuple[str, ...]
    nodes: int
    #: CPUs of each node; None: all of them, alone.
    cpus: int | None = None
    gpus: int | None = None
    #: As Slurm takes it: ``8:00:00``.
    time: str | None = None
    grace: int = 110

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes must be at least 1, not {self.nodes}.")
        if self.time is not None and not re.fullmatch(r"[0-9:-]+", self.time):
            raise ValueError(f"time must be as Slurm takes it, such as 8:00:00, not {self.time!r}.")


def script(job: SlurmJob) -> str:
    """Return the text of a batch script."""
    wanted = [
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus}" if job.cpus is not None else "--exclusive",
        f"--gpus-per-node={job.gpus}" if job.gpus else "",
        f"--time={job.time}" if job.time else "",
        f"--signal=TERM@{job.grace + _RESERVE}",  # not B: that would reach this script alone
        "--requeue",
        "--open-mode=append",
    ]
    # srun does not take the number of CPUs from sbatch: without it a step has one.
    cpus = "$SLURM_CPUS_PER_TASK" if job.cpus is not None else "$SLURM_CPUS_ON_NODE"
    run = f"miniray run --grace {job.grace} -- {shlex.join(job.command)}"
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in wanted if option)]
    return "\n".join([*lines, f'srun --cpus-per-task="{cpus}" {run}', ""])
