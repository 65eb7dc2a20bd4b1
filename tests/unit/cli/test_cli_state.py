"""What `miniray list`, `stack` and `logs` print of what processes are called, and of more rows."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from click.testing import CliRunner, Result

from miniray.cli import logs as logs_command
from miniray.cli.logs import logs_
from miniray.cli.look import profile, stack, timeline
from miniray.cli.state import get, list_
from miniray.profiling import looks
from miniray.system import session
from miniray.util.logs import Logs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pytest
    from click import Command

STEERS = "a\x1b[2Jb"


def invoked(
    command: Command, listing: Callable[[str], Any], *arguments: str, pushed: Sequence[Any] = ()
) -> Result:
    """What a command prints of a cluster's listings, and of what the cluster pushes of one."""
    watch = {"watch": lambda _listing: iter(pushed)}
    connection = SimpleNamespace(listing=listing, close=lambda: None, **watch)
    services = SimpleNamespace(connect=lambda _address, _token: connection)
    return CliRunner().invoke(command, arguments, obj=services)


def waiting(count: int) -> list[dict[str, Any]]:
    demand = {"kind": "task", "count": 1, "since": 0.0, "reason": "full"}
    return [{**demand, "names": [f"f{number}"]} for number in range(count)]


def test_a_list_says_that_there_are_more() -> None:
    told = invoked(list_, lambda _: waiting(3), "waiting", "--limit", "2")
    assert told.output.startswith("More than 2 waiting\n")
    assert "There are more than these 2: see --limit." in told.output
    assert ("f1" in told.output, "f2" in told.output) == (True, False)
    told = invoked(list_, lambda _: waiting(2), "waiting", "--limit", "2")
    assert told.output.startswith("2 waiting\n")
    assert "more" not in told.output


def test_kinds_may_be_called_as_ray_calls_them() -> None:
    for what, rows in {"placement-groups": "0 groups", "cluster-events": "0 events"}.items():
        assert rows in invoked(list_, lambda _: [], what).output
    assert "0 nodes" in invoked(list_, lambda _: [], "node").output
    assert "There is no node" in invoked(get, lambda _: [], "nodes", "abc").output
    assert "'runtime-envs' is not one of" in invoked(list_, lambda _: [], "runtime-envs").output


def test_one_of_very_many_is_found() -> None:
    jobs = [
        {"job_id": f"{number:06x}", "start_time": 0.0, "end_time": None, "entrypoint": ""}
        | {"driver_node_id": "", "driver_pid": 1, "namespace": "", "metadata": {}}
        for number in range(11_000)
    ]
    told = invoked(get, lambda _: jobs, "job", f"{10_999:06x}")
    assert told.exit_code == 0, told.output


def test_the_short_id_that_a_list_shows_is_one_that_get_takes() -> None:
    ids = [f"{'ab' * 8}{number:016x}" for number in (1, 2)]
    group = {"name": "", "state": "CREATED", "strategy": "PACK", "stats": {}}
    group |= {"bundles": {0: {"CPU": 1.0}}, "bundles_to_node_id": {0: "cd"}}
    groups = [{**group, "placement_group_id": id} for id in ids]
    told = invoked(list_, lambda _: groups, "groups").output
    assert ("abababab-1" in told, "abababab-2" in told) == (True, True)
    told = invoked(get, lambda _: groups, "group", "abababab-2", "--json").output
    assert json.loads(told)["placement_group_id"] == ids[1]


def test_names_in_followed_events_and_in_stacks_steer_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = {"event_id": 1, "time": 0.0, "severity": "INFO", "message": STEERS}
    event |= {"source_type": "ACTOR", "event_type": "died", "custom_fields": {}}
    told = invoked(list_, lambda _: [], "events", "--follow", pushed=[event])
    assert "a\\x1b[2Jb" in told.output
    assert "\x1b" not in told.output

    found = {"groups": [{"who": [STEERS], "stack": [STEERS]}], "notes": [STEERS], "way": ""}
    monkeypatch.setattr(looks, "look", lambda *_: found)
    told = invoked(stack, lambda _: [], "1")
    assert told.output.count("a\\x1b[2Jb") == 3
    assert "\x1b" not in told.output


def test_an_event_that_is_pushed_again_by_a_new_head_is_printed_once() -> None:
    event = {"time": 0.0, "severity": "INFO", "source_type": "NODE", "event_type": "joined"}
    old, first, second = (
        {**event, "event_id": number, "message": f"m{number}", "custom_fields": {}}
        for number in range(3)
    )
    pushes = [old, first, old, first, second]
    told = invoked(list_, lambda _: [old], "events", "--follow", "--json", pushed=pushes)
    assert [told.output.count(f'"m{number}"') for number in range(3)] == [1, 1, 1]


def test_how_many_events_are_left_out_is_said_where_they_are_missing() -> None:
    event = {"time": 0.0, "severity": "INFO", "source_type": "NODE", "event_type": "joined"}
    early, old, new, late = (
        {**event, "event_id": number, "message": f"m{number}", "custom_fields": {}}
        for number in (1, 5, 6, 9)
    )
    arguments = ("events", "--follow", "--filter", "event_id!=5")
    told = invoked(list_, lambda _: [early, old], *arguments, pushed=[early, old, new, late])
    assert told.stderr == "2 left out: events came faster than they were read.\n"
    assert [told.stdout.count(f" m{number}") for number in (1, 5, 6, 9)] == [1, 0, 1, 1]


def test_a_group_that_is_gone_is_on_no_node_and_waits_for_none() -> None:
    group = {"placement_group_id": "ab", "name": "", "strategy": "PACK", "stats": {}}
    group |= {"bundles": {0: {"CPU": 1.0}}, "bundles_to_node_id": {0: ""}}
    told = invoked(list_, lambda _: [{**group, "state": "REMOVED"}], "groups").output
    assert "1 CPU" in told
    assert "no node yet" not in told
    told = invoked(list_, lambda _: [{**group, "state": "PENDING"}], "groups").output
    assert "1 CPU on no node yet" in told


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_recorded() -> None:
    for command, *arguments in ((profile, "cpu", "1"), (timeline,)):
        told = invoked(command, lambda _: int("asked"), *arguments, "-o", "/nowhere/x.html")
        assert told.exit_code == 2
        assert "There is no folder /nowhere to write to." in told.output


def test_a_node_that_does_not_answer_is_told_once_while_logs_are_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks_left = [1, 2, 3]

    def once_more(*_: Any) -> Logs:
        if not looks_left:
            raise KeyboardInterrupt
        looks_left.pop()
        return Logs(notes=["Node bb: no way."])

    monkeypatch.setattr(logs_command, "logs", once_more)
    monkeypatch.setattr(logs_command, "follow", once_more)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    told = invoked(logs_, lambda _: [], "--follow")
    assert told.exit_code == 0
    assert told.output.count("Node bb: no way.") == 1


def test_logs_are_followed_through_another_node_when_the_one_that_was_asked_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [SimpleNamespace(address="h:1", name=name, close=lambda: None) for name in "ab"]
    asked: list[str] = []

    def once_more(connection: Any, *_: Any) -> Logs:
        asked.append(connection.name)
        raise ConnectionError if connection is nodes[0] else KeyboardInterrupt

    monkeypatch.setattr(logs_command, "logs", lambda *_: Logs())
    monkeypatch.setattr(logs_command, "follow", once_more)
    monkeypatch.setattr(session, "find_clusters", lambda: nodes[1:])
    monkeypatch.setattr(time, "sleep", lambda _: None if len(asked) < 5 else int("stop"))
    left = iter(nodes)
    services = SimpleNamespace(connect=lambda _address, _token: next(left))
    told = CliRunner().invoke(logs_, ["--follow"], obj=services)
    assert (told.exit_code, asked) == (0, ["a", "b"])


def test_after_the_end_of_a_cluster_its_logs_are_found_by_what_their_files_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(_address: Any, _token: Any) -> Any:
        raise ConnectionError("No cluster is running.")

    name = f"worker-Counter-7-20261127-120000-{'ab' * 8}-{'cd' * 16}.out"
    (tmp_path / name).write_text("2026-11-27 12:00:00.000 [Counter] counted\n", encoding="utf-8")
    monkeypatch.setattr(session, "find_clusters", list)
    monkeypatch.setattr(logs_command, "_last_session", lambda: tmp_path)
    services = SimpleNamespace(connect=nobody)
    for of in ("Counter", "7", "cd" * 16):
        assert "counted" in CliRunner().invoke(logs_, [of], obj=services).output
    told = CliRunner().invoke(logs_, ["my-counter"], obj=services)
    assert told.exit_code == 1
    assert "no names of actors and runs are known. There are logs of Counter." in told.output


def test_what_is_no_regular_expression_is_told_without_a_cluster_too() -> None:
    def nobody(_address: Any, _token: Any) -> Any:
        raise ConnectionError("No cluster is running.")

    services = SimpleNamespace(connect=nobody)
    told = CliRunner().invoke(logs_, ["--grep", "["], obj=services)
    assert "'[' is no regular expression" in told.output
