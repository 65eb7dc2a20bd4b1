"""What `miniray start`, `status` and `stop` refuse, and who may do what."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import is_alive, wait_until
from command_helpers import CommandLine, Started, command_line, one_line
from ports import refused_address

from miniray.security.certificates import make_credentials, server_context
from miniray.security.token import JoinToken, parse_token
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def shared() -> Iterator[CommandLine]:
    yield from command_line()


@pytest.fixture(scope="module")
def head(shared: CommandLine) -> Started:
    """A cluster that the tests of this module share and only look at."""
    return shared.start_head("--num-cpus", "1")


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
    with refused_address() as address:
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
        started = time.monotonic()
        line = one_line(shared.run("start", "--address", head.address, "--token", str(wrong)))
        assert time.monotonic() - started < 20  # long before the time for a start is over
        assert "token" in line
        assert ("its secret is not this cluster's" in line) == (wrong.secret == bytes(32))
        assert str(wrong) not in line
    assert len(shared.records()) == 1


class Middle:
    """Passes the first connection on to the head, and answers the others in its place."""

    def __init__(self, head: Started) -> None:
        self._head = head
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            self._pass_on(self._listener.accept()[0])
            context = server_context(make_credentials(bytes(32)))
            context.verify_mode = ssl.CERT_NONE
            while True:
                sock = self._listener.accept()[0]
                threading.Thread(target=self._answer, args=(context, sock), daemon=True).start()

    def _pass_on(self, sock: socket.socket) -> None:
        to_head = socket.create_connection(("127.0.0.1", self._head.port))
        for one, other in ((sock, to_head), (to_head, sock)):
            threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    @staticmethod
    def _copy(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError), other:
            while data := one.recv(1 << 16):
                other.sendall(data)

    @staticmethod
    def _answer(context: ssl.SSLContext, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(sock, server_side=True) as tls:
            tls.recv(1)

    def __enter__(self) -> Middle:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


def test_one_in_the_middle_is_told_as_another_head(shared: CommandLine, head: Started) -> None:
    started = time.monotonic()
    with Middle(head) as middle:
        line = one_line(shared.run("start", "--address", middle.address, "--token", head.token))
    assert middle.address in line
    assert "another certificate" in line
    assert time.monotonic() - started < 20  # long before the time for a start is over
    assert len(shared.records()) == 1


def _with_fake(tmp_path: Path, statement: str) -> dict[str, str]:
    """Variables under which every interpreter begins with a statement."""
    (tmp_path / "sitecustomize.py").write_text(statement)
    return {"PYTHONPATH": str(tmp_path)}


OTHER_MINIRAY = "import miniray.version; miniray.version.VERSION = '0.0.1'"
OTHER_PYTHON = "import miniray.version; miniray.version.PYTHON_VERSION = '3.99.0'"


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
        (["start", "--address", "127.0.0.1:", "--token", JOIN[-1]], "HOST:PORT"),
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
    shared: CommandLine, arguments: list[str], said: str
) -> None:
    pids, records = shared.pids(), shared.records()
    done = shared.run(*arguments)
    line = one_line(done)
    assert done.returncode == 2
    assert said in line
    assert line.endswith("--help'.")
    assert shared.pids() <= pids  # one of an earlier command may have ended
    assert shared.records() == records


@pytest.mark.parametrize("arguments", [["start", "--head"], ["status"], ["stop"]])
def test_a_tunable_that_makes_no_sense_is_named(shared: CommandLine, arguments: list[str]) -> None:
    line = one_line(shared.run(*arguments, MINIRAY_HEAD_GRACE="soon"))
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
    secrets = [f"{session['folder']}/token", f"{session['folder']}/head.key"]
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
