"""A client that is asked for a lease in use gives back an equal one that it does not use."""

from __future__ import annotations

from typing import Any

import pytest
from head_harness import FakeCluster, FakeDaemon, task_spec

from miniray._proto import head_pb2

GROUP = 3


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def daemon(cluster: FakeCluster) -> FakeDaemon:
    return cluster.node({"CPU": 4})


def get(daemon: FakeDaemon, client: bytes, total: int, **spec: Any) -> list[int]:
    daemon.notice(client, "want_leases", GROUP, task_spec(**spec), total)
    begun = daemon.take("start_lease")
    for lease in begun:
        started = head_pb2.LeaseStarted(lease=lease.number, process_id=daemon.worker(client))
        daemon.tell(lease_started=started)
    return [lease.number for lease in begun]


def revoked(daemon: FakeDaemon, client: bytes) -> list[int]:
    return [number for number, _ in daemon.pushes(client, "lease_revoked")]


def give_back(daemon: FakeDaemon, client: bytes, number: int) -> None:
    daemon.notice(client, "return_lease", number)
    daemon.lease_ended(number)


def test_the_other_lease_serves_who_waits_and_no_more_are_asked_for(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    first, second = daemon.driver(), daemon.driver()
    held = get(daemon, first, 4)
    assert get(daemon, second, 1) == []
    cluster.timers.pass_time(1)
    [asked] = revoked(daemon, first)
    idle = next(number for number in held if number != asked)
    daemon.notice(first, "swap_lease", asked, idle)
    cluster.timers.pass_time(1)
    assert revoked(daemon, first) == []  # the idle one is on its way
    give_back(daemon, first, idle)
    assert daemon.one("start_lease").owner == second
    cluster.timers.pass_time(1)
    assert revoked(daemon, first) == []


def test_a_lease_that_was_kept_can_be_asked_for_again(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    first, second = daemon.driver(), daemon.driver()
    held = get(daemon, first, 4)
    get(daemon, second, 2)
    cluster.timers.pass_time(1)
    asked = revoked(daemon, first)
    assert len(asked) == 2
    idle = next(number for number in held if number not in asked)
    daemon.notice(first, "swap_lease", asked[0], idle)
    for number in (idle, asked[1]):
        give_back(daemon, first, number)
    third = daemon.driver()
    get(daemon, third, 1)
    cluster.timers.pass_time(1)
    assert revoked(daemon, first) + revoked(daemon, second)


def test_leases_of_others_are_not_swapped(cluster: FakeCluster, daemon: FakeDaemon) -> None:
    first, second = daemon.driver(), daemon.driver()
    held = get(daemon, first, 3)
    [other] = get(daemon, second, 1)
    get(daemon, daemon.driver(), 1)
    cluster.timers.pass_time(1)
    [asked] = revoked(daemon, first)
    daemon.notice(first, "swap_lease", asked, other)
    daemon.notice(second, "swap_lease", asked, next(n for n in held if n != asked))
    daemon.notice(first, "swap_lease", asked, 12345)
    give_back(daemon, first, asked)
    assert len(daemon.take("start_lease")) == 1
