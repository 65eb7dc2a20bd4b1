"""Workers that end by rule and wait for calls that need what these workers hold."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from head_harness import FakeCluster, FakeDaemon, task_spec

from miniray._proto import head_pb2
from miniray.common.config import config
from miniray.exceptions import TaskUnschedulableError

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


def want_gpu(daemon: FakeDaemon, client: bytes, name: str = "inner", group: int = 9) -> None:
    daemon.notice(client, "want_leases", group, task_spec(name=name, resources=GPU), 1)


def failures(daemon: FakeDaemon, client: bytes) -> list[Any]:
    return [pickle.loads(error) for _, error in daemon.pushes(client, "lease_failed")]


def depart(daemon: FakeDaemon, number: int, process_id: bytes, *callees: bytes) -> None:
    """A worker has ended its work, and waits for its calls."""
    daemon.notice(daemon.node_id, "awaits_calls", process_id, number, list(callees))


def wait_long(cluster: FakeCluster) -> None:
    cluster.timers.pass_time(config().reserve_after * 1.2)


def test_a_call_of_a_departing_worker_that_needs_its_device_is_refused_with_the_reason(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    number, worker = run(daemon, daemon.driver(), "outer")
    want_gpu(daemon, worker)
    depart(daemon, number, worker)
    cluster.timers.pass_time(config().reserve_after * 0.9)
    assert failures(daemon, worker) == []
    wait_long(cluster)
    (error,) = failures(daemon, worker)
    assert isinstance(error, TaskUnschedulableError)
    assert "inner" in str(error)
    assert "needs GPU 1, which the worker of outer holds" in str(error)


def test_what_such_a_worker_calls_later_is_refused_too(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    number, worker = run(daemon, daemon.driver(), "outer")
    depart(daemon, number, worker)
    wait_long(cluster)
    want_gpu(daemon, worker)
    wait_long(cluster)
    assert len(failures(daemon, worker)) == 1


def test_a_call_through_others_is_refused_too(cluster: FakeCluster, daemon: FakeDaemon) -> None:
    number, worker = run(daemon, daemon.driver(), "outer")
    _, between = run(daemon, worker, "between", CPU=1)
    want_gpu(daemon, between)
    depart(daemon, number, worker)
    wait_long(cluster)
    assert len(failures(daemon, between)) == 1


def test_a_call_of_an_actor_on_which_the_worker_waits_is_refused(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    driver = daemon.driver()
    number, worker = run(daemon, driver, "outer")
    actor = daemon.worker(driver)
    want_gpu(daemon, actor)
    depart(daemon, number, worker, actor)
    wait_long(cluster)
    assert len(failures(daemon, actor)) == 1


def test_others_that_wait_for_the_device_go_on_waiting(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    driver = daemon.driver()
    number, worker = run(daemon, driver, "outer")
    want_gpu(daemon, driver)
    depart(daemon, number, worker)
    wait_long(cluster)
    assert failures(daemon, driver) == []
    daemon.lease_ended(number)
    daemon.one("start_lease")


def test_a_call_waits_while_another_task_may_make_room(cluster: FakeCluster) -> None:
    daemon = cluster.node({"CPU": 4, "GPU": 2}, {"GPU": ["0", "1"]})
    driver = daemon.driver()
    number, worker = run(daemon, driver, "outer")
    other, _ = run(daemon, driver, "long", group=2)
    want_gpu(daemon, worker)
    depart(daemon, number, worker)
    wait_long(cluster)
    assert failures(daemon, worker) == []
    daemon.lease_ended(other)
    daemon.one("start_lease")


def test_of_two_workers_in_each_others_way_one_yields(cluster: FakeCluster) -> None:
    daemon = cluster.node({"CPU": 4, "GPU": 2}, {"GPU": ["0", "1"]})
    driver = daemon.driver()
    held = [run(daemon, driver, f"outer {n}", group=n) for n in (1, 2)]
    for number, worker in held:
        want_gpu(daemon, worker)
        depart(daemon, number, worker)
    wait_long(cluster)
    (number, worker), (_, other) = held
    assert [len(failures(daemon, process)) for process in (worker, other)] == [1, 0]
    daemon.end_process(worker)
    daemon.lease_ended(number)
    assert daemon.one("start_lease").owner == other


def test_of_two_workers_in_each_others_way_both_yield_if_the_first_goes_on_waiting(
    cluster: FakeCluster,
) -> None:
    daemon = cluster.node({"CPU": 4, "GPU": 2}, {"GPU": ["0", "1"]})
    driver = daemon.driver()
    held = [run(daemon, driver, f"outer {n}", group=n) for n in (1, 2)]
    for number, worker in held:
        want_gpu(daemon, worker)
        depart(daemon, number, worker)
    wait_long(cluster)
    wait_long(cluster)
    assert [len(failures(daemon, worker)) for _, worker in held] == [1, 1]


def test_a_worker_that_ended_is_in_nobodys_way(cluster: FakeCluster, daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    number, worker = run(daemon, driver, "outer")
    depart(daemon, number, worker)
    daemon.lease_ended(number)
    daemon.end_process(worker)
    run(daemon, driver, "other", group=3)
    want_gpu(daemon, driver)
    wait_long(cluster)
    assert failures(daemon, driver) == []


def test_a_daemon_can_ask_who_waits_for_whom(cluster: FakeCluster, daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    _, worker = run(daemon, driver, "outer")
    _, between = run(daemon, worker, "between", CPU=1)
    ask = daemon.node_id, "waits_for"
    assert daemon.ask(*ask, worker, worker)
    assert daemon.ask(*ask, worker, between)
    assert not daemon.ask(*ask, between, worker)
    assert not daemon.ask(*ask, worker, driver)
