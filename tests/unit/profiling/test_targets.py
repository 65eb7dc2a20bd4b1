"""What commands mean by a name."""

from __future__ import annotations

from typing import Any

import pytest

from miniray.common.object_ref import short_id
from miniray.profiling.looks import profile
from miniray.profiling.targets import TargetError, find


class Cluster:
    def listing(self, what: str) -> list[dict[str, Any]]:
        actor = {"actor_id": "ab" * 16, "name": "", "class_name": "main.<locals>.Counter"}
        process = {"worker_id": "07", "pid": 7, "node_id": "aa", "actor_id": "ab" * 16}
        return {"actors": [actor], "workers": [process]}.get(what, [])


def test_a_class_inside_of_a_function_is_named_as_lists_show_it() -> None:
    cluster: Any = Cluster()
    for name in ("Counter", "main.<locals>.Counter", "ab" * 3):
        assert [each["pid"] for each in find(cluster, name)] == [7]


def test_an_actor_is_found_by_the_short_id_that_status_and_errors_show() -> None:
    cluster: Any = Cluster()
    assert [each["pid"] for each in find(cluster, short_id("ab" * 16))] == [7]
    with pytest.raises(TargetError, match="Nothing that runs is called"):
        find(cluster, f"{'ab' * 4}-7")


def test_a_process_that_allocates_nothing_is_said_to() -> None:
    class Idle(Cluster):
        def ask_nodes(self, *_asked: Any) -> list[tuple[bytes, Any, str]]:
            each = {"way": "memray", "samples": [], "note": "", "name": "f", "pid": 7, "rank": None}
            return [(b"\xaa", [each], "")]

    cluster: Any = Idle()
    assert profile(cluster, "memory", "7", 1.0)["notes"] == [
        "f (pid 7): It allocated nothing in these 1 s."
    ]


def test_a_profile_of_one_rank_leaves_the_other_ranks_alone() -> None:
    asked = []

    class Run(Cluster):
        def ask_nodes(self, what: str, arguments: Any, *_how: Any) -> list[tuple[bytes, Any, str]]:
            asked.append((what, arguments[0]))
            if what == "processes":
                assert arguments == ("probe", ("rank",), [b"\7", b"\10"])
                ranks = [(bytes([n]), n, "worker", b"", n - 7, "") for n in (7, 8)]
                return [(b"\xaa", ranks, "")]
            each = {"way": "", "samples": [], "note": "", "name": "loop"}
            told = [{**each, "pid": id[0], "rank": id[0] - 7} for id in arguments[0]]
            return [(b"\xaa", told, "")]

        def listing(self, what: str) -> list[dict[str, Any]]:
            [each] = super().listing(what)
            return [each, {**each, "pid": 8, "worker_id": "08"}]

    cluster: Any = Run()
    profile(cluster, "cpu", "Counter", 1.0, rank=1)
    assert asked == [("processes", "probe"), ("profile", [b"\10"])]
    with pytest.raises(TargetError, match="Counter has no rank 2"):
        profile(cluster, "cpu", "Counter", 1.0, rank=2)


def test_a_rank_that_does_not_answer_is_one_of_those_that_do_not() -> None:
    """It may hold Python's lock: then it is the one that somebody wants to look at."""

    class Silent(Cluster):
        def ask_nodes(self, *_asked: Any) -> list[tuple[bytes, Any, str]]:
            told = [(b"\7", 7, "worker", b"", 0, ""), (b"\10", 8, "worker", b"", None, "no time")]
            return [(b"\xaa", told, "")]

        def listing(self, what: str) -> list[dict[str, Any]]:
            [each] = super().listing(what)
            return [each, {**each, "pid": 8, "worker_id": "08"}]

    cluster: Any = Silent()
    assert [each["pid"] for each in find(cluster, "Counter", 0)] == [7]
    assert [each["pid"] for each in find(cluster, "Counter", 1)] == [8]
