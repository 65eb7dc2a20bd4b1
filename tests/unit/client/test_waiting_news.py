"""What a driver says of what waits for resources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from miniray.client.bootstrap import WaitingNews

if TYPE_CHECKING:
    from collections.abc import Callable

    Answer = Callable[[Any, list[dict[str, Any]], int], None]


class Cluster:
    """An I/O loop and a link of which a test says what waits, and when reminders are due."""

    def __init__(self) -> None:
        self.waiting: list[dict[str, Any]] = []
        self.reminders: list[Callable[[], None]] = []
        self.told: list[str] = []
        self.news = WaitingNews(self, self, self.told.append)  # type: ignore[arg-type]

    def call_later(self, _delay: float, callback: Callable[[], None]) -> Callable[[], None]:
        self.reminders = [callback]  # a new one is set after the one before was cancelled
        return self.reminders.clear

    def head_request_async(self, method: str, _args: tuple[Any, ...], done: Answer) -> None:
        assert method == "waiting_of_job"
        done(None, list(self.waiting), -1)

    def push(self, *waiting: dict[str, Any]) -> list[str]:
        """What is told when the head says that something of this waits."""
        self.told.clear()
        self.waiting = [*waiting]
        self.news.on_pending()
        return list(self.told)

    def remind(self) -> None:
        self.reminders.pop()()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def demand(*names: str, since: float = 1000.0, seconds: float = 5.0, **more: Any) -> dict[str, Any]:
    found = {"kind": "task", "shape": {"CPU": 2}, "count": 1, "names": list(names)}
    when = {"since": since, "seconds": seconds}
    return {**found, **when, "infeasible": False, "reason": "it needs CPU 2", **more}


def test_a_demand_is_told_once_while_it_waits(cluster: Cluster) -> None:
    assert cluster.push(demand("work")) == ["work waits: it needs CPU 2."]
    changed = demand("work", seconds=9, reason="the largest node has 1")
    assert cluster.push(changed) == []


def test_a_demand_that_waits_again_is_told_again(cluster: Cluster) -> None:
    cluster.push(demand("work"))
    cluster.waiting = []
    cluster.remind()  # it was served, so nothing reminds any more
    assert cluster.push(demand("work", since=2000)) == ["work waits: it needs CPU 2."]
    assert cluster.reminders


def test_a_demand_that_waits_again_before_a_reminder_is_told_again(cluster: Cluster) -> None:
    cluster.push(demand("work"))
    assert cluster.push(demand("work", since=1010)) == ["work waits: it needs CPU 2."]


def test_demands_that_cannot_be_served_for_different_reasons_are_all_told(cluster: Cluster) -> None:
    labels = [demand("work", infeasible=True, reason=f"no node has zone {z}") for z in "ab"]
    cluster.push(labels[0])
    told = cluster.push(*labels)
    assert [each.split(".")[0] for each in told] == ["work waits: no node has zone b"]


def test_several_functions_wait(cluster: Cluster) -> None:
    assert cluster.push(demand("load", "train")) == ["load, train wait: it needs CPU 2."]
