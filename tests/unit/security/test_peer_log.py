from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import pytest

from miniray.security.peer_log import Arrivals, PeerLog, connected_to, open_files

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr("miniray.security.peer_log.time.monotonic", lambda: now[0])

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


def test_an_address_is_told_once_a_minute_with_what_came_meanwhile(
    pass_time: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    log = PeerLog(logger.warning)
    for _ in range(100):
        log.add("10.0.0.1", "was refused")
    log.add("10.0.0.2", "was refused")
    assert caplog.messages == [
        "10.0.0.1 was refused",
        "10.0.0.2 was refused",
    ]
    pass_time(61)
    log.add("10.0.0.1", "hung up")
    assert caplog.messages[2:] == [
        "10.0.0.1 hung up (99 more connections since the last such line)"
    ]


def test_a_stranger_with_many_addresses_fills_neither_memory_nor_the_log(
    pass_time: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    log = PeerLog(logger.warning)
    for minute in range(3):
        for number in range(10_000):
            log.add(f"10.{minute}.{number // 256}.{number % 256}", "hung up")
        assert len(log) <= 33
        assert len(caplog.messages) <= 33 * (minute + 1)
        pass_time(61)
    log.add("10.9.0.1", "hung up")
    assert caplog.messages[-1] == "10.9.0.1 hung up"
    assert any("further addresses" in told for told in caplog.messages)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_tells_who_is_connected_to_a_port(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        # The other family has this port too, and may have connections at it.
        before = connected_to(port)
        with socket.create_connection((host, port)) as sock:
            client = (host, sock.getsockname()[1])
            assert client not in before
            assert client in connected_to(port)


def test_it_is_told_when_connections_have_nearly_all_descriptors(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrivals = Arrivals(logger.warning)
    arrivals()
    assert not caplog.messages
    count, _ = open_files()
    monkeypatch.setattr(
        "miniray.security.peer_log.resource.getrlimit", lambda _: (count + 1, count + 1)
    )
    for _ in range(200):  # in no time
        arrivals()
    [told] = caplog.messages
    assert f"of the {count + 1} files that it may have open" in told
