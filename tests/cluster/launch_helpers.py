"""Hosts of an allocation, each of which is a process of this machine with what a scheduler sets."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from command_helpers import CommandLine

#: Seconds that a run may take on a busy machine.
PATIENCE = 60.0

#: Prints the ranks of the nodes that a program finds, and ends with the code it is given.
RANKS = """
print(sorted(node["Labels"]["rank"] for node in miniray.nodes() if node["Alive"]))
sys.exit(int(sys.argv[1]))
"""
SHOW_RANKS = f"""
import sys, miniray
miniray.init()
{RANKS}
"""

#: Before that, it prints how many places have a secret where it runs, and where a task of it does.
LOOKS_AND_SHOWS = f"""
import os, pathlib, re, sys, miniray
miniray.init()
own = os.environ["MINIRAY_TMPDIR"].encode()  # other tests run at the same time
secret = re.compile(rb"mr1[.][A-Za-z0-9_-]{{43}}[.]")
def found():
    texts = []
    for path in [*pathlib.Path("/proc").glob("[0-9]*/cmdline"), pathlib.Path("/proc/self/environ")]:
        try:
            if own in path.with_name("environ").read_bytes():
                texts.append(path.read_bytes())
        except OSError:
            pass
    return sum(bool(secret.search(text)) for text in texts)
print(found(), miniray.get(miniray.remote(found).remote()))
{RANKS}
"""

#: A program that saves what another host computes when SIGTERM comes, and ends with 5. The signal
#: may come twice, from a scheduler and from `miniray run`: a second one would end it as it exits.
SAVES_AT_SIGTERM = """
import pathlib, signal, sys, time, miniray
from miniray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
miniray.init()
folder = pathlib.Path(sys.argv[1])
other = next(n["NodeID"] for n in miniray.nodes() if n["Labels"]["rank"] == "1")

@miniray.remote
def save():
    return "saved on the other host"

def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ref = save.options(scheduling_strategy=On(other, soft=False)).remote()
    (folder / "checkpoint").write_text(miniray.get(ref))
    sys.exit(5)

signal.signal(signal.SIGTERM, end)
(folder / "running").touch()
while True:
    signal.pause()
"""


def slurm(rank: int, size: int) -> dict[str, str]:
    """What ``srun -N SIZE --ntasks-per-node=1`` sets."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": str(size),
        "SLURM_NODEID": str(rank),
        "SLURM_LOCALID": "0",
    }


def open_mpi(rank: int, size: int) -> dict[str, str]:
    """What ``mpirun -N 1`` of Open MPI sets."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "PMIX_NAMESPACE": "prterun-n1-31@1",
    }


def hydra(rank: int, size: int) -> dict[str, str]:
    """What ``mpiexec -ppn 1`` of MPICH sets, in a job of PBS."""
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "PBS_JOBID": "12.pbs"}


@dataclasses.dataclass
class Hosts:
    """The hosts of one run."""

    command: CommandLine
    folder: Path
    size: int
    scheduler: Callable[[int, int], dict[str, str]] = slurm
    #: Arguments of `miniray run`.
    options: tuple[str, ...] = ()
    processes: dict[int, subprocess.Popen[str]] = dataclasses.field(default_factory=dict)

    def start(
        self, rank: int, *program: str, options: tuple[str, ...] = (), **variables: str
    ) -> subprocess.Popen[str]:
        """Start one host's part."""
        self.processes[rank] = self.command.popen(
            *("miniray", "run", "--host", "127.0.0.1", "--rendezvous", str(self.folder)),
            *(*self.options, *options, "--", *program),
            variables={
                **self.scheduler(rank, self.size),
                "MINIRAY_MACHINE_ID": f"n{rank}",
                **variables,
            },
        )
        return self.processes[rank]

    def start_all(self, *program: str, **variables: str) -> None:
        """Start all parts, the first host last."""
        for rank in reversed(range(self.size)):
            self.start(rank, *program, **variables)

    def end_of(self, rank: int) -> tuple[int, str]:
        """Wait for a host's end; return its exit code and output."""
        process = self.processes[rank]
        output, _ = process.communicate(timeout=PATIENCE)
        return process.returncode, output

    def codes(self) -> list[int]:
        """Wait for the end of all; return the exit codes by rank."""
        return [self.end_of(rank)[0] for rank in sorted(self.processes)]

    def signal_all(self, number: signal.Signals) -> None:
        """Do as a scheduler: all hosts get a signal at the same time."""
        for process in self.processes.values():
            process.send_signal(number)

    def kill(self) -> None:
        """End what a failed test has left."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate(timeout=PATIENCE)


@contextlib.contextmanager
def hosts(
    command: CommandLine, folder: Path, size: int, *options: str, scheduler: object = slurm
) -> Iterator[Hosts]:
    """The hosts of a run, which end with the block."""
    found = Hosts(command, folder, size, scheduler, options)  # type: ignore[arg-type]
    try:
        yield found
    finally:
        found.kill()
