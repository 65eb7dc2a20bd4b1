"""Which nodes are asked for lines of logs."""

from __future__ import annotations

from typing import Any

from miniray.logs.log_files import LogQuery
from miniray.util.logs import Logs, Whose, follow, logs


class Cluster:
    """One node that lives and one that is gone."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def listing(self, _what: str) -> list[dict[str, Any]]:
        about = {"session_dir": "/nowhere", "hostname": "elsewhere", "reason": "it burnt"}
        return [
            {"node_id": "aa", "state": "ALIVE", **about},
            {"node_id": "bb", "state": "DEAD", **about},
        ]

    def ask_nodes(
        self, _what: str, _arguments: Any, _seconds: float, nodes: list[bytes]
    ) -> list[tuple[bytes, Any, str]]:
        self.asked = nodes
        lines = [("1", "f", 1, "out", text) for text in ("apple", "pear")]
        return [(node, {"lines": lines, "more": False, "ends": {}}, "") for node in nodes]


def test_a_node_that_is_gone_is_not_asked_again_and_again() -> None:
    cluster: Any = Cluster()
    wanted = Whose(LogQuery(pids=(1,)), ("aa", "bb"))
    found = logs(cluster, wanted)
    assert cluster.asked == [b"\xaa"]
    assert found.notes == [
        "Node bb is gone (it burnt); its logs are on elsewhere in /nowhere/logs."
    ]
    assert follow(cluster, wanted, found).notes == []
    assert cluster.asked == [b"\xaa"]


def test_what_is_followed_is_searched_by_who_follows() -> None:
    cluster: Any = Cluster()
    found = follow(cluster, Whose(LogQuery(grep="^p")), Logs())
    assert [each.text for each in found.lines] == ["pear"]
