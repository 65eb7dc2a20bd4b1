"""`miniray slurm script`: a script for sbatch. Slurm itself is never called."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds before the time limit, beyond the grace of the run, at which Slurm sends SIGTERM.
_RESERVE = 10


def script(
    command: Sequence[str],
    *,
    nodes: int,
    cpus: int | None = None,
    gpus: int | None = None,
    time: str | None = None,
    grace: int = 110,
) -> str:
    """Return the text of a batch script.

    Args:
        command: What it runs on the first node.
        nodes: Of the job.
        cpus: CPUs of each node; None: all of them, alone.
        gpus: GPUs of each node.
        time: Limit as Slurm takes it: ``8:00:00``.
        grace: Seconds that the command gets to save its state before that.

    Raises:
        ValueError: Slurm would take the time for something else.
    """
    if time is not None and not re.fullmatch(r"[0-9:-]+", time):
        raise ValueError(f"time must be as Slurm takes it, such as 8:00:00, not {time!r}.")
    wanted = [
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}" if cpus is not None else "--exclusive",
        f"--gpus-per-node={gpus}" if gpus else "",
        f"--time={time}" if time else "",
        f"--signal=TERM@{grace + _RESERVE}",  # not B: that would reach this script alone
        "--requeue",
        "--open-mode=append",
    ]
    # srun does not take the number of CPUs from sbatch: without it a step has one.
    cpus_of_step = "$SLURM_CPUS_PER_TASK" if cpus is not None else "$SLURM_CPUS_ON_NODE"
    run = f"miniray run --grace {grace} -- {shlex.join(command)}"
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in wanted if option)]
    return "\n".join([*lines, f'srun --cpus-per-task="{cpus_of_step}" {run}', ""])
