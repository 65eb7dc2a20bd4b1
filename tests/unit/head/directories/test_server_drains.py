"""Nodes that are drained, as those who ask for it and who need room see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from head_harness import FakeCluster, FakeDaemon, actor_spec, new_id, task_spec
from kept import kept

from miniray._proto import head_pb2
from miniray.head.storage import SqliteStorage

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def daemon(cluster: FakeCluster) -> FakeDaemon:
    return cluster.node({"CPU": 2})


def make_actor(daemon: FakeDaemon, owner: bytes) -> tuple[bytes, Any]:
    """An actor of two CPUs that lives: its id, and how it was started."""
    id = owner + new_id()
    spec = actor_spec(resources={"CPU": 2}, placement_resources={"CPU": 2})
    daemon.notice(owner, "create_actor", id, spec, False)
    daemon.notice(owner, "start_actor", id, (0, b"", ()), [], None)
    start = daemon.one("start_actor")
    process_id = daemon.worker(owner)
    daemon.tell(
        actor=head_pb2.ActorReported(actor_id=id, lease=start.number, process_id=process_id)
    )
    return id, start


def state_of(daemon: FakeDaemon, asker: bytes) -> tuple[str, dict[str, float]]:
    [node] = daemon.ask(asker, "state", "node_states")
    return node["state"], node["used"]


def test_nothing_new_is_placed_on_a_drained_node_and_what_runs_goes_on(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    make_actor(daemon, driver)
    assert daemon.ask(driver, "drain_node", daemon.node_id.hex()[:10]) == daemon.node_id.hex()
    assert state_of(daemon, driver) == ("DRAINING", {"CPU": 2.0})
    daemon.notice(driver, "want_leases", 1, task_spec(resources={"CPU": 0.5}), 1)
    assert not daemon.take("start_lease")
    [demand] = daemon.ask(driver, "state", "pending")
    assert "is draining" in demand["reason"]
    assert daemon.ask(driver, "available_resources") == {}
    assert daemon.ask(driver, "cluster_resources") == {"CPU": 2.0}


def test_what_a_drained_node_does_not_give_is_not_shown_as_used(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    driver = daemon.driver()
    make_actor(daemon, driver)
    idle = cluster.node({"CPU": 4})
    daemon.ask(driver, "drain_node", idle.node_id.hex())
    status = daemon.ask(driver, "status")
    assert (status["used"], status["total"]) == ({"CPU": 2.0}, {"CPU": 6.0})


def test_leases_of_tasks_come_back_after_the_task_that_runs(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    for group in (1, 2):
        daemon.notice(driver, "want_leases", group, task_spec(resources={"CPU": 1}), 1)
    begun, starting = daemon.take("start_lease")
    daemon.tell(lease_started=head_pb2.LeaseStarted(lease=begun.number, process_id=new_id()))
    node_id = daemon.ask(driver, "drain_node", daemon.node_id.hex())
    assert daemon.pushes(driver, "lease_revoked") == [(begun.number, 1)]
    daemon.tell(lease_started=head_pb2.LeaseStarted(lease=starting.number, process_id=new_id()))
    assert daemon.pushes(driver, "lease_revoked") == [(starting.number, 2)]
    number = daemon.begin(driver, "await_drained", node_id)
    for lease in (begun.number, starting.number):
        assert daemon.answer(driver, number) == []
        daemon.notice(driver, "return_lease", lease)
        daemon.lease_ended(lease)
    assert daemon.answer(driver, number) == [True]


def test_a_node_that_is_put_back_into_service_is_used_at_once(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    node_id = daemon.ask(driver, "drain_node", daemon.node_id.hex())
    daemon.notice(driver, "want_leases", 1, task_spec(resources={"CPU": 0.5}), 1)
    assert daemon.ask(driver, "undo_drain", node_id) == node_id
    assert daemon.one("start_lease")
    assert state_of(daemon, driver)[0] == "ALIVE"


def test_who_waits_hears_when_nothing_runs_there_any_more(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    actor, start = make_actor(daemon, driver)
    node_id = daemon.ask(driver, "drain_node", daemon.node_id.hex())
    number = daemon.begin(driver, "await_drained", node_id)
    assert daemon.answer(driver, number) == []
    daemon.ask(driver, "kill_actor", actor, True)
    daemon.lease_ended(start.number)
    assert daemon.answer(driver, number) == [True]
    assert daemon.ask(driver, "await_drained", node_id) is True


def test_who_waits_hears_that_the_node_is_in_service_again(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    make_actor(daemon, driver)
    node_id = daemon.ask(driver, "drain_node", daemon.node_id.hex())
    number = daemon.begin(driver, "await_drained", node_id)
    daemon.ask(driver, "undo_drain", node_id)
    assert daemon.answer(driver, number) == [False]


def test_who_waits_hears_when_the_node_is_gone(cluster: FakeCluster, daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    other = cluster.node({"CPU": 4})
    daemon.ask(driver, "drain_node", daemon.node_id.hex())
    _, start = make_actor(other, other.driver())
    assert start
    node_id = daemon.ask(driver, "drain_node", other.node_id.hex())
    number = daemon.begin(driver, "await_drained", node_id)
    assert other.node is not None
    cluster.head.lose(other.node, "gone")
    assert daemon.answer(driver, number) == [True]


def test_who_ends_does_not_wait_any_more(cluster: FakeCluster, daemon: FakeDaemon) -> None:
    driver, command = daemon.driver(), daemon.driver()
    make_actor(daemon, driver)
    node_id = daemon.ask(driver, "drain_node", daemon.node_id.hex())
    before = kept(cluster.head.cluster.drains)
    daemon.begin(command, "await_drained", node_id)
    assert kept(cluster.head.cluster.drains) > before
    daemon.end_process(command)
    assert kept(cluster.head.cluster.drains) <= before


@pytest.mark.parametrize(
    ("prefix", "complaint"),
    [
        ("xyz", "No living node has"),
        ("", "No living node has"),
        ("0", "Several nodes have"),
    ],
)
def test_a_node_must_be_named_so_that_it_is_the_only_one(
    cluster: FakeCluster, daemon: FakeDaemon, prefix: str, complaint: str
) -> None:
    cluster.node({"CPU": 1})
    with pytest.raises(ValueError, match=complaint):
        daemon.ask(daemon.driver(), "drain_node", prefix)


def test_a_drained_node_that_comes_back_is_still_drained(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    other = cluster.node({"CPU": 1})
    driver = other.driver()
    other.ask(driver, "drain_node", daemon.node_id.hex())
    other.notice(driver, "want_leases", 1, task_spec(resources={"CPU": 2}), 1)
    assert daemon.node is not None
    cluster.head.lose(daemon.node, "silent")
    back = cluster.node({"CPU": 2}, node_id=daemon.node_id)
    assert not back.take("start_lease")
    other.ask(driver, "undo_drain", daemon.node_id.hex())
    assert back.one("start_lease")


def test_a_drained_node_is_still_drained_after_a_restart_of_the_head(tmp_path: Path) -> None:
    import asyncio

    node_id = new_id()

    async def life(*, first: bool) -> None:
        storage = SqliteStorage(tmp_path / "head.db")
        saved = storage.start("cluster")
        cluster = FakeCluster(storage, saved.epoch)
        cluster.head.recovery.restore(saved)
        daemon = cluster.node({"CPU": 2}, node_id=node_id)
        if first:
            daemon.ask(daemon.driver(), "drain_node", node_id.hex())
        assert state_of(daemon, daemon.driver())[0] == "DRAINING"
        await storage.close()

    asyncio.run(life(first=True))
    asyncio.run(life(first=False))
