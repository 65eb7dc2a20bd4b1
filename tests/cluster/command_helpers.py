"""The `miniray` command and driver programs as a user runs them, in a folder of their own.

Nothing here runs miniray in the process of the tests, so that what a cluster leaves
behind can be told apart from what the tests hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from cluster_helpers import processes_with, wait_until
from forked_commands import READ_AT_START, run_forked
from ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A driver that makes one actor on each of two nodes and lets them call each other.
CROSSING = """
import json, os, sys
import psutil
import miniray
from miniray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

def network():
    return "grpc" in sys.modules or len(psutil.Process().net_connections("inet"))

@miniray.remote
class Half:
    def network(self):
        return network()
    def node(self):
        return miniray.get_runtime_context().get_node_id()
    def ask(self, other):
        return miniray.get(other.node.remote())
    def make(self, size):
        return bytes(size)
    def size_of(self, other, size):
        return len(miniray.get(other.make.remote(size)))

miniray.init(**json.loads(sys.argv[1]))
nodes = sorted(node["NodeID"] for node in miniray.nodes() if node["Alive"])
a, b = (Half.options(scheduling_strategy=On(node, soft=False)).remote() for node in nodes)
print(json.dumps({
    "nodes": nodes,
    "actors": miniray.get([a.node.remote(), b.node.remote()]),
    # One after the other: each waits for the other one meanwhile.
    "crossed": [miniray.get(b.ask.remote(a)), miniray.get(a.ask.remote(b))],
    "sizes": [miniray.get(x.size_of.remote(y, 10_000_000)) for x, y in ((a, b), (b, a))],
    "network": [network(), *miniray.get([a.network.remote(), b.network.remote()])],
}))
"""

#: Seconds that a command or a driver program may take on a busy machine.
PATIENCE = 45.0


@dataclasses.dataclass(frozen=True)
class Started:
    """What `miniray start` printed."""

    output: str
    #: ``HOST:PORT`` of the cluster's head.
    address: str
    #: Empty for a node that joined.
    token: str

    @property
    def port(self) -> int:
        """Where the head listens."""
        return int(self.address.rpartition(":")[2])


class CommandLine:
    """The command line of a user whose session files are all under one folder.

    Args:
        root: the folder, with a short path: sockets go there.
        variables: variables of the environment of everything that is run.
    """

    def __init__(self, root: Path, **variables: str) -> None:
        self.root = root
        scripts = sysconfig.get_path("scripts")
        self.environment = {
            **os.environ,
            "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
            "MINIRAY_TMPDIR": str(root),
            **variables,
        }

    # --- running -----------------------------------------------------------------
    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``miniray`` with these arguments to its end."""
        if any(name.startswith(READ_AT_START) for name in variables):
            return self._run(["miniray", *arguments], variables)
        environment = {**self.environment, **variables}
        return run_forked(arguments, environment, PATIENCE)

    def shell(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line as a user pastes it into a terminal."""
        return self._run(["sh", "-c", line], {})

    def python(self, source: str, *arguments: str, **variables: str) -> Any:
        """Run a driver program to its end, and return what it printed last, as JSON."""
        done = self._run([sys.executable, "-c", source, *arguments], variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def failing_python(self, source: str, **variables: str) -> str:
        """Run a driver program that ends with an error, and return the error's line."""
        done = self._run([sys.executable, "-c", source], variables)
        assert done.returncode != 0, done.stdout
        return done.stderr.strip().splitlines()[-1]

    def _run(
        self, command: list[str], variables: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def popen(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a program that goes on; its output comes in one pipe, as text."""
        return subprocess.Popen(
            command,
            env={**self.environment, **options.pop("variables", {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    # --- nodes -------------------------------------------------------------------
    def start_head(self, *arguments: str, **variables: str) -> Started:
        """``miniray start --head`` at a port that stays its own when it is killed."""
        (port,) = free_ports(1)
        done = self.run("start", "--head", "--port", str(port), *arguments, **variables)
        assert done.returncode == 0, done.stderr
        token = re.search(r"MINIRAY_TOKEN=(\S+)", done.stdout)
        assert token is not None, done.stdout
        return Started(done.stdout, _address_in(done.stdout), token[1])

    def join(self, head: Started, *arguments: str, **variables: str) -> Started:
        """``miniray start`` of one more node."""
        done = self.run(
            "start", "--address", head.address, "--token", head.token, *arguments, **variables
        )
        assert done.returncode == 0, done.stderr
        return Started(done.stdout, _address_in(done.stdout), "")

    # --- traces --------------------------------------------------------------------
    def records(self) -> list[dict[str, Any]]:
        """The records of this user's nodes, in the order of their starts."""
        folder = self.root / f"miniray-{os.geteuid()}" / "clusters"
        records = []
        for path in folder.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # its node has ended meanwhile
                records.append(json.loads(path.read_text()))
        return sorted(records, key=lambda record: record["started"])

    def pids(self) -> set[int]:
        """Every living process that was started for this folder."""
        return processes_with("MINIRAY_TMPDIR", str(self.root))

    def files(self) -> list[Path]:
        """What is on disk and should not outlive a cluster: everything but logs."""
        return sorted(self._lasting(self.root))

    def _lasting(self, folder: Path) -> Iterator[Path]:
        for path in folder.iterdir():
            kept = path.name in ("logs", "clusters", "environments") or (
                path.name.startswith(("miniray-", "session_"))
            )
            if not kept:
                yield path
            elif path.name not in ("logs", "environments"):
                yield from self._lasting(path)

    def sessions(self) -> list[Path]:
        """Folders of sessions, which stay for their logs when a node has ended."""
        return sorted(self.root.glob("miniray-*/session_*"))

    def leaves_nothing(self, timeout: float = 20.0) -> None:
        """Wait until no process and no file is left; fail with what is."""

        def nothing_is_left() -> bool:
            return not self.pids() and not self.files()

        try:
            wait_until(nothing_is_left, timeout)
        except AssertionError:
            raise AssertionError(f"left: {self.describe_rest()}") from None

    def describe_rest(self) -> str:
        """What is left, for the message of a failure."""
        commands = []
        for pid in self.pids():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended meanwhile
                continue
            commands.append(f"{pid}: {command[:120]}")
        return f"{commands} {[str(path) for path in self.files()]}"


def _address_in(output: str) -> str:
    address = re.search(r" at (\S+:\d+) \(", output)
    assert address is not None, output
    return address[1]


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The single line of a command that failed; nothing may be on its stdout."""
    assert done.returncode != 0, done.stdout
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.strip()


def command_line() -> Iterator[CommandLine]:
    """A command line in a folder of its own; its nodes end, and leave nothing."""
    root = Path(tempfile.mkdtemp(prefix="mr-cl-", dir="/tmp"))
    command = CommandLine(root)
    yield command
    if command.records() or command.pids():  # many tests start nothing, or stop it themselves
        command.run("stop", "--force", "--include-programs")
    command.leaves_nothing()
    shutil.rmtree(root)


def daemons(command: CommandLine) -> list[psutil.Process]:
    """The node daemons, in the order of their starts."""
    return [psutil.Process(record["processes"]["boot"]["pid"]) for record in command.records()]


def assert_crosses(told: dict[str, Any]) -> None:
    assert len(told["nodes"]) == 2
    assert told["actors"] == told["nodes"]
    assert told["crossed"] == told["nodes"]
    assert told["sizes"] == [10_000_000] * 2
    assert told["network"] == [0] * 3  # neither driver nor worker is on it, nor has loaded gRPC
