"""Who has waited long, in order."""

from __future__ import annotations

import pytest

from miniray.common.specs import NodeAffinity
from miniray.head.scheduling.aging import Aging
from miniray.head.scheduling.demands import Demand, LeaseRequest
from miniray.head.scheduling.resources import ResourcePool, node_pool
from miniray.head.scheduling.scheduler import ClusterScheduler


@pytest.fixture
def numbers() -> dict[str, int]:
    """The current number of each owner."""
    return {}


@pytest.fixture
def aging(numbers: dict[str, int]) -> Aging[str]:
    return Aging(lambda owner, number: numbers.get(owner) == number)


def wait(aging: Aging[str], numbers: dict[str, int], owner: str, number: int) -> None:
    numbers[owner] = number
    aging.add(owner, number, float(number))


def test_who_came_first_is_taken_first_and_only_once(
    aging: Aging[str], numbers: dict[str, int]
) -> None:
    for owner, number in (("a", 1), ("b", 2), ("c", 9)):
        wait(aging, numbers, owner, number)
    assert aging.take_old(5.0) == ("a", 1, 1.0)
    aging.add("a", 1, 1.0)
    assert [aging.take_old(5.0) for _ in range(3)] == [("a", 1, 1.0), ("b", 2, 2.0), None]
    assert aging.first_after(5.0) == 9.0


def test_what_does_not_hold_any_more_is_passed_over(
    aging: Aging[str], numbers: dict[str, int]
) -> None:
    for owner, number in (("a", 1), ("b", 2), ("c", 3)):
        wait(aging, numbers, owner, number)
    wait(aging, numbers, "a", 4)
    del numbers["b"]
    assert aging.first_after(0.0) == 3.0
    assert aging.take_old(5.0) == ("c", 3, 3.0)
    assert aging.take_old(5.0) == ("a", 4, 4.0)
    assert aging.first_after(0.0) is None


def node(number: int, cpus: float = 1.0) -> ResourcePool:
    return node_pool(f"{number:032x}", {"CPU": cpus})


def ask(scheduler: ClusterScheduler, id: bytes, demand: Demand, now: float = 0.0) -> None:
    scheduler.submit(LeaseRequest(id, demand), now)


def test_the_next_deadline_is_that_of_the_first_who_has_not_waited_long() -> None:
    scheduler = ClusterScheduler(reserve_after=10.0)
    scheduler.add_node(node(0), 0.0)
    ask(scheduler, b"held", Demand.of({"CPU": 1}))
    assert scheduler.next_deadline() is None
    for number in range(3):
        ask(scheduler, b"%d" % number, Demand.of({"CPU": 1 - number / 10}), 1.0 + number)
    assert scheduler.next_deadline() == 11.0
    scheduler.cancel(b"0", 5.0)
    assert scheduler.next_deadline() == 12.0
    scheduler.advance(12.0)
    assert scheduler.next_deadline() == 13.0


def test_what_became_feasible_again_is_reserved_for() -> None:
    scheduler = ClusterScheduler(reserve_after=10.0)
    scheduler.add_node(node(0), 0.0)
    ask(scheduler, b"large", Demand.of({"CPU": 3}))
    scheduler.advance(11.0)
    scheduler.add_node(node(1, 4.0), 12.0)
    assert scheduler.lease(b"large") is not None
    ask(scheduler, b"next", Demand.of({"CPU": 3}), 12.0)
    ask(scheduler, b"small", Demand.of({"CPU": 0.5}), 12.0)
    scheduler.release(b"large", 13.0)
    assert scheduler.lease(b"next") is not None


def test_who_prefers_a_node_uses_others_while_that_is_of_no_use() -> None:
    scheduler = ClusterScheduler()
    for number in range(2):
        scheduler.add_node(node(number), 0.0)
        ask(scheduler, b"held%d" % number, Demand.of({"CPU": 1}))
    wanted = NodeAffinity(f"{0:032x}", soft=True)
    ask(scheduler, b"a", Demand.of({"CPU": 1}, placement=wanted))
    scheduler.release(b"held1", 1.0)
    assert scheduler.lease(b"a") is None
    scheduler.drain_node(f"{0:032x}", 2.0)
    assert scheduler.lease(b"a") is not None
    ask(scheduler, b"b", Demand.of({"CPU": 1}, placement=wanted))
    scheduler.drain_node(f"{0:032x}", 3.0, draining=False)
    scheduler.release(b"a", 4.0)
    assert scheduler.lease(b"b") is None
    scheduler.release(b"held0", 5.0)
    lease = scheduler.lease(b"b")
    assert lease is not None
    assert lease.allocation.node_id == f"{0:032x}"
