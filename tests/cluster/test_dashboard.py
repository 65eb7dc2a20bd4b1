"""The page's server: who is let in, what its streams say, and how its process comes and goes."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from cluster_helpers import takes_less_than, wait_until
from page_client import PageClient, rows_until
from prometheus_client.parser import text_string_to_metric_families

import miniray

if TYPE_CHECKING:
    from command_helpers import CommandLine

pytestmark = pytest.mark.engine("miniray")

CLUSTER = {"num_cpus": 4, "num_gpus": 3, "include_dashboard": True, "dashboard_port": 0}


@miniray.remote(num_cpus=0)
class Counter:
    def pid(self) -> int:
        return os.getpid()

    def say(self, *lines: str) -> None:
        print(*lines, sep="\n", flush=True)

    def spin(self) -> None:
        while True:
            sum(range(1000))

    def wait(self) -> None:
        time.sleep(60)


@pytest.fixture
def page(cluster: Any) -> PageClient:
    return PageClient.let_in()


def web_processes() -> list[psutil.Process]:
    """The processes of this node that have the page's socket, without the daemon."""
    daemon = daemon_process()
    port = daemon.net_connections("inet")[0].laddr.port
    found = []
    for process in daemon.children(recursive=True):
        try:
            if any(each.laddr.port == port for each in process.net_connections("inet")):
                found.append(process)
        except psutil.Error:
            continue
    return found


def daemon_process() -> psutil.Process:
    (daemon,) = psutil.Process().children()
    return daemon


# --- access ---------------------------------------------------------------------------------------


def test_without_a_cookie_nothing_but_the_empty_page_is_answered(page: PageClient) -> None:
    stranger = PageClient(page.address)
    for path in ("/api/events?topic=actors", "/metrics", "/api/version", "/api/nothing"):
        status, _, answer = stranger.ask("GET", path)
        assert (status, "miniray dashboard" in str(answer)) == (401, True)
    assert stranger.ask("POST", "/api/stack", {"worker": "x"})[0] == 401
    assert stranger.ask("GET", "/static/nothing.js")[0] == 404


def test_a_code_lets_one_browser_in(cluster: Any) -> None:
    from miniray.client.command_connection import connect_for_cli

    connection = connect_for_cli(None, "", None)
    code = connection.page().url.partition("#k=")[2]
    browser = PageClient(cluster.dashboard_url)
    status, headers, _ = browser.ask("POST", "/api/login", {"code": code})
    assert status == 204
    cookie = headers["set-cookie"]
    assert cookie.startswith("mr_")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    status, headers, answer = browser.ask("POST", "/api/login", {"code": code})
    assert status == 401
    assert "set-cookie" not in headers
    assert "used" in answer["error"]


def test_a_cookie_that_was_changed_is_none(page: PageClient) -> None:
    good = page.headers["Cookie"]
    assert page.ask("GET", "/api/events?topic=nothing")[0] == 404
    for bad in (good[:-1] + "0" * (good[-1] != "0") + "1" * (good[-1] == "0"), f"mr_x{good}"):
        assert page.ask("GET", "/api/events?topic=nothing", Cookie=bad)[0] == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8265", "10.0.0.1", "localhost.x"])
def test_a_foreign_host_gets_403(page: PageClient, host: str) -> None:
    status, _, answer = page.ask("GET", "/", Host=host)
    assert status == 403
    assert host in answer["error"]


def test_a_page_of_another_origin_gets_403(page: PageClient) -> None:
    own, other = f"http://{page.address}", "http://127.0.0.1:1"
    assert page.ask("GET", "/api/events?topic=nothing", Origin=own)[0] == 404
    assert page.ask("GET", "/api/events?topic=nothing", Origin=other)[0] == 403


def test_every_answer_forbids_foreign_scripts_and_frames(page: PageClient) -> None:
    for path in ("/api/nothing", "/static/nothing"):
        _, headers, _ = page.ask("GET", path)
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert headers["x-frame-options"] == "DENY"


def test_the_secret_of_the_cluster_is_in_no_answer(page: PageClient, cluster: Any) -> None:
    token = (Path(cluster.address_info["session_dir"]) / "token").read_text().strip()
    with page.events("nodes") as events:
        assert token.rpartition(".")[2] not in str(next(events))
    assert token.rpartition(".")[2] not in str(page.headers)


def test_prometheus_reads_the_metrics_with_the_token_of_a_file_and_nothing_else(
    cluster: Any,
) -> None:
    file = Path(cluster.address_info["session_dir"]) / "metrics_token"
    assert file.stat().st_mode & 0o777 == 0o600
    client = PageClient(cluster.dashboard_url)
    client.headers["Authorization"] = f"Bearer {file.read_text()}"
    status, headers, _ = client.ask("GET", "/metrics")
    assert (status, "text" in headers["content-type"]) == (200, True)
    assert client.ask("GET", "/api/session")[0] == 401
    assert client.ask("POST", "/api/jobs/", {"entrypoint": "true"})[0] == 401


def test_the_command_line_prints_the_token_that_programs_show(cluster: Any) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "miniray", "dashboard", "--token"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()
    client = PageClient(cluster.dashboard_url)
    client.headers["Authorization"] = f"Bearer {told}"
    assert client.ask("GET", "/api/session")[0] == 200


# --- streams --------------------------------------------------------------------------------------


def test_an_actor_that_is_killed_changes_its_row_within_a_second(page: PageClient) -> None:
    numbers = itertools.count()

    def kill() -> float:
        name = f"killed{next(numbers)}."
        actor = Counter.options(name=name).remote()
        pid = miniray.get(actor.pid.remote())
        with page.events("actors", search=name) as events:
            (row,) = rows_until(events, len).values()
            assert (row["class_name"], row["state"], row["pid"]) == ("Counter", "ALIVE", pid)
            began = time.monotonic()
            miniray.kill(actor)
            rows_until(events, lambda rows: [row["state"] for row in rows.values()] == ["DEAD"])
            return time.monotonic() - began

    takes_less_than(1, kill)


def test_a_window_is_searched_and_sorted_by_the_server(page: PageClient) -> None:
    actors = [Counter.options(name=f"window {index}").remote() for index in range(7)]
    miniray.get([actor.pid.remote() for actor in actors])
    wanted = {"search": "window", "sort": "-name", "from_": 2, "size": 3}
    with page.events("actors", **wanted) as events:
        event = next(event for event in events if event["total"] == 7)
    names = [event["changed"][key]["name"] for key in event["order"]]
    assert names == ["window 4", "window 3", "window 2"]


def test_one_stream_carries_several_topics(page: PageClient) -> None:
    actor = Counter.options(name="among others").remote()
    miniray.get(actor.pid.remote())
    with page.events("actors,nodes", search="among") as events:
        told = {}
        for event in events:
            told[event["topic"]] = event
            if len(told) == 2 and told["actors"]["total"] == 1:
                break
    assert told["nodes"]["total"] == 1  # the search is that of the first topic


def test_what_waits_is_said_with_the_reason(page: PageClient) -> None:
    waiting = Counter.options(num_cpus=100).remote()
    with page.events("waiting") as events:
        (row,) = rows_until(events, len).values()
    assert row["names"] == ["Counter"]
    assert "100" in row["reason"]
    del waiting


def test_the_map_of_devices_says_who_has_which_share_and_what_is_free(page: PageClient) -> None:
    actors = [Counter.options(num_gpus=0.4, name=f"share {index}").remote() for index in range(2)]
    pids = miniray.get([actor.pid.remote() for actor in actors])
    group = miniray.util.placement_group([{"GPU": 1}], name="set aside")
    miniray.get(group.ready())
    try:
        with page.events("devices") as events:
            rows = rows_until(
                events, lambda rows: sum(len(row["held"]) for row in rows.values()) == 3
            )
        reserved, shared, free = sorted(rows.values(), key=lambda row: row["free"])
        assert [(each["name"], each["share"]) for each in shared["held"]] == [
            ("share 0", 0.4),
            ("share 1", 0.4),
        ]
        assert [each["pid"] for each in shared["held"]] == pids
        assert shared["free"] == pytest.approx(0.2)
        assert [(each["kind"], each["name"]) for each in reserved["held"]] == [
            ("group", "set aside")
        ]
        assert (free["held"], free["free"], free["quarantined"]) == ([], 1, None)
    finally:
        miniray.util.remove_placement_group(group)


def test_the_topics_after_the_first_come_whole(page: PageClient) -> None:
    with page.events("nodes,devices,waiting") as events:
        seen: dict[str, Any] = {}
        while len(seen) < 3:
            event = next(events)
            seen[event["topic"]] = event
    assert set(seen) == {"nodes", "devices", "waiting"}
    assert seen["nodes"]["summary"]["cluster"]["total"]["CPU"] == 4
    assert page.ask("GET", "/api/events?topic=nodes,nothing")[0] == 404


def test_the_stack_of_an_actor_is_shown_while_it_runs(page: PageClient) -> None:
    actor = Counter.remote()
    pid = miniray.get(actor.pid.remote())
    running = actor.wait.remote()
    of = actor._actor_id.hex()

    def shown() -> str:
        status, _, answer = page.ask("POST", "/api/stack", {"of": of})
        assert status == 200, answer
        return str(answer["groups"])

    wait_until(lambda: "in wait" in shown() or "wait (" in shown())
    miniray.kill(actor)
    with pytest.raises(miniray.exceptions.ActorDiedError):
        miniray.get(running)
    status, _, answer = page.ask("POST", "/api/stack", {"of": f"x:{pid}"})
    assert (status, "x" in answer["error"]) == (400, True)
    assert page.ask("POST", "/api/stack", {"of": 7})[0] == 400
    assert page.ask("GET", "/api/stack")[0] == 405


def test_tasks_are_counted_by_function(page: PageClient) -> None:
    @miniray.remote
    def counted(fails: bool) -> None:
        assert not fails

    refs = [counted.remote(number == 0) for number in range(4)]
    miniray.wait(refs, num_returns=4)

    def told(rows: dict[str, Any]) -> bool:
        row = next((row for name, row in rows.items() if name.endswith("counted")), {})
        return (row.get("finished"), row.get("failed")) == (3, 1)

    with page.events("tasks") as events:
        assert rows_until(events, told)


def test_an_object_is_listed_with_its_size_and_what_holds_it(page: PageClient) -> None:
    ref = miniray.put(bytes(500_000))
    with page.events("objects", sort="-object_size") as events:
        rows = rows_until(events, lambda rows: any(ref.hex() in key for key in rows))
    (row,) = (row for key, row in rows.items() if ref.hex() in key)
    assert row["object_size"] >= 500_000
    assert row["why"]


def test_events_name_what_happened(page: PageClient) -> None:
    actor = Counter.options(name="with an end").remote()
    miniray.get(actor.pid.remote())
    miniray.kill(actor)
    with page.events("events", sort="-event_id") as events:
        rows_until(events, lambda rows: any("killed" in row["message"] for row in rows.values()))


def test_the_page_of_an_actor_says_what_it_runs(page: PageClient) -> None:
    actor = Counter.remote()
    pid = miniray.get(actor.pid.remote())
    running = [actor.wait.remote() for _ in range(3)]
    with page.events(f"actor:{actor._actor_id.hex()}") as events:
        rows_until(events, lambda rows: len(rows) == 3)
    with page.events(f"worker:{miniray.nodes()[0]['NodeID']}:{pid}") as events:
        states = ["queued", "queued", "running"]
        event = next(
            event
            for event in events
            if sorted(row["state"] for row in events.rows.values()) == states
        )
    assert event["summary"]["worker"]["memory"] > 1e6
    miniray.kill(actor)
    for ref in running:
        with pytest.raises(miniray.exceptions.ActorDiedError):
            miniray.get(ref)
    with page.events(f"actor:{'0' * 32}") as events:
        assert "no actor" in next(events)["error"]


def test_the_log_of_an_actor_is_shown_and_searched_after_its_end_too(page: PageClient) -> None:
    actor = Counter.remote()
    id = actor._actor_id.hex()
    miniray.get(actor.say.remote("first line", "second line"))
    assert page.ask("GET", f"/api/logs?of={'f' * 32}&tail=5")[2]["lines"] == []
    miniray.kill(actor)

    def shown(query: str) -> list[str]:
        status, _, answer = page.ask("GET", f"/api/logs?of={id}&{query}")
        assert status == 200, answer
        return [" ".join(line.split()[-2:]) for line in answer["lines"]]

    wait_until(lambda: shown("tail=400") == ["first line", "second line"])
    assert len(shown("grep=second")) == 1
    assert len(shown("grep=(second")) == 0
    assert "--tail" in page.ask("GET", f"/api/logs?of={id}&tail=1")[2]["more"]
    assert page.ask("GET", "/api/logs")[0] == 400


def test_why_something_waits_is_answered_as_on_the_command_line(page: PageClient) -> None:
    actor = Counter.options(name="busy").remote()
    miniray.get(actor.pid.remote())
    running, waits = actor.wait.remote(), actor.pid.remote()

    def told() -> str:
        status, _, answer = page.ask("POST", "/api/why", {"of": waits.hex()})
        return str(answer["chain"]) if status == 200 else ""

    wait_until(lambda: "wait" in told() and "busy" in told())
    status, _, answer = page.ask("POST", "/api/why", {"of": "no such thing"})
    assert (status, "no such thing" in answer["error"]) == (400, True)
    miniray.kill(actor)
    for ref in (running, waits):
        with pytest.raises(miniray.exceptions.ActorDiedError):
            miniray.get(ref)


def test_nodes_say_what_their_machine_uses(page: PageClient) -> None:
    with page.events("usage") as events:
        rows = rows_until(
            events, lambda rows: all(row["cpu_percent"] is not None for row in rows.values())
        )
    ((node, row),) = rows.items()
    assert node == miniray.nodes()[0]["NodeID"]
    assert 0 < row["memory_used"] < row["memory_total"]
    assert 0 <= row["cpu_percent"] <= 100


def test_a_busy_actor_is_profiled(page: PageClient) -> None:
    actor = Counter.remote()
    miniray.get(actor.pid.remote())
    running = actor.spin.remote()
    asked = {"of": actor._actor_id.hex(), "kind": "cpu", "seconds": 0.5}
    status, _, answer = page.ask("POST", "/api/profile", asked)
    assert status == 200, answer
    assert "spin" in str(answer["tree"])
    miniray.kill(actor)
    with pytest.raises(miniray.exceptions.ActorDiedError):
        miniray.get(running)
    assert page.ask("POST", "/api/profile", {**asked, "kind": "x"})[0] == 400
    status, _, answer = page.ask("POST", "/api/profile", {**asked, "seconds": "5"})
    assert (status, answer["error"]) == (400, "seconds is a number, not '5'.")


@pytest.mark.parametrize("topic", ["nodes", "jobs", "workers", "groups"])
def test_each_topic_has_rows_at_once(page: PageClient, topic: str) -> None:
    with page.events(topic) as events:
        event = next(events)
    assert event["topic"] == topic
    assert event["total"] == len(event["order"]) == event["summary"]["total"]


# --- the process ----------------------------------------------------------------------------------


def test_a_web_process_that_was_killed_comes_back_with_the_next_request(page: PageClient) -> None:
    (web,) = web_processes()
    os.kill(web.pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(web.pid))
    with page.events("nodes") as events:
        assert next(events)["total"] == 1
    (again,) = web_processes()
    assert again.pid != web.pid
    assert again.nice() > 0


def test_a_port_that_is_taken_is_passed_by_and_the_real_one_printed(command: CommandLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        head = command.start_head("--num-cpus", "1", "--dashboard-port", port)
    (record,) = command.records()
    host, _, real = record["dashboard_url"].partition(":")
    assert (host, real.isdigit()) == ("127.0.0.1", True)
    assert real != port
    assert f"miniray dashboard ({host}:{real})" in head.output
    printed = command.run("dashboard", "--no-open").stdout
    assert printed.startswith(f"http://{host}:{real}/#k=")
    page = PageClient(f"{host}:{real}")
    code = printed.strip().partition("#k=")[2]
    assert page.ask("POST", "/api/login", {"code": code})[0] == 204


def test_an_address_that_is_none_of_this_machine_is_a_warning_at_the_start(
    command: CommandLine,
) -> None:
    command.start_head("--num-cpus", "1", "--dashboard-host", "192.0.2.1")
    (record,) = command.records()
    assert record["dashboard_url"] == ""


def test_init_prints_where_the_page_is_that_it_was_asked_for_and_the_command_opens_it(
    command: CommandLine,
) -> None:
    program = """
import subprocess, sys, miniray
context = miniray.init(num_cpus=1, include_dashboard=True, dashboard_port=0)
words = [sys.executable, "-m", "miniray", "dashboard", "--no-open", "--address"]
subprocess.run([*words, context.address_info["address"]], check=True)
print(context.dashboard_url, context.address_info["address"])
"""
    with command.popen(sys.executable, "-u", "-c", program) as running:
        printed, _ = running.communicate(timeout=60)
    lines = printed.splitlines()
    [(page, address)] = [line.split() for line in lines if line.startswith("127.0.0.1:")]
    assert any(line.startswith(f"http://{page}/#k=") for line in lines)
    opens = f"`miniray dashboard --address {address}` opens it."
    assert f"miniray: The page of this cluster is at {page}: {opens}" in lines


def test_an_embedded_cluster_listens_for_browsers_when_it_is_asked_to(command: CommandLine) -> None:
    program = """
import json, psutil, miniray
from miniray.client.command_connection import connect_for_cli
context = miniray.init(num_cpus=1)
def listening():
    found = psutil.Process().children(recursive=True)
    return sum(len(each.net_connections("inet")) for each in found)
before = listening(), context.dashboard_url
page = connect_for_cli(None, "", None).page()
print(json.dumps([before, listening(), page.url]))
"""
    before, after, url = command.python(program)
    assert before == [0, None]
    assert after == 1
    assert url.startswith("http://127.0.0.1:")


def test_the_page_has_the_metrics_as_text_and_the_last_hour_for_charts(page: PageClient) -> None:
    status, headers, answer = page.ask("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {family.name for family in text_string_to_metric_families(answer.decode())}
    assert "miniray_node_up" in names
    page.headers["Accept"] = "application/openmetrics-text;version=1.0.0;q=0.7,text/plain;q=0.3"
    _, headers, answer = page.ask("GET", "/metrics")
    assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.decode().endswith("# EOF\n")
    del page.headers["Accept"]
    status, _, answer = page.ask("GET", "/api/metrics")
    assert (status, answer["interval"]) == (200, 10)
