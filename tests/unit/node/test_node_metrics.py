"""The last hour of a node."""

from __future__ import annotations

import errno
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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
    figures = [(f"object_store_{name}_bytes", {}, 0.0) for name in ("used", "spilled")]
    node = metrics.NodeMetrics(clients, questions, "/", lambda: figures, devices)
    node.look()

    def no_descriptor() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(metrics, "_memory", no_descriptor)
        now += metrics.INTERVAL
        node.look()
    now += metrics.INTERVAL
    node.look()
    _, series = questions.answers["history"](1.0)
    assert [math.isnan(value) for value in series["memory"][-3:]] == [False, True, False]
