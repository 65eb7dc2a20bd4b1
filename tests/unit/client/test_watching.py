"""Rows that a command watches: what waits for it, and what ends it."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from miniray.client.command_connection import CommandConnection
from miniray.messages import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Watched(CommandConnection):
    """Stands for the connection to a cluster; calls of the tests stand for its I/O thread."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(address="there"))  # type: ignore[arg-type]
        self.topics: dict[str, Callable[..., object]] = {}
        self.asked: list[str] = []
        self.refusal: ValueError | None = None

    @contextlib.contextmanager
    def attached(
        self, _job_id: bytes | None = None, on_lost: Callable[[], object] | None = None
    ) -> Iterator[Any]:
        assert on_lost is not None
        self.lost = on_lost

        def ask(method: str, _listings: list[str]) -> None:
            self.asked.append(method)
            if self.refusal is not None:
                raise self.refusal
            self.push(0)

        link = SimpleNamespace(head_request=ask, head_notice=ask)
        yield SimpleNamespace(link=link, runtime=SimpleNamespace(on_topic=self.topics))

    def push(self, *numbers: int) -> None:
        rows = {str(number): {"event_id": number} for number in numbers}
        self.topics["rows"]("events", plain.dumps((rows, [])))


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_head_that_is_back_is_asked_again(watched: Watched) -> None:
    rows = watched.watch("events")
    assert next(rows) == {"event_id": 0}
    watched.topics["head_back"]()
    assert next(rows) == {"event_id": 0}
    assert watched.asked == ["watch", "watch"]


def test_of_more_rows_than_wait_the_latest_stay(watched: Watched) -> None:
    rows = watched.watch("events")
    next(rows)
    for number in range(1, 5001):
        watched.push(number)
    watched.lost()
    waited = [row["event_id"] for row in itertools.islice(rows, 999)]
    assert waited == list(range(4002, 5001))
    with pytest.raises(ConnectionError, match="The cluster at there has ended"):
        next(rows)


def test_one_that_the_head_refuses_gets_its_error(watched: Watched) -> None:
    watched.refusal = ValueError("16 processes watch")
    with pytest.raises(ValueError, match="16 processes watch"):
        next(watched.watch("events"))
