"""Workers that have done their work, and keep what others wait for until their calls have ended."""

from __future__ import annotations

import pytest
from head_harness import FakeCluster, FakeDaemon, new_id, task_spec

from miniray._proto import head_pb2
from miniray.common.config import config

GPU = {"GPU": 1}


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def daemon(cluster: FakeCluster) -> FakeDaemon:
    return cluster.node({"CPU": 4, "GPU": 1}, {"GPU": ["0"]})


def run(
    daemon: FakeDaemon, client: bytes, name: str, group: int = 1, **resources: float
) -> tuple[int, bytes]:
    """A task of a client gets a lease: its number and the process that runs it."""
    spec = task_spec(name=name, resources=resources or GPU)
    daemon.notice(client, "want_leases", group, spec, 1)
    begun = daemon.one("start_lease")
    process_id = daemon.worker(begun.job_id)
    daemon.tell(lease_started=head_pb2.LeaseStarted(lease=begun.number, process_id=process_id))
    return begun.number, process_id


def want(daemon: FakeDaemon, client: bytes, name: str = "inner", **resources: float) -> None:
    spec = task_spec(name=name, resources=resources or GPU)
    daemon.notice(client, "want_leases", 9, spec, 1)


def block(daemon: FakeDaemon, number: int, leaving: bytes = b"") -> None:
    """A task waits for others; or its worker does, which is ``leaving``."""
    daemon.tell(blocked=head_pb2.LeaseBlocked(lease=number, blocked=True, leaving=leaving))


def ended(daemon: FakeDaemon) -> list[tuple[int, bool, str]]:
    return [(end.lease, end.kill, end.why) for end in daemon.take("end_lease")]


def wait_long(cluster: FakeCluster) -> None:
    """Twice as long as others wait, and then some."""
    for _ in range(5):
        cluster.timers.pass_time(config().reserve_after / 2)


def test_a_leaving_worker_whose_call_needs_its_device_is_ended_with_the_reason(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    number, worker = run(daemon, daemon.driver(), "outer")
    want(daemon, worker)
    block(daemon, number, leaving=worker)
    cluster.timers.pass_time(config().reserve_after * 0.9)
    assert ended(daemon) == []
    wait_long(cluster)
    ((lease, kill, why), *_) = ended(daemon)
    assert (lease, kill) == (number, True)
    assert "others had waited 10 s for its GPU" in why


def test_what_a_leaving_worker_keeps_is_left_to_it_if_nobody_waits_for_that(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    number, worker = run(daemon, daemon.driver(), "outer")
    want(daemon, daemon.driver(), CPU=100)
    block(daemon, number, leaving=worker)
    wait_long(cluster)
    assert ended(daemon) == []


def test_a_leaving_worker_may_wait_for_a_task_of_its_own_that_runs(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    number, worker = run(daemon, daemon.driver(), "outer")
    inner, _ = run(daemon, worker, "inner", CPU=1)
    want(daemon, daemon.driver())
    block(daemon, number, leaving=worker)
    wait_long(cluster)
    assert ended(daemon) == []
    block(daemon, inner)
    wait_long(cluster)
    assert ended(daemon)[0][0] == number


def test_a_leaving_worker_may_wait_for_a_task_that_waits_for_what_others_hold(
    cluster: FakeCluster,
) -> None:
    daemon = cluster.node({"CPU": 4, "GPU": 1, "licence": 1}, {"GPU": ["0"]})
    driver = daemon.driver()
    number, worker = run(daemon, driver, "outer")
    run(daemon, driver, "holder", group=2, licence=1)
    want(daemon, worker, licence=1)
    want(daemon, driver)
    block(daemon, number, leaving=worker)
    wait_long(cluster)
    assert ended(daemon) == []


def test_a_worker_that_waits_in_the_middle_of_its_task_keeps_its_device(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    number, _ = run(daemon, daemon.driver(), "outer")
    want(daemon, daemon.driver())
    block(daemon, number)
    wait_long(cluster)
    assert all(not kill for _, kill, _ in ended(daemon))


def test_a_placement_group_that_waits_for_the_device_gets_it(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    driver = daemon.driver()
    number, worker = run(daemon, driver, "outer")
    arguments = (driver + new_id(), [GPU], "PACK", "", "tests", False, None)
    daemon.notice(driver, "create_placement_group", *arguments)
    block(daemon, number, leaving=worker)
    wait_long(cluster)
    assert ended(daemon)[0][0] == number


def test_a_worker_that_begins_to_leave_is_given_time_however_long_others_have_waited(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    number, worker = run(daemon, daemon.driver(), "outer")
    want(daemon, worker)
    wait_long(cluster)
    block(daemon, number, leaving=worker)
    cluster.timers.pass_time(config().reserve_after * 0.9)
    assert ended(daemon) == []
