"""Which nodes are asked for lines of logs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from miniray.logs.log_files import LogQuery
from miniray.util import logs as logs_of_nodes
from miniray.util.logs import Logs, LogSelection, follow, logs

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


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
    wanted = LogSelection(LogQuery(pids=(1,)), ("aa", "bb"))
    found = logs(cluster, wanted)
    assert cluster.asked == [b"\xaa"]
    assert found.notes == [
        "Node bb is gone (it burnt); its logs are on elsewhere in /nowhere/logs."
    ]
    assert follow(cluster, wanted, found).notes == []
    assert cluster.asked == [b"\xaa"]


def test_what_is_followed_is_searched_by_who_follows() -> None:
    cluster: Any = Cluster()
    found = follow(cluster, LogSelection(LogQuery(grep="^p")), Logs())
    assert [each.text for each in found.lines] == ["pear"]


def test_a_node_that_is_gone_and_whose_files_cannot_be_searched_leaves_the_others_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Here(Cluster):
        def listing(self, what: str) -> list[dict[str, Any]]:
            place = {"session_dir": str(tmp_path), "hostname": os.uname().nodename}
            return [{**each, **place} for each in super().listing(what)]

    async def search(*_: Any) -> Any:
        raise OSError("the search failed: no memory")

    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(logs_of_nodes, "search", search)
    cluster: Any = Here()
    found = logs(cluster, LogSelection(LogQuery()))
    assert [each.text for each in found.lines] == ["apple", "pear"]
    assert found.notes == ["Node bb: the search failed: no memory."]
