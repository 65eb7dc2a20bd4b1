from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from miniray.security.refusals import Refusals

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr("miniray.security.refusals.time.monotonic", lambda: now[0])

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


def test_an_address_is_told_once_a_minute_with_what_came_meanwhile(
    pass_time: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    refusals = Refusals(logger, "the port")
    for _ in range(100):
        refusals.add("10.0.0.1", "it has no certificate")
    refusals.add("10.0.0.2", "it has no certificate")
    assert caplog.messages == [
        "the port refused 10.0.0.1: it has no certificate",
        "the port refused 10.0.0.2: it has no certificate",
    ]
    pass_time(61)
    refusals.add("10.0.0.1", "it hung up")
    assert caplog.messages[2:] == [
        "the port refused 10.0.0.1: it hung up (99 more connections since this was last told)"
    ]


def test_a_stranger_with_many_addresses_fills_neither_memory_nor_the_log(
    pass_time: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    refusals = Refusals(logger, "the port")
    for minute in range(3):
        for number in range(10_000):
            refusals.add(f"10.{minute}.{number // 256}.{number % 256}", "it hung up")
        assert len(refusals) <= 33
        assert len(caplog.messages) <= 33 * (minute + 1)
        pass_time(61)
    refusals.add("10.9.0.1", "it hung up")
    assert caplog.messages[-1] == "the port refused 10.9.0.1: it hung up"
    assert any("further addresses" in told for told in caplog.messages)
