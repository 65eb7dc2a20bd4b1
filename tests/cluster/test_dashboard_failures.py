"""What the page's streams say while something of the cluster is gone, and that they go on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from cluster_helpers import wait_until
from page_client import PageClient, rows_until
from running_cluster import running_cluster

import miniray
from miniray.system.session import find_clusters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from command_helpers import CommandLine

pytestmark = pytest.mark.engine("miniray")


@miniray.remote(num_cpus=0)
class Sitter:
    def pid(self) -> int:
        return os.getpid()

    def hold_the_lock(self) -> None:
        """Run native code that never gives up the interpreter's lock."""
        sum(range(10**10))


@pytest.fixture
def one_node(session_root: Path) -> Iterator[Any]:
    with running_cluster({"num_cpus": 1}) as cluster:
        yield cluster


@pytest.fixture
def two_nodes(session_root: Path) -> Iterator[Any]:
    with running_cluster({"num_cpus": 1}, {"num_cpus": 1, "resources": {"far": 1}}) as cluster:
        yield cluster


def next_head(daemon: psutil.Process) -> psutil.Process:
    """Stop the head that a daemon has just begun to start, before it serves."""
    while True:
        for child in daemon.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "miniray.node.head_process" in " ".join(child.cmdline()):
                    child.suspend()
                    return child


def test_a_stream_says_that_the_head_is_gone_and_goes_on_when_it_is_back(one_node: Any) -> None:
    actor = Sitter.options(name="stays").remote()
    miniray.get(actor.pid.remote())
    page = PageClient.let_in(one_node.address)
    head = next(each for each in find_clusters() if each.is_head).processes["head"]
    daemon = psutil.Process(head.pid).parent()
    assert daemon is not None
    with page.events("actors") as events:
        rows_until(events, len)
        os.kill(head.pid, signal.SIGKILL)
        following = next_head(daemon)
        error = next(event["error"] for event in events if "error" in event)
        assert "head" in error
        following.resume()
        assert next(event for event in events if "error" not in event)["total"] == 1
        (row,) = events.rows.values()
    assert row["name"] == "stays"
    other = Sitter.options(name="later").remote()
    miniray.get(other.pid.remote())
    with page.events("actors", search="later") as events:
        rows_until(events, lambda rows: [row["state"] for row in rows.values()] == ["ALIVE"])


def test_a_node_that_is_lost_is_dead_on_the_page_with_the_reason(two_nodes: Any) -> None:
    page = PageClient.let_in(two_nodes.address)
    with page.events("nodes") as events:
        rows_until(events, lambda rows: len(rows) == 2)
        two_nodes.remove_node(two_nodes.worker_nodes[0], allow_graceful=False)
        rows = rows_until(events, lambda rows: "DEAD" in [row["state"] for row in rows.values()])
    (dead,) = (row for row in rows.values() if row["state"] == "DEAD")
    assert dead["state_message"]


def test_a_process_that_hangs_in_native_code_is_looked_at_from_outside(one_node: Any) -> None:
    actor = Sitter.remote()
    miniray.get(actor.pid.remote())
    page = PageClient.let_in(one_node.address)
    running = actor.hold_the_lock.remote()
    of = {"of": actor._actor_id.hex()}
    wait_until(lambda: "hold_the_lock" in str(page.ask("POST", "/api/stack", of)[2]))
    with page.events(f"actor:{actor._actor_id.hex()}") as events:
        assert next(events)["summary"]["actor"]["state"] == "ALIVE"
    miniray.kill(actor)
    with pytest.raises(miniray.exceptions.ActorDiedError):
        miniray.get(running)


def test_viewers_beyond_the_bound_are_refused_and_a_slow_one_holds_up_nobody(
    one_node: Any,
) -> None:
    page = PageClient.let_in(one_node.address)
    actors = [Sitter.options(name=f"row {number}").remote() for number in range(20)]
    miniray.get([actor.pid.remote() for actor in actors])
    request = "GET /api/events?topic=actors&size=500 HTTP/1.1\r\n"
    request += f"Host: {page.address}\r\nCookie: {page.headers['Cookie']}\r\n\r\n"
    host, _, port = page.address.partition(":")
    with contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(100)
        ]
        for each in slow:  # they never read
            each.sendall(request.encode())
        wait_until(lambda: not _is_served(page))
        status, _, answer = page.ask("GET", "/api/session")
        assert (status, "100 views" in answer["full"]) == (200, True)
    # Those that have left count no more.
    wait_until(lambda: _is_served(page))


def test_strangers_who_hold_connections_shut_nobody_out(two_nodes: Any) -> None:
    page = PageClient.let_in(two_nodes.address)
    host, _, port = page.address.partition(":")
    with contextlib.ExitStack() as stack, page.events("nodes") as events:
        rows_until(events, len)
        for number in range(400):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            if number % 2:  # others say nothing at all
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
        assert page.ask("GET", "/api/session")[0] == 200
        two_nodes.remove_node(two_nodes.worker_nodes[0], allow_graceful=False)
        rows_until(events, lambda rows: "DEAD" in [row["state"] for row in rows.values()])


def _is_served(page: PageClient) -> bool:
    with contextlib.suppress(AssertionError), page.events("nodes") as events:
        return "total" in next(events)
    return False


def test_the_web_process_ends_after_its_last_client_and_starts_again(
    session_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAY_DASHBOARD_IDLE", "1")
    with miniray.init(num_cpus=1, include_dashboard=True, dashboard_port=0) as context:
        (daemon,) = psutil.Process().children()
        before = {each.pid for each in daemon.children(recursive=True)}
        page = PageClient(context.dashboard_url)
        for _ in range(2):
            assert page.ask("GET", "/api/session")[0] == 401
            wait_until(lambda: {each.pid for each in daemon.children(recursive=True)} == before)


def test_what_is_given_to_init_and_start_takes_effect(command: CommandLine) -> None:
    command.start_head("--num-cpus", "1", "--include-dashboard", "false")
    (record,) = command.records()
    assert record["dashboard_url"] == ""


def test_over_the_network_the_page_is_served_with_tls(session_root: Path) -> None:
    import ssl

    with miniray.init(
        num_cpus=1, include_dashboard=True, dashboard_host="0.0.0.0", dashboard_port=0
    ) as context:
        assert context.dashboard_url is not None
        host, _, port = context.dashboard_url.rpartition(":")
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        request = f"GET /api/session HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        plain = socket.create_connection((host, int(port)), 20)
        with plain, trusting.wrap_socket(plain) as secured:
            secured.sendall(request)
            assert b" 401 " in secured.recv(100)
