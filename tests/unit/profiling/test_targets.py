"""What commands mean by a name."""

from __future__ import annotations

from typing import Any

from miniray.profiling.targets import find


class Cluster:
    def listing(self, what: str) -> list[dict[str, Any]]:
        assert what == "actors"
        actor = {"actor_id": "ab" * 16, "name": "", "state": "ALIVE", "pid": 7, "node_id": "aa"}
        return [{**actor, "class_name": "main.<locals>.Counter"}]


def test_a_class_inside_of_a_function_is_named_as_lists_show_it() -> None:
    cluster: Any = Cluster()
    for name in ("Counter", "main.<locals>.Counter", "ab" * 3):
        assert find(cluster, name) == {"aa": [7]}
