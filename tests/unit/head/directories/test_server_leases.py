"""Leases of workers for tasks, and how clients are asked to give them back."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from head_harness import FakeCluster, FakeDaemon, actor_spec, new_id, task_spec

from miniray._proto import head_pb2
from miniray.common.specs import BundleAffinity, GrantedLease, NodeAffinity
from miniray.exceptions import PlacementGroupRemovedError, TaskUnschedulableError
from miniray.head.directories.contention import may_ask

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUP = 7


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def daemon(cluster: FakeCluster) -> FakeDaemon:
    return cluster.node({"CPU": 4})


def want(daemon: FakeDaemon, client: bytes, total: int, near: bytes = b"", **spec: Any) -> None:
    daemon.notice(client, "want_leases", GROUP, task_spec(**spec), total, near)


def start(daemon: FakeDaemon, starts: Sequence[GrantedLease]) -> list[int]:
    """The workers of these leases are up; the leases' numbers."""
    for lease in starts:
        process_id = daemon.worker(lease.job_id)
        daemon.tell(lease_started=head_pb2.LeaseStarted(lease=lease.number, process_id=process_id))
    return [lease.number for lease in starts]


def get(
    daemon: FakeDaemon, client: bytes, total: int, group: int = GROUP, **spec: Any
) -> list[int]:
    """Leases that a client asks for and gets at once."""
    want(daemon, client, total, **spec)
    return start(daemon, daemon.take("start_lease"))


def free_cpus(daemon: FakeDaemon, client: bytes) -> float:
    return daemon.ask(client, "available_resources").get("CPU", 0.0)


def test_a_client_hears_of_a_lease_when_its_worker_runs(daemon: FakeDaemon) -> None:
    client = daemon.driver()
    want(daemon, client, 1, runtime_env="{}", max_calls=3)
    begun = daemon.one("start_lease")
    assert daemon.pushes(client, "lease_granted") == []
    assert (begun.owner, begun.job_id, begun.epoch) == (client, client, 1)
    told = (begun.spec.runtime_env, begun.max_calls, begun.job.namespace)
    assert told == ("{}", 3, "tests")
    held = begun.allocation
    assert (held.resources(), held.devices, held.bundle) == ({"CPU": 1.0}, (), None)
    start(daemon, [begun])
    ((group, number, node_id, _, limit),) = daemon.pushes(client, "lease_granted")
    assert (group, number, node_id, limit) == (GROUP, begun.number, daemon.node_id, 3)


def test_shapes_of_which_nothing_is_wanted_are_forgotten(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    client = daemon.driver()
    for group in range(3):
        daemon.notice(client, "want_leases", group, task_spec(), 1)
        (number,) = start(daemon, daemon.take("start_lease"))
        daemon.notice(client, "return_lease", number)
        daemon.notice(client, "want_leases", group, task_spec(), 0)
        daemon.lease_ended(number)
    assert not cluster.head.cluster.leases._groups[client]


def test_tasks_that_take_nothing_start_few_workers_at_a_time(daemon: FakeDaemon) -> None:
    client = daemon.driver()
    want(daemon, client, 25, resources={})
    starts = daemon.take("start_lease")
    assert len(starts) == 10
    start(daemon, starts[:3])
    more = daemon.take("start_lease")
    assert len(more) == 3
    daemon.lease_ended(more[0].number)
    instead = daemon.one("start_lease")
    want(daemon, client, 8, resources={})
    start(daemon, [*starts[3:], *more[1:], instead])
    assert daemon.take("start_lease") == []
    want(daemon, client, 25, resources={})
    start(daemon, daemon.take("start_lease"))
    start(daemon, daemon.take("start_lease"))
    assert daemon.take("start_lease") == []
    assert len(daemon.pushes(client, "lease_granted")) == 25


def test_tasks_that_take_a_cpu_start_their_workers_at_once(cluster: FakeCluster) -> None:
    daemon = cluster.node({"CPU": 24})
    want(daemon, daemon.driver(), 30)
    assert len(daemon.take("start_lease")) == 24


@pytest.mark.parametrize("wrong", [{"resources": {"CPU": b"half"}}, {"resources": None}])
def test_tasks_that_the_head_cannot_read_fail_with_its_words(
    daemon: FakeDaemon, wrong: dict[str, Any]
) -> None:
    client = daemon.driver()
    want(daemon, client, 1, **wrong)
    ((group, error),) = daemon.pushes(client, "lease_failed")
    assert group == GROUP
    with pytest.raises(TaskUnschedulableError, match=r"task cannot .*\(ValueError: .*resources"):
        raise pickle.loads(error)


@pytest.mark.parametrize(("given", "with_devices", "without"), [(None, 1, 0), (0, 0, 0), (2, 2, 2)])
def test_a_worker_that_had_devices_ends_after_a_task_unless_told_otherwise(
    cluster: FakeCluster, given: int | None, with_devices: int, without: int
) -> None:
    for devices, limit in (({"FPGA": ["0"]}, with_devices), ({}, without)):
        daemon = cluster.node({} if devices else {"FPGA": 1}, devices)
        client = daemon.driver()
        want(daemon, client, 1, resources={"FPGA": 1}, max_calls=given)
        begun = daemon.one("start_lease")
        assert begun.max_calls == limit
        start(daemon, [begun])
        assert [body[4] for body in daemon.pushes(client, "lease_granted")] == [limit]


def test_leases_are_on_the_node_that_is_named_until_it_is_full(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    other = cluster.node({"CPU": 2})
    client = daemon.driver()
    want(daemon, client, 1)
    want(daemon, client, 3, near=other.node_id)
    starts = other.take("start_lease")
    assert (len(daemon.take("start_lease")), len(starts)) == (1, 2)
    start(other, starts)
    want(daemon, client, 4, near=other.node_id)
    assert len(daemon.take("start_lease")) == 1


def test_a_worker_that_was_given_back_is_handed_on_with_the_calls_that_it_has_left(
    daemon: FakeDaemon,
) -> None:
    client = daemon.driver()
    (number,) = get(daemon, client, 1, max_calls=5)
    daemon.notice(client, "return_lease", number, False, 3)
    assert daemon.one("end_lease").calls_left == 3
    daemon.tell(lease_ended=head_pb2.LeaseEnded(lease=number))
    want(daemon, client, 1, max_calls=5)
    again = daemon.one("start_lease").number
    process_id = daemon.worker(client)
    daemon.tell(
        lease_started=head_pb2.LeaseStarted(lease=again, process_id=process_id, calls_left=3)
    )
    assert [body[4] for body in daemon.pushes(client, "lease_granted")] == [5, 3]


def test_as_many_leases_come_as_are_wanted_and_fit(daemon: FakeDaemon) -> None:
    client = daemon.driver()
    assert len(get(daemon, client, 2)) == 2
    assert len(get(daemon, client, 10)) == 2
    assert get(daemon, client, 10) == []


def test_a_long_queue_keeps_one_request_waiting(daemon: FakeDaemon) -> None:
    client = daemon.driver()
    get(daemon, client, 100_000)
    assert len(daemon.cluster.head.cluster.grants.waiting) == 1
    (pending,) = daemon.ask(client, "state", "pending")
    assert (pending["count"], pending["names"]) == (99_996, ["work"])
    want(daemon, client, 10, name="later")
    (pending,) = daemon.ask(client, "state", "pending")
    assert (pending["count"], pending["names"]) == (6, ["later"])
    want(daemon, client, 4)
    assert daemon.ask(client, "state", "pending") == []


def test_a_returned_lease_is_free_when_its_daemon_says_so(daemon: FakeDaemon) -> None:
    client, other = daemon.driver(), daemon.driver()
    first, *_ = get(daemon, client, 4)
    want(daemon, other, 1)
    daemon.notice(client, "return_lease", first)
    end = daemon.one("end_lease")
    assert (end.lease, end.kill) == (first, False)
    assert daemon.take("start_lease") == []
    daemon.lease_ended(first)
    assert daemon.one("start_lease").owner == other


def test_a_client_cannot_return_the_lease_of_another(daemon: FakeDaemon) -> None:
    client, other = daemon.driver(), daemon.driver()
    (number,) = get(daemon, client, 1)
    daemon.notice(other, "return_lease", number)
    assert daemon.take("end_lease") == []


def test_a_lease_whose_worker_crashed_counts_until_its_client_returns_it(
    daemon: FakeDaemon,
) -> None:
    client = daemon.driver()
    numbers = get(daemon, client, 4)
    daemon.lease_ended(numbers[0])
    assert free_cpus(daemon, client) == 1.0
    assert get(daemon, client, 4) == []
    daemon.notice(client, "return_lease", numbers[0])
    assert daemon.take("end_lease") == []
    assert len(get(daemon, client, 4)) == 1


def test_leases_end_with_their_client(daemon: FakeDaemon) -> None:
    client, other = daemon.driver(), daemon.driver()
    numbers = get(daemon, client, 100)
    want(daemon, other, 4)
    daemon.end_process(client, None, planned=True)
    ended = daemon.take("end_lease")
    assert {end.lease for end in ended} == set(numbers)
    assert all(end.kill for end in ended)
    for number in numbers:
        daemon.lease_ended(number)
    assert [begun.owner for begun in daemon.take("start_lease")] == [other] * 4


def test_a_worker_that_starts_after_its_client_ended_is_ended(daemon: FakeDaemon) -> None:
    client = daemon.driver()
    want(daemon, client, 1)
    begun = daemon.one("start_lease")
    daemon.end_process(client, None)
    assert daemon.one("end_lease").kill
    start(daemon, [begun])
    assert daemon.pushes(client, "lease_granted") == []


def test_what_can_never_run_fails_once_with_the_reason(daemon: FakeDaemon) -> None:
    client = daemon.driver()
    want(daemon, client, 5, placement=NodeAffinity((b"gone" * 2).hex(), soft=False))
    ((group, error),) = daemon.pushes(client, "lease_failed")
    assert group == GROUP
    failure = pickle.loads(error)
    assert isinstance(failure, TaskUnschedulableError)
    assert "work" in str(failure)
    assert daemon.ask(client, "state", "pending") == []


def test_an_impossible_amount_fails_with_the_reason(daemon: FakeDaemon) -> None:
    client = daemon.driver()
    want(daemon, client, 1, resources={"GPU": 1.5})
    ((_, error),) = daemon.pushes(client, "lease_failed")
    assert "1.5" in str(pickle.loads(error))


def test_an_environment_that_cannot_be_made_fails_the_group(daemon: FakeDaemon) -> None:
    client = daemon.driver()
    want(daemon, client, 6)
    first, *_ = daemon.take("start_lease")
    daemon.tell(lease_failed=head_pb2.LeaseFailed(lease=first.number, error=b"no pip"))
    assert daemon.pushes(client, "lease_failed") == [(GROUP, b"no pip")]
    assert free_cpus(daemon, client) == 1.0
    assert daemon.take("start_lease") == []


def fail(daemon: FakeDaemon, error: bytes, tries: int) -> None:
    """The start of the worker that the daemon was asked for last fails."""
    begun = daemon.one("start_lease")
    daemon.tell(lease_failed=head_pb2.LeaseFailed(lease=begun.number, error=error, tries=tries))


def test_a_worker_that_may_start_elsewhere_is_tried_again(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    client = daemon.driver()
    want(daemon, client, 1)
    for _ in range(3):
        fail(daemon, b"fork", 3)
        cluster.timers.pass_time(1)
    assert daemon.pushes(client, "lease_failed") == [(GROUP, b"fork")]
    assert daemon.take("start_lease") == []


def test_workers_that_exit_and_those_that_are_killed_are_counted_apart(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    client = daemon.driver()
    want(daemon, client, 1)
    for _ in range(2):
        fail(daemon, b"exited", 3)
        cluster.timers.pass_time(10)
        for _ in range(4):
            fail(daemon, b"killed", 20)
            cluster.timers.pass_time(10)
    assert daemon.pushes(client, "lease_failed") == []
    fail(daemon, b"exited", 3)
    assert daemon.pushes(client, "lease_failed") == [(GROUP, b"exited")]


def test_the_pause_before_another_worker_is_started_grows(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    client = daemon.driver()
    want(daemon, client, 1)
    fail(daemon, b"killed", 20)
    for pause in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0):
        fail(daemon, b"killed", 20)
        cluster.timers.pass_time(pause - 0.01)
        assert daemon.take("start_lease") == []
        cluster.timers.pass_time(0.02)
    start(daemon, [daemon.one("start_lease")])
    want(daemon, client, 2)
    fail(daemon, b"killed", 20)
    assert daemon.take("start_lease")


def test_a_client_that_ends_in_such_a_pause_gets_no_worker(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    client = daemon.driver()
    want(daemon, client, 1)
    for _ in range(2):
        fail(daemon, b"killed", 20)
    daemon.end_process(client)
    cluster.timers.pass_time(10)
    assert daemon.take("start_lease") == []


def test_a_blocked_task_lends_its_cpu(daemon: FakeDaemon) -> None:
    client, worker = daemon.driver(), daemon.driver()
    numbers = get(daemon, client, 4)
    want(daemon, worker, 1)
    assert daemon.take("start_lease") == []
    daemon.tell(blocked=head_pb2.LeaseBlocked(lease=numbers[0], blocked=True))
    lent = daemon.one("start_lease")
    daemon.tell(blocked=head_pb2.LeaseBlocked(lease=numbers[0], blocked=False))
    daemon.lease_ended(lent.number)
    assert free_cpus(daemon, client) == 0.0


def test_a_task_in_a_group_draws_on_it_and_fails_when_it_is_removed(daemon: FakeDaemon) -> None:
    client = daemon.driver()
    id = client + new_id()
    daemon.notice(
        client, "create_placement_group", id, [{"CPU": 1}], "PACK", "", "tests", False, None
    )
    (number,) = get(daemon, client, 3, placement=BundleAffinity(id, -1, capture_child_tasks=True))
    daemon.ask(client, "remove_placement_group", id)
    ((_, error),) = daemon.pushes(client, "lease_failed")
    assert isinstance(pickle.loads(error), PlacementGroupRemovedError)
    end = daemon.one("end_lease")
    assert (end.lease, end.kill) == (number, True)
    daemon.lease_ended(number)
    assert free_cpus(daemon, client) == 4.0


def test_the_spec_of_a_task_names_its_group(daemon: FakeDaemon) -> None:
    client = daemon.driver()
    id = client + new_id()
    daemon.notice(
        client, "create_placement_group", id, [{"CPU": 1}], "PACK", "", "tests", False, None
    )
    want(daemon, client, 1, placement=BundleAffinity(id, -1, capture_child_tasks=True))
    begun = daemon.one("start_lease")
    group = begun.spec.group
    assert (group.placement_group_id, group.capture_child_tasks) == (id, True)
    assert begun.allocation.bundle == (id, 0)


# --- giving back -------------------------------------------------------------------


def revoked(daemon: FakeDaemon, client: bytes) -> list[int]:
    return [number for number, _ in daemon.pushes(client, "lease_revoked")]


def hand_over(daemon: FakeDaemon, client: bytes, numbers: Sequence[int]) -> list[bytes]:
    """A client returns leases; who gets what comes free."""
    for number in numbers:
        daemon.notice(client, "return_lease", number)
        daemon.lease_ended(number)
    begun = daemon.take("start_lease")
    start(daemon, begun)
    return [lease.owner for lease in begun]


def test_clients_share_equally_after_asking_back(cluster: FakeCluster, daemon: FakeDaemon) -> None:
    first, second = daemon.driver(), daemon.driver()
    get(daemon, first, 100)
    want(daemon, second, 100)
    cluster.timers.pass_time(1)
    back = revoked(daemon, first)
    assert len(back) == 2
    assert hand_over(daemon, first, back) == [second, second]
    want(daemon, first, 100)
    cluster.timers.pass_time(1)
    assert revoked(daemon, first) == revoked(daemon, second) == []


def test_a_lease_is_asked_back_once(cluster: FakeCluster, daemon: FakeDaemon) -> None:
    first, second = daemon.driver(), daemon.driver()
    get(daemon, first, 4)
    want(daemon, second, 1)
    cluster.timers.pass_time(1)
    assert len(revoked(daemon, first)) == 1
    want(daemon, second, 1)
    cluster.timers.pass_time(1)
    assert revoked(daemon, first) == []


def test_the_only_slot_goes_round(cluster: FakeCluster) -> None:
    daemon = cluster.node({"CPU": 1})
    clients = [daemon.driver() for _ in range(3)]
    for client in clients:
        get(daemon, client, 10)
    holders = [clients[0]]
    for _ in range(6):
        cluster.timers.pass_time(1)
        (number,) = revoked(daemon, holders[-1])
        (holder,) = hand_over(daemon, holders[-1], [number])
        want(daemon, holders[-1], 10)
        holders.append(holder)
    assert holders == [clients[index % 3] for index in range(7)]


def test_a_new_lease_is_not_asked_back_at_once(cluster: FakeCluster) -> None:
    daemon = cluster.node({"CPU": 1})
    first, second = daemon.driver(), daemon.driver()
    want(daemon, second, 0)
    get(daemon, first, 10)
    want(daemon, second, 10)
    cluster.timers.pass_time(0.009)
    assert revoked(daemon, first) == []
    cluster.timers.pass_time(0.1)
    assert len(revoked(daemon, first)) == 1


def test_an_actor_that_needs_several_leases_gets_what_tasks_give_back(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    client = daemon.driver()
    get(daemon, client, 100)
    id = client + new_id()
    spec = actor_spec(resources={"CPU": 2}, placement_resources={"CPU": 2})
    daemon.notice(client, "create_actor", id, spec, False)
    daemon.notice(client, "start_actor", id, (0, b"", ()), [], None)
    cluster.timers.pass_time(0.9)
    assert revoked(daemon, client) == []
    cluster.timers.pass_time(0.2)
    back = revoked(daemon, client)
    assert len(back) == 2
    for number in back:  # the client wants more leases, and gets none of what comes back
        assert hand_over(daemon, client, [number]) == []
    assert daemon.one("start_actor").actor_id == id


def test_leases_whose_workers_start_late_are_gathered_too(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    client, other = daemon.driver(), daemon.driver()
    want(daemon, client, 100)
    *first, last = daemon.take("start_lease")
    start(daemon, first)
    want(daemon, other, 1, resources={"CPU": 4})
    cluster.timers.pass_time(3)
    assert revoked(daemon, client) == []
    start(daemon, [last])
    cluster.timers.pass_time(0.1)
    assert len(revoked(daemon, client)) == 4


def test_a_waiting_placement_group_gets_what_tasks_give_back(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    client, other = daemon.driver(), daemon.driver()
    get(daemon, client, 100)
    id = other + new_id()
    bundles = [{"CPU": 1}, {"CPU": 2}]
    daemon.notice(
        other, "create_placement_group", id, bundles, "STRICT_PACK", "", "tests", False, None
    )
    cluster.timers.pass_time(11)
    back = revoked(daemon, client)
    assert len(back) == 3
    assert hand_over(daemon, client, back) == []
    assert daemon.ask(other, "placement_group_table", id)["state"] == "CREATED"


def test_leases_are_not_asked_back_for_what_they_cannot_serve(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    first, second = daemon.driver(), daemon.driver()
    get(daemon, first, 4)
    want(daemon, second, 1, resources={"GPU": 1})
    cluster.timers.pass_time(1)
    assert revoked(daemon, first) == []


def test_sharing_ends_with_equal_shares() -> None:
    assert may_ask(held=4, by_waiter=2)
    assert not may_ask(held=3, by_waiter=2)
    assert may_ask(held=1, by_waiter=0)


def test_who_heard_that_a_task_waits_hears_that_it_has_become_infeasible(
    cluster: FakeCluster,
) -> None:
    daemon = cluster.node({"CPU": 1})
    driver = daemon.driver()
    big = cluster.node({"CPU": 2})
    for id in (1, 2):
        daemon.notice(driver, "want_leases", id, task_spec(resources={"CPU": 2}), 1)
    cluster.timers.pass_time(60)
    assert daemon.pushes(driver, "pending") == [()]
    [told] = daemon.long_waiting(driver)
    assert ("has 0 of 2 free" in told["reason"], told["infeasible"]) == (True, False)
    assert big.node is not None
    cluster.head.lose(big.node, "gone")
    cluster.timers.pass_time(1)
    assert daemon.pushes(driver, "pending") == [()]
    [told] = daemon.long_waiting(driver)
    assert (told["names"], told["count"], told["infeasible"]) == (["work"], 2, True)
