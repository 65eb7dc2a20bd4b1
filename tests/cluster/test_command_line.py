"""`miniray start`, `status` and `stop` with real nodes, and drivers that attach to them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from cluster_helpers import is_alive, processes_with, wait_until
from command_helpers import CommandLine, Started, one_line

from miniray.security.token import JoinToken, parse_token
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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

OUTSIDE = """
import json, sys
import numpy as np
import miniray

@miniray.remote(num_cpus=0)
class Far:
    def node(self):
        return miniray.get_runtime_context().get_node_id()
    def total(self, array):
        return int(array.sum())
    def make(self, size):
        return np.ones(size, dtype=np.uint8)

miniray.init(sys.argv[1])
actors = [Far.remote() for _ in range(4)]
array = miniray.put(np.ones(10_000_000, dtype=np.uint8))
print(json.dumps({
    "own": miniray.get_runtime_context().get_node_id(),
    "actors": miniray.get([actor.node.remote() for actor in actors]),
    "there": miniray.get(actors[0].total.remote(array)),
    "back": miniray.get(actors[1].make.remote(10_000_000)).size,
    "cpus": miniray.cluster_resources()["CPU"],
    "nodes": [node["NodeID"] for node in miniray.nodes()],
}))
"""

ADDRESS = """
import json, miniray
print(json.dumps(miniray.init().address_info["address"]))
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[CommandLine]:
    """A command line that no other test shares; its nodes end with the test."""
    del tmp_path  # the path of a socket has at most 107 bytes
    yield from _command_line()


@pytest.fixture(scope="module")
def shared() -> Iterator[CommandLine]:
    yield from _command_line()


def _command_line() -> Iterator[CommandLine]:
    root = Path(tempfile.mkdtemp(prefix="mr-cl-", dir="/tmp"))
    command = CommandLine(root)
    yield command
    command.run("stop", "--force")
    command.leaves_nothing()
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def head(shared: CommandLine) -> Started:
    """A cluster that the tests of this module share and only look at."""
    return shared.start_head("--num-cpus", "1")


# --- two nodes -----------------------------------------------------------------------


def daemons(command: CommandLine) -> list[psutil.Process]:
    """The node daemons, in the order of their starts."""
    return [psutil.Process(record["processes"]["boot"]["pid"]) for record in command.records()]


def connections(processes: list[psutil.Process]) -> list[tuple[int, int]]:
    """(index of one daemon, index of another) for each TCP connection from one to the other."""
    listening = {
        connection.laddr.port: index
        for index, process in enumerate(processes)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    return [
        (index, listening[connection.raddr.port])
        for index, process in enumerate(processes)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr.port in listening
    ]


def assert_crosses(told: dict[str, Any]) -> None:
    assert len(told["nodes"]) == 2
    assert told["actors"] == told["nodes"]
    assert told["crossed"] == told["nodes"]
    assert told["sizes"] == [10_000_000] * 2
    assert told["network"] == [0] * 3  # neither driver nor worker is on it, nor has loaded gRPC


def test_actors_of_two_nodes_of_one_machine_call_each_other(command: CommandLine) -> None:
    head = command.start_head("--num-cpus", "1")
    command.join(head, "--num-cpus", "1")
    for address in ("auto", head.address):
        options = json.dumps({"address": address, "log_to_driver": False})
        assert_crosses(command.python(CROSSING, options))
    assert_crosses(command.python(CROSSING, "{}", MINIRAY_ADDRESS=head.address))
    assert connections(daemons(command)) == []  # they use Unix sockets


def test_nodes_of_different_machines_talk_over_tls(command: CommandLine) -> None:
    head = command.start_head("--num-cpus", "1")
    command.join(head, "--num-cpus", "1", MINIRAY_MACHINE_ID="another machine")
    # A driver that goes on, so that the connections are there to be looked at.
    driver = command.popen(
        sys.executable,
        "-c",
        CROSSING + "sys.stdout.flush(); miniray.get(a.ask.remote(b)); import time; time.sleep(60)",
        "{}",
    )
    try:
        assert driver.stdout is not None
        assert_crosses(json.loads(driver.stdout.readline()))
        nodes = daemons(command)
        assert {(0, 1), (1, 0)} & set(connections(nodes))
        for node in nodes:
            for connection in node.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    assert_speaks_only_tls(connection.laddr.port)
    finally:
        driver.kill()
        driver.communicate()


def test_a_driver_outside_of_the_cluster_attaches_with_address_and_token(
    command: CommandLine,
) -> None:
    head = command.start_head("--num-cpus", "2")
    home = command.root / "outside"
    home.mkdir()
    outside = {"MINIRAY_TMPDIR": str(home), "MINIRAY_MACHINE_ID": "outside"}
    told = command.python(OUTSIDE, head.address, MINIRAY_TOKEN=head.token, **outside)
    assert told["there"] == told["back"] == 10_000_000
    assert told["own"] not in told["actors"]  # nothing is placed on a driver's own machine
    assert told["cpus"] == 2
    assert len(told["nodes"]) == 1
    assert told["own"] not in told["nodes"]
    attach = f"import miniray; miniray.init({head.address!r})"
    assert "MINIRAY_TOKEN" in command.failing_python(attach, **outside)
    wrong = str(JoinToken(parse_token(head.token).fingerprint, bytes(32)))
    error = command.failing_python(attach, MINIRAY_TOKEN=wrong, **outside)
    assert error.startswith("miniray.exceptions.AuthenticationError: ")
    assert wrong not in error
    wait_until(lambda: not processes_with("MINIRAY_TMPDIR", str(home)))
    assert not list(home.rglob("*.sock"))
    shutil.rmtree(home)
    assert (
        len(
            command.python(
                "import miniray, json; miniray.init('auto'); "
                "print(json.dumps([n for n in miniray.nodes() if n['Alive']]))"
            )
        )
        == 1
    )


def test_workers_run_in_the_folder_of_their_driver(
    shared: CommandLine, head: Started, tmp_path: Path
) -> None:
    del head
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    source = """
import json, os, miniray
miniray.init(address="auto", log_to_driver=False)
@miniray.remote
def look():
    import beside
    return [os.getcwd(), beside.VALUE]
print(json.dumps(miniray.get(look.remote())))
"""
    driver = shared.popen(sys.executable, "-c", source, cwd=tmp_path)
    output, _ = driver.communicate(timeout=30)
    assert json.loads(output) == [str(tmp_path.resolve()), 7]


def assert_speaks_only_tls(port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain) as encrypted,
    ):
        assert encrypted.getpeercert(binary_form=True)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        assert not _answer(plain).startswith(bytes(3))  # no frame of HTTP/2


def _answer(connection: socket.socket) -> bytes:
    try:
        return connection.recv(100)
    except ConnectionResetError:
        return b"reset"


def test_a_node_that_ends_leaves_the_cluster_running(command: CommandLine) -> None:
    head = command.start_head("--num-cpus", "1")
    command.join(head, "--num-cpus", "1")
    daemons(command)[1].terminate()
    wait_until(lambda: "1 node," in command.run("status").stdout)
    assert command.python(ADDRESS) == head.address


# --- what start prints -----------------------------------------------------------------


def test_what_start_prints_can_be_pasted(command: CommandLine, tmp_path: Path) -> None:
    head = command.start_head("--num-cpus", "1")
    lines = [line.strip() for line in head.output.splitlines()]
    [join] = [line for line in lines if line.startswith("miniray start --address")]
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
[found] = state.list_objects()
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
    assert "its daemon ended" in told
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


# --- failures ----------------------------------------------------------------------------


def test_the_version_is_told(shared: CommandLine) -> None:
    assert shared.run("--version").stdout == f"miniray {VERSION}\n"


def test_the_command_of_an_interpreter_is_its_module(shared: CommandLine) -> None:
    told = shared.shell(f"{sys.executable} -m miniray --version")
    assert told.stdout == f"miniray {VERSION}\n"


def test_a_port_that_is_taken_is_named(command: CommandLine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        line = one_line(command.run("start", "--head", "--port", str(port)))
    assert f"127.0.0.1:{port}" in line
    assert "another process uses this port" in line
    command.leaves_nothing()
    assert command.sessions() == []


def test_a_port_with_a_head_of_ones_own_names_it(shared: CommandLine, head: Started) -> None:
    line = one_line(shared.run("start", "--head", "--port", str(head.port)))
    assert f"already running at {head.address}" in line
    assert "miniray stop" in line


def test_joining_where_nothing_listens_fails_at_once(command: CommandLine) -> None:
    with socket.socket() as free:  # bound but not listening: nobody else takes it meanwhile
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        token = str(JoinToken(bytes(32), bytes(32)))
        line = one_line(command.run("start", "--address", address, "--token", token))
    assert line.startswith(f"Error: Nothing listens at {address}.")
    command.leaves_nothing()
    assert command.sessions() == []


def test_joining_what_is_no_head_fails(command: CommandLine) -> None:
    token = str(JoinToken(bytes(32), bytes(32)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        line = one_line(
            command.run(
                "start", "--address", address, "--token", token, MINIRAY_START_TIMEOUT="0.5"
            )
        )
    assert address in line
    command.leaves_nothing()
    assert command.sessions() == []


def test_the_token_of_another_cluster_is_refused(shared: CommandLine, head: Started) -> None:
    token = parse_token(head.token)
    for wrong in (
        JoinToken(token.fingerprint, bytes(32)),  # the secret is wrong
        JoinToken(bytes(32), token.secret),  # the head is another one than expected
    ):
        line = one_line(shared.run("start", "--address", head.address, "--token", str(wrong)))
        assert "token" in line
        assert str(wrong) not in line
    assert len(shared.records()) == 1


def _with_fake(tmp_path: Path, statement: str) -> dict[str, str]:
    """Variables under which every interpreter begins with a statement."""
    (tmp_path / "sitecustomize.py").write_text(statement)
    return {"PYTHONPATH": str(tmp_path)}


OTHER_MINIRAY = "import miniray.version; miniray.version.VERSION = '0.0.1'"
OTHER_PYTHON = "import platform; platform.python_version = lambda: '3.99.0'"


@pytest.mark.parametrize(
    ("fake", "named"), [(OTHER_MINIRAY, "miniray 0.0.1"), (OTHER_PYTHON, "Python 3.99.0")]
)
def test_other_versions_cannot_join_or_attach(
    shared: CommandLine, head: Started, tmp_path: Path, fake: str, named: str
) -> None:
    variables = _with_fake(tmp_path, fake)
    join = ("start", "--address", head.address, "--token", head.token)
    line = one_line(shared.run(*join, **variables))
    assert named in line
    assert len(shared.records()) == 1
    for error in (
        one_line(shared.run("status", **variables)),
        shared.failing_python("import miniray; miniray.init(address='auto')", **variables),
    ):
        what, version = named.split()
        assert what in error
        assert version in error
    assert error.startswith("miniray.exceptions.VersionMismatchError: ")


def test_an_attachment_to_nothing_says_what_to_start(command: CommandLine) -> None:
    error = command.failing_python("import miniray; miniray.init(address='auto')")
    assert error.startswith("ConnectionError:")
    assert "miniray start --head" in error
    error = command.failing_python("import miniray; miniray.init(address='127.0.0.1:1')")
    assert error.startswith("ConnectionError:")
    assert "miniray start --address 127.0.0.1:1" in error
    assert "miniray start --head" in one_line(command.run("status"))


JOIN = ["start", "--address", "127.0.0.1:1", "--token", str(JoinToken(bytes(32), bytes(32)))]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["start"], "--head"),
        (["start", "--head", "--address", "127.0.0.1:1"], "either --head"),
        (["start", "--address", "127.0.0.1:1"], "token"),
        (["start", "--address", "127.0.0.1", "--token", JOIN[-1]], "HOST:PORT"),
        (["start", "--address", "127.0.0.1:1", "--token", "secret"], "'mr1.'"),
        (["start", "--address", "127.0.0.1:1", "--token", JOIN[-1][:-5]], "cut"),
        ([*JOIN, "--resources", '{"FPGA": 2'], "is not JSON"),
        ([*JOIN, "--resources", '{"FPGA": -2}'], "at least 0, not -2"),
        ([*JOIN, "--num-cpus", "-1"], "at least 0, not -1"),
        ([*JOIN, "--num-gpus", "two"], "'two'"),
        ([*JOIN, "--memory", "much"], "'much'"),
        ([*JOIN, "--labels", "zone"], "'zone'"),
        (["start", "--head", "--port", "70000"], "65535, not 70000"),
        (["start", "--head", "--frob"], "--frob"),
        (["stop", "--grace-period", "-1"], "-1"),
        (["frob"], "frob"),
    ],
)
def test_a_misuse_is_one_line_and_starts_nothing(
    command: CommandLine, arguments: list[str], said: str
) -> None:
    done = command.run(*arguments)
    line = one_line(done)
    assert done.returncode == 2
    assert said in line
    assert line.endswith("--help'.")
    assert not command.pids()
    assert not command.records()


@pytest.mark.parametrize("arguments", [["start", "--head"], ["status"], ["stop"]])
def test_a_tunable_that_makes_no_sense_is_named(command: CommandLine, arguments: list[str]) -> None:
    line = one_line(command.run(*arguments, MINIRAY_HEAD_GRACE="soon"))
    assert "MINIRAY_HEAD_GRACE" in line
    assert "'soon'" in line


def test_an_address_that_is_not_this_machines_cannot_be_listened_at(command: CommandLine) -> None:
    line = one_line(command.run("start", "--head", "--port", "0", "--host", "192.0.2.1"))
    assert line == ("Error: Cannot listen on 192.0.2.1:0: 192.0.2.1 is no address of this machine.")
    command.leaves_nothing()


# --- rights --------------------------------------------------------------------------------


def test_only_the_user_can_read_what_a_cluster_keeps(shared: CommandLine, head: Started) -> None:
    del head
    [record] = shared.records()
    session = Path(record["session"]["folder"])
    for folder in (session, Path(record["session"]["socket_dir"]), session.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    kept = [path for path in session.iterdir() if path.is_file()]
    assert session / "token" in kept
    for path in [*kept, session.parent / "clusters" / f"{record['session']['id']}.json"]:
        assert path.stat().st_mode & 0o777 == 0o600, path
    sockets = list(Path(record["session"]["socket_dir"]).glob("*.sock"))
    assert len(sockets) >= 3


INTRUDE = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for path in sys.argv[1:]:
    try:
        if path.endswith(".sock"):
            socket.socket(socket.AF_UNIX).connect(path)
        else:
            open(path).read()
    except PermissionError:
        continue
    sys.exit(path)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_connect_nor_read_the_token(
    shared: CommandLine, head: Started
) -> None:
    del head
    [record] = shared.records()
    session = record["session"]
    secrets = [f"{session['folder']}/token", f"{session['folder']}/authority.key"]
    sockets = [str(path) for path in Path(session["socket_dir"]).glob("*.sock")]
    intruder = shared.popen(sys.executable, "-c", INTRUDE, *secrets, *sockets)
    output, _ = intruder.communicate(timeout=30)
    assert intruder.returncode == 0, output
    shared.root.chmod(0o755)  # the folder around them is usually /tmp
    try:
        intruder = shared.popen(sys.executable, "-c", INTRUDE, *secrets, *sockets)
        output, _ = intruder.communicate(timeout=30)
    finally:
        shared.root.chmod(0o700)
    assert intruder.returncode == 0, output


def test_ended_processes_are_not_waited_for(command: CommandLine) -> None:
    """A record of a node that was killed is no cluster, and goes with the next look."""
    command.start_head("--num-cpus", "1")
    [record] = command.records()
    for process in record["processes"].values():
        os.kill(process["pid"], signal.SIGKILL)
    wait_until(lambda: not any(is_alive(p["pid"]) for p in record["processes"].values()))
    assert "No cluster" in one_line(command.run("status"))
    assert command.records() == []
    command.leaves_nothing()
