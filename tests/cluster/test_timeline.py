"""`miniray timeline`: what ran where and when, with arrows from who called to what ran."""

from __future__ import annotations

import concurrent.futures
import json
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import wait_until
from running_cluster import running_cluster

import miniray
from miniray.client.command_connection import CommandConnection, connect_for_cli
from miniray.common import spans
from miniray.profiling.timeline import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


pytestmark = pytest.mark.engine("miniray")

#: Bytes of the first node's memory for values.
STORE = 100 << 20


@pytest.fixture(scope="module", autouse=True)
def cluster(session_root: Path) -> Iterator[CommandConnection]:
    far = {"num_cpus": 2, "resources": {"far": 2}}
    with running_cluster({"num_cpus": 4, "object_store_memory": STORE}, far):
        connection = connect_for_cli(None, "--address", None)
        yield connection
        connection.close()


@miniray.remote
class Works:
    def sleeps(self, seconds: float) -> None:
        time.sleep(seconds)

    def quick(self) -> None:
        """Take no time."""

    def fails(self) -> None:
        time.sleep(0.002)
        raise ValueError("no")

    def dies(self) -> None:
        os._exit(3)


@miniray.remote
def asks(works: Any) -> None:
    miniray.get(works.sleeps.remote(0.02))


@miniray.remote
def makes() -> Any:
    return np.zeros(4 << 20, np.uint8)


def recorded(
    cluster: CommandConnection, work: Callable[[], object], seconds: float = 2.0
) -> tuple[list[dict[str, Any]], list[str]]:
    """Record while the work is done again and again."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        recording = pool.submit(record, cluster, seconds)
        while not recording.done():
            work()
            time.sleep(0.03)  # some dozens of times show as much as thousands
        return recording.result()


def slices(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["cat"], event["name"]), []).append(event)
    return found


def test_calls_have_arrows_from_where_they_were_made(cluster: CommandConnection) -> None:
    works = Works.remote()
    events, notes = recorded(cluster, lambda: miniray.get(asks.remote(works)))
    assert notes == []
    found = slices(events)
    inner = found["call", "Works.sleeps"]
    assert all(event["dur"] >= 20_000 for event in inner)
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys() != set()
    makers = {event["tid"] for event in found["call", "asks"]}
    arrows = [id for id, end in ends.items() if end["tid"] == inner[0]["tid"]]
    assert {begins[id]["tid"] for id in arrows} == makers
    assert all(begins[id]["ts"] <= ends[id]["ts"] for id in arrows)
    # The task's get lies within the task.
    [wait] = [each for each in found["wait", "get"] if each["tid"] in makers][:1]
    assert any(
        each["ts"] <= wait["ts"] and wait["ts"] + wait["dur"] <= each["ts"] + each["dur"] + 1
        for each in found["call", "asks"]
    )


def test_transfers_between_nodes_are_recorded(cluster: CommandConnection) -> None:
    events, _ = recorded(cluster, lambda: miniray.get(makes.options(resources={"far": 1}).remote()))
    found = slices(events)
    assert any(kind == "transfer" for kind, _ in found)
    assert len({event["pid"] for event in events}) == 2


def test_values_that_go_to_disk_and_come_back_are_recorded(cluster: CommandConnection) -> None:
    def work() -> None:
        refs = [miniray.put(np.zeros(STORE // 4, np.uint8)) for _ in range(6)]
        assert miniray.get(refs[0]).size == STORE // 4

    events, _ = recorded(cluster, work)
    assert {"spill", "restore"} <= {kind for kind, _ in slices(events)}


@miniray.remote
def reads(value: Any) -> None:
    """Have an argument to load."""


def test_loading_of_arguments_lies_within_the_call(cluster: CommandConnection) -> None:
    ref = makes.remote()
    events, _ = recorded(cluster, lambda: miniray.get(reads.remote(ref)))
    found = slices(events)
    [load, *_] = found["arguments", "reads"]
    assert any(
        each["tid"] == load["tid"]
        and each["ts"] <= load["ts"]
        and load["ts"] + load["dur"] <= each["ts"] + each["dur"] + 1
        for each in found["call", "reads"]
    )


def test_a_worker_that_starts_during_a_recording_takes_part(cluster: CommandConnection) -> None:
    made: list[Any] = []

    def work() -> None:
        made.append(Works.remote())
        miniray.get(made[-1].sleeps.remote(0.3))

    events, notes = recorded(cluster, work)
    assert notes == []
    tracks = {event["tid"] for event in slices(events)["call", "Works.sleeps"]}
    assert len(tracks) > 1


def test_what_does_not_fit_is_said(
    cluster: CommandConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "MOST", 5)  # of this driver
    works = Works.remote()
    miniray.get(works.quick.remote())
    events, notes = recorded(cluster, lambda: miniray.get(works.quick.remote()))
    # A fast actor has more than fits, too.
    who = f"driver (pid {os.getpid()}): "
    assert [note for note in notes if who in note and note.endswith("more did not fit.")], notes
    assert len(slices(events)["call", "Works.quick"]) > 5


def test_two_recordings_at_once_are_refused(cluster: CommandConnection) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: record(cluster, 1.0), range(2)))
    notes = [note for _, notes in both for note in notes]
    assert any("it is being recorded already" in note for note in notes)
    assert record(cluster, 0.1)[1] == []  # neither left anything behind


def test_calls_above_a_millisecond_are_remembered_without_a_recording(tmp_path: Path) -> None:
    works = Works.remote()
    miniray.get([works.sleeps.remote(0.01), works.quick.remote()])
    with pytest.raises(ValueError, match="no"):
        miniray.get(works.fails.remote())
    events = miniray.timeline()
    assert events is not None
    found = slices(events)
    assert [each["args"] for each in found["call", "Works.fails"]] == [{"failed": True}]
    assert all(each["dur"] > 1000 for each in found.get(("call", "Works.quick"), ()))
    miniray.timeline(str(tmp_path / "timeline.json"))
    assert slices(json.loads((tmp_path / "timeline.json").read_text())).keys() == found.keys()


def test_the_last_long_calls_of_a_worker_that_crashed_are_beside_its_log(
    session_root: Path,
) -> None:
    works = Works.remote()
    miniray.get(works.sleeps.remote(0.015))
    works.dies.remote()
    wait_until(
        lambda: any("Works.sleeps" in each.read_text() for each in session_root.rglob("*.calls"))
    )
