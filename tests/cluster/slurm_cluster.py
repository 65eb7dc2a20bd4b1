"""A real Slurm on this machine: slurmctld, three slurmd and munged, in a folder of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_helpers import processes_with
from needed_tools import find_tool
from ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Each "host" has more CPUs than this machine may have, so that runs fit side by side.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
TaskProlog={folder}/prolog
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
KillWait=60
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
"""
NODE = "NodeName={name} NodeHostname={machine} NodeAddr=127.0.0.1 Port={port} CPUs=64\n"
PARTITION = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
#: The "hosts" are told apart as miniray tells apart machines.
PROLOG = '#!/bin/sh\necho "export MINIRAY_MACHINE_ID=$SLURMD_NODENAME"\n'
NODES = ("n1", "n2", "n3")
#: Seconds that a daemon may take on a busy machine.
PATIENCE = 60.0


@dataclasses.dataclass
class Slurm:
    """A cluster of Slurm."""

    folder: Path
    daemons: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        """What makes Slurm's commands, and tasks, find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, command: str, *arguments: str) -> str:
        """Run one of Slurm's commands; return what it prints."""
        done = subprocess.run(
            [find_tool(command), *arguments],
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *command: str) -> None:
        """Start a daemon that stays in the foreground."""
        with (self.folder / "daemons.log").open("ab") as log:
            self.daemons.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **self.variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )


def wait(slurm: Slurm, ready: Callable[[], object]) -> None:
    """Wait for something of the cluster; fail with its logs."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        lost = [each.args for each in slurm.daemons if each.poll() is not None]
        if lost or time.monotonic() > deadline:
            logs = [path.read_text(errors="replace")[-2000:] for path in slurm.folder.glob("*.log")]
            raise AssertionError(f"Slurm does not start; ended: {lost}\n" + "\n".join(logs))
        time.sleep(0.05)


@contextlib.contextmanager
def slurm_cluster(proctrack: str = "pgid") -> Iterator[Slurm]:
    """A running cluster, whose jobs and daemons end with the block."""
    slurm = Slurm(Path(tempfile.mkdtemp(prefix="mr-slurm-", dir="/tmp")))
    try:
        _start(slurm, proctrack)
        yield slurm
    finally:
        # What runs a job outlives the daemons; all have the variable.
        for pid in processes_with("SLURM_CONF", slurm.variables["SLURM_CONF"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in slurm.daemons:
            daemon.wait()
        shutil.rmtree(slurm.folder)


def _start(slurm: Slurm, proctrack: str) -> None:
    folder, machine = slurm.folder, socket.gethostname().partition(".")[0]
    folder.chmod(0o755)
    munge = folder / "munge"
    for each in (munge, folder / "state"):
        each.mkdir(mode=0o755)
    programs = folder / "bin"
    programs.mkdir()
    for program in ("munge", "unmunge"):  # those that find this daemon without a word
        (programs / program).write_text(
            f'#!/bin/sh\nexec {find_tool(program)} --socket={munge}/socket "$@"\n'
        )
        (programs / program).chmod(0o755)
    (munge / "key").write_bytes(os.urandom(64))
    (munge / "key").chmod(0o600)
    (folder / "prolog").write_text(PROLOG)
    (folder / "prolog").chmod(0o755)
    port, *ports = free_ports(1 + len(NODES))
    text = CONFIGURATION.format(
        folder=folder, machine=machine, port=port, user=getpass.getuser(), proctrack=proctrack
    )
    for name, each in zip(NODES, ports, strict=True):
        text += NODE.format(name=name, machine=machine, port=each)
    (folder / "slurm.conf").write_text(text + PARTITION)
    files = [f"--{what}-file={munge / what}" for what in ("key", "log", "pid", "seed")]
    options = ["--foreground", "--force", f"--socket={munge}/socket"]
    slurm.start(find_tool("munged"), *options, *files)
    wait(slurm, (munge / "socket").exists)
    slurm.start(find_tool("slurmctld"), "-D", "-c")
    for name in NODES:
        slurm.start(find_tool("slurmd"), "-D", "-c", "-N", name)
    wait(slurm, lambda: _idle(slurm) == len(NODES))


def _idle(slurm: Slurm) -> int:
    try:
        return slurm.ask("sinfo", "--noheader", "--Node", "--states=idle").count("\n")
    except AssertionError:  # the controller does not listen yet
        return 0
