"""The head in a process of its own: its end, its port, and who it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until

from miniray._proto import head_pb2, head_pb2_grpc
from miniray.messages import plain
from miniray.security import channels
from miniray.security.certificates import make_credentials, meet_head
from miniray.security.token import JoinToken
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


SECRET = b"s" * 32
TOKEN = JoinToken(bytes(32), SECRET)
_PROCESS = """
import json, os, sys
from pathlib import Path
from miniray.head.main import HeadOptions
from miniray.head.main import run_head

told = json.loads(sys.argv[1])
write = told.pop("write")
told["secret"] = bytes.fromhex(told["secret"])
told["session_dir"] = Path(told["session_dir"])
run_head(HeadOptions(ready=lambda facts: os.write(write, json.dumps(facts).encode()), **told))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="mr-"))
    yield path
    shutil.rmtree(path)


def hello() -> head_pb2.FromNode:
    facts = head_pb2.NodeHello(
        node_id=b"12345678",
        version=VERSION,
        python=platform.python_version(),
        address="m|/s|",
        resources=plain.dumps({"scalars": {"CPU": 4}}),
    )
    return head_pb2.FromNode(hello=facts)


@contextlib.asynccontextmanager
async def calling(folder: Path, secret: str = TOKEN.grpc_secret) -> AsyncIterator[Any]:
    channel = channels.channel(f"unix:{folder / 'head.sock'}", secret)
    try:
        yield head_pb2_grpc.HeadStub(channel)
    finally:
        await channel.close()


async def greet(session: Any) -> Any:
    await session.write(hello())
    return (await session.read()).welcome


class HeadProcess:
    """A head in a process of its own."""

    def __init__(self, folder: Path, **options: Any) -> None:
        read, write = os.pipe()
        inherited = [write, *(fd for fd in (options.get("parent_pidfd"),) if fd is not None)]
        told = {
            "unix_path": str(folder / "head.sock"),
            "secret": SECRET.hex(),
            "session_dir": str(folder),
            "cluster_id": "test",
            "write": write,
            **options,
        }
        command = [sys.executable, "-c", _PROCESS, json.dumps(told)]
        self.process = subprocess.Popen(command, pass_fds=inherited)
        self.pid = self.process.pid
        os.close(write)
        readable, _, _ = select.select([read], [], [], 20)
        assert readable
        self.facts = json.loads(os.read(read, 1 << 16))
        os.close(read)

    def wait(self) -> None:
        try:
            self.process.wait(20)
        finally:
            self.process.kill()

    def stop(self) -> None:
        self.process.terminate()
        self.wait()


def test_the_process_stops_its_daemons_when_it_is_asked_to_end(folder: Path) -> None:
    process = HeadProcess(folder)
    assert process.facts["address"] == f"unix:{folder / 'head.sock'}"

    async def scenario() -> str:
        async with calling(folder) as stub:
            session = stub.Session()
            await greet(session)
            os.kill(process.pid, signal.SIGTERM)
            return str((await session.read()).stop.reason)

    assert "stopped" in asyncio.run(scenario())
    process.wait()
    assert "the head stops" in (folder / "logs" / "head.log").read_text()


def test_the_process_ends_with_the_one_it_belongs_to(folder: Path) -> None:
    parent = subprocess.Popen(["sleep", "60"])
    fd = os.pidfd_open(parent.pid)
    process = HeadProcess(folder, parent_pidfd=fd)
    parent.kill()
    parent.wait()
    process.wait()
    os.close(fd)


def test_a_port_that_is_taken_is_told(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = HeadProcess(folder, tcp_host="127.0.0.1", tcp_port=port)
        assert str(port) in process.facts["error"]
        process.wait()


def test_a_later_head_waits_until_the_port_is_free(folder: Path) -> None:
    log = folder / "logs" / "head.log"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = threading.Thread(
            target=lambda: (wait_until(lambda: "It is tried for" in text(log)), taken.close())
        )
        free.start()
        process = HeadProcess(folder, tcp_host="127.0.0.1", tcp_port=port, port_patience=60)
        free.join()
    assert process.facts["address"] == f"127.0.0.1:{port}"
    process.stop()


def test_a_later_head_tells_for_how_long_it_tried_its_port(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = HeadProcess(folder, tcp_host="127.0.0.1", tcp_port=port, port_patience=0.5)
        assert str(port) in process.facts["error"]
        assert "tried for 0.5 s" in process.facts["error"]
        process.wait()


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_the_network_side_is_pinned_by_the_fingerprint(folder: Path) -> None:
    process = HeadProcess(folder, tcp_host="127.0.0.1", tcp_port=0)
    host, _, port = process.facts["address"].partition(":")
    expected = bytes.fromhex(process.facts["fingerprint"])
    member = make_credentials(TOKEN.members_key)
    head = meet_head(host, int(port), expected, member, 10)

    async def scenario() -> bool:
        channel = channels.channel(process.facts["address"], TOKEN.grpc_secret, member, head)
        welcome = await greet(head_pb2_grpc.HeadStub(channel).Session())
        await channel.close()
        return bool(welcome.nodes_are_all)

    assert asyncio.run(scenario())
    process.stop()


#: Fills the disk of its session's folder, kills the head, and makes room when one could not start.
ROOM_COMES = """
import contextlib, os, signal, time
from pathlib import Path
import miniray, psutil
from miniray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 1})
pids = cluster.head_node.pids
rest = Path(os.environ["MINIRAY_TMPDIR"], "rest")
with rest.open("wb", buffering=0) as file, contextlib.suppress(OSError):
    while file.write(bytes(4096)):
        pass
os.kill(pids["head"], signal.SIGKILL)
heads = set()
while len(heads) < 2:
    time.sleep(0.01)
    heads |= {child.pid for child in psutil.Process(pids["node"]).children()}
    heads -= {pids["head"], pids["template"]}
rest.unlink()
assert miniray.get(miniray.remote(os.getpid).remote(), timeout=60) > 0
cluster.shutdown()
"""


def test_a_head_that_is_killed_while_its_disk_is_full_is_back_when_there_is_room(
    folder: Path,
) -> None:
    """The disk is a file system of 8 MiB, mounted for this test's processes only."""
    alone = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mount namespaces are not available to this user")
    mount = 'mount -t tmpfs -o size=8m tmpfs "$MINIRAY_TMPDIR" && exec "$@"'
    done = subprocess.run(
        [*alone, "sh", "-c", mount, "sh", sys.executable, "-c", ROOM_COMES],
        env={**os.environ, "MINIRAY_TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
