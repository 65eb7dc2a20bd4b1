"""`miniray list`, `get`, `summary`, `status`, `logs` and the event log, as a user runs them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import processes_with, takes_less_than, wait_until
from forked_commands import run_forked
from running_cluster import running_cluster

import miniray
from miniray.client.command_connection import connect_for_cli
from miniray.system.session import find_clusters
from miniray.util import state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from command_helpers import CommandLine

    from miniray.cluster_utils import Cluster

#: A name that steers a terminal, and one that steers a page.
EVIL = "\x1b[2J<script>alert(1)</script>\nsecond line"


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    with running_cluster({"num_cpus": 2}, {"num_cpus": 1, "resources": {"far": 2}}) as cluster:
        yield cluster


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_forked(arguments, {**os.environ, **variables}, 60)


def shown(*arguments: str) -> str:
    done = run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def listed(what: str, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(shown("list", what, "--json", *arguments))
    return found


@miniray.remote
class Talker:
    def say(self, text: str) -> int:
        print(text)
        return os.getpid()

    def crash(self) -> None:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)


@miniray.remote
def speak(text: str) -> None:
    print(text)


@miniray.remote
def hold(folder: Path, name: str) -> None:
    (folder / name).touch()
    while not (folder / "go").exists():
        time.sleep(0.01)


@miniray.remote(max_retries=0)
def fail() -> None:
    raise ValueError("no")


def test_an_actor_is_listed_found_and_counted_with_a_name_that_steers_nothing() -> None:
    actor = Talker.options(name=EVIL).remote()
    pid = miniray.get(actor.say.remote("hello"))
    table = shown("list", "actors")
    assert "\x1b" not in table
    assert r"\x1b[2J<script>alert(1)</script>\nsecond line" in table
    [row] = listed("actors", "--filter", "class_name=Talker", "--filter", "state!=DEAD")
    assert (row["name"], row["pid"], row["num_restarts"]) == (EVIL, pid, 0)
    assert json.loads(shown("get", "actor", row["actor_id"], "--json"))["name"] == EVIL
    assert "\x1b" not in shown("get", "actor", row["actor_id"])
    assert json.loads(shown("summary", "actors", "--json"))["summary"]["Talker"]["state_counts"]
    [worker] = listed("workers", "--filter", f"pid={pid}")
    assert (worker["name"], worker["actor_id"]) == ("Talker", row["actor_id"])
    miniray.kill(actor)


def test_a_dead_actor_keeps_its_restarts_its_job_and_the_cause() -> None:
    actor = Talker.options(name="restarted", max_restarts=1, max_task_retries=0).remote()
    for _ in range(2):
        with pytest.raises(miniray.exceptions.MinirayError):
            miniray.get(actor.crash.remote())
    wait_until(lambda: listed("actors", "--filter", "name=restarted")[0]["state"] == "DEAD")
    [row] = listed("actors", "--filter", "name=restarted")
    assert row["num_restarts"] == 1
    assert row["job_id"] == miniray.get_runtime_context().get_job_id()
    assert "SIGSEGV" in row["death_cause"]
    found = listed("events", "--limit", "10000")
    told = [each["event_type"] for each in found if "Talker" in each["message"]]
    assert [each for each in told if each in ("restarted", "died")][-2:] == ["restarted", "died"]
    assert "crashed" in told


def test_tasks_are_listed_by_what_they_do_and_counted_by_function(tmp_path: Path) -> None:
    refs = [hold.remote(tmp_path, str(number)) for number in range(4)]
    behind = speak.remote(hold.remote(tmp_path, "never"))
    wait_until(lambda: len(listed("tasks", "--filter", "state=RUNNING")) == 3)
    rows = listed("tasks")
    running = [row for row in rows if row["state"] == "RUNNING"]
    assert {row["name"] for row in running} == {"hold"}
    assert all(row["seconds"] is not None and row["worker_pid"] for row in running)
    [waiting] = listed("tasks", "--filter", "name=speak")
    assert waiting["state"] == "PENDING_ARGS_AVAIL"
    assert waiting["waits_for"]
    counts = json.loads(shown("summary", "tasks", "--json"))["summary"]
    assert counts["hold"]["state_counts"]["RUNNING"] == 3
    assert counts["speak"]["state_counts"] == {"PENDING_ARGS_AVAIL": 1}
    assert f"{waiting['task_id']}" in shown("get", "task", waiting["task_id"])
    (tmp_path / "go").touch()
    miniray.get([*refs, behind])
    with pytest.raises(ValueError, match="no"):
        miniray.get(fail.remote())
    counts = state.summarize_tasks()["cluster"]["summary"]
    assert counts["hold"]["state_counts"]["FINISHED"] >= 5
    assert counts["fail"]["state_counts"] == {"FAILED": 1}


def test_a_thousand_actors_are_listed_quickly() -> None:
    actors = [Talker.options(num_cpus=1000).remote() for _ in range(1000)]
    wait_until(lambda: len(state.list_actors(limit=2000)) >= 1000)

    def list_them() -> float:
        began = time.monotonic()
        rows = state.list_actors(filters=[("state", "=", "PENDING_CREATION")], limit=2000)
        took = time.monotonic() - began
        assert len(rows) == 1000
        assert all("needs CPU 1000" in str(row.why_waits) for row in rows)
        return took

    takes_less_than(1, list_them)
    assert len(listed("actors", "--limit", "1500")) >= 1000
    assert len(listed("actors", "--limit", "10")) == 10
    del actors


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("list", "things"), "'things' is not one of 'actors', 'tasks', 'nodes', 'workers'"),
        (("list", "actors", "--filter", "nonsense"), "Write KEY=VALUE or KEY!=VALUE"),
        (
            ("list", "actors", "--filter", "colour=red"),
            "has no field 'colour' to filter by; it has",
        ),
        (("list", "nodes", "--follow"), "--follow is for events, not for nodes"),
        (("get", "actor", "nobody"), "There is no actor 'nobody': `miniray list actors` shows"),
        (("summary", "nodes"), "'nodes' is not one of 'tasks', 'actors', 'objects'"),
        (("logs", "nobody"), "Nothing was printed by 'nobody'. It is the name, id or class of"),
        (("logs", "--rank", "0"), "--rank is of a training run: name it"),
        (("logs", "--since", "yesterday"), "'yesterday' is no time. Write 30s, 10m, 2h"),
        (("logs", "--grep", "["), "'[' is no regular expression"),
        (("why", "nobody"), "Nothing that is called 'nobody' waits or runs: give the id of"),
    ],
)
def test_wrong_input_is_told_with_what_is_allowed(arguments: tuple[str, ...], told: str) -> None:
    done = run(*arguments)
    assert done.returncode != 0
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_status_is_shown_as_json() -> None:
    found = json.loads(shown("status", "--json"))
    assert len([node for node in found["nodes"] if node["state"] == "ALIVE"]) == 2


def test_logs_are_those_of_all_nodes_in_order_by_name_by_pid_and_searched() -> None:
    near = Talker.options(name="near").remote()
    far = Talker.options(name="far", resources={"far": 1}).remote()
    pid = miniray.get(near.say.remote("apple from near"))
    miniray.get(far.say.remote("pear from afar"))
    miniray.get([speak.remote(f"task {number} speaks") for number in range(3)])
    wait_until(lambda: "task 2 speaks" in shown("logs", "speak"))
    everything = shown("logs", "--tail", "1000")
    assert everything.index("apple from near") < everything.index("pear from afar")
    assert "pear" not in shown("logs", "near")
    assert "apple from near" in shown("logs", str(pid))
    assert "pear from afar" in shown("logs", "far", "--grep", "^pear")
    assert shown("logs", "Talker", "--grep", "apple|pear", "--tail", "1").count("\n") == 1
    assert "apple" not in shown("logs", "speak")
    [line] = shown("logs", "near", "--json", "--grep", "apple").splitlines()
    assert json.loads(line)["pid"] == pid
    assert "node" in shown("logs", "head", "--tail", "5")
    assert "apple" in shown("logs", "near", "--since", "1h")


def test_what_is_printed_is_followed() -> None:
    talker = Talker.options(name="followed").remote()
    miniray.get(talker.say.remote("first"))
    wait_until(lambda: "first" in shown("logs", "followed"))
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "miniray", "logs", "followed", "--follow"],
        stdout=subprocess.PIPE,
        text=True,
    ) as following:
        try:
            assert following.stdout is not None
            assert "first" in following.stdout.readline()
            miniray.get(talker.say.remote("second"))
            assert "second" in following.stdout.readline()
        finally:
            following.send_signal(signal.SIGINT)
            assert following.wait(30) == 0


def test_what_is_followed_goes_on_when_the_head_answers_again() -> None:
    talker = Talker.options(name="patient").remote()
    miniray.get(talker.say.remote("first"))
    wait_until(lambda: "first" in shown("logs", "patient"))
    head = next(each for each in find_clusters() if each.is_head).processes["head"]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "miniray", "logs", "patient", "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as following:
        try:
            assert following.stdout is not None
            assert following.stderr is not None
            assert "first" in following.stdout.readline()
            os.kill(head.pid, signal.SIGSTOP)
            assert "head of the cluster does not answer" in following.stderr.readline()
            miniray.get(talker.say.remote("second"))  # calls need no head
            os.kill(head.pid, signal.SIGCONT)
            assert "second" in following.stdout.readline()
        finally:
            os.kill(head.pid, signal.SIGCONT)
            following.send_signal(signal.SIGINT)
            assert following.wait(30) == 0


def test_the_error_of_a_crash_names_the_command_that_shows_its_last_words() -> None:
    talker = Talker.remote()
    with pytest.raises(miniray.exceptions.ActorDiedError) as caught:
        miniray.get(talker.crash.remote())
    _, _, told = str(caught.value).partition("`miniray logs ")
    words = shown("logs", told.partition("`")[0]).splitlines()
    assert any("last words" in line for line in words)
    begin = next(i for i, line in enumerate(words) if "Fatal Python error: Segmentation" in line)
    assert all("(Talker pid=" in line for line in words[begin:])
    assert any("in crash" in line for line in words[begin:])


def test_a_node_that_is_lost_is_listed_with_the_reason_and_its_logs_stay(nodes: Cluster) -> None:
    node = nodes.add_node(num_cpus=1, resources={"doomed": 1})
    nodes.wait_for_nodes()
    talker = Talker.options(name="doomed", resources={"doomed": 1}).remote()
    miniray.get(talker.say.remote("words of the lost"))
    wait_until(lambda: "words of the lost" in shown("logs", "doomed"))
    nodes.remove_node(node, allow_graceful=False)
    wait_until(lambda: listed("actors", "--filter", "name=doomed")[0]["state"] == "DEAD")
    [lost] = listed("nodes", "--filter", "state=DEAD")
    assert lost["state_message"]
    assert "words of the lost" in shown("logs", "doomed")
    told = [each["event_type"] for each in listed("events", "--filter", "source_type=NODE")]
    assert told.count("joined") == 3
    assert told[-1] == "lost"
    assert "NODE lost" in shown("list", "events", "--filter", "source_type=NODE")


def test_events_are_followed_by_number(tmp_path: Path) -> None:
    before = listed("events")[-1]["event_id"]
    actor = Talker.options(name="news").remote()
    miniray.get(actor.say.remote("hello"))
    later = [each for each in listed("events") if each["event_id"] > before]
    [event] = [each for each in later if "'news'" in each["message"]]
    assert event["message"].startswith("Talker 'news' runs on node ")
    assert event["custom_fields"]["actor_id"]


def test_a_seventeenth_follower_is_told_that_sixteen_follow_already() -> None:
    cluster = connect_for_cli(None, "--address", None)
    with contextlib.ExitStack() as followers:
        for _ in range(16):
            rows = followers.enter_context(contextlib.closing(cluster.watch("node_states")))
            assert next(rows)["state"] == "ALIVE"
        refused = run("list", "events", "--follow", "--limit", "1")
        assert (refused.returncode, refused.stdout.count("\n")) == (1, 5)
        assert refused.stderr.endswith("16 processes watch this cluster, which is the limit.\n")
        with pytest.raises(ValueError, match="16 processes watch this cluster"):
            next(cluster.watch("node_states"))


def test_a_cluster_elsewhere_is_looked_at_with_its_address_and_token(command: CommandLine) -> None:
    head = command.start_head("--num-cpus", "1")
    driver = (
        "import miniray, json; miniray.init(address='auto', log_to_driver=False); "
        "print(json.dumps(miniray.get(miniray.remote(lambda: print('said inside') or 1).remote())))"
    )
    assert command.python(driver, MINIRAY_ADDRESS=head.address) == 1
    home = command.root / "outside"
    home.mkdir()
    outside = {
        "MINIRAY_TMPDIR": str(home),
        "MINIRAY_MACHINE_ID": "outside",
        "MINIRAY_TOKEN": head.token,
    }

    def told(*arguments: str) -> str:
        done = command.run(*arguments, "--address", head.address, **outside)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "JOB ended" in told("list", "events")
    assert "said inside" in told("logs")
    assert json.loads(told("list", "tasks", "--json")) == []
    refused = command.run("why", "--address", head.address, **outside)
    assert "No driver waits for a value" in refused.stderr
    wait_until(lambda: not processes_with("MINIRAY_TMPDIR", str(home)))
    shutil.rmtree(home)
