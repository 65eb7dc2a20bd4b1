"""What the logs of head, nodes and workers say of ends: of those that were meant, and of others."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import is_alive, wait_until
from command_helpers import CommandLine, command_line, daemons

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: What a healthy cluster has no reason to write.
ALARMS = re.compile(r"ERROR|WARNING|Traceback|exited|signal (?!SIGTERM)")

PROGRAM = """
import sys
import miniray
from miniray.util.placement_group import placement_group, remove_placement_group
from miniray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

@miniray.remote
def f():
    return 1

@miniray.remote
class A:
    def f(self):
        return 1

miniray.init(*sys.argv[2:3], **({} if sys.argv[2:] else {"num_cpus": 2}))
a = A.remote()
assert miniray.get([f.remote(), f.remote(), a.f.remote()]) == [1, 1, 1]
miniray.kill(a)
group = placement_group([{"CPU": 1}])
in_group = A.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote()
assert miniray.get(in_group.f.remote()) == 1
remove_placement_group(group)
print(1, flush=True)
if sys.argv[1] == "shutdown":
    miniray.shutdown()
"""

ENDS = """
import os, signal, sys
import miniray

@miniray.remote
def earlier():
    pass

@miniray.remote(max_retries=0)
def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

@miniray.remote
class Victim:
    def pid(self):
        return os.getpid()
    def leave(self, code):
        os._exit(code)

miniray.init(num_cpus=2)
pids = []
for code in (0, 7):
    victim = Victim.remote()
    pids.append(miniray.get(victim.pid.remote()))
    try:
        miniray.get(victim.leave.remote(code))
    except miniray.exceptions.ActorDiedError:
        pass
victim = Victim.remote()
pids.append(miniray.get(victim.pid.remote()))
miniray.kill(victim)
try:
    miniray.get(victim.pid.remote())
except miniray.exceptions.ActorDiedError:
    pass
miniray.get([earlier.remote() for _ in range(4)])  # its workers and leases serve crash() too
try:
    miniray.get(crash.remote())
except miniray.exceptions.WorkerCrashedError as error:
    pids.append(error.pid)
miniray.shutdown()
print(pids)
"""

MANY_ENDS = """
import os
import miniray

@miniray.remote
class Victim:
    def leave(self):
        os._exit(7)

miniray.init(num_cpus=2)
for _ in range(20):
    try:
        miniray.get(Victim.remote().leave.remote())
    except miniray.exceptions.ActorDiedError:
        pass
print(1)
"""


@pytest.fixture
def machine() -> Iterator[Callable[[str], CommandLine]]:
    """Makes the command line of a user of another machine."""
    with contextlib.ExitStack() as stack:

        def make(name: str) -> CommandLine:
            user = stack.enter_context(contextlib.contextmanager(command_line)())
            user.environment["MINIRAY_MACHINE_ID"] = name
            return user

        yield make


def logs(root: Path, name: str = "*") -> str:
    """All that was logged under a folder, in files of this name."""
    paths = sorted(root.glob(f"miniray-*/session_*/logs/{name}"))
    return "".join(path.read_text(errors="replace") for path in paths)


def has_left(command: CommandLine, why: str) -> None:
    """Wait until the head has logged that a node has left for a reason."""
    wait_until(lambda: f"has left: {why}" in logs(command.root, "head.log"))


@pytest.mark.parametrize("end", ["shutdown", "end of the program"])
def test_a_clean_end_of_an_embedded_cluster_leaves_no_alarm_in_any_log(
    command: CommandLine, end: str
) -> None:
    command.python(PROGRAM, end)
    wait_until(lambda: not command.pids())
    assert not ALARMS.search(logs(command.root)), logs(command.root)
    assert "has left: it was stopped (the driver called shutdown())" in logs(command.root)


def test_a_driver_that_detaches_a_node_that_is_stopped_and_a_crash_are_told_apart(
    command: CommandLine, machine: Callable[[str], CommandLine]
) -> None:
    head = command.start_head("--num-cpus", "2")
    driver, stopped, killed = (machine(name) for name in ("d", "s", "k"))
    driver.python(PROGRAM, "shutdown", head.address, MINIRAY_TOKEN=head.token)
    has_left(command, "it detached (the driver called shutdown())")
    assert "joined from 127.0.0.1\n" in logs(command.root, "head.log")
    stopped.join(head, "--num-cpus", "1")
    assert stopped.run("stop").returncode == 0
    has_left(command, "it was stopped (signal SIGTERM)")
    for user in (command, driver, stopped):
        assert not ALARMS.search(logs(user.root)), logs(user.root)

    killed.join(head, "--num-cpus", "1")
    daemons(killed)[0].kill()
    crash = "is lost: its daemon ended unexpectedly, or the network failed"
    wait_until(lambda: crash in logs(command.root, "head.log"))
    told = command.run("status").stdout
    assert "DEAD: it was stopped (signal SIGTERM)" in told
    assert "DEAD: its daemon ended unexpectedly, or the network failed" in told
    assert command.run("stop").returncode == 0
    assert logs(command.root, "head.log").count("WARNING") == 1  # that one


def test_a_stopped_head_is_no_alarm_for_the_nodes_that_end_with_it(
    command: CommandLine, machine: Callable[[str], CommandLine]
) -> None:
    head = command.start_head("--num-cpus", "1")
    other = machine("o")
    other.join(head, "--num-cpus", "1")
    assert command.run("stop").returncode == 0
    wait_until(lambda: not other.pids())
    assert "the head stops: signal SIGTERM" in logs(command.root)
    assert "the node stops: the cluster was stopped" in logs(other.root)
    for user in (command, other):
        assert not ALARMS.search(logs(user.root)), logs(user.root)


def test_each_process_that_ends_unexpectedly_is_a_line_of_the_nodes_log(
    command: CommandLine,
) -> None:
    zero, seven, _killed, crashed = command.python(ENDS)
    lines = logs(command.root, "node.log").splitlines()
    told = [line.split(" ", 2)[-1] for line in lines if "worker" in line]
    # Of one that crashed, where its last calls are is told too.
    assert [line.partition(". Its last calls")[0] for line in told] == [
        f"WARNING miniray.node.daemon: worker {zero} of Victim exited with code 0",
        f"WARNING miniray.node.daemon: worker {seven} of Victim exited with code 7",
        f"WARNING miniray.node.daemon: worker {crashed} of crash was ended by signal 11 (SIGSEGV)",
    ]


def test_a_head_that_is_killed_is_told_in_lines_of_the_log_not_in_dumps(
    command: CommandLine, machine: Callable[[str], CommandLine]
) -> None:
    head = command.start_head("--num-cpus", "1")
    other = machine("o")
    other.join(head, "--num-cpus", "1")
    [record] = command.records()
    boot, dead = (record["processes"][name]["pid"] for name in ("boot", "head"))
    os.kill(boot, signal.SIGSTOP)  # so that no other head comes
    try:
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda: "out of reach; waiting for it" in logs(other.root, "node.log"))
    finally:
        os.kill(boot, signal.SIGCONT)
    wait_until(lambda: "is open again" in logs(other.root, "node.log"))
    told = logs(other.root, "node.log")
    assert "WARNING miniray.node.node_main: the head of the cluster is out of reach" in told
    for line in told.splitlines():
        assert re.match(r"\d{4}-\d\d-\d\d .* (INFO|WARNING) miniray", line), told
    assert told.count("UNAVAILABLE") <= 2
    os.kill(boot, signal.SIGKILL)
    wait_until(lambda: not is_alive(boot))
    wait_until(lambda: "ended unexpectedly" in logs(command.root, "head.log"))
    wait_until(lambda: not command.pids())


def test_the_logs_of_head_and_node_have_the_limit_of_worker_logs(command: CommandLine) -> None:
    limits = {"MINIRAY_LOG_FILE_BYTES": "1000", "MINIRAY_LOG_FILES": "2"}
    command.python(MANY_ENDS, **limits)
    for name in ("head.log", "node.log"):
        files = sorted(command.root.glob(f"miniray-*/session_*/logs/{name}*"))
        assert [file.name for file in files] == [name, f"{name}.1"]
        assert all(0 < file.stat().st_size <= 1000 for file in files)


def test_a_program_whose_cluster_is_stopped_is_not_told_that_its_tasks_run_again(
    command: CommandLine, tmp_path: Path
) -> None:
    source = """
import pathlib, sys, time, miniray
path = pathlib.Path(sys.argv[1])
@miniray.remote
def begun():
    path.touch()
    time.sleep(600)
ref = begun.remote()
while not path.exists():
    time.sleep(0.01)
print("waits", flush=True)
miniray.get(ref)
"""
    with command.popen(sys.executable, "-c", source, str(tmp_path / "begun")) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "waits\n"
        assert command.run("stop", "--include-programs").returncode == 0
        told = driver.stdout.read()
    assert "NodeDiedError" in told
    assert "again (attempt" not in told
