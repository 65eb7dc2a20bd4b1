from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from tests_cli_support import TOKEN, one_line

from miniray.cli.status import format_duration, render, watch_status
from miniray.cli.tables import describe_amounts, describe_usage, format_amount

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

    from miniray.common.state_types import ActorStatus, ClusterStatus, PendingDemand
    from miniray.system.session import ClusterRecord

REASON = "It needs 0.6 GPU on one device; the most that a device of node 2222 has free is 0.4."


def actor(**changes: Any) -> ActorStatus:
    made: ActorStatus = {
        "actor_id": "aa" * 8 + "00" * 7 + "07",
        "class_name": "Counter",
        "name": "",
        "namespace": "",
        "state": "ALIVE",
        "since": 900.0,
        "node_id": "1" * 28,
        "pid": 4242,
        "restarts": 0,
        "resources": {"GPU": 0.5},
    }
    return {**made, **changes}  # type: ignore[typeddict-item]


def demand(**changes: Any) -> PendingDemand:
    made: PendingDemand = {
        "kind": "actor",
        "shape": [{"GPU": 0.6}],
        "count": 3,
        "names": ["Trainer"],
        "since": 900.0,
        "reason": REASON,
        "infeasible": False,
    }
    return {**made, **changes}  # type: ignore[typeddict-item]


def state(**changes: Any) -> ClusterStatus:
    made: ClusterStatus = {
        "address": "10.0.0.1:6379",
        "version": "0.1.0",
        "started": 0.0,
        "head_started": 0.0,
        "awaited": [],
        "time": 1000.0,
        "nodes": [
            {
                "node_id": "1" * 28,
                "address": "10.0.0.1",
                "hostname": "alpha",
                "is_head": True,
                "state": "ALIVE",
                "total": {"CPU": 8.0, "GPU": 2.0, "node:10.0.0.1": 1.0},
                "used": {"CPU": 2.0, "GPU": 0.5},
                "labels": {},
                "object_store_used": 2**20,
                "object_store_capacity": 2**30,
                "object_store_spilled": 0,
                "quarantined": [],
                "silent": 0.0,
                "reason": "",
            },
            {
                "node_id": "2" * 28,
                "address": "10.0.0.2",
                "hostname": "beta",
                "is_head": False,
                "state": "DEAD",
                "total": {},
                "used": {},
                "labels": {},
                "object_store_used": 0,
                "object_store_capacity": 2**30,
                "object_store_spilled": 0,
                "quarantined": [],
                "silent": 0.0,
                "reason": "no heartbeat for 15 s",
            },
        ],
        "total": {"memory": 2.0**34, "CPU": 8.0, "GPU": 2.0, "node:10.0.0.1": 1.0},
        "used": {"CPU": 2.0, "GPU": 0.5},
        "dead_actors": [],
        "actors": [actor()],
        "pending": [],
        "placement_groups": [],
    }
    return {**made, **changes}  # type: ignore[typeddict-item]


def rendered(of: ClusterStatus, *, terminal: bool = False, width: int = 80) -> str:
    out = io.StringIO()
    render(of, Console(file=out, force_terminal=terminal, width=width, color_system=None))
    return out.getvalue()


def row(text: str, beginning: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(beginning)]
    return line.split()


def test_values_on_disk_are_shown_when_there_are_some() -> None:
    assert "on disk" not in rendered(state())
    nodes = [{**node, "object_store_spilled": 2**29} for node in state()["nodes"]]
    assert row(rendered(state(nodes=nodes)), "objects on disk")[3:] == ["1", "GiB", "-"]


def test_devices_in_quarantine_are_shown_with_the_process_that_keeps_them() -> None:
    why = "pid 77 (Trainer) could not be killed"
    record = {
        "pids": [77],
        "names": ["Trainer"],
        "devices": {"GPU": ["0", "3"]},
        "since": state()["time"] - 90,
        "reason": why,
    }
    first, *others = state()["nodes"]
    shown = rendered({**state(), "nodes": [{**first, "quarantined": [record]}, *others]})
    assert "Quarantined" in shown
    assert "Quarantined" not in rendered(state())
    [row] = [line for line in shown.splitlines() if why in line]
    assert "GPU 0, 3" in row
    assert "1 min" in row


def test_the_first_line_says_which_cluster_and_how_large() -> None:
    first = rendered(state()).splitlines()[0]
    assert first == "Cluster at 10.0.0.1:6379: 1 node, up 16 min, miniray 0.1.0"


def test_the_object_store_shows_what_objects_take_not_what_is_granted() -> None:
    of = state()
    of["nodes"][0]["total"]["object_store_memory"] = of["total"]["object_store_memory"] = 2.0**30
    text = rendered(of, width=160)
    assert "object_store_memory 1 MiB/1 GiB" in text
    assert row(text, "object_store_memory") == ["object_store_memory", "1", "MiB", "1", "GiB"]


def test_a_waiting_demand_is_shown_in_full_however_narrow_the_output() -> None:
    text = rendered(state(pending=[demand()]), width=40)
    assert REASON in text
    assert row(text, "3 actors")[:5] == ["3", "actors", "(Trainer)", "0.6", "GPU"]
    assert "1 min" in text


def test_what_can_never_be_served_comes_first_and_is_marked() -> None:
    never = demand(infeasible=True, since=999.0, reason="No node has more than 2 GPU.", count=1)
    text = rendered(state(pending=[demand(), never]))
    assert "INFEASIBLE: No node has more than 2 GPU." in text
    assert text.index("INFEASIBLE") < text.index(REASON)


def test_a_waiting_group_shows_its_bundles() -> None:
    waiting = demand(kind="placement_group", shape=[{"CPU": 1.0}, {"GPU": 1.0}], names=[""])
    text = rendered(state(pending=[waiting]))
    assert "3 placement groups" in text
    assert "1 CPU; 1 GPU" in text


def test_placed_groups_name_the_node_of_each_bundle() -> None:
    group = {
        "placement_group_id": "9" * 32,
        "name": "",
        "strategy": "PACK",
        "state": "CREATED",
        "bundles": [{"CPU": 1.0}, {"GPU": 1.0}],
        "bundle_nodes": ["1" * 28, ""],
    }
    text = rendered(state(placement_groups=[group]))
    assert "1 CPU on 11111111; 1 GPU on no node yet" in text


def test_an_actor_that_died_is_shown_with_the_whole_reason_however_narrow_the_output() -> None:
    why = "The actor Counter (aa07) died: its process 800 exited with code 1, after 2 restarts."
    dead = {"actor_id": "aa" * 15 + "07", "class_name": "Counter", "name": "", "died": 880.0}
    text = rendered(state(actors=[], dead_actors=[{**dead, "reason": why}]), width=40)
    assert why in text
    assert "2 min ago" in text
    assert "Dead actors" not in rendered(state())


def test_an_idle_cluster_says_that_nothing_waits() -> None:
    text = rendered(state(actors=[]))
    assert "No actors." in text
    assert "Nothing waits." in text
    assert "Placement groups" not in text


def test_many_actors_are_counted_rather_than_listed() -> None:
    text = rendered(state(actors=[actor() for _ in range(130)]))
    assert text.count("aaaaaaaa") == 100
    assert "and 30 more" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_names_that_look_like_markup_are_shown_as_they_are(terminal: bool) -> None:
    text = rendered(state(actors=[actor(name="[red]x[/red]")]), terminal=terminal, width=200)
    assert "[red]x[/red]" in text


def test_only_a_terminal_gets_drawn_tables() -> None:
    assert "│" in rendered(state(), terminal=True, width=120)
    assert rendered(state()).isascii()


def test_names_cannot_steer_the_terminal_or_forge_lines() -> None:
    evil = "x\x1b]0;owned\x1b[2J\nNodes: fake"
    made = state(
        actors=[actor(name=evil, class_name=evil)],
        pending=[demand(names=[evil], reason=evil, shape=[{evil: 1.0}])],
        used={evil: 1.0},
        total={evil: 1.0},
    )
    for terminal in (False, True):
        text = rendered(made, terminal=terminal)
        assert "\x1b]" not in text
        assert "\x1b[2J" not in text
        assert not any(line.startswith("Nodes: fake") for line in text.splitlines())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (-3, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (3720, "1 h 2 min"),
        (180000, "2 d 2 h"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_amounts_are_written_without_noise() -> None:
    assert format_amount("GPU", 0.30000000000000004) == "0.3"
    assert format_amount("GPU", 10.0) == "10"
    assert format_amount("memory", 1536 * 2**20) == "1.5 GiB"
    assert format_amount("memory", 100.0) == "100 B"
    assert describe_amounts({"memory": 1024.0, "a": 1.0, "GPU": 1.0, "CPU": 2.0}) == (
        "2 CPU, 1 GPU, 1 a, 1 KiB memory"
    )
    assert describe_usage({}, {"CPU": 4.0}) == "CPU 0/4"


class Connected:
    def __init__(self, answer: ClusterStatus | Exception) -> None:
        self.answer = answer
        self.closed = False

    def status(self) -> ClusterStatus:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed = True


def test_status_asks_the_cluster_that_is_meant_and_leaves_it(
    miniray: Callable[..., Result],
) -> None:
    connection, asked = Connected(state()), []
    arguments = ("status", "--address", "h:1", "--token-file", "-")
    result = miniray(
        *arguments,
        connect=lambda *given: (asked.append(given), connection)[1],
        input=f"{TOKEN}\n",
    )
    assert result.exit_code == 0, result.output
    assert "Cluster at 10.0.0.1:6379" in result.stdout
    assert asked == [("h:1", TOKEN)]  # that of standard input
    assert connection.closed


def test_without_a_cluster_status_says_how_to_start_one(miniray: Callable[..., Result]) -> None:
    line = one_line(miniray("status"))
    assert "No cluster of yours is running" in line
    assert "miniray start --head" in line


def test_a_cluster_that_is_not_here_is_named(
    miniray: Callable[..., Result], record: Callable[..., ClusterRecord]
) -> None:
    record()
    assert "No cluster at h:1" in one_line(miniray("status", "--address", "h:1"))


def test_an_actor_whose_constructor_runs_is_starting_for_so_long() -> None:
    assert "STARTING for 1 min" in rendered(state(actors=[actor(state="STARTING")]), width=200)
    assert "ALIVE for" not in rendered(state(actors=[actor()]), width=200)


def test_a_watched_status_is_drawn_again_and_says_what_is_wrong() -> None:
    looks = iter([state(actors=[actor()]), ConnectionError("The head is out of reach."), None])

    def look() -> ClusterStatus:
        found = next(looks)
        if found is None:
            raise KeyboardInterrupt
        if isinstance(found, Exception):
            raise found
        return found

    out = io.StringIO()
    watch_status(look, 0, Console(file=out, force_terminal=True, width=200, height=50))
    assert "Counter" in out.getvalue()
    assert "The head is out of reach." in out.getvalue()
