"""What commands mean by a name."""

from __future__ import annotations

from typing import Any

import pytest

from miniray.profiling.looks import profile
from miniray.profiling.targets import TargetError, find


class Cluster:
    def listing(self, what: str) -> list[dict[str, Any]]:
        assert what == "actors"
        actor = {"actor_id": "ab" * 16, "name": "", "state": "ALIVE", "pid": 7, "node_id": "aa"}
        return [{**actor, "class_name": "main.<locals>.Counter"}]


def test_a_class_inside_of_a_function_is_named_as_lists_show_it() -> None:
    cluster: Any = Cluster()
    for name in ("Counter", "main.<locals>.Counter", "ab" * 3):
        assert find(cluster, name) == {"aa": [7]}


def test_a_profile_of_one_rank_leaves_the_other_ranks_alone() -> None:
    asked = []

    class Run(Cluster):
        def ask_nodes(self, what: str, arguments: Any, *_how: Any) -> list[tuple[bytes, Any, str]]:
            asked.append((what, arguments[0]))
            if what == "processes":
                assert arguments == ("probe", ("rank",), [7, 8])
                return [(b"\xaa", [(b"", pid, "worker", b"", pid - 7, "") for pid in (7, 8)], "")]
            each = {"way": "", "samples": [], "note": "", "name": "loop"}
            told = [{**each, "pid": pid, "rank": pid - 7} for pid in arguments[0]["aa"]]
            return [(b"\xaa", told, "")]

        def listing(self, what: str) -> list[dict[str, Any]]:
            [actor] = super().listing(what)
            return [actor, {**actor, "pid": 8}]

    cluster: Any = Run()
    profile(cluster, "cpu", "Counter", 1.0, rank=1)
    assert asked == [("processes", "probe"), ("profile", {"aa": [8]})]
    with pytest.raises(TargetError, match="Counter has no rank 2"):
        profile(cluster, "cpu", "Counter", 1.0, rank=2)
