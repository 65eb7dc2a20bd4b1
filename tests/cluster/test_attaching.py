"""Nodes of one machine and of several, and drivers that attach to them."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from cluster_helpers import processes_with, wait_until
from command_helpers import (
    CROSSING,
    CommandLine,
    Started,
    assert_crosses,
    command_line,
    daemons,
    one_line,
)

from miniray.security.token import JoinToken, parse_token

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def shared() -> Iterator[CommandLine]:
    yield from command_line()


@pytest.fixture(scope="module")
def one_node(shared: CommandLine) -> Started:
    """A cluster that tests of this module share, and leave as it was."""
    return shared.start_head("--num-cpus", "2")


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
        # The page is for browsers of this machine, and on loopback.
        pages = {record["dashboard_url"].rpartition(":")[2] for record in command.records()}
        assert {(0, 1), (1, 0)} & set(connections(nodes))
        for node in nodes:
            for connection in node.net_connections("tcp"):
                port = connection.laddr.port
                if connection.status == psutil.CONN_LISTEN and str(port) not in pages:
                    assert_speaks_only_tls(port)
    finally:
        driver.kill()
        driver.communicate()


def test_a_driver_outside_of_the_cluster_attaches_with_address_and_token(
    shared: CommandLine, one_node: Started
) -> None:
    command, head = shared, one_node
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


#: A driver outside, which attaches twice; its child and its tasks say whether they know the token.
TOKENS = """
import json, os, subprocess, sys
import miniray

LOOK = "import os, sys; print('MINIRAY_TOKEN' in os.environ)"

@miniray.remote
def look():
    return "MINIRAY_TOKEN" in os.environ

told = []
for _ in range(2):
    miniray.init(sys.argv[1])
    told += [miniray.get(look.remote()), "MINIRAY_TOKEN" in os.environ]
    miniray.shutdown()
child = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True)
print(json.dumps([*told, child.stdout]))
"""


def test_the_token_is_in_no_environment_but_the_one_it_was_given_in(
    command: CommandLine, tmp_path: Path
) -> None:
    head = command.start_head("--num-cpus", "0")
    joined = command.run("start", "--address", head.address, "--num-cpus", "1",
                         MINIRAY_TOKEN=head.token)  # fmt: skip
    assert joined.returncode == 0, joined.stderr
    home = command.root / "outside"
    home.mkdir()
    outside = {"MINIRAY_TMPDIR": str(home), "MINIRAY_MACHINE_ID": "outside"}
    (tmp_path / "token").write_text(head.token)
    by_file = {"MINIRAY_TOKEN_FILE": str(tmp_path / "token"), **outside}
    for address, where in (
        (head.address, {"MINIRAY_TOKEN": head.token, **outside}),
        (head.address, by_file),
        ("auto", {"MINIRAY_TOKEN": head.token}),
    ):
        told = command.python(TOKENS, address, **where)
        assert told == [False] * 4 + ["False\n"]
    by_file["MINIRAY_TOKEN_FILE"] = "/no/token"
    attach = f"import miniray; miniray.init({head.address!r})"
    error = command.failing_python(attach, **by_file)
    assert "TokenError: The token file /no/token cannot be read" in error
    shutil.rmtree(home)


def test_the_token_is_not_on_the_command_line_of_a_start_that_stays(
    shared: CommandLine, one_node: Started
) -> None:
    head = one_node
    join = ("start", "--address", head.address, f"--token={head.token}", "--num-cpus", "1")
    start = shared.popen("miniray", *join, "--block")
    try:
        assert start.stdout is not None
        while "Its logs are in" not in start.stdout.readline():
            assert start.poll() is None
        shown = psutil.Process(start.pid).cmdline()
        assert head.token not in " ".join(shown)
        assert f"--token={'*' * len(head.token)}" in shown
        assert head.address in shown
    finally:
        start.terminate()
        start.communicate(timeout=30)
    wait_until(lambda: "1 node," in shared.run("status").stdout)


#: What the functions of util.state tell outside of a cluster, without init().
LOOK_OUTSIDE = """
import json, sys
from miniray.util import state
print(json.dumps([node.node_id for node in state.list_nodes(sys.argv[1])]))
"""


def test_commands_look_at_a_cluster_elsewhere_with_its_token(
    command: CommandLine, tmp_path: Path
) -> None:
    head = command.start_head("--num-cpus", "2")
    [record] = command.records()
    node = record["node_id"]
    home = command.root / "outside"
    home.mkdir()
    outside = {"MINIRAY_TMPDIR": str(home), "MINIRAY_MACHINE_ID": "outside"}
    known = {**outside, "MINIRAY_TOKEN": head.token}
    where = ("--address", head.address.replace("127.0.0.1", "localhost"))

    shown = command.run("status", *where, **known)
    assert shown.returncode == 0, shown.stderr
    assert f"Cluster at {head.address}: 1 node, " in shown.stdout
    shown = command.run("memory", *where, **known)
    assert "on 1 node\n" in shown.stdout  # not that of the command
    assert node[:8] in shown.stdout
    file = tmp_path / "token"
    file.write_text(head.token)
    shown = command.run("drain", *where, "--token-file", str(file), "--wait", node[:4], **outside)
    assert shown.returncode == 0, shown.stderr
    assert "Nothing runs there any more." in shown.stdout
    by_file = command.run("status", *where, **outside, MINIRAY_TOKEN_FILE=str(file))
    assert f"Cluster at {head.address}: 1 node, " in by_file.stdout
    assert command.python(LOOK_OUTSIDE, where[1], **known) == [node]

    line = one_line(command.run("status", *where, **outside))
    assert "MINIRAY_TOKEN" in line
    wrong = str(JoinToken(parse_token(head.token).fingerprint, bytes(32)))
    line = one_line(command.run("status", *where, **outside, MINIRAY_TOKEN=wrong))
    assert "token" in line
    assert wrong not in line
    wait_until(lambda: not processes_with("MINIRAY_TMPDIR", str(home)))
    assert not [path for path in home.rglob("*") if path.is_file()]  # nor a log
    shutil.rmtree(home)


def test_a_cluster_is_found_by_any_name_of_its_machine(
    shared: CommandLine, one_node: Started
) -> None:
    command, head = shared, one_node
    source = "import miniray, json, sys; print(json.dumps(miniray.init(sys.argv[1])['address']))"
    for host in ("localhost", "[::1]"):
        address = f"{host}:{head.port}"
        assert f"Cluster at {head.address}" in command.run("status", "--address", address).stdout
        assert command.python(source, address) == head.address
    error = command.failing_python("import miniray; miniray.init('localhost:1')")
    assert f"Running here: {head.address}." in error


@pytest.mark.usefixtures("one_node")
def test_workers_run_in_the_folder_of_their_driver(shared: CommandLine, tmp_path: Path) -> None:
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
