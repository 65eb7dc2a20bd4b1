"""`miniray start`, `status` and `stop` with real nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import wait_until
from command_helpers import (
    CROSSING,
    PATIENCE,
    CommandLine,
    Started,
    assert_crosses,
    command_line,
    daemons,
    one_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def shared() -> Iterator[CommandLine]:
    yield from command_line()


@pytest.fixture(scope="module")
def head(shared: CommandLine) -> Started:
    """A cluster that the tests of this module share and only look at."""
    return shared.start_head("--num-cpus", "1")


# --- what start prints -----------------------------------------------------------------


def test_what_start_prints_can_be_pasted(command: CommandLine, tmp_path: Path) -> None:
    head = command.start_head("--num-cpus", "1")
    lines = [line.strip() for line in head.output.splitlines()]
    [join] = [line for line in lines if "miniray start --address" in line]
    joined = command.shell(join)
    assert joined.returncode == 0, joined.stderr
    assert len(command.records()) == 2

    program = [line for line in lines if line == "import miniray" or "miniray.init" in line]
    script = tmp_path / "pasted.py"
    script.write_text("\n".join([*program, "print(len(miniray.nodes()))"]))
    assert command.shell(f"{sys.executable} {script}").stdout.endswith("2\n")

    for label in ("To look at it:", "To stop it:"):
        [line] = [line for line in lines if line.startswith(label)]
        done = command.shell(line.removeprefix(label))
        assert done.returncode == 0, done.stderr
    [logs] = [line for line in lines if line.startswith("Its logs are in")]
    assert (Path(logs.split()[-1]) / "node.log").exists()
    command.leaves_nothing()


def test_a_head_for_other_machines_tells_an_address_that_they_can_reach(
    command: CommandLine,
) -> None:
    head = command.start_head("--host", "0.0.0.0", "--num-cpus", "1")
    host = head.address.rpartition(":")[0]
    assert host != "0.0.0.0"
    assert "To join from another machine:" in head.output
    command.join(head, "--num-cpus", "1")
    named = command.start_head("--host", "0.0.0.0", "--node-ip-address", "127.0.0.2")
    assert named.address.startswith("127.0.0.2:")


#: Runs the rest of the command on a machine with these addresses ($0) and no default route.
LAB = 'ip link set lo up && for ip in $0; do ip addr add $ip/24 dev lo || exit; done && exec "$@"'


@pytest.mark.parametrize("addresses", ["10.77.1.1", "10.77.1.1 10.78.1.1"])
def test_a_head_for_other_machines_needs_no_default_route(
    command: CommandLine, addresses: str
) -> None:
    alone = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "-Urn"]
    lab = [*alone, "sh", "-c", LAB, addresses]
    if subprocess.run([*lab, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("network namespaces are not available to this user")
    start = command.popen(*lab, "miniray", "start", "--head", "--port", "0", "--host", "0.0.0.0")
    output, _ = start.communicate(timeout=PATIENCE)
    if " " in addresses:
        assert start.returncode == 1
        assert "10.77.1.1, 10.78.1.1. Give one of them as --node-ip-address." in output
        assert "192.0.2.1" not in output
        return
    assert start.returncode == 0, output
    assert "running at 10.77.1.1:" in output
    assert "To join from another machine:" in output


def test_a_head_that_is_not_found_where_others_look_for_it_says_so(command: CommandLine) -> None:
    elsewhere = ("start", "--head", "--port", "0", "--node-ip-address")
    line = one_line(command.run(*elsewhere, "203.0.113.77"))
    assert "203.0.113.77: this machine has no such address; it has" in line
    line = one_line(command.run(*elsewhere, "127.0.0.2"))
    assert "127.0.0.2: it listens on 127.0.0.1" in line
    command.leaves_nothing()
    assert command.sessions() == []


# --- status ----------------------------------------------------------------------------


def test_status_shows_nodes_usage_actors_and_why_work_waits(
    shared: CommandLine, head: Started, tmp_path: Path
) -> None:
    source = """
import json, sys, time, pathlib
import miniray
from miniray.util.placement_group import placement_group
miniray.init(address="auto")

@miniray.remote(num_cpus=1)
class Holder:
    def ready(self): return True

@miniray.remote(num_cpus=1)
class Hopeful: pass

@miniray.remote(resources={"gold": 2})
def alchemy(): pass

holder = Holder.options(name="the holder").remote()
miniray.get(holder.ready.remote())
hopeful = Hopeful.remote()
refs = [alchemy.remote() for _ in range(3)]
group = placement_group([{"CPU": 1}, {"CPU": 1}])
time.sleep(100)
"""
    driver = shared.popen(sys.executable, "-c", source)
    try:
        wait_until(lambda: len(_waiting(shared.run("status").stdout)) == 3)
        shown = shared.run("status")
        assert shown.returncode == 0
        assert shown.stdout.startswith(f"Cluster at {head.address}: 1 node, up ")
        assert "CPU 1/1" in shown.stdout
        [holder] = [line for line in shown.stdout.splitlines() if "the holder" in line]
        assert "Holder" in holder
        assert "ALIVE" in holder
        assert holder.endswith("1 CPU")
        infeasible, *others = _waiting(shown.stdout)
        assert infeasible.startswith("3 tasks (alchemy")
        assert "INFEASIBLE" in infeasible
        assert "gold" in infeasible
        assert any(line.startswith("1 actor (Hopeful)") and "CPU" in line for line in others)
        assert any(line.startswith("1 placement group") and "CPU" in line for line in others)
    finally:
        driver.kill()
        driver.communicate()
    wait_until(lambda: "Nothing waits." in shared.run("status").stdout)


def _waiting(shown: str) -> list[str]:
    """The rows under "Waiting:" of what status prints."""
    _, _, rest = shown.partition("\nWaiting:\n")
    return [line.strip() for line in rest.splitlines()[1:] if line.startswith("  ")]


def test_status_of_one_of_two_clusters(command: CommandLine) -> None:
    first = command.start_head("--num-cpus", "1")
    second = command.start_head("--num-cpus", "2")
    for head, cpus in ((first, 1), (second, 2)):
        shown = command.run("status", "--address", head.address)
        assert f"CPU 0/{cpus}" in shown.stdout
    assert f"at {second.address}" in command.run("status").stdout


#: A program with a cluster of its own, until its input ends.
OWN_CLUSTER = """
import sys
import miniray

@miniray.remote(num_cpus=0)
class Mine:
    def held(self):
        return miniray.put(bytes(2**21))

context = miniray.init(num_cpus=int(sys.argv[1]))
mine = Mine.remote()
held = miniray.get(mine.held.remote())
print(context["address"], flush=True)
sys.stdin.read()
"""

#: What the functions of util.state tell without init(), and what init() attaches to.
LOOK = """
import json
import miniray
from miniray.util import state

actors = [(actor.class_name, actor.node_id) for actor in state.list_actors()]
[found, *_] = state.list_objects()  # the largest first
own = miniray.init(num_cpus=1)["address"]
print(json.dumps({"actors": actors, "size": found.object_size, "own": own}))
"""


@pytest.fixture
def own_cluster(command: CommandLine) -> Iterator[Callable[[int], str]]:
    """Starts a program with a cluster of so many CPUs of its own; tells the cluster's address."""
    with contextlib.ExitStack() as stack:

        def start(num_cpus: int) -> str:
            program = subprocess.Popen(
                [sys.executable, "-c", OWN_CLUSTER, str(num_cpus)],
                env=command.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(program)  # closes its input and waits for its end
            assert program.stdout is not None
            return program.stdout.readline().strip()

        yield start


def test_the_cluster_of_a_running_program_is_found_where_none_was_started(
    command: CommandLine, own_cluster: Callable[[int], str]
) -> None:
    address = own_cluster(3)
    shown = command.run("status")
    assert shown.returncode == 0, shown.stderr
    assert f"Cluster at {address}: 1 node" in shown.stdout
    assert "CPU 0/3" in shown.stdout
    assert "Mine" in shown.stdout
    assert "2 MiB" in command.run("memory").stdout
    looked = command.python(LOOK)
    [(name, _node)] = looked["actors"]
    assert name == "Mine"
    assert looked["size"] >= 2**21
    assert looked["own"] != address  # another program does not attach to it


def test_of_several_programs_the_user_says_which_and_a_started_cluster_comes_first(
    command: CommandLine, own_cluster: Callable[[int], str]
) -> None:
    addresses = {own_cluster(cpus): cpus for cpus in (2, 3)}
    line = one_line(command.run("status"))
    assert "--address" in line
    for address, cpus in addresses.items():
        assert address in line
        assert f"CPU 0/{cpus}" in command.run("status", "--address", address).stdout
        assert f"CPU 0/{cpus}" in command.run("status", MINIRAY_ADDRESS=address).stdout
    head = command.start_head("--num-cpus", "1")
    assert f"Cluster at {head.address}" in command.run("status").stdout


# --- stop ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [[], ["--force"], ["--grace-period", "3"]])
def test_stop_ends_all_nodes_with_their_workers(command: CommandLine, how: list[str]) -> None:
    head = command.start_head("--num-cpus", "1")
    command.join(head, "--num-cpus", "1")
    kept = CROSSING.replace("Half.options(", 'Half.options(lifetime="detached", ')
    options = json.dumps({"namespace": "kept"})
    assert_crosses(command.python(kept, options))
    assert len(command.pids()) > 5  # the detached actors too
    stopped = command.run("stop", *how)
    assert stopped.returncode == 0, stopped.stderr
    assert not command.pids()
    assert not command.files()
    assert stopped.stdout.count("Ended the ") == 2


def test_stop_with_nothing_to_stop_says_so(command: CommandLine) -> None:
    stopped = command.run("stop")
    assert stopped.returncode == 0
    assert stopped.stdout == "No node of yours is running on this machine.\n"


def test_a_driver_hears_that_its_cluster_was_stopped(command: CommandLine) -> None:
    command.start_head("--num-cpus", "1")
    source = """
import sys, time, miniray
miniray.init(address="auto", log_to_driver=False)
@miniray.remote
class A:
    def wait(self): time.sleep(100)
    def ready(self): return 1
a = A.remote()
miniray.get(a.ready.remote())
print("ready", flush=True)
try:
    miniray.get(a.wait.remote())
except miniray.exceptions.RayError as error:
    print(type(error).__name__, flush=True)
"""
    driver = command.popen(sys.executable, "-c", source)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    assert command.run("stop").returncode == 0
    output, _ = driver.communicate(timeout=30)
    assert driver.returncode == 0, output
    told, error = output.splitlines()
    assert "it was stopped (signal SIGTERM)" in told
    assert error in {"NodeDiedError", "ActorDiedError"}


# --- start --block -----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_blocking_start_ends_its_node_when_it_is_asked_to(
    command: CommandLine, number: signal.Signals
) -> None:
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        start = command.popen("miniray", "start", "--head", "--port", "0", "--block")
    finally:
        signal.signal(signal.SIGHUP, inherited)
    assert start.stdout is not None
    while "Its logs are in" not in start.stdout.readline():  # until then it interrupts the start
        assert start.poll() is None
    start.send_signal(number)
    output, _ = start.communicate(timeout=30)
    assert start.returncode == 0, output
    assert output.endswith("The node has ended.\n")
    command.leaves_nothing()


def test_a_blocking_start_fails_when_its_node_ends_by_itself(command: CommandLine) -> None:
    start = command.popen("miniray", "start", "--head", "--port", "0", "--block")
    assert start.stdout is not None
    while "Its logs are in" not in start.stdout.readline():  # until then it ends while it starts
        assert start.poll() is None
    daemons(command)[0].kill()
    output, _ = start.communicate(timeout=30)
    assert start.returncode == 1
    assert "The node has ended by itself." in output.splitlines()[-1]
    command.leaves_nothing()


def test_a_blocking_start_that_is_killed_takes_its_node_along(command: CommandLine) -> None:
    start = command.popen("miniray", "start", "--head", "--port", "0", "--block")
    assert start.stdout is not None
    while "Its logs are in" not in start.stdout.readline():
        assert start.poll() is None
    start.kill()
    start.communicate(timeout=30)
    wait_until(lambda: not command.pids())
    command.leaves_nothing()


def test_a_start_that_is_interrupted_leaves_nothing(command: CommandLine) -> None:
    start = command.popen("miniray", "start", "--head", "--port", "0", start_new_session=True)
    wait_until(lambda: len(command.pids()) > 1)
    os.killpg(start.pid, signal.SIGINT)
    start.communicate(timeout=30)
    interrupted = start.returncode != 0
    if not interrupted:  # it was ready just before
        command.run("stop")
    command.leaves_nothing()
    assert len(command.sessions()) == (0 if interrupted else 1)
