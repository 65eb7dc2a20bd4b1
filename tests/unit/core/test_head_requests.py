"""What a process asks the head for the API."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from miniray.client.head_requests import HeadRequests
from miniray.common.ids import ObjectIds


def test_a_program_that_makes_many_groups_waits_for_the_head_now_and_then() -> None:
    asked: list[str] = []
    runtime: Any = SimpleNamespace(
        ids=ObjectIds(bytes(8)),
        own_groups=set(),
        facts=SimpleNamespace(namespace="tests"),
        link=SimpleNamespace(
            head_request=lambda *_: asked.append("request"),
            head_notice=lambda *_: asked.append("notice"),
        ),
    )
    for _ in range(1000):
        HeadRequests.create_placement_group(runtime, [{"CPU": 1}], "PACK", "", None, None)
    assert asked.count("request") == 3
    assert asked[:255] == ["notice"] * 255
