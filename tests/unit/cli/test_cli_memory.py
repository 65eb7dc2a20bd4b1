from __future__ import annotations

import dataclasses
import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from tests_cli_support import one_line

from miniray.cli.memory import MemoryView
from miniray.cli.tables import draw
from miniray.common.names import format_bytes
from miniray.util.state_records import ClusterMemoryState, NodeMemoryState, ObjectState

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

    from miniray.system.session import ClusterRecord

NODE = "aa" * 8


def node(**changes: Any) -> NodeMemoryState:
    made = NodeMemoryState(
        node_id=NODE,
        node_ip="10.0.0.1",
        state_message=None,
        capacity=10 << 30,
        used=3 << 20,
        pooled=1 << 20,
        freed=0,
        writing=0,
        spilled=0,
        num_segments=2,
        freed_by={},
        num_inline=4,
        inline_bytes=2048,
        no_answer=[],
    )
    return dataclasses.replace(made, **changes)


def an_object(number: int = 1, **changes: Any) -> ObjectState:
    made = ObjectState(
        object_id="bb" * 8 + f"{number:016x}",
        object_size=1 << 20,
        task_status="NIL",
        reference_type="LOCAL_REFERENCE",
        call_site="a.py:1 in main",
        type="DRIVER",
        pid=10,
        ip="10.0.0.1",
        owner_id="bb" * 8,
        owner="driver (pid 10)",
        node_id=NODE,
        state="HELD",
        allocated=1 << 20,
        is_copy=False,
        is_spilled=False,
        holders=[],
        why="1 ref in driver (pid 10)",
    )
    return dataclasses.replace(made, **changes)


def shown(
    objects: list[ObjectState], nodes: list[NodeMemoryState] | None = None, **how: Any
) -> str:
    out = io.StringIO()
    view = MemoryView(ClusterMemoryState(nodes or [node()], objects), **how)
    console = Console(file=out, width=80, color_system=None)
    draw(view.headline("10.0.0.1:6379"), view.sections(), console)
    return out.getvalue()


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of a table, columns first; they are at least two spaces apart."""
    lines = text.split(f"\n{title}:\n")[1].split("\n\n", maxsplit=1)[0].splitlines()
    return [[cell.strip() for cell in line.strip().split("  ") if cell.strip()] for line in lines]


def test_the_first_line_says_how_full_the_store_is() -> None:
    first = shown([], [node(), node(node_id="cc" * 8)]).splitlines()[0]
    assert first == (
        "Object store of the cluster at 10.0.0.1:6379: 6 MiB of 20 GiB in use on 2 nodes"
    )


def test_nodes_are_shown_with_what_is_used_for_what() -> None:
    text = shown([], [node(freed=1 << 20, spilled=5 << 20)])
    assert rows(text, "Nodes")[1:] == [
        [NODE[:8], "10.0.0.1", "3 MiB", "10 GiB", "1 MiB", "1 MiB", "5 MiB", "2", "4 (2 KiB)"]
    ]
    assert "No large objects." in text
    assert "Freed but still mapped" not in text
    assert "Did not answer" not in text


def test_objects_are_shown_with_why_they_are_held() -> None:
    text = shown([an_object(7), an_object(7, is_copy=True), an_object(8, object_id="", owner="")])
    first, copy, unknown = rows(text, "Objects")[1:4]
    assert first == [
        "bbbbbbbb-7",
        "1 MiB",
        "driver (pid 10)",
        "a.py:1 in main",
        "LOCAL_REFERENCE",
        "1 ref in driver (pid 10)",
        NODE[:8],
    ]
    assert copy[5] == "a copy; 1 ref in driver (pid 10)"
    assert (unknown[0], unknown[2]) == ("-", "-")


def test_what_is_on_disk_is_marked_and_counted_as_shown() -> None:
    found = [an_object(1), an_object(2, allocated=0, is_spilled=True)]
    text = shown(found, [node(used=1 << 20, spilled=1 << 20, num_segments=2)])
    in_memory, on_disk = rows(text, "Objects")[1:]
    assert in_memory[-1] == NODE[:8]
    assert on_disk[-1] == f"{NODE[:8]} (disk)"
    assert "more" not in text


def test_who_maps_what_is_freed_and_who_did_not_answer_is_shown() -> None:
    nodes = [
        node(freed_by={"Reader (pid 5)": 1 << 20}, no_answer=["Busy (pid 6)"]),
        node(node_id="cc" * 8, state_message="it did not answer in time", capacity=0, used=0),
    ]
    text = shown([], nodes)
    assert rows(text, "Freed but still mapped")[1:] == [[NODE[:8], "Reader (pid 5)", "1 MiB"]]
    silent, busy = rows(text, "Did not answer")[1:]
    assert silent == ["cccccccc", "-", "The node: it did not answer in time."]
    assert busy[1] == "Busy (pid 6)"
    assert len(rows(text, "Nodes")) == 2


def test_what_the_limit_leaves_out_is_summed_up() -> None:
    text = shown([an_object()], [node(num_segments=12, used=5 << 20)])
    assert rows(text, "Objects")[-1] == ["11 more", "4 MiB", "not shown; --limit shows more"]
    grouped = shown([an_object()], [node(num_segments=12, used=5 << 20)], group_by="owner")
    assert rows(grouped, "Objects by owner")[-1] == ["not shown; --limit shows more", "11", "4 MiB"]


@pytest.mark.parametrize(
    ("sort_by", "expected"),
    [("size", [1, 2, 3]), ("pid", [3, 1, 2]), ("call-site", [2, 1, 3]), ("node", [2, 3, 1])],
)
def test_objects_are_sorted_as_asked(sort_by: str, expected: list[int]) -> None:
    objects = [
        an_object(1, pid=2, call_site="b", node_id="c"),
        an_object(2, pid=2, call_site="a", node_id="a"),
        an_object(3, pid=1, call_site="c", node_id="b"),
    ]
    text = shown(objects, [node(num_segments=3)], sort_by=sort_by)
    numbers = [int(row[0].rpartition("-")[2]) for row in rows(text, "Objects")[1:]]
    assert numbers == expected


@pytest.mark.parametrize(
    ("group_by", "title", "expected"),
    [
        (
            "owner",
            "Objects by owner",
            [["driver (pid 10)", "2", "3 MiB"], ["K (pid 1)", "1", "1 MiB"]],
        ),
        ("call-site", "Objects by call site", [["a.py:1 in main", "3", "4 MiB"]]),
        ("node", "Objects by node", [[NODE[:8], "3", "4 MiB"]]),
        ("reference-type", "Objects by reference type", [["LOCAL_REFERENCE", "3", "4 MiB"]]),
    ],
)
def test_objects_are_summed_up_as_asked(
    group_by: str, title: str, expected: list[list[str]]
) -> None:
    objects = [an_object(1), an_object(2, owner="K (pid 1)"), an_object(3, object_size=2 << 20)]
    text = shown(objects, [node(num_segments=3)], group_by=group_by)
    assert rows(text, title)[1:] == expected


@pytest.mark.parametrize(
    ("units", "size"),
    [("auto", "1 MiB"), ("b", "1048576 B"), ("kb", "1024 KiB"), ("mb", "1 MiB"), ("gb", "0 GiB")],
)
def test_sizes_are_in_the_units_asked_for(units: str, size: str) -> None:
    text = shown([an_object()], [node(num_segments=1)], units=units)
    assert rows(text, "Objects")[1][1] == size


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 << 39, "1.5 TiB")]
)
def test_bytes_are_shown_in_the_largest_unit_that_fits(amount: int, text: str) -> None:
    assert format_bytes(amount) == text


class Connection:
    def __init__(self) -> None:
        self.asked: list[tuple[int, bool, float]] = []
        self.address = "10.0.0.1:6379"
        self.closed = False

    def ask_nodes(self, what: str, question: tuple[int, bool], seconds: float) -> list[Any]:
        assert what == "memory"
        self.asked.append((*question, seconds))
        return []

    def listing(self, what: str) -> list[dict[str, Any]]:
        assert what == "node_states"
        return []

    def close(self) -> None:
        self.closed = True


def test_the_command_asks_the_cluster_and_leaves_it(
    miniray: Callable[..., Result], record: Callable[..., ClusterRecord]
) -> None:
    record()
    connection = Connection()
    arguments = ("memory", "--limit", "7", "--all", "--timeout", "0.5", "--sort-by", "PID")
    done = miniray(*arguments, connect=lambda *_: connection)
    assert done.exit_code == 0, done.output
    assert "0 B of 0 B in use on 0 nodes" in done.output
    assert (connection.asked, connection.closed) == ([(7, True, 0.5)], True)
    done = miniray("memory", "--json", connect=lambda *_: connection)
    assert json.loads(done.output) == {"nodes": [], "objects": []}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--sort-by", "colour"), "--sort-by"),
        (("--limit", "0"), "--limit"),
        (("--timeout", "0"), "--timeout"),
        ((), "No cluster of yours is running"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    miniray: Callable[..., Result], arguments: tuple[str, ...], named: str
) -> None:
    assert named in one_line(miniray("memory", *arguments))
