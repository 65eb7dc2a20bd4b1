"""Rows about runs: from the command that starts the hosts to the program's result, and the end.

The hosts are those of the tests: three slurmd, and two servers of OpenSSH in namespaces, as root.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from _common import Engine, Figure, row

if TYPE_CHECKING:
    from collections.abc import Sequence

TESTS = Path(__file__).resolve().parent.parent / "tests"
#: A program of either engine that says when it has a result, then ends when its input does.
PROGRAM = """
import sys, {engine}
{engine}.init()

@{engine}.remote
def work():
    return "result"

print({engine}.get(work.remote()), len({engine}.nodes()), flush=True)
{rest}
"""
#: Ray's command takes every Ray of the machine for its own, on other hosts of a test too.
#: Its first process is a shell, which reaps what others leave.
APART = (
    "unshare",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
    "sh",
    "-c",
    '"$@"; exit',
    "sh",
)
#: Marks the processes of a run.
MARK = "LAUNCH_MARK"


def _program(engine: Engine, rest: str = "") -> tuple[str, str, str]:
    return sys.executable, "-c", PROGRAM.format(engine=engine.name, rest=rest)


#: Ray's command looks for itself there.
FOLDER = Path(sys.executable).parent


def _command(engine: Engine) -> str:
    return str(FOLDER / engine.name)


def _run(engine: Engine, address: str, nodes: int, *program: str) -> Sequence[str]:
    """The command that each host gets."""
    if engine.name == "miniray":
        own_address = ("--host", "127.0.0.1") if nodes > 1 else ()  # all hosts are this machine
        return (_command(engine), "run", *own_address, "--", *program)
    options = ("--address", address, "--min-nodes", str(nodes))
    return (*APART, _command(engine), "symmetric-run", *options, "--", *program)


def _until_result(process: subprocess.Popen[str], nodes: int) -> float:
    """The time at which a program tells its result."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("result"):
            assert line.split() == ["result", str(nodes)], line
            return time.perf_counter()
    raise RuntimeError(f"no result: {''.join(seen)[-500:]}")


def _until_gone(mark: str) -> float:
    """The time at which no process of a run is left."""
    wanted = f"{MARK}={mark}".encode()
    while any(wanted in _environment(path) for path in Path("/proc").glob("[0-9]*/environ")):
        time.sleep(0.01)
    return time.perf_counter()


def _environment(path: Path) -> bytes:
    try:
        # Of a server's connection, whose process is none of the run, only the variables are.
        server = path.with_name("comm").read_bytes() == b"sshd\n"
        return b"" if server else path.read_bytes()
    except OSError:
        return b""


def _start(words: Sequence[str], mark: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        env={**os.environ, "PATH": f"{FOLDER}:{os.environ['PATH']}", MARK: mark, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@row(
    "slurm",
    Figure("three Slurm hosts, to the program's result", "s", 3.0),
    Figure("three Slurm hosts, from the program's end until no process is left", "s", 2.0),
    Figure("three Slurm hosts, from SIGKILL to all until no process is left", "s", 2.0),
    limit=180,
)
def slurm(engine: Engine) -> tuple[float, float, float]:
    if engine.name == "ray":
        raise NotImplementedError("symmetric-run takes hosts with one address for one host")
    sys.path[:0] = [str(TESTS), str(TESTS / "cluster")]
    from slurm_cluster import slurm_cluster

    with slurm_cluster() as cluster, tempfile.TemporaryDirectory() as home:
        variables = {**cluster.variables, "HOME": home}
        mark = uuid.uuid4().hex
        start = time.perf_counter()
        step = _start(["srun", "-N3", *_run(engine, "", 3, *_program(engine))], mark, **variables)
        result = _until_result(step, 3)
        ended = _until_gone(mark)
        step.communicate()
        mark = uuid.uuid4().hex
        program = _program(engine, "import time; time.sleep(600)")
        step = _start(["srun", "-N3", *_run(engine, "", 3, *program)], mark, **variables)
        _until_result(step, 3)
        killed = time.perf_counter()
        cluster.ask("scancel", "--signal=KILL", "--name=miniray")
        gone = _until_gone(mark)
        step.communicate()
    return result - start, ended - result, gone - killed


@row(
    "ssh",
    Figure("two hosts over SSH, to the program's result", "s", 4.0),
    Figure("two hosts over SSH, from the program's end until no process is left", "s", 2.0),
    limit=180,
)
def ssh(engine: Engine) -> tuple[float, float]:
    sys.path[:0] = [str(TESTS), str(TESTS / "cluster")]
    from ssh_hosts import HOSTS, network

    mark = uuid.uuid4().hex
    folders = {name: os.environ[name] for name in os.environ if name.endswith("_TMPDIR")}
    with (
        tempfile.TemporaryDirectory() as folder,
        network(Path(folder), {**os.environ, MARK: mark}, {**folders, MARK: mark}) as hosts,
    ):
        start = time.perf_counter()
        if engine.name == "miniray":
            words = (_command(engine), "ssh", *HOSTS, "--", *_program(engine))
            parts = [hosts.popen(*words)]
        else:  # the same command on each host, by hand
            address = f"{next(iter(HOSTS.values()))}:6379"
            line = shlex.join(_run(engine, address, len(HOSTS), *_program(engine)))
            # Where a cluster is made without a token, its other hosts would need one.
            line = f"PATH={FOLDER}:$PATH RAY_AUTH_MODE=disabled {line}"
            parts = [hosts.popen("ssh", name, line) for name in HOSTS]
        result = _until_result(parts[0], len(HOSTS))
        ended = _until_gone(mark)
        for part in parts:
            part.communicate()
    return result - start, ended - result


@row(
    "laptop",
    Figure("one machine: what the command adds until the program's result", "s", 0.1),
    Figure("one machine, to the program's result", "s"),
    limit=400,
)
def laptop(engine: Engine) -> tuple[float, float]:
    alone, run = [], []
    for _ in range(3 if engine.name == "miniray" else 1):  # Ray's command takes half a minute
        for times, words in (
            (alone, (*(APART if engine.name == "ray" else ()), *_program(engine))),
            (run, _run(engine, "127.0.0.1:6379", 1, *_program(engine))),
        ):
            mark = uuid.uuid4().hex
            start = time.perf_counter()
            process = _start(words, mark)
            times.append(_until_result(process, 1) - start)
            process.communicate()
            _until_gone(mark)
    return min(run) - min(alone), min(run)
