"""What a process asks the head for the API."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from process_doubles import Caller

from miniray.client.cluster_requests import ClusterRequests


def test_a_program_that_makes_many_groups_waits_for_the_head_now_and_then() -> None:
    asked: list[str] = []
    facts: Any = SimpleNamespace(namespace="tests")
    link: Any = SimpleNamespace(
        head_request=lambda *_: asked.append("request"),
        head_notice=lambda *_: asked.append("notice"),
    )
    me = Caller()
    actors: Any = None
    head = ClusterRequests(facts, link, me.table, me.calls, actors)
    for _ in range(1000):
        head.create_placement_group(
            [{"CPU": 1}], "PACK", name="", lifetime=None, bundle_label_selector=None
        )
    assert asked.count("request") == 3
    assert asked[:255] == ["notice"] * 255
