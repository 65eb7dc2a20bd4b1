"""The last hour of a node."""

from __future__ import annotations

import asyncio
import errno
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from miniray.common.series import Series
from miniray.node import metrics

if TYPE_CHECKING:
    import pytest


def test_a_point_that_cannot_be_read_is_a_gap_and_leaves_the_heartbeats_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(metrics.time, "time", lambda: now)
    clients: Any = SimpleNamespace(notices={}, clients={})
    questions: Any = SimpleNamespace(answers={})
    devices: Any = SimpleNamespace(sample=list)
    node = metrics.NodeMetrics(clients, questions, "/", list, devices, lambda _: "work")
    node.look(0.0, 0.0)

    def no_descriptor() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(metrics, "_memory", no_descriptor)
        now += metrics.INTERVAL
        node.look(0.0, 0.0)
    now += metrics.INTERVAL
    node.look(0.0, 0.0)
    slots = {slot: point["memory"] for slot, point in questions.answers["history"](1.0)}
    first = int(1000.0 // metrics.INTERVAL)
    assert slots.keys() == {first, first + 2}
    assert all(0 < used <= 1 for used in slots.values())


def test_cpu_time_of_what_has_ended_stays_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    used, counted = {1: 2.0, 2: 5.0}, Series()
    monkeypatch.setattr(metrics, "of_process", lambda pid: (used.get(pid, 0.0), 0))
    monkeypatch.setattr(metrics, "COUNTED", counted)
    clients: Any = SimpleNamespace(notices={}, clients={})
    questions: Any = SimpleNamespace(answers={})
    devices: Any = SimpleNamespace(sample=list)
    runs = {b"a": "Counter", b"b": "Counter"}
    node = metrics.NodeMetrics(clients, questions, "/", list, devices, runs.__getitem__)

    def look() -> list[float]:
        for id, pid in ((b"a", 1), (b"b", 2)):
            if pid in used:
                node.count_cpu(SimpleNamespace(process_id=id, pid=pid, role="worker"))  # type: ignore[arg-type]
        [row] = counted.rows()
        assert row[4] == (("role", "worker"), ("name", "Counter"))
        return row[5]

    assert look() == [7.0]
    used[1] = 3.5
    assert look() == [8.5]
    del used[1]
    node.ended(b"a")
    assert look() == [8.5]
    used[2] = 6.0
    assert look() == [9.5]


def test_calls_whose_name_their_caller_has_folded_into_others_count_once() -> None:
    told = [{"first": 3.0}, {"(others)": 3.0, "second": 2.0}]

    async def ask(*_asked: Any) -> list[Any]:
        rows = [
            ("counter", "calls_total", "", (), [["function", name]], [count])
            for name, count in told.pop(0).items()
        ]
        return [("", rows, "")]

    facts = {"pid": os.getpid(), "role": "driver", "is_command": False}
    caller = SimpleNamespace(process_id=b"caller", **facts)
    clients: Any = SimpleNamespace(notices={}, clients={b"caller": caller})
    questions: Any = SimpleNamespace(answers={}, ask_processes=ask)
    devices: Any = SimpleNamespace(sample=list)
    node = metrics.NodeMetrics(clients, questions, "/", list, devices, lambda _: "work")
    node._sample = list  # type: ignore[method-assign]
    for _ in range(2):
        rows, _ = asyncio.run(questions.answers["metrics"](1.0))
    counted = {row[4]: row[5] for row in rows if row[1] == "calls_total"}
    assert counted == {(("function", "(others)"),): [3.0], (("function", "second"),): [2.0]}
